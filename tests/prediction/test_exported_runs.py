"""``raygnn export``: what it writes serves without raygnn, and what it can not write is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

import raygnn
from raygnn.cli import main
from raygnn.errors import DataError, InputError
from raygnn.graph.data import etype_str
from raygnn.graph.sources import load_graph
from raygnn.models.network import Schema
from raygnn.models.registry import build_model
from tests.graphs import on_whole_graph
from tests.small_jobs import JobFactory, train_on_ranks

SERVE = """
import sys, torch
given = torch.load(sys.argv[2], weights_only=True)
program = torch.export.load(sys.argv[1]).module()
torch.save(program(given["x"], given["edges"], {}, {}), sys.argv[3])
assert not {"raygnn", "dgl", "ray"} & sys.modules.keys()
"""


@pytest.mark.system
@pytest.mark.parametrize(("typed", "kind"), [(False, "sage"), (True, "hgt")])
def test_a_process_without_raygnn_gives_the_same(
    typed: bool, kind: str, make_job: JobFactory, tmp_path: Path
) -> None:
    config = make_job(graph={"typed": typed}, model={"kind": kind}, train={"epochs": 1})
    run = train_on_ranks(config)
    made = raygnn.export(run, out=tmp_path / "model.pt2")
    assert config.graph is not None
    data = load_graph(config.graph)
    widths = {t: frame.data["feat"].shape[1] for t, frame in data.nodes.items()}
    assert (made.features, made.target) == (widths, "item" if typed else "_N")
    assert sorted(made.edges) == sorted(map(etype_str, data.edges))
    given = {
        "x": {t: torch.from_numpy(frame.data["feat"]) for t, frame in data.nodes.items()},
        "edges": {
            etype_str(e): torch.stack([torch.from_numpy(end) for end in (frame.src, frame.dst)])
            for e, frame in data.edges.items()
        },
    }
    torch.save(given, tmp_path / "given.pt")
    files = [str(tmp_path / name) for name in ("model.pt2", "given.pt", "found.pt")]
    subprocess.run([sys.executable, "-I", "-c", SERVE, *files], check=True, cwd=tmp_path)
    found = torch.load(tmp_path / "found.pt")

    model = build_model(config.model, Schema(widths, list(data.edges), 4, target=made.target))
    model.load_state_dict(torch.load(run.path / "checkpoints" / "selected.pt"))
    torch.testing.assert_close(found, on_whole_graph(model, 2, data), atol=1e-5, rtol=1e-5)


def test_the_command(
    make_job: JobFactory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train_on_ranks(make_job(train={"epochs": 1}))
    out = tmp_path / "model.pt2"
    assert main(["export", str(run.path), "--out", str(out), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["path"], facts["target"], facts["edges"]) == (str(out), "_N", ["_N:_E:_N"])
    before = out.read_bytes()
    assert main(["export", str(run.path), "--out", str(out)]) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert out.read_bytes() == before

    about = run.path / "checkpoints" / "selected.json"
    values = json.loads(about.read_text())
    about.write_text(json.dumps({**values, "schema": {"etypes": [1]}}))
    with pytest.raises(DataError, match="what data the network is for"):
        raygnn.export(run, out=out, overwrite=True)
    assert out.read_bytes() == before


def test_a_class_of_ones_own_is_refused(make_job: JobFactory, tmp_path: Path) -> None:
    run = train_on_ranks(make_job(train={"epochs": 1}))
    file = run.path / "config.yaml"
    mark, text = file.read_text().split("\n", 1)
    job = {**yaml.safe_load(text), "model": {"kind": "somewhere:Net"}}
    file.write_text(f"{mark}\n{yaml.safe_dump(job)}")
    with pytest.raises(InputError, match=r"somewhere:Net.*can not be exported"):
        raygnn.export(raygnn.open_run(run.path), out=tmp_path / "model.pt2")
    assert not (tmp_path / "model.pt2").exists()
