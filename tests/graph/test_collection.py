"""Collections: nothing is lost, unlike graphs are refused, and splits are fair."""

from __future__ import annotations

import errno
import json
import resource
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raygnn.cli import main
from raygnn.config.graph import GraphSplit
from raygnn.config.load import load_config
from raygnn.config.schema import Config
from raygnn.errors import ConfigError, DataError
from raygnn.graph import available_memory
from raygnn.graph.collection import (
    CollectionMeta,
    MissingCollection,
    find_collection,
    pack,
    read_collection,
    split_graphs,
)
from raygnn.graph.collection.mapped_collection import Collection, open_collection
from raygnn.graph.collection.pack import make_collection
from raygnn.graph.data import SPLITS
from raygnn.graph.dgl import dgl
from raygnn.graph.partition.manifest import file_facts
from tests.support.builders import assert_not_imported, assert_refused
from tests.support.graphs import ensure_collection

pytestmark = pytest.mark.dgl


def job(storage: Path, path: Path, **sections: Any) -> Config:
    graph = {"format": "graphs", "path": str(path), **sections.pop("graph", {})}
    task = {"kind": "graph_classification", "target": "y", **sections.pop("task", {})}
    return load_config(
        {
            "name": "a",
            "storage": str(storage),
            "graph": graph,
            "task": task,
            "model": {"kind": "gin"},
            **sections,
        }
    )


def samples_of(config: Config) -> Collection:
    return open_collection(config, ensure_collection(config).directory)


def save(path: Path, graphs: list[Any], **labels: Any) -> Path:
    labels = {name: torch.as_tensor(values) for name, values in labels.items()}
    dgl().save_graphs(str(path), graphs, labels)
    return path


def ring(num: int, **data: torch.Tensor) -> Any:
    ids = torch.arange(num)
    graph = dgl().graph((ids, (ids + 1) % max(num, 1)), num_nodes=num)
    graph.ndata.update(data)
    return graph


def typed(users: int, items: int, edges: int, generator: torch.Generator) -> Any:
    def ends(num: int) -> torch.Tensor:
        return torch.randint(num, (edges,), generator=generator)

    graph = dgl().heterograph(
        {
            ("user", "buys", "item"): (ends(users), ends(items)),
            ("item", "sold:to", "user"): ([], []),
        },
        num_nodes_dict={"user": users, "item": items},
    )
    for ntype, num in (("user", users), ("item", items)):
        graph.nodes[ntype].data["feat"] = torch.rand(num, 3, generator=generator).bfloat16()
    graph.nodes["user"].data["age"] = torch.randint(99, (users,), generator=generator)
    graph.edges["buys"].data["w"] = torch.rand(edges, generator=generator, dtype=torch.float64)
    return graph


def assert_same(samples: Any, graphs: list[Any], labels: torch.Tensor) -> None:
    assert samples.num == len(graphs)
    for number, (graph, label) in enumerate(zip(graphs, labels)):
        sample = samples[number]
        assert sample.num_nodes == {ntype: graph.num_nodes(ntype) for ntype in graph.ntypes}
        assert set(sample.edges) == set(graph.canonical_etypes)
        for etype, ends in sample.edges.items():
            for own, other in zip(ends, graph.edges(etype=etype, order="eid")):
                assert own.dtype == torch.int64
                assert torch.equal(own, other.long())
        for found, wanted in (
            (sample.node_data, {n: graph.nodes[n].data for n in graph.ntypes}),
            (sample.edge_data, {e: graph.edges[e].data for e in graph.canonical_etypes}),
        ):
            for kind, arrays in wanted.items():
                assert found[kind].keys() == arrays.keys()
                for name, array in arrays.items():
                    assert torch.equal(found[kind][name], array), (number, kind, name)
        assert torch.equal(sample.y, label)
        assert sample.y.dtype == labels.dtype


# --- nothing is lost -----------------------------------------------------------------------------


