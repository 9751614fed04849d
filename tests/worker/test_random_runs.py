"""Random jobs on two and three ranks: none hangs, none ends without a cause, each is exact.

What a run's losses must be is what one rank alone, with the same global batches, has.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from raygnn.config.load import load_config
from tests.support.small_jobs import job, train_on_ranks

DATASET = "tests.support.datasets:RandomGraphs"
TOLERANCE = 1e-5

dtype_lists = st.lists(st.sampled_from(["fp32", "bf16", "fp16", "fp64"]), min_size=1, max_size=3)


@st.composite
def graph_jobs(draw: st.DrawFn) -> dict[str, Any]:
    """Draw jobs on many graphs: empty ones, and without edges."""
    num = draw(st.integers(3, 30))
    family = draw(st.sampled_from(["gin", "gcn", "sage", "gat"]))
    model = {"kind": family, "hidden": 8, "layers": draw(st.integers(1, 3)), "dropout": 0.0}
    if family == "gat":
        model["heads"] = 2
    return {
        "graph": {
            "format": "dataset",
            "dataset": DATASET,
            "args": {
                "num": num,
                "dtypes": draw(dtype_lists),
                "largest": draw(st.integers(0, 7)),
                "edges": draw(st.sampled_from([0.0, 1.0, 3.0])),
                "seed": draw(st.integers(0, 99)),
            },
            "val": draw(st.sampled_from([0.0, 0.2])),
            "test": draw(st.sampled_from([0.0, 0.2])),
        },
        "task": {"kind": "graph_classification"},
        "model": {**model, "readout": draw(st.sampled_from(["sum", "mean", "max"]))},
        "guard": {"every": draw(st.integers(1, 3))},
    }


@st.composite
def node_jobs(draw: st.DrawFn) -> dict[str, Any]:
    """Draw jobs on the nodes of one graph: few seeds, more parts than ranks, either topology."""
    typed = draw(st.booleans())
    return {
        "graph": {
            "format": "planted",
            "nodes": draw(st.integers(40, 300)),
            "degree": draw(st.sampled_from([1.0, 4.0, 10.0])),
            "classes": draw(st.integers(2, 5)),
            "features": draw(st.integers(1, 9)),
            "train": draw(st.sampled_from([0.05, 0.2, 0.5])),
            "val": draw(st.sampled_from([0.0, 0.1])),
            "typed": typed,
            "seed": draw(st.integers(0, 9)),
        },
        "model": {
            "kind": draw(st.sampled_from(["sage", "gcn", "gin"])),
            "hidden": 8,
            "layers": 2,
            "dropout": 0.0,
        },
        "sampling": {
            "fanout": draw(st.sampled_from([[3, 3], [-1, -1], [1, 2]])),
            "topology": draw(st.sampled_from(["replicated", "partitioned"])),
            "cache": draw(st.sampled_from([0.0, 0.3])),
        },
        "partition": {"method": "random"},
    }


@st.composite
def whole_jobs(draw: st.DrawFn) -> dict[str, Any]:
    sections = draw(st.one_of(graph_jobs(), node_jobs()))
    workers = draw(st.integers(2, 3))
    batch = draw(st.integers(1, 8))
    sections["cluster"] = {"workers": workers, "num_cpus": workers}
    sections.setdefault("sampling", {})
    sections["sampling"] |= {"batch_size": batch, "prefetch": draw(st.integers(0, 3))}
    sections["train"] = {
        "epochs": 2,
        "max_steps": 4,
        "lr": 0.05,
        "optimizer": "sgd",  # Adam's first steps depend only on a gradient's sign
        "accumulate": draw(st.integers(1, 3)),
        "log_every": 1,
        "seed": draw(st.integers(0, 5)),
    }
    return sections


def _losses(storage: Path, sections: dict[str, Any], name: str, workers: int) -> list[float] | str:
    """Return the loss of each step, or the error that ended the run."""
    spread = {k: dict(v) if isinstance(v, dict) else v for k, v in sections.items()}
    total = sections["cluster"]["workers"] * sections["sampling"]["batch_size"]
    assert total % workers == 0
    spread["sampling"]["batch_size"] = total // workers
    spread["cluster"] = {"workers": workers, "num_cpus": workers}
    base = job(storage, name=name)
    for section in ("graph", "sampling", "train", "model"):
        base.pop(section)
    config = load_config({**base, "sampling": {}, **spread})
    replicated = config.sampling.topology != "partitioned"
    try:
        run = train_on_ranks(config, replicated=replicated)
    except RuntimeError as error:
        return str(error)
    records = (run.path / "metrics.jsonl").read_text().splitlines()
    return [r["train/loss"] for r in map(json.loads, records) if "train/loss" in r]


def _check(sections: dict[str, Any]) -> None:
    storage = Path(tempfile.mkdtemp())
    try:
        together = _losses(storage, sections, "together", sections["cluster"]["workers"])
        alone = _losses(storage, sections, "alone", 1)
    finally:
        shutil.rmtree(storage, ignore_errors=True)
    kind = sections["graph"]["format"]
    if isinstance(alone, str) or isinstance(together, str):
        # the same cause, whether it was sent to other ranks or not
        assert isinstance(together, str), f"alone: {alone}\ntogether: {together}"
        assert isinstance(alone, str), f"alone: {alone}\ntogether: {together}"
        cause = "is left to train on"
        assert cause in alone, alone
        assert cause in together, together
        event(f"{kind}: {cause}")
        return
    event(f"{kind}: trained")
    assert np.allclose(together, alone, rtol=TOLERANCE, atol=TOLERANCE), (together, alone)


_COMMON: dict[str, Any] = {
    "deadline": None,
    "suppress_health_check": list(HealthCheck),
    "derandomize": True,
}


@pytest.mark.system
@settings(max_examples=12, **_COMMON)
@given(whole_jobs())
def test_a_few_runs(sections: dict[str, Any]) -> None:
    _check(sections)
