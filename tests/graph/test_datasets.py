"""`graph: {format: dataset}`: dataset classes of PyG, DGL and OGB, and the user's own."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from raygnn.config.graph import DatasetGraph
from raygnn.config.load import load_config
from raygnn.errors import ConfigError, DataError, InputError
from raygnn.graph.collection import (
    CollectionMeta,
    MissingCollection,
    find_collection,
)
from raygnn.graph.collection.mapped_collection import open_collection
from raygnn.graph.collection.pack import make_collection
from raygnn.graph.data import DEFAULT_ETYPE, MASKS, GraphData
from raygnn.graph.outofcore.divide import make_partition
from raygnn.graph.partition.layout import PartitionMeta
from raygnn.graph.partition.make import Missing, find_partition
from raygnn.graph.sources import datasets, digest, load_graph
from tests.conftest import CHECKOUT
from tests.support.datasets import cora, tolokers
from tests.support.ogb_builder import link_splits

MODULE = '''
from pathlib import Path

import numpy as np
import torch
from torch_geometric.data import Data, HeteroData, InMemoryDataset


def ring(num=6, **more):
    nodes = torch.arange(num)
    index = torch.stack([nodes, (nodes + 1) % num])
    return Data(x=torch.arange(num * 2.0).reshape(num, 2), edge_index=index, **more)


class One:
    """A graph with what it is given; its other graph is of seven nodes."""

    def __init__(self, splits=0, name="One", **more):
        self.name = name
        masks = torch.eye(6, dtype=torch.bool)
        for at, split in enumerate(("train", "val", "test")):
            mask = masks[at] if not splits else torch.stack([masks[at + s] for s in range(splits)], 1)
            more[f"{split}_mask"] = mask
        more = {key: torch.tensor(v) if isinstance(v, list) else v for key, v in more.items()}
        self.graph = ring(y=torch.arange(6)[:, None] % 2, **more)

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return [self.graph, ring(7, train_mask=torch.ones(7, dtype=torch.bool), y=torch.ones(7).long())][index]


kept = One().graph


def graph_alone():
    return kept


class Typed:
    def __len__(self):
        return 1

    def __getitem__(self, index):
        data = HeteroData()
        data["paper"].x = torch.rand(4, 3)
        data["paper"].y = torch.tensor([0, 1, 0, 1])
        data["author"].num_nodes = 2
        data["author", "writes", "paper"].edge_index = torch.tensor([[0, 1, 1], [0, 3, 2]])
        data["author", "writes", "paper"].edge_attr = torch.tensor([[1.0], [2.0], [3.0]])
        data["paper", "cites", "paper"].edge_index = torch.tensor([[0, 1], [1, 2]])
        return data

    def get_idx_split(self):
        return {"train": {"paper": torch.tensor([0, 2])}, "valid": {"paper": np.array([1])}, "test": {"paper": [3]}}


class Ogb:
    """As OGB's own classes give a graph: a dictionary of arrays, and labels."""

    def __init__(self, train=(0, 1)):
        self.train = np.array(train)

    def __len__(self):
        return 1

    def __getitem__(self, index):
        graph = {
            "edge_index": np.array([[0, 1, 2], [1, 2, 0]]), "edge_feat": None,
            "node_feat": np.ones((3, 2), np.float32), "node_year": np.array([[1], [2], [3]]), "num_nodes": 3,
        }
        return graph, np.array([[0.0], [1.0], [np.nan]])

    def get_idx_split(self):
        return {"train": self.train, "valid": np.array([], np.int64), "test": np.array([], np.int64)}


class Many:
    """Rings of PyG of 1 to num nodes; their class is whether the number is odd."""

    def __init__(self, num=12, bad=-1, split=False):
        self.num, self.bad = num, bad
        self.splits = {"train": list(range(1, num)), "valid": [0]} if split is True else split or None

    def __len__(self):
        return self.num

    def __getitem__(self, number):
        if number == self.bad:
            raise OSError("unreadable")
        size = self.num - number
        return ring(size, y=torch.tensor([[number % 2]]), name=f"ring {number}", number=torch.tensor([number]))


class Pairs(Many):
    """The same as pairs of a graph and named labels; of one graph a label is unknown."""

    def __init__(self, unknown=-1):
        super().__init__()
        self.unknown = unknown

    def __getitem__(self, number):
        data = super().__getitem__(number)
        del data.y
        if number == self.unknown:
            return data, {"kind": number % 2, "size": None}
        return data, {"kind": number % 2, "size": float(data.num_nodes)}


