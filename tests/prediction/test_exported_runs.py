"""``raygnn export``: it serves without raygnn what `raygnn predict` says, and is whole."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import Tensor

import raygnn
from raygnn.cli import main
from raygnn.config.load import load_config
from raygnn.errors import CapabilityError, DataError, InputError
from raygnn.graph.data import GraphData, etype_str
from raygnn.graph.sources import load_graph
from raygnn.models import program
from raygnn.prediction import export as export_module
from raygnn.prediction.export import Exported
from raygnn.runs.run import Run
from raygnn.util.files import read_json
from tests.prediction.test_predict import ask
from tests.prediction.test_transformed_tables import small
from tests.support.datasets import RandomGraphs
from tests.support.plain_embeddings import learned_rows
from tests.support.small_jobs import JobFactory, job, train_on_ranks
from tests.worker import test_timed_jobs as timed
from tests.worker.test_edge_tasks import LIKED_BY, LIKES, LINKS, config_of, paid, shop
from tests.worker.test_graph_tasks import dataset, make
from tests.worker.test_multitask import several

pytestmark = pytest.mark.long

ONE_LAYER: dict[str, Any] = {
    "model": {"layers": 1, "hidden": 8},
    "sampling": {"fanout": [5]},
}

SERVE = """
import sys, torch

class NothingElse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("raygnn", "dgl", "ray", "lightning", "torch_geometric"):
            raise ImportError(name + " is not here")

sys.meta_path.insert(0, NothingElse())
try:
    import raygnn
    raise SystemExit("raygnn is here")
except ImportError:
    pass
programs, given = {}, torch.load(sys.argv[2], weights_only=True)
out = []
for name, inputs in given:
    if name not in programs:
        programs[name] = torch.export.load(f"{sys.argv[1]}/{name}.pt2").module()
    out.append(programs[name](**inputs))
torch.save(out, sys.argv[3])
"""


def served(made: Exported, *given: tuple[str, dict[str, Any]]) -> list[Any]:
    """Call programs by name, each with its inputs, in a process that has torch only."""
    place = made.path.parent
    torch.save(list(given), place / "given.pt")
    files = [str(made.path), str(place / "given.pt"), str(place / "found.pt")]
    subprocess.run([sys.executable, "-I", "-c", SERVE, *files], check=True, cwd=place)
    found: list[Any] = torch.load(place / "found.pt", weights_only=True)
    return found


def whole(data: GraphData) -> dict[str, Any]:
    """Return an encoder's inputs: all nodes, and the message edges."""
    ends = {e: np.stack([frame.src, frame.dst]) for e, frame in data.edges.items()}
    if LIKES in data.edges:  # is what is predicted, of which some is hidden, and its reverse
        masks = data.edges[LIKES].data
        hidden = masks["val_mask"] | masks["test_mask"]
        pairs = set(zip(*ends[LIKES][:, hidden].tolist(), strict=True))
        back = [pair not in pairs for pair in zip(*ends[LIKED_BY][::-1].tolist(), strict=True)]
        ends[LIKES], ends[LIKED_BY] = ends[LIKES][:, ~hidden], ends[LIKED_BY][:, back]
    return {
        "x": {t: torch.from_numpy(frame.data["feat"]) for t, frame in data.nodes.items()},
        "edges": {
            etype_str(e): torch.from_numpy(np.ascontiguousarray(both)) for e, both in ends.items()
        },
    }


def column(table: Any, name: str) -> Tensor:
    values = np.stack(table.to_pandas()[name].to_numpy()).astype(np.float32)
    return torch.from_numpy(values)


def close(found: Tensor, expected: Tensor) -> None:
    assert not found.requires_grad
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.system
@pytest.mark.parametrize(("typed", "kind"), [(False, "sage"), (True, "hgt")])
def test_nodes(typed: bool, kind: str, make_job: JobFactory, tmp_path: Path) -> None:
    config = make_job(graph={"typed": typed}, model={"kind": kind}, train={"epochs": 1})
    run = train_on_ranks(config)
    made = raygnn.export(run, out=tmp_path / "served")
    assert config.graph is not None
    data = load_graph(config.graph)
    assert sorted(file.name for file in made.path.iterdir()) == ["export.json", "model.pt2"]
    known = json.loads((made.path / "export.json").read_text())
    facts = made.to_dict()
    assert facts.pop("path") == str(tmp_path / "served")
    assert known == json.loads(json.dumps(facts))
    (facts,) = known["programs"].values()
    assert facts["outputs"] == 4
    assert sorted(facts["inputs"]["edges"]) == sorted(map(etype_str, data.edges))
    assert known["goals"][""]["ntype"] == ("item" if typed else "_N")
    (found,) = served(made, ("model", whole(data)))
    close(found.softmax(1), column(ask(run, config, 1), "scores"))


