"""Predictions for graphs that a model of whole graphs was not trained on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pyarrow as pa
import pytest
import torch

import raygnn
from raygnn.errors import InputError
from raygnn.graph.dgl import dgl
from raygnn.prediction.request import Asked
from raygnn.prediction.request import ask as plan
from raygnn.runs.run import Run
from tests.prediction.test_predict import ask
from tests.support.datasets import Bonds, RandomGraphs
from tests.support.small_jobs import train_on_ranks
from tests.worker.test_graph_tasks import dataset, make

pytestmark = pytest.mark.long

OWN = "tests.worker.test_graph_tasks:OwnGin"
SPLITS = ("train", "val", "test")


def asked(run: Run, *overrides: str, split: str = "all") -> Asked:
    return plan(run, (*SPLITS, "all"), split, overrides=overrides, display=False, new_data=True)


def answer(run: Run, workers: int, *overrides: str, split: str = "all", **more: Any) -> Any:
    """Predict for other graphs; return a frame, or metrics."""
    found = asked(run, *overrides, split=split)
    table = ask(run, found.config, workers, split=split, sizes=found.weights.sizes, **more)
    return table if isinstance(table, dict) else table.to_pandas()


def save(path: Path, numbers: list[int], **labels: Any) -> Path:
    """Save some of the random graphs in a file of DGL's."""
    graphs = RandomGraphs(num=60)
    dgl().save_graphs(str(path), [graphs[number][0] for number in numbers], labels)
    return path


def scores(frame: pandas.DataFrame) -> np.ndarray:
    return np.stack(frame["scores"])