class FromFile(InMemoryDataset):
    """A dataset as PyG's are, from a file of numbers."""

    raw_file_names = ["numbers.txt"]
    processed_file_names = ["data.pt"]

    def __init__(self, root, **options):
        super().__init__(root, **options)
        self.load(self.processed_paths[0])

    def download(self):
        raise ConnectionError("no network")

    def process(self):
        numbers = [float(word) for word in Path(self.raw_paths[0]).read_text().split()]
        x = torch.tensor(numbers)[:, None]
        self.save([Data(x=x, edge_index=torch.tensor([[0], [1]]), train_mask=x[:, 0] > 0, y=torch.ones(len(x)).long())], self.processed_paths[0])
'''  # noqa: E501


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's module, in the working directory; imported anew where it is written again."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.delitem(sys.modules, "mine_for_test", raising=False)
    (tmp_path / "mine_for_test.py").write_text(MODULE)
    return tmp_path / "mine_for_test.py"


def section(name: str, keys: dict[str, Any] | None = None, **args: Any) -> dict[str, Any]:
    dataset = {"format": "dataset", "dataset": f"mine_for_test:{name}", "args": args}
    return {**dataset, **(keys or {})}


def load(name: str, keys: dict[str, Any] | None = None, **args: Any) -> GraphData:
    return load_graph(DatasetGraph(**section(name, keys, **args)))


def nodes(data: GraphData, ntype: str = "_N") -> dict[str, Any]:
    return data.nodes[ntype].data


# --- one graph


@pytest.mark.usefixtures("module")
def test_a_graph_of_pyg() -> None:
    data = load("One", weight=[1, 2, 3, 4, 5, 6], edge_kind=[9, 8, 7, 6, 5, 4])
    assert data.name == "one"
    found = nodes(data)
    assert found["feat"].tolist() == [[2 * i, 2 * i + 1] for i in range(6)]
    assert found["label"].tolist() == [0, 1] * 3
    assert found["label"].dtype == np.int64
    assert found["weight"].tolist() == [1, 2, 3, 4, 5, 6]
    for at, split in enumerate(("train", "val", "test")):
        assert found[f"{split}_mask"].dtype == np.bool_
        assert np.flatnonzero(found[f"{split}_mask"]).tolist() == [at]
    edges = data.edges[DEFAULT_ETYPE]
    assert (edges.src.tolist(), edges.dst.tolist()) == ([0, 1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 0])
    assert edges.data["edge_kind"].tolist() == [9, 8, 7, 6, 5, 4]
    assert load("graph_alone").num_nodes == 6  # a function that returns one
    for _ in range(2):  # the dataset's own arrays are not scaled
        scaled = load("graph_alone", {"normalize": "standard"})
        assert np.allclose(nodes(scaled)["feat"].std(0), 1)
    assert nodes(load("graph_alone"))["feat"].tolist() == found["feat"].tolist()


@pytest.mark.usefixtures("module")
def test_index_and_split_choose() -> None:
    assert load("One", {"index": 1}).num_nodes == 7
    for split in (0, 1, 2):
        found = nodes(load("One", {"split": split}, splits=3))
        assert np.flatnonzero(found["val_mask"]).tolist() == [1 + split]
    assert nodes(load("One", splits=3))["train_mask"].ndim == 1  # without split, the first one
    for keys, match in (
        ({"index": 2}, r"graph\.index.*choose graph.index from 0 to 1"),
        ({"split": 3}, r"there is no split 3: .* have 3"),
    ):
        with pytest.raises(ConfigError, match="(?s)" + match) as caught:
            load("One", keys, splits=3)
        assert caught.value.remedy
    with pytest.raises(ConfigError, match="have 1"):
        load("One", {"split": 1})


@pytest.mark.usefixtures("module")
def test_a_graph_of_several_types() -> None:
    data = load("Typed", {"reverse": True})
    assert {t: frame.num for t, frame in data.nodes.items()} == {"paper": 4, "author": 2}
    found = nodes(data, "paper")
    assert found["label"].tolist() == [0, 1, 0, 1]
    assert found["train_mask"].tolist() == [True, False, True, False]
    assert found["val_mask"].tolist() == [False, True, False, False]
    assert found["test_mask"].tolist() == [False, False, False, True]
    writes = data.edges["author", "writes", "paper"]
    assert (writes.src.tolist(), writes.dst.tolist()) == ([0, 1, 1], [0, 3, 2])
    assert writes.data["edge_attr"].tolist() == [[1], [2], [3]]
    assert data.edges["paper", "rev_writes", "author"].src.tolist() == [0, 3, 2]


@pytest.mark.usefixtures("module")
def test_a_graph_as_ogb_gives_it() -> None:
    data = load("Ogb")
    found = nodes(data)
    assert found["label"].tolist() == [0, 1, -1]
    assert found["year"].tolist() == [1, 2, 3]
    assert found["feat"].shape == (3, 2)
    assert found["train_mask"].tolist() == [True, True, False]
    assert not found["val_mask"].any()
    with pytest.raises(DataError, match="train, row 1: node 7 is not a node: there are 3"):
        load("Ogb", train=[0, 7])


@pytest.mark.parametrize("kind", ["ogbl-collab", "ogbl-citation2", "ogbl-wikikg2"])
def test_links_of_all_splits_are_edges(kind: str) -> None:
    """OGB's graph lacks its held-out links; ours includes them."""
    dataset = {"dataset": "tests.support.ogb_builder:Links", "args": {"kind": kind}}
    data = load_graph(DatasetGraph(format="dataset", **dataset))
    edges = data.edges[DEFAULT_ETYPE]
    ends = {"ogbl-citation2": ("source_node", "target_node"), "ogbl-wikikg2": ("head", "tail")}
    for part, mask in zip(link_splits(kind), MASKS, strict=True):
        rows = edges.data[mask]
        given = [part[name] for name in ends[kind]] if kind in ends else part["edge"].T
        np.testing.assert_array_equal(np.stack([edges.src[rows], edges.dst[rows]]), given)
        for name in {"relation", "year"} & part.keys():
            np.testing.assert_array_equal(edges.data[name][rows], part[name])
    assert edges.num == 46
    dataset["args"] = {"kind": "typed"}
    with pytest.raises(DataError, match="not of one edge type: head_type"):
        load_graph(DatasetGraph(format="dataset", **dataset))


@pytest.mark.dgl
def test_a_graph_of_dgl(module: Path) -> None:
    module.write_text(
        "import dgl, torch\n"
        "class Ring(list):\n"
        "    def __init__(self):\n"
        "        graph = dgl.graph(([2, 0, 1], [0, 1, 2]))\n"
        "        graph.ndata['feat'] = torch.eye(3).bfloat16()\n"
        "        graph.ndata['train_mask'] = torch.tensor([[1, 0], [0, 1], [0, 0]])\n"
        "        graph.edata['w'] = torch.arange(3)\n"
        "        super().__init__([(graph, torch.tensor([2, 1, 0]))])\n"
    )
    data = load("Ring", {"split": 1})
    assert nodes(data)["feat"].dtype == torch.bfloat16
    assert nodes(data)["label"].tolist() == [2, 1, 0]
    assert nodes(data)["train_mask"].tolist() == [False, True, False]
    edges = data.edges[DEFAULT_ETYPE]
    assert (edges.src.tolist(), edges.data["w"].tolist()) == ([2, 0, 1], [0, 1, 2])


@pytest.mark.parametrize(
    ("name", "args", "match"),
    [
        ("One", {"y": [1]}, "could not be constructed.*multiple values for keyword"),
        ("None_", {}, "could not be imported"),
        ("np", {}, "is a module, not a class"),
        ("Many", {"num": 0}, "there is no graph 0: mine_for_test:Many holds 0"),
        ("Many", {"bad": 0}, r"Many\[0\] failed: OSError: unreadable"),
        ("Many", {}, "no node type has a train_mask"),
        ("Pairs", {}, "labels are given by node type, and the node types are _N"),
    ],
)
@pytest.mark.usefixtures("module")
def test_unreadable_datasets_are_refused(name: str, args: dict[str, Any], match: str) -> None:
    with pytest.raises(InputError, match="(?s)" + match) as caught:
        load(name, **args)
    assert caught.value.remedy
    assert caught.value.exit_code == 2


# --- the real ones


def test_cora_is_the_public_split(data_dir: Path, tmp_path: Path) -> None:
    data = load_graph(DatasetGraph(**cora(data_dir, tmp_path)))
    assert (data.name, data.num_nodes, data.num_edges) == ("cora", 2708, 10556)
    found = nodes(data)
    assert found["feat"].shape == (2708, 1433)
    assert found["feat"].dtype == np.float32
    assert np.allclose(found["feat"].sum(axis=1), 1)
    splits = [np.flatnonzero(found[f"{split}_mask"]) for split in ("train", "val", "test")]
    assert [len(split) for split in splits] == [140, 500, 1000]
    assert splits[0].tolist() == list(range(140))
    assert splits[1].tolist() == list(range(140, 640))
    assert splits[2].min() == 1708
    assert np.bincount(found["label"][splits[0]]).tolist() == [20] * 7
    # class sizes and degree as in Kipf & Welling's and DGL's copies
    assert np.bincount(found["label"]).tolist() == [351, 217, 418, 818, 426, 298, 180]
    edges = data.edges[DEFAULT_ETYPE]
    ends = set(zip(edges.src.tolist(), edges.dst.tolist()))
    assert len(ends) == 10556
    assert all((target, source) in ends for source, target in ends)
    assert {source for source, target in ends if target == 0} == {633, 1862, 2582}


@pytest.mark.filterwarnings("ignore:Please import:DeprecationWarning")
def test_cora_is_what_its_files_hold(data_dir: Path, tmp_path: Path) -> None:
    data = load_graph(DatasetGraph(**{**cora(data_dir, tmp_path), "normalize": "none"}))
    place = data_dir / "planetoid"
    read = {
        part: pickle.loads((place / f"ind.cora.{part}").read_bytes(), encoding="latin1")
        for part in ("allx", "tx", "ally", "ty")
    }
    test = np.loadtxt(place / "ind.cora.test.index", dtype=int)
    assert np.array_equal(nodes(data)["feat"][:1708], read["allx"].toarray())
    assert np.array_equal(nodes(data)["feat"][test], read["tx"].toarray())
    assert np.array_equal(nodes(data)["label"][test], read["ty"].argmax(axis=1))
    assert np.array_equal(nodes(data)["label"][:1708], read["ally"].argmax(axis=1))


def test_tolokers_has_ten_splits(data_dir: Path, tmp_path: Path) -> None:
    stored = np.load(data_dir / "npz" / "tolokers.npz")
    for split in (0, 9):
        data = load_graph(DatasetGraph(**tolokers(data_dir, tmp_path, split=split)))
        assert (data.num_nodes, data.num_edges) == (11758, 1038000)
        assert np.array_equal(nodes(data)["feat"], stored["node_features"])
        for part in ("train", "val", "test"):
            assert np.array_equal(nodes(data)[f"{part}_mask"], stored[f"{part}_masks"][split])


def test_mutag_equals_its_text_files(data_dir: Path, tmp_path: Path) -> None:
    args = {"root": str(data_dir / "graphs"), "name": "MUTAG"}
    graph = {"format": "dataset", "dataset": "examples.gin_text:GinText", "args": args}
    meta = packed(graph, tmp_path)
    assert (meta.num_graphs, meta.num_nodes) == (188, 3371)
    assert meta.nodes["_N"].largest == 28
    labels = np.load(meta.directory / meta.graphs["label"].file)
    assert np.bincount(labels).tolist() == [63, 125]
    held = open_collection(job(graph, tmp_path), meta.directory).splits["test"]
    assert abs(labels[held].sum() - len(held) * labels.mean()) < 1  # each class evenly
    feat = np.load(meta.directory / meta.nodes["_N"].data["feat"].file)
    assert feat.shape == (3371, 9)
    assert (feat.sum(1) == 1).all()


# --- many graphs


def job(graph: dict[str, Any], storage: Path, **sections: Any) -> Any:
    task = {"kind": "graph_classification"}
    values = {"name": "a", "graph": graph, "task": task, "model": {"kind": "gin"}}
    return load_config({**values, "storage": str(storage), **sections})


def packed(graph: dict[str, Any], storage: Path, **sections: Any) -> CollectionMeta:
    found = find_collection(job(graph, storage, **sections))
    assert isinstance(found, MissingCollection)
    return make_collection(found)


@pytest.mark.usefixtures("module")
def test_many_graphs_of_pyg(tmp_path: Path) -> None:
    """The last ring has one node, so that its graph-level attributes look like a node's."""
    config = job(section("Many", {"folds": 4, "fold": 1}), tmp_path)
    meta = packed(section("Many", {"folds": 4, "fold": 1}), tmp_path)
    assert find_collection(config) == meta  # found again
    assert find_collection(job(section("Many", {"seed": 9}), tmp_path)) == meta
    samples = open_collection(config, meta.directory)
    assert (samples.num, samples.num_classes) == (12, 2)
    assert list(meta.nodes["_N"].data) == ["feat"]
    for number in (0, 3, 11):
        sample = samples[number]
        assert sample.num_nodes == {"_N": 12 - number}
        assert sample.y is not None
        assert (sample.y.tolist(), sample.y.dtype) == (number % 2, torch.int64)
        assert sample.edges[DEFAULT_ETYPE][1].tolist() == [*range(1, 12 - number), 0]
    for number in (-1, 12):
        with pytest.raises(IndexError):
            samples[number]
    assert [len(samples.splits[name]) for name in ("train", "val", "test")] == [8, 1, 3]


@pytest.mark.usefixtures("module")
def test_splits_of_the_dataset_are_kept(tmp_path: Path) -> None:
    graph = section("Many", split=True)
    meta = packed(graph, tmp_path)
    for others in (False, True):
        samples = open_collection(job(graph, tmp_path), meta.directory, others=others)
        assert samples.splits["train"].tolist() == list(range(1, 12))
        assert samples.splits["val"].tolist() == [0]
        assert samples.splits["test"].tolist() == []


@pytest.mark.usefixtures("module")
def test_named_labels(tmp_path: Path) -> None:
    meta = packed(section("Pairs"), tmp_path, task={"kind": "graph_regression", "target": "size"})
    assert meta.graphs.keys() == {"kind", "size"}
    assert np.load(meta.directory / meta.graphs["size"].file).tolist() == list(range(12, 0, -1))
    assert meta.graphs["size"].dtype == "float32"


@pytest.mark.usefixtures("module")
def test_many_graphs_that_cannot_be_packed(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"Many\[4\] failed: OSError: unreadable"):
        packed(section("Many", bad=4), tmp_path)
    assert not list(tmp_path.glob("partitions/*"))
    regression = {"kind": "graph_regression", "target": "kind"}
    with pytest.raises(DataError, match=r"'size' has shape \(\), in graph 0 no value"):
        packed(section("Pairs", unknown=0), tmp_path, task=regression)
    with pytest.raises(DataError, match=r"'size' has no value, in graph 0 shape \(\)"):
        packed(section("Pairs", unknown=5), tmp_path, task=regression)


@pytest.mark.usefixtures("module")
@pytest.mark.parametrize(
    ("splits", "match"),
    [
        ([1, 2], "splits is a list, not a dictionary"),
        ({"train": [1], "holdout": [2]}, "'train', 'holdout'"),
        ({"train": [4]}, "graph 4, but there are 4"),
        ({"train": [-1]}, "graph -1, but there are 4"),
        ({"train": [1, 1]}, "graph 1 more than once"),
        ({"train": [0, 1], "val": [1]}, "graph 1 more than once"),
        ({"train": [0.5]}, "no graph numbers for train"),
        ({"train": [True, False, True, True]}, "no graph numbers for train"),
        ({"train": "all"}, "no graph numbers for train"),
        ({"train": [[1, 1], [1, 1]]}, "no graph numbers for train"),
        ({"train": torch.zeros(1).bfloat16()}, "no graph numbers for train"),
    ],
)
def test_splits_of_graphs_that_are_refused(splits: Any, match: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=match):
        packed(section("Many", num=4, split=splits), tmp_path)


@pytest.mark.parametrize(
    ("label", "wanted"),
    [
        (3, torch.tensor(3)),
        (0.1, torch.tensor(0.1)),
        (np.array([1.5, 2]), torch.tensor([1.5, 2], dtype=torch.float64)),
        (np.array([1], dtype=np.int8), torch.tensor(1, dtype=torch.int8)),
        (torch.tensor([1.0, 2.0], requires_grad=True), torch.tensor([1.0, 2.0])),
    ],
)
def test_labels_of_graphs(label: Any, wanted: torch.Tensor) -> None:
    found = torch.from_numpy(datasets._label(label, "here"))
    assert found.dtype == wanted.dtype
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("label", ["toxic", np.array(["a"]), ["a"], torch.ones(1).bfloat16()])
def test_labels_of_graphs_that_are_no_numbers(label: Any) -> None:
    with pytest.raises(DataError, match="here: label"):
        datasets._label(label, "here")


# --- what stands for a dataset, and files that are missing


def write_numbers(root: Path, text: str = "1 2 3") -> dict[str, Any]:
    (root / "raw").mkdir(parents=True, exist_ok=True)
    (root / "raw" / "numbers.txt").write_text(text)
    return section("FromFile", root=str(root))


def digest_of(graph: dict[str, Any]) -> str:
    return digest(DatasetGraph(**graph))


def test_a_changed_dataset_is_another_partition(module: Path, tmp_path: Path) -> None:
    graph = write_numbers(tmp_path / "a")
    found = [digest_of(graph)]
    assert digest_of(write_numbers(tmp_path / "b")) == found[0]  # elsewhere, the same files
    found.append(digest_of({**graph, "normalize": "row"}))
    found.append(digest_of({**graph, "index": 1}))
    found.append(digest_of({**graph, "split": 1}))
    found.append(digest_of({**graph, "args": {**graph["args"], "force_reload": True}}))
    found.append(digest_of(write_numbers(tmp_path / "c", "1 2 4")))
    found.append(digest_of(write_numbers(tmp_path / "a", "1 2 5")))
    found += [digest_of(section("One")), digest_of(section("One", root="x"))]
    found.append(digest_of(section("One", root="y")))  # no files stand for its directory
    write_numbers(tmp_path / "a")
    module.write_text(MODULE + "\n# changed\n")
    del sys.modules["mine_for_test"]
    found.append(digest_of(graph))
    assert len(set(found)) == len(found)


def test_a_partition_of_a_dataset_is_found_again(module: Path, tmp_path: Path) -> None:
    """A second command uses the partition that the first one built."""
    config = {"name": "a", "graph": section("One"), "model": {"kind": "gcn"}}
    config = load_config({**config, "storage": str(tmp_path / "runs")})
    found = find_partition(config, 1)
    assert isinstance(found, Missing)
    make_partition(found, load_graph(config.graph))
    again = find_partition(config, 1)
    assert isinstance(again, PartitionMeta)
    assert again.num_nodes("_N") == 6


def test_a_relative_root_is_beside_the_config(module: Path, tmp_path: Path) -> None:
    write_numbers(tmp_path / "jobs" / "data")
    text = "name: a\nmodel: {kind: gcn}\ngraph: {format: dataset, dataset: 'mine_for_test:FromFile'"
    (tmp_path / "jobs" / "job.yaml").write_text(text + ", args: {root: data}}\n")
    config = load_config(tmp_path / "jobs" / "job.yaml")
    assert isinstance(config.graph, DatasetGraph)
    assert config.graph.args["root"] == str(tmp_path / "jobs" / "data")
    assert load_graph(config.graph).num_nodes == 3
    other = load_config(tmp_path / "jobs" / "job.yaml", ["graph.args.root=elsewhere"])
    assert isinstance(other.graph, DatasetGraph)
    assert other.graph.args["root"] == str(tmp_path / "elsewhere")


def tree(place: Path) -> set[Path]:
    return {path for path in place.rglob("*") if path.is_file()}


def test_a_raw_file_that_is_missing(module: Path, tmp_path: Path) -> None:
    before = tree(tmp_path)
    with pytest.raises(DataError) as caught:
        load("FromFile", root=str(tmp_path / "data"))
    message = str(caught.value)
    assert "mine_for_test:FromFile could not download it: ConnectionError: no network" in message
    assert str(tmp_path / "data" / "raw" / "numbers.txt") in message
    assert "→ put into" in message
    assert tree(tmp_path) == before


def test_cora_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise ConnectionError("no network")

    monkeypatch.setattr("torch_geometric.io.fs.cp", refuse)
    monkeypatch.setattr("torch_geometric.datasets.planetoid.fs.cp", refuse)
    (tmp_path / "planetoid").mkdir()
    section = cora(tmp_path, tmp_path / "data")
    with pytest.raises(DataError, match=r"ind\.cora\.x") as caught:
        load_graph(DatasetGraph(**section))
    assert caught.value.where == str(tmp_path / "data" / "Cora" / "raw" / "ind.cora.x")
    assert "ind.cora.test.index" in str(caught.value.remedy)
    assert tree(tmp_path / "data") == set()


def test_a_root_that_may_not_be_written(
    module: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = write_numbers(tmp_path / "data")

    def refuse(path: str, *_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr("torch_geometric.io.fs.makedirs", refuse)
    with pytest.raises(DataError, match="cannot write what it makes of its raw files") as caught:
        load_graph(DatasetGraph(**graph))
    assert caught.value.where == str(tmp_path / "data" / "processed")
    assert "graph.args.root" in str(caught.value.remedy)


def test_examples_are_where_messages_say() -> None:
    assert (CHECKOUT / "examples" / "gin_text.py").is_file()
    assert len((CHECKOUT / "examples" / "gin_text.py").read_text().splitlines()) <= 40