def neighbourhood(
    data: GraphData, seeds: np.ndarray, hops: int
) -> tuple[np.ndarray, np.ndarray, Tensor]:
    """Return the nodes around seeds, the in-edges within ``hops``, numbered among these nodes, and
    the nodes' degrees in the whole graph, which has one type."""
    (frame,), (nodes,) = data.edges.values(), data.nodes.values()
    inner = around = seeds
    for _ in range(hops):
        inner = around
        around = np.union1d(inner, frame.src[np.isin(frame.dst, inner)])
    within = np.isin(frame.dst, inner)
    both = np.stack([frame.src[within], frame.dst[within]])
    degree = np.bincount(frame.dst, minlength=nodes.num)[around]
    return around, np.searchsorted(around, both), torch.from_numpy(degree)


@pytest.mark.system
def test_a_neighbourhood_is_enough(make_job: JobFactory, tmp_path: Path) -> None:
    """Messages may be weighted by degrees in the whole graph."""
    config = make_job(model={"kind": "gcn"}, train={"epochs": 1})
    run = train_on_ranks(config)
    made = raygnn.export(run, out=tmp_path / "served")
    assert config.graph is not None
    data, seeds = load_graph(config.graph), np.array([5, 90, 1200])
    nodes, edges, degree = neighbourhood(data, seeds, 2)
    assert len(nodes) < 1000
    given = {
        "x": {"_N": torch.from_numpy(data.nodes["_N"].data["feat"][nodes])},
        "edges": {"_N:_E:_N": torch.from_numpy(edges)},
        "degree": {"_N:_E:_N": degree},
    }
    (found,) = served(made, ("model", given))
    of_seeds = found[np.searchsorted(nodes, seeds)]
    close(of_seeds.softmax(1), column(ask(run, config, 1), "scores")[seeds])


@pytest.mark.system
@pytest.mark.slow
def test_several_tasks(tmp_path: Path) -> None:
    """An encoder, and decoders of nodes, of links, and of edges that say something."""
    more = {"model": {"decoder_features": ["amount", "pieces"]}, "train": {"epochs": 2}}
    config = several(tmp_path, data=paid(), **more)
    run = train_on_ranks(config)
    made = raygnn.export(run, out=tmp_path / "served")
    names = ["encoder", "decoder-link", "decoder-price", "decoder-kind"]
    assert list(made.programs) == [f"{name}.pt2" for name in names]
    data = paid()
    likes = data.edges[LIKES]
    (rows,) = served(made, ("encoder", whole(data)))
    for ntype, found in rows.items():
        close(found, column(ask(run, config, 1, embeddings=True, ntype=ntype), "embedding"))
    pairs = {"source": rows["person"][likes.src], "target": rows["thing"][likes.dst]}
    read = np.concatenate([likes.data["amount"], likes.data["pieces"][:, None]], 1)
    features = {"features": torch.from_numpy(read.astype(np.float32))}
    pairs["relation"] = torch.from_numpy(likes.data["relation"])
    link, price, kind = served(
        made,
        ("decoder-link", pairs),
        ("decoder-price", {"rows": rows["thing"]}),
        ("decoder-kind", {**pairs, **features}),
    )
    close(link.flatten(), column(ask(run, config, 1, task="link"), "score"))
    close(price.flatten(), column(ask(run, config, 1, task="price"), "prediction"))
    close(kind.softmax(1), column(ask(run, config, 1, task="kind"), "scores"))