@settings(max_examples=20)
@given(
    sizes=st.lists(
        st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(0, 6)), min_size=1, max_size=6
    ),
    seed=st.integers(0, 2**32),
    shards=st.integers(1, 3),
)
def test_graphs_come_back_as_they_were(
    sizes: list[tuple[int, int, int]], seed: int, shards: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    graphs = [typed(*size, generator) for size in sizes]
    labels = torch.randint(3, (len(graphs),), generator=generator)
    other = torch.rand(len(graphs), 2, generator=generator)
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory) / "shards"
        place.mkdir()
        for shard, numbers in enumerate(np.array_split(np.arange(len(graphs)), shards)):
            if len(numbers):
                some = [graphs[number] for number in numbers]
                file = place / f"{shard}.{'bin' if shard else 'dgl'}"
                save(file, some, y=labels[numbers], other=other[numbers])
        (place / "notes.txt").write_text("not read")
        config = job(Path(directory) / "runs", place)
        samples = samples_of(config)
        assert isinstance(samples, Collection)
        assert samples.num_classes == int(labels.max()) + 1
        assert_same(samples, graphs, labels)
        meta = samples.meta
        assert meta.num_nodes == sum(graph.num_nodes() for graph in graphs)
        assert meta.num_edges == sum(graph.num_edges() for graph in graphs)
        assert meta.graphs["other"].shape == (2,)
        assert meta.bytes == sum(
            path.stat().st_size for path in meta.directory.iterdir() if path.suffix == ".npy"
        )
        assert {name: file_facts(meta.directory / name) for name in meta.files} == meta.files
        for kept in ("float64", "bfloat16"):
            columns = [*meta.nodes["item"].data.values(), *meta.edges[_BUYS].data.values()]
            assert kept in {column.dtype for column in columns}


_BUYS = ("user", "buys", "item")


def test_graphs_without_nodes_or_edges(tmp_path: Path) -> None:
    graphs = [ring(0), ring(2, feat=torch.ones(2, 3)), dgl().graph(([], []), num_nodes=1)]
    graphs[2].ndata["feat"] = torch.zeros(1, 3)
    graphs[1].edata["w"] = torch.ones(2)
    samples = samples_of(job(tmp_path, save(tmp_path / "g.bin", graphs, y=[0, 1, 0])))
    assert samples[0].num_nodes == {"_N": 0}
    assert samples[0].node_data["_N"]["feat"].shape == (0, 3)
    assert samples[2].edge_data["_N", "_E", "_N"]["w"].shape == (0,)
    only_empty = job(tmp_path, save(tmp_path / "e.bin", [ring(0), ring(0)], y=[0, 1]))
    assert samples_of(only_empty)[1].num_nodes == {"_N": 0}


def test_writing_to_a_sample_changes_nothing(tmp_path: Path) -> None:
    file = save(tmp_path / "g.bin", [ring(2, feat=torch.ones(2, 3))], y=[1])
    samples = samples_of(job(tmp_path, file))
    sample = samples[0]
    sample.node_data["_N"]["feat"].fill_(5)
    assert sample.y is not None
    sample.y.fill_(5)
    assert samples[0].node_data["_N"]["feat"].eq(1).all()
    assert samples[0].y == 1


