"""A sweep tries what it says, chooses what is clearly faster, and marks what changes results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from raygnn.config.load import load_config
from raygnn.config.rules import contradictions
from raygnn.config.schema import Config
from raygnn.runs.metrics_files import read_metrics
from raygnn.runs.run import list_runs
from raygnn.sampling.exchange import Exchange
from raygnn.tuning.search import NUMERICS, Trial, apply, axes, is_exact, search
from raygnn.tuning.trials import Tuning
from raygnn.worker.comm import reduction
from raygnn.worker.job import TRIALS, Job
from tests.support.ranks import run_ranks
from tests.support.small_jobs import JobFactory, _data, job, runtime


def config(**sections: Any) -> Config:
    return load_config(job(Path("runs"), **sections))


def possible(base: Config) -> Any:
    return lambda chosen: not contradictions(apply(base, chosen))


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 4), st.randoms(use_true_random=False))
def test_the_search(workers: int, random: Any) -> None:
    """For any rates, each setting is tried once, contradictions are not, and the fastest is
    chosen."""
    base = config(train={"accumulate": 2})
    rates: dict[str, float] = {}

    def measure(chosen: Any) -> Trial:
        key = str(sorted(chosen.items()))
        rate = rates.setdefault(key, random.uniform(50, 200))
        return Trial(chosen, rate, {})

    found = search(axes(base, workers, 2**40), measure, possible(base))
    sweep = found.trials
    assert len(sweep) == len(rates)
    assert len({str(sorted(t.settings.items())) for t in sweep}) == len(sweep)
    assert all(not contradictions(apply(base, t.settings)) for t in sweep)
    assert is_exact(found.exact)
    assert found.fastest_rate >= found.exact_rate >= found.base_rate
    assert found.fastest_rate * 1.02 >= max(t.rate for t in sweep)
    assert found.fastest_rate > found.base_rate or found.fastest == {}
    if workers == 1:
        assert {key for t in sweep for key in t.settings} == {"sampling.prefetch"}


def test_noise_changes_nothing() -> None:
    small = iter([100.0, 101.0, 99.0] * 100)
    found = search(
        axes(config(), 2, 2**40), lambda s: Trial(s, next(small), {}), possible(config())
    )
    assert found.exact == found.fastest == {}
    for odd in ([100.0, 130.0], [50.0, 100.0]):  # fast once, or as configured slow once
        rates = iter(odd + [100.0] * 300)
        found = search(
            axes(config(), 2, 2**40), lambda s, r=rates: Trial(s, next(r), {}), possible(config())
        )
        assert found.fastest == {}


def test_a_gain_that_does_not_last_is_not_chosen() -> None:
    rates = iter([100.0, 130.0, 100.0, 130.0] + [100.0] * 300)  # seen twice, and never again
    found = search(axes(config(), 1, 0), lambda s: Trial(s, next(rates), {}), possible(config()))
    assert found.fastest == found.exact == {}


def test_buckets_that_are_all_the_same() -> None:
    def sizes(gradients: int) -> list[Any]:
        return [a.values for a in axes(config(), 2, gradients) if a.key == "comm.bucket_cap_mb"]

    assert sizes(2**40) == [(1, 5, 125)] * 2
    assert sizes(8 * 2**20) == [(1, 5)] * 2
    assert sizes(1000) == [()] * 2


def test_caches_are_tried_where_ranks_are_on_several_hosts() -> None:
    keys = ([a.key for a in axes(config(), 2, 0, one_host=one)] for one in (True, False))
    assert ["sampling.cache" in there for there in keys] == [False, True]


def test_contradictory_settings_are_not_tried() -> None:
    base = config(precision="bf16")
    tried = search(axes(base, 2, 2**40), lambda s: Trial(s, 1.0, {}), possible(base)).trials
    assert not any("comm.compression" in t.settings for t in tried)


def _tune(exchange: Exchange, job: Job) -> dict[str, Any]:
    torch.set_num_threads(1)
    return Tuning(job, runtime(exchange)).run()


@pytest.mark.alone
@pytest.mark.parametrize("typed", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_slow_line(typed: bool, make_job: JobFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte is slow on this network: fewer bytes are chosen, and marked."""
    total = reduction.Reduction._sum

    def costs(self: Any, values: Any) -> Any:
        time.sleep(values.nbytes * 1e-6)
        return total(self, values)

    monkeypatch.setattr(reduction.Reduction, "_sum", costs)
    made = make_job(
        graph={"typed": typed}, comm={"overlap": False}, model={"hidden": 64 if typed else 128}
    )
    place, ntype = _data(made, 2)
    for name in ("logs", "checkpoints"):
        (made.run_dir / name).mkdir(parents=True)
    given = Job(made, place, made.run_dir, ntype, True, 0.0, 128)
    found, other = run_ranks(2, _tune, replace(given, tune=0.1))
    assert other["fastest"] == found["fastest"]
    assert other["base_rate"] == found["base_rate"]
    assert set(found["fastest"]) & set(NUMERICS)
    assert not set(found["exact"]) & set(NUMERICS)
    assert found["fastest_rate"] > found["base_rate"]
    trials = read_metrics(made.run_dir / TRIALS)
    sweep = [t["settings"] for t in found["trials"]]
    assert list({str(t["settings"]): t["settings"] for t in trials}.values()) == sweep
    sizes = {str(t["settings"]): t["bytes"]["gradients"] for t in trials}
    whole = sizes["{}"]
    (half,) = {size for key, size in sizes.items() if "'bf16'" in key and "accumulate" not in key}
    assert half == whole / 2
    assert not list((made.run_dir / "checkpoints").iterdir())
    assert not (made.run_dir / "metrics.jsonl").exists()


@pytest.mark.system
@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    """The command uses an embedded Ray; the result can be set, and no run is created."""
    made = job(tmp_path / "runs", cluster={"address": "local", "workers": 2, "num_cpus": 4})
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(made))
    argv = [sys.executable, "-m", "raygnn", "tune", "job.yaml", "--seconds", "0.1", "--json"]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["trials"][0]["settings"] == {}
    assert json.loads(Path(found["path"]).read_text()) == found
    for chosen in (found["exact"], found["fastest"]):
        load_config(tmp_path / "job.yaml", [f"{key}={value}" for key, value in chosen.items()])
    assert {path.name for path in (tmp_path / "runs").iterdir()} >= {".tuning", "partitions"}
    assert list_runs(str(tmp_path / "runs")) == []