@pytest.mark.parametrize(
    ("task", "model"),
    [
        ({**LINKS, "negatives": {"number": 40}}, {"decoder": "distmult"}),
        pytest.param(
            {**LINKS, "kind": "tests.support.own_steps:Ranking", "like": "link_prediction"},
            {},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"kind": "edge_regression", "etype": "likes", "target": "stars"},
            {"kind": "gat"},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["links", "own step", "numbers"],
)
def test_edges(task: dict[str, Any], model: dict[str, Any], tmp_path: Path) -> None:
    config = config_of(
        tmp_path,
        "edges",
        task={"reverse": "liked_by", **task},
        model={"hidden": 8, **model},
        train={"epochs": 1},
    )
    run = train_on_ranks(config)
    made = raygnn.export(run, out=tmp_path / "served")
    data = shop()
    likes = data.edges[LIKES]
    rows = torch.export.load(made.path / "encoder.pt2").module()(**whole(data))
    pairs = {"source": rows["person"][likes.src], "target": rows["thing"][likes.dst]}
    if "relation" in made.programs["decoder.pt2"]["inputs"]:
        pairs["relation"] = torch.from_numpy(likes.data["relation"])
    (out,) = served(made, ("decoder", pairs))
    table = ask(run, config, 1)
    if "scores" in table.column_names:
        close(out.softmax(1), column(table, "scores"))
    else:
        name = "score" if "score" in table.column_names else "prediction"
        close(out.flatten(), column(table, name))


def test_learned_rows_and_a_step_of_ones_own(make_job: JobFactory, tmp_path: Path) -> None:
    """Embeddings follow the features, and modules of the user's step are not part of the model."""
    config = make_job(
        graph={"nodes": 300, "features": 12},  # with the rows 16 numbers, which the step expects
        task={"kind": "tests.support.own_steps:Denoising"},
        model={"embedding": {"dim": 4, "ntypes": ["_N"]}},
        train={"epochs": 1},
    )
    run = train_on_ranks(config)
    made = raygnn.export(run, out=tmp_path / "served")
    assert config.graph is not None
    given = whole(load_graph(config.graph))
    given["x"]["_N"] = torch.cat([given["x"]["_N"], torch.from_numpy(learned_rows(run)["_N"])], 1)
    found = torch.export.load(made.path / "model.pt2").module()(**given)
    close(found.softmax(1), column(ask(run, config, 1), "scores"))


def test_nodes_without_layers(tmp_path: Path) -> None:
    values = {**job(tmp_path, train={"epochs": 1}), "model": {"kind": "none"}}
    config = load_config({**values, "sampling": {"batch_size": 64}})
    run = train_on_ranks(config)
    made = raygnn.export(run, out=tmp_path / "served")
    assert list(made.programs) == ["decoder.pt2"]
    assert config.graph is not None
    (rows,) = whole(load_graph(config.graph))["x"].values()
    found = torch.export.load(made.path / "decoder.pt2").module()(rows=rows)
    close(found.softmax(1), column(ask(run, config, 1), "scores"))


@pytest.mark.dgl
def test_graphs(tmp_path: Path) -> None:
    config = make(tmp_path, graph=dataset(num=30), train={"epochs": 1})
    run = train_on_ranks(config)
    made = raygnn.export(run, out=tmp_path / "served")
    graphs = [graph for graph, _ in map(RandomGraphs(num=30).__getitem__, range(30))]
    first = np.cumsum([0, *(graph.num_nodes() for graph in graphs)])
    ends = [torch.stack(g.edges()) + int(at) for g, at in zip(graphs, first[:-1], strict=True)]
    given = {
        "x": {"_N": torch.cat([graph.ndata["feat"] for graph in graphs])},
        "edges": {"_N:_E:_N": torch.cat(ends, 1)},
        "sizes": {"_N": torch.tensor([graph.num_nodes() for graph in graphs])},
    }
    found = torch.export.load(made.path / "model.pt2").module()(**given)
    close(found.softmax(1), column(ask(run, config, 1), "scores"))


def test_times_are_inputs(tmp_path: Path) -> None:
    run = train_on_ranks(timed.config_of(tmp_path, timed.tables(tmp_path / "t")))
    made = raygnn.export(run, out=tmp_path / "served")
    of_edges = made.programs["encoder.pt2"]["inputs"]["elapsed"]
    assert of_edges.keys() == made.programs["encoder.pt2"]["inputs"]["edges"].keys()


def test_the_export_contains_the_transforms(tmp_path: Path) -> None:
    """A program's inputs are columns transformed as for the training."""
    config, *_ = small(tmp_path, train={"epochs": 1})
    run = train_on_ranks(config)
    made = raygnn.export(run, out=tmp_path / "served")
    written = json.loads((made.path / "export.json").read_text())
    kept = json.loads((run.path / "checkpoints" / "selected.json").read_text())
    assert written["transforms"] == kept["transforms"] != {}
    (inputs,) = (one["inputs"] for one in written["programs"].values())
    assert inputs["edges"].keys() == {"customer:calls:customer"}  # the tables' own names
    assert inputs["x"]["customer"]["shape"] == ["nodes of customer", 32]
    assert len(written["transforms"]["customer/feat"]) == 14  # columns, in the YAML's order
    names = written["columns"]["customer/feat"]
    assert [names[:4], len(names)] == [["visits", "visits", "income", "income[0]"], 32]
    assert written["words"] == kept["words"]


def test_the_command(trained: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "served"
    assert main(["export", str(trained.path), "--out", str(out), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["path"] == str(out)
    assert list(facts["programs"]) == ["model.pt2"]
    before = {file.name: file.read_bytes() for file in out.iterdir()}
    assert main(["export", str(trained.path), "--out", str(out)]) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert {file.name: file.read_bytes() for file in out.iterdir()} == before
    (out / "export.json").write_text("old")
    (out / "decoder.pt2").touch()
    assert main(["export", str(trained.path), "--out", str(out), "--overwrite"]) == 0
    assert "served: model.pt2" in capsys.readouterr().out
    assert {file.name for file in out.iterdir()} == before.keys()
    assert (out / "export.json").read_bytes() == before["export.json"]
    assert [file.name for file in tmp_path.iterdir()] == ["served"]


def test_foreign_directories_are_not_overwritten(trained: Run, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis").touch()
    for out, what in (
        (mine, "no directory of raygnn export"),
        (tmp_path / "a" / "b", "no directory"),
    ):
        with pytest.raises(InputError, match=what):
            raygnn.export(trained, out=out, overwrite=True)
    assert [file.name for file in mine.iterdir()] == ["thesis"]


def test_nothing_is_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the second program has other outputs, or the disk is full, the directory is as before."""
    run = train_on_ranks(config_of(tmp_path, "links", task=LINKS, train={"epochs": 1}, **ONE_LAYER))
    place = tmp_path / "place"
    place.mkdir()
    raygnn.export(run, out=place / "served")
    before = {file: file.read_bytes() for file in place.rglob("*") if file.is_file()}
    compare, written = program.check, []

    def fails(error: Exception) -> Any:
        def check(one: Any, exported: Any) -> Any:
            written.append(list(place.rglob("encoder.pt2")))
            if "source" in one.inputs:
                raise error
            return compare(one, exported)

        return check

    for error, kind in ((AssertionError("other numbers"), CapabilityError),
                        (KeyboardInterrupt(), KeyboardInterrupt)):  # fmt: skip
        monkeypatch.setattr(program, "check", fails(error))  # type: ignore[arg-type]
        with pytest.raises(kind):
            raygnn.export(run, out=place / "served", overwrite=True)
        assert len(written.pop()) == 2  # beside the place that it is for
        assert {file: file.read_bytes() for file in place.rglob("*") if file.is_file()} == before
    monkeypatch.setattr(program, "check", compare)
    for module, function, out in (
        (program, "replacing", "new"),
        (export_module, "publish", "served"),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(module, function, _full)
            with pytest.raises(InputError, match="full"):
                raygnn.export(run, out=place / out, overwrite=True)
        assert {file: file.read_bytes() for file in place.rglob("*") if file.is_file()} == before
        assert len(list(place.iterdir())) == 1


def _full(path: Path, *_: Path) -> Any:
    raise OSError(28, "No space left on device", str(path))


def test_a_run_without_a_schema_is_not_exported(trained: Run, tmp_path: Path) -> None:
    about = trained.path / "checkpoints" / "selected.json"
    values = json.loads(about.read_text())
    try:
        for schema in ({}, {"etypes": [1]}):
            about.write_text(json.dumps({**values, "schema": schema}))
            with pytest.raises(DataError, match="does not describe the network"):
                raygnn.export(trained, out=tmp_path / "served")
    finally:
        about.write_text(json.dumps(values))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("huge", ["model", "file"])
def test_oversized_models_and_files_of_foreign_runs_are_not_read(
    huge: str, trained: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No model of a terabyte is allocated, and no file of a terabyte is read."""
    shutil.copytree(trained.path, tmp_path / "run")
    if huge == "model":
        file = tmp_path / "run/config.yaml"
        file.write_text(re.sub(r"hidden: \d+", "hidden: 500_000", file.read_text()))
    else:
        file, about = (tmp_path / "run/checkpoints" / f"selected.{end}" for end in ("pt", "json"))
        os.truncate(file, 1 << 40)
        monkeypatch.setattr(export_module.weights, "sha256", lambda _: read_json(about)["sha256"])
    with pytest.raises(DataError, match="bytes, and the model that the run describes"):
        raygnn.export(tmp_path / "run", out=tmp_path / "out")


@pytest.mark.parametrize(
    "model", [{"kind": "somewhere:Net"}, {"kind": "torch_geometric.nn:GAT", "interface": "pyg"}]
)
def test_a_class_from_outside_is_refused(
    model: dict[str, str], trained: Run, tmp_path: Path
) -> None:
    """The class is refused without being imported."""
    run = Path(shutil.copytree(trained.path, tmp_path / "run"))
    file = run / "config.yaml"
    mark, text = file.read_text().split("\n", 1)
    values = {**yaml.safe_load(text), "model": model}
    file.write_text(f"{mark}\n{yaml.safe_dump(values)}")
    with pytest.raises(InputError, match=f"{model['kind']} is a class from outside raygnn"):
        raygnn.export(run, out=tmp_path / "served")
    assert not (tmp_path / "served").exists()
