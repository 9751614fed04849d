"""Networks that read features of edges, on one graph: sampled, exact, on any ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from raygnn.checkpoint import weights
from raygnn.config.schema import Config
from raygnn.graph.data import EdgeFrame, EdgeType, GraphData, NodeFrame
from raygnn.models.network import Schema
from raygnn.models.registry import build_model
from raygnn.runs.run import Run
from raygnn.sampling.batch import Adjacency, Block
from tests.prediction.test_predict import ask
from tests.support.small_jobs import losses, slow_but, train_on_ranks
from tests.worker.test_edge_tasks import config_of

pytestmark = pytest.mark.long

NODES, DEGREE = 300, 10
TRAIN = {"epochs": 25, "lr": 0.02, "weight_decay": 0.001, "eval_every": 5}
PAYS: EdgeType = ("one", "pays", "one")


def payments(seed: int = 0) -> GraphData:
    """Build nodes of two classes that only their in-edges determine, each in three ways.

    ``amount`` [E, 2], less for one class than for the other; ``kind``, other whole numbers; and
    ``real``, 1 for the half of the edges whose sources' ``feat`` says the class, of which the other
    half says the opposite.
    """
    rng = np.random.default_rng(seed)
    label, side = rng.integers(0, 2, NODES), rng.permutation(np.arange(NODES) % 2)
    dst = np.repeat(np.arange(NODES), DEGREE)
    real = np.tile(np.arange(DEGREE) % 2, NODES)
    by_side = [np.flatnonzero(side == which) for which in (0, 1)]
    wanted = np.where(real == 1, label[dst], 1 - label[dst])
    src = np.where(wanted == 1, rng.choice(by_side[1], len(dst)), rng.choice(by_side[0], len(dst)))
    amount = rng.normal(size=(len(dst), 2)).astype(np.float32)
    amount[:, 1] += 2.0 * label[dst] - 1
    order = rng.permutation(len(dst))
    data = {
        "amount": amount,
        "kind": label[dst] + 2 * rng.integers(0, 2, len(dst)),
        "real": real.astype(np.float64),
    }
    split = rng.integers(0, 3, NODES)
    feat = np.stack([side, 1 - side], 1).astype(np.float32)
    nodes = {"feat": feat, "label": label}
    nodes |= {f"{name}_mask": split == i for i, name in enumerate(("train", "val", "test"))}
    edges = EdgeFrame(src[order], dst[order], {name: rows[order] for name, rows in data.items()})
    return GraphData("payments", {"one": NodeFrame(NODES, nodes)}, {PAYS: edges})


MODELS: dict[str, dict[str, Any]] = {
    "sage": {"kind": "sage", "edge_features": "amount"},
    "sage-max": {"kind": "sage", "aggregator": "max", "edge_categories": {"kind": 4}},
    "gin": {"kind": "gin", "edge_features": ["amount"], "edge_categories": {"kind": 3}},
    "gat": {"kind": "gat", "heads": 2, "edge_features": ["real", "amount"]},
    "gatv2": {"kind": "gatv2", "heads": 2, "edge_features": "real"},
    "rgcn": {"kind": "rgcn", "bases": 2, "edge_features": "amount"},
    "hgt": {"kind": "hgt", "heads": 2, "edge_features": "amount"},
    "han": {"kind": "han", "heads": 2, "edge_categories": {"kind": 4}},
}


def make(
    tmp_path: Path,
    name: str,
    model: dict[str, Any],
    workers: int = 1,
    data: GraphData | None = None,
    **more: Any,
) -> Config:
    sampling = {"fanout": [6, 4], "batch_size": 24 // workers, **more.pop("sampling", {})}
    return config_of(
        tmp_path,
        name,
        data=data or payments(),
        model={"hidden": 16, "dropout": 0.0, **model},
        sampling=sampling,
        cluster={"workers": workers},
        **{"train": TRAIN, **more},
    )


@pytest.mark.parametrize("name", slow_but("gatv2", MODELS))
def test_classes_that_the_edges_alone_tell(name: str, tmp_path: Path) -> None:
    """Accuracy without edge features is chance; with them it is the same in exact evaluation and in
    prediction on other ranks."""
    run = train_on_ranks(make(tmp_path, name, MODELS[name]))
    assert run.summary["metrics"]["test/accuracy"] >= 0.95
    without = {key: value for key, value in MODELS[name].items() if not key.startswith("edge_")}
    blind = train_on_ranks(make(tmp_path, "blind", without))
    assert blind.summary["metrics"]["test/accuracy"] < 0.65


def exact(run: Run, config: Config, data: GraphData) -> Tensor:
    """Return the class probabilities of all nodes, with the whole graph as one block."""
    model, edges = config.model, data.edges[PAYS]
    names = model.edge_feature_names
    columns = [torch.as_tensor(edges.data[n]).float().reshape(edges.num, -1) for n in names]
    rows = torch.cat(columns, 1) if columns else None
    categories = {n: torch.as_tensor(edges.data[n]) for n in model.edge_category_widths}
    src, dst = torch.as_tensor(edges.src), torch.as_tensor(edges.dst)
    adj = Adjacency.of_edges(src, dst, NODES, rows=rows, categories=categories)
    schema = Schema(
        {"one": 2},
        [PAYS],
        2,
        target="one",
        edge_features={} if rows is None else {PAYS: rows.shape[1]},
        edge_categories={PAYS: {n: (4, w) for n, w in model.edge_category_widths.items()}},
    )
    network = build_model(model, schema).eval()
    network.load_state_dict(torch.load(run.path / "checkpoints" / "selected.pt"))
    block = Block({PAYS: adj}, {"one": NODES}, {"one": NODES})
    x = {"one": torch.as_tensor(data.nodes["one"].data["feat"])}
    with torch.no_grad():
        return network([block, block], x, {PAYS: adj.degree}).softmax(1)


@pytest.mark.parametrize("name", ["sage", "gin", "gatv2"])
def test_any_ranks_draw_and_compute_the_same(name: str, tmp_path: Path) -> None:
    found, runs = [], []
    for workers, parts, replicated in ((1, 1, True), (2, 2, True), (2, 2, False)):
        config = make(
            tmp_path,
            f"{workers}-{replicated}",
            MODELS[name],
            workers,
            parts=parts,
            train={"epochs": 2, "lr": 0.02},
        )
        runs.append(train_on_ranks(config, replicated=replicated))
        found.append((losses(runs[-1]), runs[-1].summary["metrics"]))
    assert len(found[0][0]) > 6
    for other, metrics in found[1:]:
        assert np.abs(other - found[0][0]).max() < 1e-4
        assert metrics == pytest.approx(found[0][1], abs=2e-3)
    assert (found[1][0] == found[2][0]).all()  # the same with either topology, to the bit
    expected = exact(runs[-1], config, payments())
    for workers in (1, 2):
        frame = ask(runs[-1], config, workers).to_pandas()
        torch.testing.assert_close(
            torch.tensor(np.stack(frame["scores"]), dtype=torch.float32),
            expected,
            atol=1e-4,
            rtol=1e-4,
        )


def test_other_data_than_those_of_the_training(tmp_path: Path) -> None:
    """Fewer categories are accepted; more are refused."""
    (tmp_path / "other").mkdir()
    (tmp_path / "more").mkdir()
    config = make(tmp_path, "run", MODELS["gin"], train={"epochs": 2})
    run = train_on_ranks(config)
    sizes = weights.find(run.path / "checkpoints").sizes
    other = payments(1)
    kinds = other.edges[PAYS].data["kind"]
    kinds[:] = np.minimum(kinds, 2)
    changed = make(tmp_path / "other", "run", MODELS["gin"], data=other)
    frame = ask(run, changed, 2, sizes=sizes).to_pandas()
    scores = torch.tensor(np.stack(frame["scores"]), dtype=torch.float32)
    torch.testing.assert_close(scores, exact(run, config, other), atol=1e-4, rtol=1e-4)
    kinds[3] = 4
    changed = make(tmp_path / "more", "run", MODELS["gin"], data=other)
    with pytest.raises(RuntimeError, match=r"have 5 categories of one:pays:one/kind, .* for 4"):
        ask(run, changed, 2, sizes=sizes)


@pytest.mark.parametrize(
    "task",
    [
        {"kind": "link_prediction", "negatives": {"number": 30}},
        {"kind": "edge_classification", "target": "kind"},
    ],
    ids=lambda task: task["kind"],
)
def test_tasks_on_edges_read_those_that_messages_pass_along(
    task: dict[str, Any], tmp_path: Path
) -> None:
    """Held-out edges are not among them, and seeds' own edges are not sampled."""
    found = []
    for workers, parts, replicated in ((1, 1, True), (2, 2, True), (2, 2, False)):
        config = make(
            tmp_path,
            f"{workers}-{replicated}",
            {"kind": "gin", "edge_features": ["amount", "real"], "edge_categories": {"kind": 2}},
            workers,
            parts=parts,
            task=task,
            sampling={"fanout": [6, 4], "batch_size": 240 // workers},
            train={"epochs": 1},
        )
        run = train_on_ranks(config, replicated=replicated)
        found.append((losses(run), run.summary["metrics"]))
    assert len(found[0][0]) > 6
    for other, metrics in found[1:]:
        assert np.abs(other - found[0][0]).max() < 1e-4
        assert metrics == pytest.approx(found[0][1], abs=1e-3)
    assert (found[1][0] == found[2][0]).all()


class OwnEdges(nn.Module):
    """A user's model: DGL adds up messages from the arrays of sources and edges.

    Args:
        arrays: those that it is told are there, with their shapes and dtypes.
    """

    def __init__(self, in_features: Any, out_features: int, arrays: dict[str, Any]):
        super().__init__()
        self.arrays = arrays
        self.kinds = nn.Embedding(4, 2)
        self.linear = nn.Linear(in_features["one"] + 2 + 1 + 2, out_features)

    def forward(self, blocks: Any, x: Any) -> Tensor:
        from dgl import function as fn

        for block in blocks:
            shapes = {n: [str(v.dtype)[6:], *v.shape[1:]] for n, v in block.edata.items()}
            assert shapes == self.arrays, shapes
        block = blocks[-1]
        kind = block.edata["kind"]
        with block.local_scope():
            block.srcdata["h"] = x["one"]
            block.apply_edges(fn.copy_u("h", "h"))
            columns = [block.edata["h"], block.edata["amount"], block.edata["real"][:, None]]
            block.edata["m"] = torch.cat([*columns, self.kinds(kind)], 1)
            block.update_all(fn.copy_e("m", "m"), fn.mean("m", "m"))
            return self.linear(block.dstdata["m"])


@pytest.mark.dgl
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_your_own_model_is_given_the_arrays(precision: str, tmp_path: Path) -> None:
    dtype = {"fp32": "float32", "bf16": "bfloat16"}[precision]
    arrays = {"amount": [dtype, 2], "real": [dtype], "kind": ["int64"]}
    model = {
        "kind": "tests.worker.test_edge_inputs:OwnEdges",
        "edge_features": ["amount", "kind", "real"],
        "args": {"arrays": arrays},
        "layers": 1,
    }
    found = []
    for workers, replicated in ((1, True), (2, False)):
        config = config_of(
            tmp_path,
            f"own-{workers}",
            data=payments(),
            parts=workers,
            model=model,
            sampling={"fanout": [6], "batch_size": 24 // workers},
            cluster={"workers": workers},
            precision=precision,
            train={**TRAIN, "lr": 0.05, "max_steps": None if workers == 1 else 5},
        )
        run = train_on_ranks(config, replicated=replicated)
        assert workers > 1 or run.summary["metrics"]["test/accuracy"] >= 0.95
        found.append(losses(run))
    assert np.abs(found[0][:5] - found[1][:5]).max() < (1e-4 if precision == "fp32" else 0.02)
