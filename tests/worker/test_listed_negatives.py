"""Negatives of files, ranked as the evaluator of OGB ranks them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor

import raygnn
from raygnn.config.load import load_config
from raygnn.config.model import read_model
from raygnn.config.schema import Config
from raygnn.errors import ConfigError, DataError
from raygnn.graph.data import EdgeFrame
from raygnn.models.decoders import make_decoder
from raygnn.runs.run import Run
from tests.prediction.test_predict import ask
from tests.support.ogb_builder import link_splits
from tests.support.small_jobs import job, losses, slow_but, train_on_ranks
from tests.worker import test_timed_jobs as timed_jobs
from tests.worker.test_edge_tasks import LIKES, LINKS, PEOPLE, THINGS, config_of, shop

pytestmark = pytest.mark.long

HITS, RANKED = (20, 50, 100), (1, 3, 10)


def ogb_config(place: Path, name: str, workers: int, **task: Any) -> Config:
    args = {"kind": name}
    graph = {"format": "dataset", "dataset": "tests.support.ogb_builder:Links", "args": args}
    model = {"kind": "none", "decoder": "distmult", "embedding": {"dim": 8}}
    values = job(
        place,
        name=f"{name}-{workers}",
        task={"kind": "link_prediction", **task},
        train={"epochs": 2, "lr": 0.5, "log_every": 1, "eval_every": 1},
        cluster={"workers": workers},
    )
    return load_config(
        {**values, "graph": graph, "model": model, "sampling": {"batch_size": 12 // workers}}
    )


def evaluator_hits(positive: Tensor, negative: Tensor, k: int) -> float:
    """Compute hits@k as ogb.linkproppred.Evaluator does."""
    if len(negative) < k:
        return 1.0
    kth = torch.topk(negative, k)[0][-1]
    return float(torch.sum(positive > kth)) / len(positive)


def evaluator_ranks(positive: Tensor, negative: Tensor) -> Tensor:
    """Compute ranks as ogb's evaluator of mrr does, whose scores are means over them."""
    optimistic = (negative > positive.view(-1, 1)).sum(dim=1)
    pessimistic = (negative >= positive.view(-1, 1)).sum(dim=1)
    return 0.5 * (optimistic + pessimistic) + 1


class Scores:
    """Scores of a run's tested model, whose embeddings are multiples of a small unit."""

    def __init__(self, run: Run, config: Config, ntypes: tuple[str, str]):
        found = torch.load(run.path / "checkpoints" / "selected.pt")
        relation = next(value for name, value in found.items() if name.endswith("relation"))
        decoder: Any = make_decoder(read_model(kind="sage"), "distmult", 8, len(relation), 1)
        decoder.relation.data = relation
        self.decoder, self.rows = decoder, []
        for ntype in ntypes:
            table = ask(run, config, 1, embeddings=True, ntype=ntype).to_pandas()
            assert table["node"].tolist() == list(range(len(table)))
            self.rows.append(torch.tensor(np.stack(table["embedding"].to_list())))

    def __call__(self, source: Any, target: Any, relation: Any = None) -> Tensor:
        both = np.broadcast_arrays(source, target)
        s, t = (torch.from_numpy(ids.ravel().copy()) for ids in both)
        kinds = None
        if relation is not None:
            kinds = torch.from_numpy(np.broadcast_to(relation, both[0].shape).ravel().copy())
        with torch.no_grad():
            scores: Tensor = self.decoder(self.rows[0][s], self.rows[1][t], kinds)
        return scores.view(both[0].shape)


def by_ogb(part: dict[str, Any], scores: Scores) -> dict[str, float]:
    """Compute ogb's metrics for a dataset of this kind."""
    if "edge" in part:
        positive, negative = scores(*part["edge"].T), scores(*part["edge_neg"].T)
        return {f"hits@{k}": evaluator_hits(positive, negative, k) for k in HITS}
    if "source_node" in part:
        source, target = part["source_node"], part["target_node"]
        absent = scores(source[:, None], part["target_node_neg"])
        ranks = evaluator_ranks(scores(source, target), absent)
    else:
        head, tail, kind, heads, tails = (
            part[name] for name in ("head", "tail", "relation", "head_neg", "tail_neg")
        )
        kinds = kind[:, None]
        both = scores(heads, tail[:, None], kinds), scores(head[:, None], tails, kinds)
        ranks = torch.cat([evaluator_ranks(scores(head, tail, kind), absent) for absent in both])
    hits = {f"hits@{k}": float((ranks <= k).double().mean()) for k in RANKED}
    reciprocal = 1 / ranks.double().sort().values  # the last digit of a sum depends on the order
    return {"mrr": float(reciprocal.sum()) / len(ranks), **hits}