@pytest.fixture(scope="module")
def from_files(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run trained on 30 graphs in a file, in folds."""
    storage = tmp_path_factory.mktemp("files")
    numbers = list(range(30))
    file = save(storage / "old.bin", numbers, label=torch.tensor(numbers) % 2)
    graph = {"format": "graphs", "path": str(file), "folds": 10, "fold": 3}
    return train_on_ranks(make(storage, graph=graph, train={"epochs": 1}))


@pytest.fixture(scope="module")
def from_class(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run trained on 30 graphs of a dataset class."""
    storage = tmp_path_factory.mktemp("class")
    return train_on_ranks(make(storage, graph=dataset(num=30), train={"epochs": 1}))


@pytest.fixture(scope="module")
def before(from_files: Run) -> pandas.DataFrame:
    """Predictions for the graphs of the training."""
    config = plan(from_files, overrides=["cluster.workers=1"], display=False).config
    frame: pandas.DataFrame = ask(from_files, config, 1).to_pandas()
    return frame


@pytest.mark.dgl
@pytest.mark.parametrize("workers", [1, 2])
def test_files_without_targets(
    workers: int, from_files: Run, before: pandas.DataFrame, tmp_path: Path
) -> None:
    """A directory of two files has fewer graphs than the training had folds."""
    (tmp_path / "new").mkdir()
    save(tmp_path / "new" / "a.bin", [4, 11, 2])
    save(tmp_path / "new" / "b.bin", [29, 5])
    where = f"graph.path={tmp_path / 'new'}"
    frame = answer(from_files, workers, where)
    assert frame["graph"].tolist() == list(range(5))
    assert np.allclose(scores(frame), scores(before.iloc[[4, 11, 2, 29, 5]]), atol=1e-6)
    assert frame["split"].isna().all()
    assert frame["label"].isna().all()
    few = answer(from_files, workers, where, wanted=pa.array([3, 1]))
    assert few["graph"].tolist() == [1, 3]
    assert np.allclose(scores(few), scores(frame.iloc[[1, 3]]), atol=1e-6)
    rows = answer(from_files, workers, where, scores=False, embeddings=True)
    assert rows["graph"].tolist() == list(range(5))
    own = torch.load(from_files.path / "checkpoints" / "selected.pt")
    out = np.stack(rows["embedding"]) @ own["readout.weight"].numpy().T
    shares = torch.from_numpy(out + own["readout.bias"].numpy()).softmax(1)
    assert np.allclose(shares, scores(frame), atol=1e-5)
    with pytest.raises(RuntimeError, match="none of these graphs has a target 'label'"):
        answer(from_files, workers, where, rows=False)


@pytest.mark.dgl
def test_a_target_that_is_known_of_some(from_files: Run, tmp_path: Path) -> None:
    """Targets are a single class, and -1 where it is unknown."""
    numbers = list(range(30, 38))
    labels = torch.tensor([0, 0, 0, -1, 0, -1, 0, -1])
    where = f"graph.path={save(tmp_path / 'new.bin', numbers, label=labels)}"
    frame = answer(from_files, 2, where)
    assert frame["label"].isna().tolist() == (labels < 0).tolist()
    known = frame.dropna(subset="label")
    right = (known["prediction"] == known["label"]).mean()
    metrics = answer(from_files, 2, where, rows=False)
    assert metrics["all/accuracy"] == pytest.approx(right, abs=1e-6)
    loss = -np.log(scores(known)[:, 0]).mean()
    assert metrics["all/loss"] == pytest.approx(loss, abs=1e-5)


@pytest.mark.dgl
@pytest.mark.parametrize(("workers", "kind"), [(1, "gin"), (2, OWN)])
def test_other_arguments_of_a_class(workers: int, kind: str, tmp_path: Path) -> None:
    """Predictions for a larger dataset, which begins with the training's graphs."""
    model = {"kind": kind, **({} if kind == OWN else {"hidden": 8, "layers": 2})}
    run = train_on_ranks(make(tmp_path, graph=dataset(num=20), model=model, train={"epochs": 1}))
    frame = answer(run, workers, "graph.args.num=31")
    own = plan(run, display=False).config
    old = ask(run, own, 2).to_pandas()
    assert frame["graph"].tolist() == list(range(31))
    assert np.allclose(scores(frame.iloc[:20]), scores(old), atol=1e-6)
    assert frame["split"].isna().all()
    assert frame["label"].tolist() == [number % 2 for number in range(31)]


@pytest.mark.dgl
@pytest.mark.parametrize("how", ["none", "alone", "dictionary"])
def test_a_class_without_targets(how: str, from_class: Run) -> None:
    name = "graph.dataset=tests.support.datasets:Unlabelled"
    frame = answer(from_class, 2, name, f"graph.args={{num: 9, how: {how}}}")
    whole = answer(from_class, 1, "graph.args.num=9")
    assert np.allclose(scores(frame), scores(whole), atol=1e-6)
    assert frame["label"].isna().all()


@pytest.mark.dgl
def test_splits_of_a_class(from_class: Run) -> None:
    """A dataset class provides its own splits; the fractions of the config are not used."""
    other = (
        "graph.dataset=tests.support.datasets:Chosen",
        "graph.args={num: 12, val: [1], test: [3, 4, 10]}",
    )
    frame = answer(from_class, 2, *other)
    assert frame["split"].value_counts().to_dict() == {"train": 8, "test": 3, "val": 1}
    tests = answer(from_class, 2, *other, split="test")
    assert tests["graph"].tolist() == [3, 4, 10]
    metrics = answer(from_class, 2, *other, split="test", rows=False)
    right = (tests["prediction"] == tests["label"]).mean()
    assert metrics["test/accuracy"] == pytest.approx(right, abs=1e-6)
    assert answer(from_class, 2, "graph.args.num=9", split="test", rows=False) == {}


@pytest.mark.dgl
def test_numbers(tmp_path: Path) -> None:
    """A regression whose targets are known of some."""
    task = {"kind": "graph_regression", "metric": "mae"}
    run = train_on_ranks(
        make(tmp_path, graph=dataset("Sums", num=20), task=task, train={"epochs": 1})
    )
    labels = torch.rand(8)
    labels[[2, 5]] = torch.nan
    path = save(tmp_path / "new.bin", list(range(8)), label=labels)
    other = f"graph={{format: graphs, path: {path}}}"
    frame = answer(run, 2, other)
    old = answer(run, 1, "graph.args.num=8")
    assert np.allclose(frame["prediction"], old["prediction"], atol=1e-5)
    assert frame["label"].isna().tolist() == labels.isnan().tolist()
    error = (frame["prediction"] - frame["label"]).abs().mean()
    assert answer(run, 2, other, rows=False)["all/mae"] == pytest.approx(error, abs=1e-5)


@pytest.mark.dgl
def test_edges_tell(tmp_path: Path) -> None:
    """Edge features and categories of new graphs are read as those of the training."""
    model = {"kind": "gin", "edge_features": "amount", "edge_categories": {"kind": 2}}
    graph = dataset("Bonds", num=60) | {"val": 0.1, "test": 0.1}
    train = {"epochs": 12, "lr": 0.02, "optimizer": "adam"}
    run = train_on_ranks(make(tmp_path, graph=graph, model=model | {"hidden": 16}, train=train))
    metrics = answer(run, 2, "graph.args.num=40", "graph.args.start=100", rows=False)
    assert metrics["all/accuracy"] >= 0.95
    graphs = [Bonds(start=100)[number][0] for number in range(4)]
    graphs[2].edata["kind"] += 3
    dgl().save_graphs(str(tmp_path / "new.bin"), graphs)
    other = f"graph={{format: graphs, path: {tmp_path / 'new.bin'}}}"
    with pytest.raises(RuntimeError, match=r"6 categories of _N:_E:_N/kind, but .* trained for 3"):
        answer(run, 1, other)
    for one in graphs:
        del one.edata["amount"]
    dgl().save_graphs(str(tmp_path / "new.bin"), graphs)
    with pytest.raises(RuntimeError, match="of _N:_E:_N, the training graphs also 'amount'"):
        answer(run, 1, other)


# --- text as GIN's, through a class --------------------------------------------------------------

OLD = [(1, [5, 9, 7]), (3, [7, 7]), (1, [9, 5, 5, 9]), (3, [7, 9]), (1, [5, 5]), (3, [9, 7])]
KNOWN = {"tags": [5, 7, 9, 11], "labels": [1, 3]}


def text(path: Path, graphs: list[tuple[int, list[int]]]) -> Path:
    """Return paths of nodes with these tags."""
    lines = [f"{len(graphs)}"]
    for label, tags in graphs:
        lines.append(f"{len(tags)} {label}")
        for at, tag in enumerate(tags):
            near = [n for n in (at - 1, at + 1) if 0 <= n < len(tags)]
            lines.append(" ".join(map(str, (tag, len(near), *near))))
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def from_text(tmp_path_factory: pytest.TempPathFactory) -> Run:
    storage = tmp_path_factory.mktemp("text")
    args = {"root": str(text(storage / "old.txt", OLD).parent), "name": "old", **KNOWN}
    graph = {"format": "dataset", "dataset": "examples.gin_text:GinText", "args": args, "test": 0.2}
    return train_on_ranks(make(storage, graph=graph, train={"epochs": 2}))


def test_a_packed_dataset_keeps_its_numbers(from_text: Run, tmp_path: Path) -> None:
    config = plan(from_text, display=False).config
    old = ask(from_text, config, 2).to_pandas()
    text(tmp_path / "new.txt", [OLD[3], OLD[1], (1, [11, 9])])
    frame = answer(from_text, 2, f"graph.args.root={tmp_path}", "graph.args.name=new")
    assert np.allclose(scores(frame)[:2], scores(old.iloc[[3, 1]]), atol=1e-6)
    assert frame["label"].tolist() == [1, 1, 0]
    text(tmp_path / "odd.txt", [(1, [6])])
    with pytest.raises(InputError, match=r"ValueError: .*6"):
        answer(from_text, 2, f"graph.args.root={tmp_path}", "graph.args.name=odd")


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.dgl
@pytest.mark.parametrize(
    ("arrays", "what"),
    [
        ({}, r"arrays \[\] of _N, the training graphs also 'feat'"),
        (
            {"feat": torch.ones(4, 5)},
            r"_N/feat with rows of shape \[5\], the training graphs \[4\]",
        ),
        (
            {"feat": torch.ones(4, 4).long()},
            "feat of torch.int64, the training graphs torch.float32",
        ),
    ],
)
def test_all_unlike_those_of_the_training(
    arrays: dict[str, torch.Tensor], what: str, from_files: Run, tmp_path: Path
) -> None:
    """Graphs that agree with each other are refused if they differ from the training's."""
    graph = dgl().rand_graph(4, 6)
    graph.ndata.update(arrays)
    dgl().save_graphs(str(tmp_path / "other.bin"), [graph] * 3)
    with pytest.raises(RuntimeError, match=what):
        answer(from_files, 2, f"graph.path={tmp_path / 'other.bin'}")


@pytest.mark.dgl
def test_other_types_than_those_of_the_training(from_files: Run, tmp_path: Path) -> None:
    typed = dgl().heterograph({("a", "to", "a"): ([0], [1])})
    typed.ndata["feat"] = torch.rand(2, 4)
    dgl().save_graphs(str(tmp_path / "typed.bin"), [typed])
    with pytest.raises(RuntimeError, match=r"node types \['a'\], the training graphs"):
        answer(from_files, 1, f"graph.path={tmp_path / 'typed.bin'}")


@pytest.mark.dgl
def test_more_classes_than_it_knows(from_files: Run, from_class: Run, tmp_path: Path) -> None:
    where = save(tmp_path / "new.bin", [0, 1], label=torch.tensor([0, 4]))
    with pytest.raises(RuntimeError, match="5 classes, but the model was trained for 2"):
        answer(from_files, 1, f"graph.path={where}")
    name = "graph.dataset=tests.support.datasets:Labelled"
    with pytest.raises(RuntimeError, match="4 classes, but the model was trained for 2"):
        answer(from_class, 1, name, "graph.args={num: 8, label: 3}")
    frame = answer(from_class, 2, name, "graph.args={num: 8, label: -7}")  # unknown
    assert frame["label"].isna().tolist() == [False] * 5 + [True] + [False] * 2


@pytest.mark.dgl
def test_categories(tmp_path: Path) -> None:
    """The number of categories is the training's, whichever of them the new graphs have."""
    graph = dataset("Coloured", num=20, colours=5)
    model = {"kind": "gin", "hidden": 8, "layers": 2, "categories": {"colour": 4}}
    run = train_on_ranks(make(tmp_path, graph=graph, model=model, train={"epochs": 1}))
    weights = torch.load(run.path / "checkpoints" / "selected.pt")
    assert any(each.shape == (5, 4) for each in weights.values())
    frame = answer(run, 2, "graph.args={num: 12, colours: 2}")
    assert len(frame) == 12
    with pytest.raises(RuntimeError, match=r"9 categories of _N/colour, but .* trained for 5"):
        answer(run, 1, "graph.args={num: 12, colours: 9}")


@pytest.mark.dgl
@pytest.mark.parametrize(
    ("overrides", "split", "what"),
    [
        (["graph.path=/"], "test", "have no split 'test': fractions and folds divide"),
        (["graph.path=/"], "tests", "no split 'tests'"),
        ([], "all", "no new data are named"),
        (["graph.path=/", "graph.normalize=row"], "all", "by none when .* by row here"),
        (["graph.path=/", "task.target=y"], "all", "task.target was"),
    ],
)
def test_refused(overrides: list[str], split: str, what: str, from_files: Run) -> None:
    with pytest.raises(InputError, match=what) as caught:
        asked(from_files, *overrides, split=split)
    assert caught.value.remedy


@pytest.mark.dgl
def test_a_damaged_schema(from_class: Run, tmp_path: Path) -> None:
    target = tmp_path / "runs" / "test"
    (target / "checkpoints").mkdir(parents=True)
    for name in ("config.yaml", "checkpoints/selected.pt", "checkpoints/selected.json"):
        (target / name).write_bytes((from_class.path / name).read_bytes())
    about = target / "checkpoints" / "selected.json"
    like = {"nodes": {"_N": {}}, "edges": [1], "target": 0}
    about.write_text(json.dumps({**json.loads(about.read_text()), "like": like}))
    with pytest.raises(RuntimeError, match="schema of the training graphs is invalid"):
        answer(Run(target), 1, "graph.args.num=3")


@pytest.mark.dgl
@pytest.mark.system
@pytest.mark.usefixtures("shared_ray")
@pytest.mark.slow
def test_on_a_ray(from_text: Run, tmp_path: Path) -> None:
    """A complete prediction yields metrics of text."""
    text(tmp_path / "new.txt", [OLD[1], OLD[3]])
    where = [f"graph.args.root={tmp_path}", "graph.args.name=new"]
    one = "cluster.workers=1"
    metrics = raygnn.evaluate(from_text, new_data=True, overrides=[*where, one], display=False)
    frame = answer(from_text, 2, *where)
    right = (frame["prediction"] == frame["label"]).mean()
    assert metrics["all/accuracy"] == pytest.approx(right, abs=1e-6)