@pytest.mark.parametrize("method", ["row", "standard"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32])
def test_features_are_scaled_over_all_graphs(
    method: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    feat = torch.tensor([[1, 3], [2, 2], [6, 4]])
    graphs = [ring(1, feat=feat[:1].to(dtype)), ring(2, feat=feat[1:].to(dtype))]
    file = save(tmp_path / "g.bin", graphs, y=[0, 1])
    samples = samples_of(job(tmp_path, file, graph={"normalize": method}))
    scaled = torch.cat([samples[i].node_data["_N"]["feat"] for i in range(2)])
    assert scaled.dtype == (torch.float32 if dtype == torch.int32 else dtype)
    plain = feat.double()
    if method == "row":
        wanted = plain / plain.sum(1, keepdim=True)
    else:
        wanted = (plain - plain.mean(0)) / plain.std(0, correction=0)
    assert torch.allclose(scaled.double(), wanted, atol=0.02 if dtype == torch.bfloat16 else 1e-6)


def test_features_that_cannot_be_scaled(tmp_path: Path) -> None:
    without = save(tmp_path / "a.bin", [ring(2)], y=[0])
    with pytest.raises(ConfigError, match=r"graph\.normalize: row scales .*'feat'"):
        ensure_collection(job(tmp_path, without, graph={"normalize": "row"}))
    column = save(tmp_path / "b.bin", [ring(2, feat=torch.ones(2))], y=[0])
    with pytest.raises(DataError, match=r"_N/feat: .*only matrices"):
        ensure_collection(job(tmp_path, column, graph={"normalize": "row"}))


# --- dtypes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second", "common"),
    [
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.float32, torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.float16, torch.float32),
        (torch.float64, torch.bfloat16, torch.float64),
        (torch.bfloat16, torch.bfloat16, torch.bfloat16),
        (torch.int8, torch.uint8, torch.int16),
        (torch.int64, torch.int32, torch.int64),
    ],
)
def test_dtypes_are_widened_without_loss(
    first: torch.dtype, second: torch.dtype, common: torch.dtype, tmp_path: Path
) -> None:
    rows = [torch.tensor([[-3.5, 2], [1, 7]]).to(first), torch.tensor([[11.25, 4]]).to(second)]
    graphs = [ring(len(feat), feat=feat) for feat in rows]
    (tmp_path / "shards").mkdir()
    for number, graph in enumerate(graphs):  # labels of two dtypes, too
        label = torch.tensor([number], dtype=(torch.int32, torch.int64)[number])
        save(tmp_path / "shards" / f"{number}.bin", [graph], y=label)
    samples = samples_of(job(tmp_path, tmp_path / "shards"))
    for number, feat in enumerate(rows):
        found = samples[number].node_data["_N"]["feat"]
        assert found.dtype == common
        assert torch.equal(found, feat.to(common))
        assert samples[number].y == number


def test_rows_of_groups_of_graphs_are_widened_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from raygnn.graph.collection import pack

    monkeypatch.setattr(pack, "_TOGETHER", 2)
    kinds = [torch.bfloat16] * 40 + [torch.float32] * 3 + [torch.float64] + [torch.float16] * 3
    feats = [torch.randn(3, 2).to(kind) for kind in kinds]
    file = save(tmp_path / "g.bin", [ring(3, feat=f) for f in feats], y=[0] * len(feats))
    samples = samples_of(job(tmp_path, file))
    for number, feat in enumerate(feats):
        assert torch.equal(samples[number].node_data["_N"]["feat"], feat.double())


# --- what must be refused ------------------------------------------------------------------------


def _nan(kind: torch.dtype) -> torch.Tensor:
    return torch.tensor([[1, 2], [float("nan"), 1]]).to(kind)


_GOOD = {"feat": torch.ones(2, 2)}

UNLIKE: dict[str, tuple[Any, list[str]]] = {
    "an array is missing": (lambda: ring(2), ["graph 1", "_N", "arrays are none", "feat"]),
    "an array is more": (lambda: ring(2, **_GOOD, x=torch.ones(2)), ["graph 1", "feat, x"]),
    "rows of another shape": (
        lambda: ring(2, feat=torch.ones(2, 3)),
        ["graph 1", "_N/feat", "[3]", "[2]"],
    ),
    "another kind of numbers": (
        lambda: ring(2, feat=torch.ones(2, 2, dtype=torch.int64)),
        ["graph 1", "_N/feat", "int64", "float32"],
    ),
    "other types": (lambda: typed(1, 1, 1, torch.Generator()), ["graph 1", "node types", "item"]),
    "other edge types": (
        lambda: dgl().heterograph({("_N", "b", "_N"): ([0], [1])}),
        ["graph 1", "edge types", "_N:b:_N", "_N:_E:_N"],
    ),
    "NaN": (lambda: ring(2, feat=_nan(torch.float32)), ["graph 1", "_N/feat, row 1", "not a num"]),
    "NaN in bfloat16": (lambda: ring(2, feat=_nan(torch.bfloat16)), ["_N/feat, row 1"]),
    "NaN in float16": (lambda: ring(2, feat=_nan(torch.float16)), ["_N/feat, row 1"]),
}