def in_a_file(place: Path, part: dict[str, Any]) -> Path:
    """Write a split of ogb's, with its candidates, as `task.ranking.file`."""
    if "edge" in part:
        source, target = part["edge_neg"].T
        arrays = {"source": source, "target": target}
    else:
        names = {"source_node": "source", "target_node": "target", "head": "source"}
        names |= {"tail": "target", "relation": "relation"}
        names |= {f"{key}_neg": f"{name}_neg" for key, name in names.items()}
        arrays = {names[key]: value for key, value in part.items()}
    np.savez(place, **arrays)
    return place


@pytest.mark.parametrize(
    "name", slow_but("ogbl-wikikg2", ["ogbl-ddi", "ogbl-citation2", "ogbl-wikikg2"])
)
def test_the_protocol_of_ogb(name: str, tmp_path: Path) -> None:
    """Metrics are exactly those of ogb's evaluator for the same scores, on any number of ranks."""
    parts = dict(zip(("val", "test"), link_splits(name)[1:]))
    files = {split: in_a_file(tmp_path / f"{split}.npz", part) for split, part in parts.items()}
    found = []
    for workers in (1, 3):
        run = train_on_ranks(ogb_config(tmp_path, name, workers), replicated=False)
        for split, part in parts.items():
            file = {"file": str(files[split])}
            config = ogb_config(tmp_path, name, workers, ranking=file)
            wanted = by_ogb(part, Scores(run, config, ("_N", "_N")))
            metrics = ask(run, config, workers, split=split, rows=False)
            assert {key: metrics[f"{split}/{key}"] for key in wanted} == wanted
            found.append(wanted)
    assert any(0 < value < 1 for one in found for value in one.values())


def listed(kind: str, place: Path, hard: int = 3, rows: Any = None) -> Path:
    """Return nodes that form no edge with the other end, for the shop's edges or some ``rows``."""
    rng, edges = np.random.default_rng(7), shop().edges[LIKES]
    known = {(s, t, r) for s, t, r in zip(edges.src, edges.dst, edges.data["relation"])}
    chosen = range(edges.num) if rows is None else rows
    frame: dict[str, list[Any]] = {
        name: [] for name in ("source", "target", "relation", "source_neg", "target_neg")
    }
    for i in chosen:
        s, t, r = int(edges.src[i]), int(edges.dst[i]), int(edges.data["relation"][i])
        people = [p for p in rng.permutation(PEOPLE).tolist() if (p, t, r) not in known]
        things = [o for o in rng.permutation(THINGS).tolist() if (s, o, r) not in known]
        row = s, t, r, people[:hard], things[: hard + i % 2]
        for column, value in zip(frame.values(), row):
            column.append(value)
    place.mkdir(exist_ok=True)
    file = place / f"{kind}-{hard}-{len(frame['source'])}.parquet"
    pd.DataFrame(frame).to_parquet(file)
    return file


