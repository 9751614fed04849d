"""Jobs on graphs that a Python program holds, on a real Ray."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import raygnn
from raygnn.cli import main
from raygnn.errors import DataError

pyg = pytest.importorskip("torch_geometric.data")
pytestmark = [pytest.mark.system, pytest.mark.usefixtures("shared_ray")]

NODES, CLASSES = 300, 3


def graph(seed: int = 0) -> Any:
    random = torch.Generator().manual_seed(seed)
    label = torch.arange(NODES) % CLASSES
    split = torch.rand(NODES, generator=random)
    return pyg.Data(
        x=torch.nn.functional.one_hot(label).float(),
        y=label,
        edge_index=torch.randint(NODES, (2, 900), generator=random),
        train_mask=split < 0.6,
        val_mask=(split >= 0.6) & (split < 0.8),
        test_mask=split >= 0.8,
    )


def job(place: Path, **more: Any) -> dict[str, Any]:
    return {
        "name": "mine",
        "storage": str(place),
        "model": {"kind": "sage", "hidden": 16},
        "sampling": {"batch_size": 32},
        "train": {"epochs": 8, "lr": 0.05},
        "logging": {"loggers": []},
        "cluster": {"workers": 2},
        **more,
    }


def test_errors_name_the_graph(tmp_path: Path) -> None:
    """Messages name the graph, not the file that the check wrote it to."""
    data = graph()
    del data.train_mask
    with pytest.raises(DataError, match="there are no training nodes") as caught:
        raygnn.check(job(tmp_path), graph=data, display=False)
    assert caught.value.where == "graph=: _N/train_mask"


@pytest.mark.slow
def test_the_run_can_be_used_without_the_program(tmp_path: Path) -> None:
    """The run can be resumed by the command and used for predictions without the graph's
    program."""
    held = graph()
    before = copy.copy(held).to_dict()
    report = raygnn.check(job(tmp_path), graph=held, display=False)
    assert report.ok, report.findings
    assert not (tmp_path / "graphs").exists(), "check writes nothing"
    run = raygnn.train(job(tmp_path), graph=held, display=False)
    assert run.summary["metrics"]["test/accuracy"] > 0.9
    assert all(torch.equal(before[name], value) for name, value in held.to_dict().items())
    (file,) = (tmp_path / "graphs").iterdir()
    (partition,) = (tmp_path / "partitions").iterdir()

    raygnn.train(job(tmp_path, name="again"), graph=held, display=False)
    assert [*(tmp_path / "graphs").iterdir()] == [file]
    assert [*(tmp_path / "partitions").iterdir()] == [partition]

    config = yaml.safe_load((run.path / "config.yaml").read_text())
    assert config["graph"]["path"] == str(file)
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(config))
    command = ["train", str(tmp_path / "mine.yaml"), "--set", "train.epochs=9", "--resume"]
    assert main(command) == 0
    assert run.summary["steps"] == 9 * 3  # of 64 nodes each
    assert len(run.predict()) == NODES


def test_another_graph_is_another_partition(tmp_path: Path) -> None:
    for seed in range(2):
        raygnn.partition(job(tmp_path, name=f"of-{seed}"), graph=graph(seed), display=False)
    for kind in ("graphs", "partitions"):
        assert len([*(tmp_path / kind).iterdir()]) == 2