@pytest.mark.parametrize("name", UNLIKE)
def test_unlike_graphs(name: str, tmp_path: Path) -> None:
    make, fragments = UNLIKE[name]
    file = save(tmp_path / "g.bin", [ring(2, **_GOOD), make()], y=[0, 1])
    config = job(tmp_path / "runs", file)
    assert_refused(lambda: ensure_collection(config), ["g.bin", *fragments])
    assert not list((tmp_path / "runs").rglob("*.npy"))  # nothing half made is left


def test_no_features(tmp_path: Path) -> None:
    file = save(tmp_path / "g.bin", [ring(2, feat=torch.ones(2, 0))], y=[0])
    with pytest.raises(DataError, match=r"_N/feat: .*no features"):
        ensure_collection(job(tmp_path, file))


def test_other_labels_in_another_shard(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    save(tmp_path / "s" / "a.bin", [ring(1)], y=[0])
    save(tmp_path / "s" / "b.bin", [ring(1)], z=[0])
    with pytest.raises(DataError, match=r"b\.bin: the labels are z, in the graphs before y"):
        ensure_collection(job(tmp_path, tmp_path / "s"))
    save(tmp_path / "s" / "b.bin", [ring(1)], y=[0.5])
    with pytest.raises(DataError, match=r"b\.bin: labels 'y': it is float32, .* int64"):
        ensure_collection(job(tmp_path, tmp_path / "s"))


def test_inputs_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    with pytest.raises(DataError, match=r"no files \*.bin or \*.dgl"):
        find_collection(job(tmp_path, tmp_path / "s"))
    (tmp_path / "s" / "a.bin").write_text("2\n")
    (tmp_path / "s" / "b.bin").write_text("2\n")
    with pytest.raises(DataError, match=r"a\.bin: holds no DGL graph file here"):
        ensure_collection(job(tmp_path, tmp_path / "s"))


@pytest.mark.parametrize(
    ("labels", "task", "error", "match"),
    [
        ({"z": [0, 1]}, {}, ConfigError, r"task\.target: .* no labels 'y'; there are 'z'"),
        ({}, {}, ConfigError, "none at all"),
        ({"y": [0.0, 1.0]}, {}, ConfigError, r"float32 of shape \[2\], not one class"),
        ({"y": [[0, 1], [1, 0]]}, {}, ConfigError, r"int64 of shape \[2, 2\], not one class"),
        ({"y": [0, -1]}, {}, DataError, "lowest class is -1"),
        ({"y": torch.zeros(2, 2, 2)}, {"kind": "graph_regression"}, DataError, "one row"),
        (
            {"y": [0.5, float("nan")]},
            {"kind": "graph_regression"},
            DataError,
            r"labels 'y', graph 1: .*not a number",
        ),
        (
            {"y": torch.tensor([[1, 2], [1, float("inf")]]).bfloat16()},
            {"kind": "graph_regression"},
            DataError,
            "graph 1: .*infinite",
        ),
    ],
)
def test_labels_that_do_not_suit_the_task(
    labels: Any, task: Any, error: type[Exception], match: str, tmp_path: Path
) -> None:
    file = save(tmp_path / "g.bin", [ring(1), ring(1)], **labels)
    with pytest.raises(error, match=match):
        samples_of(job(tmp_path, file, task=task))


@pytest.mark.parametrize(
    ("label", "kind", "shape"),
    [
        ([[3], [1]], "graph_classification", ()),
        ([[0.5], [1]], "graph_regression", ()),
        ([[0.5, 1], [1, 2]], "graph_regression", (2,)),
        ([3, 1], "graph_regression", ()),
    ],
)
def test_shapes_of_targets(label: Any, kind: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    file = save(tmp_path / "g.bin", [ring(1), ring(1)], y=label)
    samples = samples_of(job(tmp_path, file, task={"kind": kind}))
    y = samples[0].y
    assert y is not None
    assert y.shape == shape
    assert torch.equal(y.reshape(-1), torch.tensor(label)[0].reshape(-1))
    assert samples.num_classes == (4 if y.dtype == torch.int64 else None)


# --- found again ---------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return save(
        tmp_path / "g.bin", [ring(n, feat=torch.ones(n, 2)) for n in (2, 3, 1)], y=[0, 1, 1]
    )


def test_a_collection_is_found_again(file: Path, tmp_path: Path) -> None:
    config = job(tmp_path / "runs", file)
    missing = find_collection(config)
    assert isinstance(missing, MissingCollection)
    made = make_collection(missing)
    assert made.directory == tmp_path / "runs" / "partitions" / made.digest[:16]
    stages: list[str] = []
    assert ensure_collection(config, stages.append) == made
    assert stages == []
    assert make_collection(missing) == made  # another process was first
    assert [path.name for path in made.directory.parent.iterdir()] == [made.directory.name]


def test_the_digest_covers_contents_and_not_splits(file: Path, tmp_path: Path) -> None:
    def digest(path: Path = file, **graph: Any) -> str:
        found = find_collection(job(tmp_path / "runs", path, graph=graph))
        assert isinstance(found, MissingCollection)
        return found.digest

    first = digest()
    for same in ({"seed": 3}, {"val": 0.3, "test": 0.2}, {"folds": 3, "fold": 1}):
        assert digest(**same) == first
    assert digest(normalize="none") == first
    assert digest(normalize="row") != first
    moved = tmp_path / "moved.bin"
    moved.write_bytes(file.read_bytes())
    assert digest(moved) == first
    save(file, [ring(2)], y=[0])
    assert digest() != first


def test_at_a_path_of_its_own(file: Path, tmp_path: Path) -> None:
    place = tmp_path / "packed"
    section = {"partition": {"path": str(place)}}
    config = job(tmp_path / "runs", file, **section)
    made = ensure_collection(config)
    assert made.directory == place
    assert find_collection(config) == made
    with pytest.raises(ConfigError, match="normalize is 'none' there and 'row' here"):
        find_collection(job(tmp_path / "runs", file, graph={"normalize": "row"}, **section))
    save(file, [ring(2)], y=[0])
    with pytest.raises(ConfigError, match=r"partition\.path: .*before they changed"):
        find_collection(config)
    task = {"kind": "graph_classification", "target": "y"}
    alone = load_config({"name": "a", "model": {"kind": "gin"}, "task": task, **section})
    assert find_collection(alone) == made
    assert len(samples_of(alone).splits["train"]) == 1
    with pytest.raises(DataError, match=r"collection\.json is missing"):
        find_collection(job(tmp_path, file, partition={"path": str(file.parent)}))
    with pytest.raises(ConfigError, match="not on a disk of this machine"):
        find_collection(job(tmp_path, file, partition={"path": "s3://bucket/graphs"}))


def test_without_a_graph_there_must_be_a_collection(tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    config = load_config(
        {
            "name": "a",
            "model": {"kind": "gin"},
            "task": {"kind": "graph_classification"},
            "partition": {"path": str(tmp_path / "none")},
        }
    )
    with pytest.raises(ConfigError, match="there is no collection at"):
        find_collection(config)


def test_graphs_that_do_not_fit_are_refused_before_they_are_read(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "job.yaml"
    config.write_text(json.dumps(job(tmp_path / "runs", file).to_dict()))
    need = 3 * file.stat().st_size
    monkeypatch.setattr(available_memory, "memory", lambda: (need, need - 1))
    assert main(["partition", str(config)]) == 3
    assert "packing the graphs takes about" in (said := capsys.readouterr().err)
    assert "[memory_fits]" in said
    monkeypatch.setattr(available_memory, "memory", lambda: (need, need))
    assert main(["partition", str(config)]) == 0


def test_memory_that_torch_does_not_get(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pack._Rows, "joined", lambda _: torch.empty(2**60, dtype=torch.int8))
    said = [str(file), "not enough memory to read it", "allocate memory"]
    assert_refused(lambda: ensure_collection(job(tmp_path, file)), said)


def test_a_full_disk(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("raygnn.graph.collection.pack.sync", full)
    with pytest.raises(DataError, match="disk or the quota is full: No space left") as caught:
        ensure_collection(job(tmp_path / "runs", file))
    assert "free space" in str(caught.value)
    assert not (tmp_path / "runs").exists()


def test_an_array_that_does_not_fit_says_why(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            pack._written(tmp_path / "feat.npy", torch.zeros(1 << 20))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.errno == errno.EFBIG


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:-1], "bytes, expected"),
        (lambda data: data + b"x", "bytes, expected"),
        (None, "is missing"),
    ],
    ids=["cut", "grown", "gone"],
)
def test_damaged_files(damage: Any, message: str, file: Path, tmp_path: Path) -> None:
    config = job(tmp_path / "runs", file)
    made = ensure_collection(config)
    looks: list[Any] = [
        lambda: find_collection(config),
        lambda: open_collection(config, made.directory),
        lambda: Collection(made, "y", GraphSplit()),
    ]
    for name in made.files:
        path = made.directory / name
        whole = path.read_bytes()
        if damage is None:
            path.unlink()
        else:
            path.write_bytes(damage(whole))
        for look in looks:
            with pytest.raises(DataError, match=message) as caught:
                look()
            assert caught.value.where == str(path)
        path.write_bytes(whole)
    assert open_collection(config, made.directory).num == 3


def test_files_of_the_right_size_with_nonsense(file: Path, tmp_path: Path) -> None:
    config = job(tmp_path / "runs", file)
    made = ensure_collection(config)
    offsets = np.array([0, 7, 5, 6]).nbytes
    for name, cut, match in (
        (made.nodes["_N"].offsets.file, offsets, "do not run from 0 to 6"),
        (made.nodes["_N"].data["feat"].file, None, "is not a .npy file"),
    ):
        path = made.directory / name
        whole = path.read_bytes()
        end = cut or len(whole)
        path.write_bytes(whole[:-end] + bytes(end))
        with pytest.raises(DataError, match=match):
            open_collection(config, made.directory)
        path.write_bytes(whole)
    path = made.directory / made.nodes["_N"].offsets.file
    path.write_bytes(path.read_bytes()[:-offsets] + np.array([0, 7, 5, 6]).tobytes())
    with pytest.raises(DataError, match="fall at row 1"):
        open_collection(config, made.directory)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda text: text[:-30], "JSON"),
        (lambda text: "[]", "damaged"),
        (lambda text: "[" * 100_000, "JSON"),
        (lambda text: text.replace('"version": 1', '"version": 9', 1), "version 9; only 1"),
        (lambda text: text.replace('"float32"', '"float31"', 1), r"nodes\._N\.data\.feat\.dtype"),
        (lambda text: text.replace('"num_graphs": 3', '"num_graphs": 0'), "num_graphs"),
        (lambda text: text.replace('"num_graphs": 3', '"num_graphs": 4'), r"expected .*\[4\]"),
        (lambda text: text.replace('"float32"', '"float64"', 1), "holds float32"),
        (lambda text: text.replace("node-0.0.npy", "node-9.npy", 1), "does not list this file"),
    ],
)
def test_damaged_manifests(change: Any, match: str, file: Path, tmp_path: Path) -> None:
    config = job(tmp_path / "runs", file)
    made = ensure_collection(config)
    manifest = made.directory / "collection.json"
    changed = change(manifest.read_text())
    assert changed != manifest.read_text()
    manifest.write_text(changed)
    with pytest.raises(DataError, match=match):
        open_collection(config, made.directory)