@pytest.mark.parametrize("kind", ["none", "uniform"])
def test_hard_negatives_are_the_same_on_any_ranks(kind: str, tmp_path: Path) -> None:
    """A resume does not change them; edges without a list have sampled ones."""
    edges = shop().edges[LIKES]
    some = np.flatnonzero(edges.data["train_mask"])
    hard = listed(kind, tmp_path / "lists", rows=some if kind == "none" else some[::2])
    candidates = listed("ranked", tmp_path / "lists", 20, np.flatnonzero(~edges.data["train_mask"]))
    number = {"number": 20} if kind == "uniform" else {}
    more: dict[str, Any] = {
        "task": {
            **LINKS,
            "negatives": {"kind": kind, "file": str(hard), **number},
            "ranking": {"file": str(candidates)},
        },
        "model": {"hidden": 8, "decoder": "distmult"},
        "fault": {"checkpoint_every": 3},
    }
    found = []
    for workers, parts, replicated in ((1, 1, True), (2, 2, False)):
        config = config_of(
            tmp_path,
            f"{workers}-{replicated}",
            parts=parts,
            sampling={"fanout": [-1, -1], "batch_size": 120 // workers},
            cluster={"workers": workers},
            train={"epochs": 2},
            **more,
        )
        run = train_on_ranks(config, replicated=replicated)
        found.append((losses(run), run.summary["metrics"]))
    for other, metrics in found[1:]:
        assert np.abs(other - found[0][0]).max() < 1e-4
        assert metrics == pytest.approx(found[0][1], abs=1e-3)
    assert found[0][1]["test/hits@20"] <= found[0][1]["test/hits@50"] == 1  # of 20 or 21 nodes

    shared = {"sampling": {"fanout": [-1, -1], "batch_size": 60}, "cluster": {"workers": 2}}
    part = config_of(tmp_path, "part", **more, **shared, train={"epochs": 2, "max_steps": 4})
    train_on_ranks(part)
    rest = config_of(tmp_path, "part", **more, **shared, train={"epochs": 2})
    resumed = train_on_ranks(rest, resume=True)
    assert losses(resumed)[-5:].tolist() == found[1][0][-5:].tolist()

    plain = config_of(tmp_path, "plain", **{**more, "task": LINKS}, train={"max_steps": 1})
    assert abs(losses(train_on_ranks(plain))[0] - found[0][0][0]) > 1e-3


def test_a_resume_wants_the_lists_it_began_with(tmp_path: Path) -> None:
    files = [listed("a", tmp_path / "lists", hard) for hard in (1, 2)]
    task = {**LINKS, "negatives": {"file": str(tmp_path / "now.parquet")}}
    for file, steps in zip(files, (3, 6)):
        (tmp_path / "now.parquet").write_bytes(file.read_bytes())
        train = {"max_steps": steps}
        config = config_of(tmp_path, "run", task=task, train=train, fault={"checkpoint_every": 3})
        if steps == 3:
            train_on_ranks(config)
        else:
            with pytest.raises(RuntimeError, match="data"):
                train_on_ranks(config, resume=True)


def test_drawn_candidates_are_the_same_on_any_ranks(tmp_path: Path) -> None:
    """The fraction of candidates above an edge is about that among all nodes."""
    found = []
    for workers, parts in ((1, 1), (3, 2)):
        config = config_of(
            tmp_path,
            f"{workers}",
            parts=parts,
            task={**LINKS, "ranking": {"candidates": 40}, "metric": "hits@20"},
            model={"hidden": 8},
            sampling={"fanout": [-1, -1], "batch_size": 60 // workers},
            cluster={"workers": workers},
            train={"epochs": 1},
        )
        run = train_on_ranks(config, replicated=False)
        found.append(run.summary["metrics"])
        again = ask(run, config, workers, split="test", rows=False)
        assert again == {k: v for k, v in run.summary["metrics"].items() if k in again}
    assert found[0] == pytest.approx(found[1], abs=1e-3)
    exact = config_of(tmp_path, "1", parts=1, task={**LINKS}, model={"hidden": 8})
    every = ask(run, exact, 1, split="test", rows=False)
    assert every["test/mrr"] < found[1]["test/mrr"]


@pytest.mark.parametrize("case", ["true", "no edge", "no list", "pairs to train", "pairs"])
def test_lists_that_do_not_fit_the_graph(case: str, tmp_path: Path) -> None:
    """A single error comes before the first step."""
    data, place = shop(), tmp_path / "lists.parquet"
    edges = data.edges[LIKES]
    if case == "pairs":  # of edges without relations
        data.edges[LIKES] = EdgeFrame(
            edges.src, edges.dst, {k: v for k, v in edges.data.items() if k.endswith("mask")}
        )
    frame = pd.read_parquet(listed("a", tmp_path / "lists"))
    kind, use, expected = "uniform", "negatives", ["lists.parquet"]
    if case == "true":
        same = (edges.src == edges.src[5]) & (edges.data["relation"] == edges.data["relation"][5])
        other = next(i for i in np.flatnonzero(same) if edges.dst[i] != edges.dst[5])
        frame.at[5, "target_neg"] = [int(edges.dst[other])]
        use, expected = "ranking", ["row 6", "it lists an edge that the graph has"]
    elif case == "no edge":
        frame.loc[7, "relation"] = 17
        expected = ["row 8", "the graph has no edge from"]
    elif case == "no list":
        train = np.flatnonzero(edges.data["train_mask"])
        some = frame["source"].eq(edges.src[train[0]]) & frame["target"].eq(edges.dst[train[0]])
        bare = some.sum()
        frame, kind = frame[~some], "none"
        expected = [f"{bare} training edges have no list, such as the edge from node "]
        expected += [f"from node {edges.src[train[0]]} to node {edges.dst[train[0]]}", "for each"]
    elif case == "pairs to train":
        frame, expected = frame[["source", "target", "relation"]], ["lists for each edge"]
    else:
        frame = pd.DataFrame({"source": [0, edges.src[9]], "target": [0, edges.dst[9]]})
        use, expected = "ranking", ["row 2", "it lists an edge that the graph has"]
        assert not ((edges.src == 0) & (edges.dst == 0)).any()
    frame.to_parquet(place)
    given = {"file": str(place)} | ({"kind": kind} if use == "negatives" else {})
    config = config_of(tmp_path, "bad", data=data, task={**LINKS, use: given})
    with pytest.raises(RuntimeError, match="DataError") as caught:
        train_on_ranks(config)
    assert all(text in str(caught.value) for text in expected), str(caught.value)
    assert not (config.run_dir / "metrics.jsonl").exists()


def test_a_list_for_all_edges(tmp_path: Path) -> None:
    """One list of a file serves both splits, and metrics are the same on any number of ranks."""
    data = shop()
    edges = data.edges[LIKES]
    masks = {name: mask for name, mask in edges.data.items() if name.endswith("mask")}
    data.edges[LIKES] = EdgeFrame(edges.src, edges.dst, masks)
    known = set(zip(edges.src.tolist(), edges.dst.tolist()))
    absent = [(s, t) for s in range(PEOPLE) for t in range(THINGS) if (s, t) not in known][::50]
    source, target = np.array(absent).T
    np.savez(tmp_path / "absent.npz", source=source, target=target)
    found = []
    for workers, parts in ((1, 1), (3, 2)):
        config = config_of(
            tmp_path,
            f"{workers}",
            data=data,
            parts=parts,
            task={**LINKS, "ranking": {"file": str(tmp_path / "absent.npz")}, "metric": "hits@50"},
            sampling={"fanout": [-1, -1], "batch_size": 60 // workers},
            cluster={"workers": workers},
            train={"epochs": 2},
        )
        found.append(train_on_ranks(config).summary["metrics"])
    assert found[0] == pytest.approx(found[1], abs=1e-2)
    assert 0 < found[0]["test/hits@20"] <= found[0]["test/hits@50"] <= found[0]["test/hits@100"] < 1


def test_candidates_are_in_one_place(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there are no negatives: kind is none"):
        config_of(tmp_path, "no", task={**LINKS, "negatives": {"kind": "none"}})
    ranking = {"candidates": 5, "file": "a.csv"}
    with pytest.raises(ConfigError, match="would be ignored: file has the candidates"):
        config_of(tmp_path, "no", task={**LINKS, "ranking": ranking})


@pytest.mark.system
@pytest.mark.slow
def test_the_commands_read_them(tmp_path: Path) -> None:
    """Training uses lists, and evaluation ranks edges among the pairs of a file."""
    parts = link_splits("ogbl-ddi")
    edges = np.concatenate([part["edge"] for part in parts])
    known = {*map(tuple, edges.tolist()), *map(tuple, edges[:, ::-1].tolist())}
    rows = [
        (s, t, other)
        for s, t in np.unique(parts[0]["edge"], axis=0).tolist()
        for other in range(5)
        if (s, other) not in known and other != t
    ]
    columns = ["source", "target", "target_neg"]
    pd.DataFrame(rows, columns=columns).to_csv(tmp_path / "hard.csv", index=False)
    negatives = {"file": str(tmp_path / "hard.csv")}
    ranking = {"file": str(in_a_file(tmp_path / "absent.npz", parts[2]))}
    config = ogb_config(tmp_path, "ogbl-ddi", 2, negatives=negatives, ranking=ranking)
    run = raygnn.train(config, display=False)
    tested = {k: v for k, v in run.summary["metrics"].items() if k.startswith("test/")}
    assert 0 < tested["test/hits@100"] < 1
    (tmp_path / "hard.csv").unlink()  # which only training reads
    assert raygnn.evaluate(run, display=False) == tested
    drawn = raygnn.evaluate(run, overrides=["task.ranking={candidates: 7}"], display=False)
    assert drawn["test/hits@10"] == 1
    assert drawn != tested
    with pytest.raises(DataError, match=r"hard\.csv"):
        raygnn.check(config.model_copy(update={"name": "again"}), display=False)


def test_lists_in_time_and_among_several_tasks(tmp_path: Path) -> None:
    """Nodes of lists are seen at the time of their edge, for any number of ranks."""
    graph = timed_jobs.tables(tmp_path / "graph")
    visits = pd.read_parquet(tmp_path / "graph" / "v.parquet").drop_duplicates(["user", "shop"])
    rng = np.random.default_rng(2)
    target = [
        [(shop + step) % timed_jobs.SHOPS for step in rng.integers(1, timed_jobs.SHOPS, 6)]
        for shop in visits["shop"]
    ]
    frame = {"source": visits["user"], "target": visits["shop"], "target_neg": target}
    pd.DataFrame(frame).to_parquet(tmp_path / "lists.parquet")
    found = []
    for workers in (1, 3):
        config = timed_jobs.config_of(tmp_path, graph, f"{workers}", cluster={"workers": workers})
        values = config.to_dict()
        file = {"file": str(tmp_path / "lists.parquet")}
        values["tasks"]["visit"] |= {"negatives": {"kind": "none", **file}, "ranking": file}
        values["sampling"]["batch_size"] = 60 // workers
        run = train_on_ranks(load_config(values), replicated=workers < 3)
        found.append((losses(run), run.summary["metrics"]))
    for other, metrics in found[1:]:
        assert np.abs(other - found[0][0]).max() < 1e-3
        assert metrics == pytest.approx(found[0][1], abs=2e-2)
    assert found[0][1]["test/visit/hits@3"] < found[0][1]["test/visit/hits@10"] == 1
