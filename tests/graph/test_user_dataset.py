"""Datasets of the user's own."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from raygnn.config.graph import ManyGraphs
from raygnn.config.load import load_config
from raygnn.errors import CapabilityError, ConfigError, DataError
from raygnn.graph.collection import open_samples, split_graphs
from raygnn.graph.collection.user_dataset import UserSamples
from raygnn.graph.dgl import dgl, missing

pytestmark = pytest.mark.dgl

MODULE = '''
import dgl
import numpy as np
import torch


class Rings:
    """Rings of 2, 3, … nodes; the label says whether there are more than 4."""

    def __init__(self, num=10, dtypes=("float32",)):
        self.num, self.dtypes = num, dtypes

    def __len__(self):
        return self.num

    def __getitem__(self, i):
        ids = torch.arange(i + 2)
        graph = dgl.graph((ids, (ids + 1) % (i + 2)), idtype=torch.int32)
        dtype = getattr(torch, self.dtypes[i % len(self.dtypes)])
        graph.ndata["feat"] = torch.full((i + 2, 3), i, dtype=dtype)
        graph.edata["w"] = ids
        return graph, self.label(i)

    def label(self, i):
        return int(i > 2)


class Split(Rings):
    def get_idx_split(self):
        return {"train": torch.tensor([5, 0, 1]), "valid": torch.tensor([2]), "test": [9, 3]}


class Labelled(Rings):
    num_classes = 3

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.labels = torch.tensor([[i % 2] for i in range(self.num)])


class Typed(Rings):
    def __getitem__(self, i):
        graph = dgl.heterograph(
            {("user", "buys", "item"): ([2, 0], [0, 1]), ("item", "by", "user"): ([], [])},
            num_nodes_dict={"user": 3, "item": 2},
        )
        graph.nodes["user"].data["feat"] = torch.ones(3, 1)
        graph.edges["buys"].data["w"] = torch.ones(2)
        return graph, {"y": np.float64(0.5), "z": torch.tensor([1.0, 2.0])}


class Given(Rings):
    """Returns what it is told to."""

    def __init__(self, item=None, label=None, error=None, splits=None, labels=None):
        super().__init__(4)
        self.item, self.label_, self.error = item, label, error
        if splits is not None:
            self.splits = splits
        if labels is not None:
            self.labels = labels

    def __getitem__(self, i):
        if self.error is not None:
            raise {"index": IndexError, "own": Own}[self.error]("mine", i)
        return super().__getitem__(i) if self.item is None else self.item

    def label(self, i):
        return self.label_


class Own(Exception):
    pass


class Bad(Rings):
    def __init__(self):
        raise FileNotFoundError("no molecules")


class Lengthless:
    def __getitem__(self, i):
        raise IndexError


class Mute:
    def __len__(self):
        return 3


class Failing(Rings):
    def __len__(self):
        raise Own("no length")


class FailingSplit(Rings):
    def get_idx_split(self):
        raise Own("no split")


number = 3
'''


@pytest.fixture
def samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function: class name and arguments → its UserSamples."""
    (tmp_path / "molecules_of_mine.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "molecules_of_mine", raising=False)

    def make(name: str, target: str = "label", graph: Any = None, **args: Any) -> UserSamples:
        config = ManyGraphs(format="graphs", **(graph or {}))
        return UserSamples(f"molecules_of_mine:{name}", args, config, target=target)

    return make


def test_graphs_are_taken_as_they_are(samples: Any) -> None:
    found = samples("Rings", num=12, dtypes=["bfloat16", "float32"])
    assert found.num == 12
    assert found.num_classes is None
    for number in (0, 1, 11):
        sample = found[number]
        num = number + 2
        assert sample.num_nodes == {"_N": num}
        src, dst = sample.edges["_N", "_E", "_N"]
        assert src.dtype == dst.dtype == torch.int64
        assert src.tolist() == list(range(num))
        assert dst.tolist() == [*range(1, num), 0]
        feat = sample.node_data["_N"]["feat"]
        assert feat.dtype == (torch.bfloat16, torch.float32)[number % 2]
        assert feat.eq(number).all()
        assert sample.edge_data["_N", "_E", "_N"]["w"].tolist() == list(range(num))
        assert sample.y is not None
        assert sample.y.shape == ()
        assert sample.y.tolist() == int(number > 2)


def test_typed_graphs_and_named_labels(samples: Any) -> None:
    sample = samples("Typed", target="y")[0]
    assert sample.num_nodes == {"user": 3, "item": 2}
    src, dst = sample.edges["user", "buys", "item"]
    assert (src.tolist(), dst.tolist()) == ([2, 0], [0, 1])
    assert len(sample.edges["item", "by", "user"][0]) == 0
    assert sample.node_data["item"] == {}
    assert sample.edge_data["user", "buys", "item"]["w"].tolist() == [1, 1]
    assert sample.y.dtype == torch.float64
    assert samples("Typed", target="z")[0].y.tolist() == [1, 2]
    with pytest.raises(DataError, match=r"Typed\[3\] has no label 'w'; there are 'y', 'z'"):
        samples("Typed", target="w")[3]


@pytest.mark.parametrize(
    ("label", "wanted"),
    [
        (3, torch.tensor(3)),
        (0.1, torch.tensor(0.1)),
        (True, torch.tensor(True)),
        (np.int32(3), torch.tensor(3, dtype=torch.int32)),
        (np.array([1.5, 2]), torch.tensor([1.5, 2], dtype=torch.float64)),
        (np.array([1], dtype=np.int8), torch.tensor(1, dtype=torch.int8)),
        (torch.tensor([[2.5]]).bfloat16()[0], torch.tensor(2.5).bfloat16()),
        (torch.tensor([1.0, 2.0], requires_grad=True), torch.tensor([1.0, 2.0])),
    ],
)
def test_labels(label: Any, wanted: torch.Tensor, samples: Any) -> None:
    y = samples("Given", label=label)[0].y
    assert y.dtype == wanted.dtype
    assert torch.equal(y, wanted)
    assert not y.requires_grad


@pytest.mark.parametrize(
    ("args", "match"),
    [
        ({"label": "toxic"}, r"Given\[1\] has a str as label"),
        ({"label": None}, "NoneType as label"),
        ({"label": np.array(["a"])}, "ndarray as label"),
        ({"label": ["a"]}, "list as label"),
        ({"label": torch.ones(2, 2)}, r"label of shape \[2, 2\]"),
        ({"item": 3}, r"Given\[1\] is a int, expected \(DGL graph, label\)"),
        ({"item": (1, 2)}, r"tuple of \(int, int\)"),
        ({"item": (1, 2, 3)}, r"tuple of \(int, int, int\)"),
    ],
)
def test_items_of_another_kind(args: Any, match: str, samples: Any) -> None:
    with pytest.raises(DataError, match=match) as caught:
        samples("Given", **args)[1]
    assert "graph.dataset molecules_of_mine:Given" in str(caught.value)
    assert caught.value.remedy


def test_a_graph_alone_is_no_item(samples: Any) -> None:
    with pytest.raises(DataError, match="is a DGLGraph"):
        samples("Given", item=dgl().graph(([0], [0])))[0]


@pytest.mark.parametrize("kind", ["index", "own"])
def test_errors_of_the_dataset_are_passed_on(kind: str, samples: Any) -> None:
    found = samples("Given", error=kind)
    with pytest.raises((IndexError, sys.modules["molecules_of_mine"].Own)) as caught:
        found[2]
    assert caught.value.args == ("mine", 2)
    assert caught.value.__cause__ is None
    assert not isinstance(caught.value, DataError)


# --- splits --------------------------------------------------------------------------------------


def lists(splits: Any) -> dict[str, list[int]]:
    return {name: numbers.tolist() for name, numbers in splits.items()}


def test_splits_of_its_own(samples: Any) -> None:
    wanted = {"train": [0, 1, 5], "val": [2], "test": [3, 9]}
    assert lists(samples("Split").splits) == wanted
    given = samples("Given", splits={"train": np.array([3, 1]), "test": range(1)})
    assert lists(given.splits) == {"train": [1, 3], "val": [], "test": [0]}
    assert all(numbers.dtype == np.int64 for numbers in given.splits.values())


def test_splits_of_the_config(samples: Any) -> None:
    section = {"val": 0.2, "test": 0.2, "seed": 4}
    config = ManyGraphs(format="graphs", **section)
    assert lists(samples("Rings", graph=section).splits) == lists(split_graphs(10, None, config))
    labelled = samples("Labelled", num=40, graph=section)
    assert labelled.num_classes == 3
    for numbers in labelled.splits.values():
        assert np.bincount(numbers % 2).tolist() == [len(numbers) // 2] * 2
    for labels in (torch.rand(4), [1, 2], ["a", "b", "c", "d"]):  # nothing to spread evenly
        found = samples("Given", labels=labels, graph=section)
        assert lists(found.splits) == lists(split_graphs(4, None, config))


@pytest.mark.parametrize(
    ("splits", "match"),
    [
        ([1, 2], "splits is a list, not a dictionary"),
        ({"val": [1]}, "has the splits 'val'"),
        ({"train": [1], "holdout": [2]}, "'train', 'holdout'"),
        ({"train": [4]}, "graph 4 in train, but there are 4"),
        ({"train": [-1]}, "graph -1 in train"),
        ({"train": [1, 1]}, "graph 1 twice in train"),
        ({"train": [0, 1], "val": [1]}, "graph 1 in train and in val"),
        ({"train": [0.5]}, "no graph numbers for train"),
        ({"train": [True, False, True, True]}, "no graph numbers for train"),
        ({"train": "all"}, "no graph numbers for train"),
        ({"train": torch.ones(2, 2, dtype=torch.int64)}, "no graph numbers for train"),
    ],
)
def test_splits_that_cannot_be(splits: Any, match: str, samples: Any) -> None:
    with pytest.raises(DataError, match=match):
        samples("Given", splits=splits)


# --- what cannot be made -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "args", "error", "match"),
    [
        ("None_", {}, ConfigError, r"graph\.dataset: .*None_ could not be imported"),
        ("number", {}, ConfigError, "is a int, not a class"),
        ("Rings", {"size": 3}, ConfigError, r"(?s)graph\.args: .*'size'.*\(num=10, dtypes="),
        ("Bad", {}, ConfigError, r"graph\.args: .*FileNotFoundError: no molecules"),
        ("Rings", {"num": 0}, DataError, "empty: its length is 0"),
        ("Lengthless", {}, DataError, "Lengthless has no __len__"),
        ("Mute", {}, DataError, "Mute has no __getitem__"),
        ("Failing", {}, DataError, r"len\(dataset\) failed: Own: no length"),
        ("FailingSplit", {}, DataError, r"get_idx_split\(\) failed: Own: no split"),
    ],
)
def test_unusable_datasets_are_refused(
    name: str, args: Any, error: type[Exception], match: str, samples: Any
) -> None:
    with pytest.raises(error, match=match):
        samples(name, **args)


def test_modules_that_cannot_be_imported(samples: Any, tmp_path: Path) -> None:
    config = ManyGraphs(format="graphs")
    with pytest.raises(ConfigError, match=r"graph\.dataset: .*No module named 'nowhere_at_all'"):
        UserSamples("nowhere_at_all:Class", {}, config)
    (tmp_path / "broken_molecules.py").write_text("def (")
    with pytest.raises(ConfigError, match=r"broken_molecules:Class could not be .*SyntaxError"):
        UserSamples("broken_molecules:Class", {}, config)
    (tmp_path / "incapable_molecules.py").write_text("import dgl.graphbolt as gb\ngb.ItemSet(3)\n")
    if "graphbolt" in missing():
        with pytest.raises(CapabilityError, match="graphbolt"):
            UserSamples("incapable_molecules:Class", {}, config)


def test_a_job_with_a_dataset_of_ones_own(samples: Any) -> None:
    config = load_config(
        {
            "name": "a",
            "graph": {"format": "graphs", "dataset": "molecules_of_mine:Typed", "args": {"num": 5}},
            "task": {"kind": "graph_regression", "target": "z"},
            "model": {"kind": "gin"},
        }
    )
    found = open_samples(config, None)
    assert found.num == 5
    assert found[4].y is not None
    assert found[4].y.tolist() == [1, 2]