def test_the_manifest_is_json_and_arrays_are_npy(file: Path, tmp_path: Path) -> None:
    made = ensure_collection(job(tmp_path / "runs", file))
    content = json.loads((made.directory / "collection.json").read_text())
    assert content["num_graphs"] == 3
    assert content["source"]["path"] == str(file)
    assert np.load(made.directory / content["nodes"]["_N"]["offsets"]["file"]).tolist() == [
        0,
        2,
        5,
        6,
    ]
    assert read_collection(made.directory) == made
    assert isinstance(made, CollectionMeta)


def test_looking_for_one_loads_no_torch(file: Path, tmp_path: Path) -> None:
    config = {
        "name": "a",
        "storage": str(tmp_path / "runs"),
        "model": {"kind": "gin"},
        "graph": {"format": "graphs", "path": str(file)},
        "task": {"kind": "graph_classification", "target": "y"},
    }
    assert_not_imported(
        "from raygnn.config.load import load_config\n"
        "from raygnn.graph.collection import find_collection\n"
        f"find_collection(load_config({config!r}))",
        *("torch", "dgl", "ray"),
    )


# --- splits --------------------------------------------------------------------------------------


def check_partition(splits: dict[str, np.ndarray], num: int) -> None:
    assert list(splits) == list(SPLITS)
    for numbers in splits.values():
        assert numbers.dtype == np.int64
        assert (np.diff(numbers) > 0).all()
    assert sorted(np.concatenate(list(splits.values())).tolist()) == list(range(num))


_classes = st.none() | st.integers(0, 2**32 - 1)
_share = st.floats(0, 0.49)


def random_classes(num: int, seed: int | None) -> np.ndarray | None:
    if seed is None:
        return None
    source = np.random.RandomState(seed)
    return source.randint(0, source.randint(1, 8), num) - 1


@given(
    num=st.integers(1, 200), seed=st.integers(0, 2**32 - 1), kinds=_classes, val=_share, test=_share
)
def test_shares(num: int, seed: int, kinds: int | None, val: float, test: float) -> None:
    classes = random_classes(num, kinds)
    splits = split_graphs(num, classes, GraphSplit(val=val, test=test, seed=seed))
    check_partition(splits, num)
    assert len(splits["train"]) >= 1
    for name, share, room in (("test", test, num - 1), ("val", val, num - 1 - len(splits["test"]))):
        count = len(splits[name])
        assert count == min(room, max(1, int(share * num + 0.5)) if share else 0)
    if classes is not None:
        for value in np.unique(classes):
            members = classes == value
            wanted = members.sum() * len(splits["test"]) / num
            assert abs(members[splits["test"]].sum() - wanted) < 1
            rest = members.sum() - members[splits["test"]].sum()
            wanted = rest * len(splits["val"]) / (num - len(splits["test"]))
            assert abs(members[splits["val"]].sum() - wanted) < 1
    again = split_graphs(num, classes, GraphSplit(val=val, test=test, seed=seed))
    assert all(np.array_equal(splits[name], again[name]) for name in SPLITS)


@given(
    num=st.integers(2, 120),
    folds=st.integers(2, 12),
    seed=st.integers(0, 2**32 - 1),
    kinds=_classes,
    val=_share,
)
def test_folds(num: int, folds: int, seed: int, kinds: int | None, val: float) -> None:
    folds = min(folds, num)
    classes = random_classes(num, kinds)
    every = [
        split_graphs(num, classes, GraphSplit(folds=folds, fold=fold, seed=seed, val=val))
        for fold in range(folds)
    ]
    for splits in every:
        check_partition(splits, num)
        rest = num - len(splits["test"])
        wanted = min(rest - 1, max(1, int(val * rest + 0.5)) if val else 0)
        assert len(splits["val"]) == wanted
    tests = [splits["test"] for splits in every]
    assert sorted(np.concatenate(tests).tolist()) == list(range(num))
    sizes = [len(test) for test in tests]
    assert max(sizes) - min(sizes) <= 1
    if classes is not None:
        for value in np.unique(classes):
            counts = [(classes[test] == value).sum() for test in tests]
            assert max(counts) - min(counts) <= 1


def test_splits_depend_on_the_seed_and_stay() -> None:
    first = split_graphs(40, None, GraphSplit())
    assert first["test"].tolist() != split_graphs(40, None, GraphSplit(seed=1))["test"].tolist()
    assert first["test"].tolist() == [7, 15, 19, 30]  # for ever: runs are resumed


def test_more_folds_than_graphs() -> None:
    with pytest.raises(ConfigError, match=r"graph\.folds: 3 graphs .* 4 folds"):
        split_graphs(3, None, GraphSplit(folds=4))
