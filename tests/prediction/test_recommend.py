"""Lists of the best targets are those of plain Python over all pairs, on any number of workers."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas
import pyarrow as pa
import pytest
import torch
import yaml

from raygnn import open_run, recommend
from raygnn.config.schema import Config
from raygnn.driver.inputs import PartitionInput
from raygnn.errors import InputError
from raygnn.graph.partition.layout import read_meta
from raygnn.models.compiled import keep_best
from raygnn.prediction import request as request_of
from raygnn.runs.run import Run
from raygnn.tasks import top
from raygnn.worker.job import Request, TaskTarget, TopLists
from tests.prediction.test_predict import ask
from tests.prediction.test_predict_at import AT, trained
from tests.prediction.test_table_jobs import shop as shop_of_tables
from tests.support.commands import Command
from tests.support.graphs import ensure_partition
from tests.support.small_jobs import edges_of, train_on_ranks
from tests.worker.test_edge_tasks import LIKES, LINKS, PEOPLE, THINGS, config_of, shop
from tests.worker.test_recommenders import recommender

COLUMNS = ["source", "rank", "target", "score"]


def lists(run: Run, config: Config, workers: int, lists: TopLists, **more: Any) -> pandas.DataFrame:
    table = ask(run, config, workers, lists=lists, scores=False, **more)
    assert table.column_names == COLUMNS
    return table.to_pandas()


def _alike(decoder: Any, kept: torch.Tensor, nodes: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.zeros(len(kept), len(nodes))


def _broken(decoder: Any, kept: torch.Tensor, nodes: torch.Tensor, *_: Any) -> torch.Tensor:
    return _alike(decoder, kept, nodes).index_fill(1, torch.tensor([3]), torch.nan)


def by_hand(scores: np.ndarray, known: set[tuple[int, int]], k: int) -> dict[int, list[int]]:
    """Return the targets of each source; of equal ones the first."""
    found = {}
    for source, row in enumerate(scores):
        order = [t for t in np.argsort(-row, kind="stable") if (source, t) not in known]
        if order:
            found[source] = [int(target) for target in order[:k]]
    return found


def targets(frame: pandas.DataFrame) -> dict[int, list[int]]:
    for _, some in frame.groupby("source"):
        assert some["rank"].tolist() == list(range(1, len(some) + 1))
    return {int(s): some["target"].tolist() for s, some in frame.groupby("source")}


def all_scores(run: Run, config: Config) -> np.ndarray:
    """Return the scores of all pairs by their embeddings; the decoder is a dot product."""
    rows = {
        ntype: np.stack(ask(run, config, 1, embeddings=True, ntype=ntype)["embedding"].to_pylist())
        for ntype in ("person", "thing")
    }
    return np.asarray(rows["person"] @ rows["thing"].T, np.float32)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Config]:
    config = recommender(tmp_path_factory.mktemp("runs"), "shop", "factors")
    return train_on_ranks(config), config


@pytest.mark.parametrize(("k", "known"), [(7, True), (1, False), (THINGS + 5, True)])
def test_lists_are_those_of_all_pairs(
    made: tuple[Run, Config], known: bool, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sources come in several rounds, candidates in several blocks."""
    monkeypatch.setattr(top, "_BLOCK", 16)
    monkeypatch.setattr(top, "_AT_ONCE", 96)
    run, config = made
    edges, scores = shop().edges[LIKES], all_scores(*made)
    had = set(zip(edges.src.tolist(), edges.dst.tolist())) if known else set()
    wanted = by_hand(scores, had, k)
    for workers in (1, 3):
        frame = lists(run, config, workers, TopLists(k, known))
        found = targets(frame)
        assert list(found) == list(wanted)  # ascending
        for source, some in found.items():  # products may be rounded differently
            assert len({*some}) == len(some) == len(wanted[source])
            assert not had & {(source, target) for target in some}
            right = scores[source, wanted[source]]
            assert scores[source, some] == pytest.approx(right, abs=1e-6)
        assert np.abs(scores[frame["source"], frame["target"]] - frame["score"]).max() < 1e-6


def test_equal_scores_are_in_order_of_the_targets(
    made: tuple[Run, Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(top, "_BLOCK", 16)
    monkeypatch.setattr(top, "table", _alike)
    edges = shop().edges[LIKES]
    had = set(zip(edges.src.tolist(), edges.dst.tolist()))
    wanted = by_hand(np.zeros((PEOPLE, THINGS)), had, 7)
    for workers in (1, 3):
        assert targets(lists(*made, workers, TopLists(7))) == wanted


def test_some_sources_and_some_candidates(made: tuple[Run, Config]) -> None:
    """Candidates are a list, or an array of their type; sources without one have no row."""
    run, config = made
    scores, data = all_scores(*made), shop()
    some, among = [5, 3, 149], [7, 2, 9, 40]
    frame = lists(run, config, 2, TopLists(3, False, pa.array(among)), wanted=pa.array(some))
    allowed = np.where(np.isin(np.arange(THINGS), among), scores, -np.inf)
    assert targets(frame) == {s: by_hand(allowed, set(), 3)[s] for s in sorted(some)}

    mask = data.nodes["thing"].data["test_mask"]
    for name, chosen in (
        ("test_mask", mask),
        ("unread", data.nodes["thing"].data["feat"][:, 0] > 0.5),
    ):
        frame = lists(run, config, 2, TopLists(4, False, name))
        allowed = np.where(chosen, scores, -np.inf)
        assert targets(frame) == by_hand(allowed, set(), 4)

    edges = data.edges[LIKES]
    one = int(edges.dst[0])
    frame = lists(run, config, 2, TopLists(4, True, pa.array([one])))
    left = set(range(PEOPLE)) - set(edges.src[edges.dst == one].tolist())
    assert targets(frame) == {person: [one] for person in sorted(left)}

    with pytest.raises(RuntimeError, match=r"--candidates: there is no 900 .* number 2"):
        lists(run, config, 1, TopLists(4, True, pa.array([1, 900])))
    with pytest.raises(
        RuntimeError, match=r"arrays: price, train_mask, val_mask, test_mask, unread\s*$"
    ):
        lists(run, config, 1, TopLists(4, True, "stock"))


def test_relations(tmp_path: Path) -> None:
    """A relation's own known edges are excluded, and its scores count."""
    given: dict[str, Any] = {"model": {"hidden": 8, "decoder": "distmult"}, "train": {"epochs": 1}}
    config = config_of(tmp_path, "related", task=LINKS, **given)
    run = train_on_ranks(config)
    for workers in (1, 2):
        found = [lists(run, config, workers, TopLists(5, relation=str(r))) for r in range(4)]
        assert len({tuple(targets(frame)[0]) for frame in found}) > 1
        edges = shop().edges[LIKES]
        for number, frame in enumerate(found):
            of = edges.data["relation"] == number
            had = set(zip(edges.src[of].tolist(), edges.dst[of].tolist()))
            assert not had & set(zip(frame["source"], frame["target"]))
    with pytest.raises(RuntimeError, match="the edges have several relations"):
        lists(run, config, 1, TopLists(5))
    with pytest.raises(RuntimeError, match="there is no relation '4'"):
        lists(run, config, 1, TopLists(5, relation="4"))


def test_one_of_several_tasks(tmp_path: Path) -> None:
    tasks = {
        "likes": LINKS,
        "price": {"kind": "node_regression", "ntype": "thing", "target": "price"},
    }
    given: dict[str, Any] = {"model": {"hidden": 8, "decoder": "dot"}, "train": {"epochs": 1}}
    config = config_of(tmp_path, "several", task=None, tasks=tasks, **given)
    run = train_on_ranks(config)
    frames = [lists(run, config, workers, TopLists(5), task="likes") for workers in (1, 2)]
    pandas.testing.assert_frame_equal(frames[0], frames[1], atol=1e-4)
    edges = shop().edges[LIKES]
    had = set(zip(edges.src.tolist(), edges.dst.tolist()))
    assert len(frames[0]) == 5 * PEOPLE
    assert not had & set(zip(frames[0]["source"], frames[0]["target"]))


@pytest.mark.dgl
def test_lists_at_a_time(tmp_path: Path) -> None:
    """What a node meets later is still recommended, and itself never."""
    run, config = trained(tmp_path, "link_prediction", time={})
    frames = [lists(run, config, workers, TopLists(6), at=AT) for workers in (1, 2)]
    pandas.testing.assert_frame_equal(frames[0], frames[1], atol=1e-4)
    everything = lists(run, config, 1, TopLists(10**6), at=AT)
    assert (everything["source"] != everything["target"]).all()
    from raygnn.graph.dgl import dgl

    (graph,), _ = dgl().load_graphs(str(tmp_path / "graph.dgl"))
    src, dst = (ends.numpy() for ends in graph.edges())
    before = graph.edata[config.sampling.time.edges].numpy() < AT
    pairs = set(zip(everything["source"], everything["target"]))
    earlier = set(zip(src[before].tolist(), dst[before].tolist()))
    assert not earlier & pairs
    later = {(s, d) for s, d in zip(src[~before].tolist(), dst[~before].tolist()) if s != d}
    assert later - earlier <= pairs
    with pytest.raises(InputError, match="lists depend on the time"):
        recommend(run, out=tmp_path / "top.parquet", display=False)


def test_equal_scores_and_nan() -> None:
    """The first of equal ones is kept, in any blocks; NaN is never lost."""
    rng = np.random.default_rng(0)
    scores = rng.integers(0, 4, (5, 40)).astype(np.float32)
    scores[2, 3:] = -np.inf
    for size in (1, 7, 40):
        best, columns = top.empty_lists(5, 6)
        for start in range(0, 40, size):
            keep_best(np.ascontiguousarray(scores[:, start : start + size]), start, best, columns)
        for row, kept, of in zip(scores, best, columns):
            order = [c for c in np.argsort(-row, kind="stable")[:6] if row[c] > -np.inf]
            assert of.tolist() == order + [-1] * (6 - len(order))
            assert kept[: len(order)].tolist() == row[order].tolist()
    scores[1, 20] = np.nan
    best, columns = top.empty_lists(5, 1)
    keep_best(scores, 0, best, columns)
    assert np.isnan(best[:, 0]).tolist() == [False, True, False, False, False]


def test_scores_that_are_nan_are_no_lists(
    made: tuple[Run, Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(top, "table", _broken)
    with pytest.raises(RuntimeError, match="scores of this model are NaN"):
        lists(*made, 2, TopLists(3))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": 0}, "lists need a length from 1"),
        ({"k": 2.5}, "lists need a length from 1"),
        ({"k": 2**31}, "to 2147483647"),
        ({"known": "excluded"}, "known is exclude or keep"),
        ({"at": 3}, "the run was trained without times"),
        ({"ids": "none.txt"}, "there is no such file"),
        ({"task": "likes"}, "this run has one task"),
    ],
)
def test_refused_before_anything_starts(
    made: tuple[Run, Config], options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message):
        recommend(made[0], out=tmp_path / "top.parquet", display=False, **options)
    assert not list(tmp_path.iterdir())


def without_ray(monkeypatch: pytest.MonkeyPatch, config: Config) -> list[Request]:
    """Let predictions find no rows, and return the requests that reach the ranks."""
    place, launched = ensure_partition(config, 2).directory, list[Request]()
    given = PartitionInput(read_meta(place), None)
    plan = SimpleNamespace(goals={"": TaskTarget(edges=edges_of(config, place))}, input=given)

    def launch(*_: Any, request: Request, **__: Any) -> dict[str, Any]:
        launched.append(request)
        return {"rows": 0}

    run = SimpleNamespace(update_summary=lambda **_: None)
    session = SimpleNamespace(plan=plan, launch=launch, run=run)
    monkeypatch.setattr(request_of, "session_beside", lambda *_, **__: nullcontext(session))
    return launched


def refused(run: Run, **options: Any) -> str:
    with pytest.raises(InputError) as error:
        recommend(run, out=run.path / "top.parquet", display=False, **options)
    return f"{error.value.where}: {error.value.what}; {error.value.remedy}"


def test_what_the_graph_lacks_is_refused_before_ranks_start(
    made: tuple[Run, Config], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Relations of edges without any, and arrays that nodes do not have."""
    run, config = made
    launched = without_ray(monkeypatch, config)
    said = refused(run, relation="likes")
    assert said == "--relation likes: the edges have no relations; leave --relation out"
    assert "the edges have no relations" in refused(run, relation=0)
    said = refused(run, candidates="array:stock")
    assert "has no array 'stock' of a number for each node" in said
    assert "arrays: price, train_mask, val_mask, test_mask, unread" in said
    assert not launched

    given: dict[str, Any] = {"model": {"hidden": 8, "decoder": "distmult"}, "train": {"epochs": 1}}
    config = config_of(tmp_path, "related", task=LINKS, **given)
    run = train_on_ranks(config)
    launched = without_ray(monkeypatch, config)
    said = "the edges have several relations; choose one of 0, 1, 2, 3"
    assert said in refused(run)
    assert "--relation 4: there is no relation '4'" in refused(run, relation=4)
    assert not launched
    for relation in (0, "0"):
        refused(run, relation=relation, candidates="array:price")
        assert launched.pop().lists == TopLists(10, candidates="price", relation="0")


def test_sources_that_know_all_targets(
    made: tuple[Run, Config], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The message names what was asked for."""
    without_ray(monkeypatch, made[1])
    said = refused(made[0])
    assert said.startswith("--known exclude: the sources have edges to all targets already; pass")
    (tmp_path / "few.txt").write_text("3\n")
    said = refused(made[0], candidates=tmp_path / "few.txt")
    assert said.startswith("--candidates: no source has a candidate; name others")


def test_an_empty_id_is_told_with_its_row(made: tuple[Run, Config], tmp_path: Path) -> None:
    file = tmp_path / "ids.parquet"
    pandas.DataFrame({"node": pandas.array([4, None, 5], "Int64"), "x": 1}).to_parquet(file)
    for option in ("ids", "candidates"):
        assert refused(made[0], **{option: file}) == (
            f"{file}, column 'node', row 2: the id is empty; remove the row"
        )


@pytest.mark.system
def test_the_command_and_its_ids(tmp_path: Path) -> None:
    """Ids are those of the tables; an unknown one is told before Ray starts."""
    shop_of_tables(tmp_path)
    task = {"kind": "link_prediction", "etype": "bought"}
    model = {"kind": "none", "decoder": "dot", "embedding": {"dim": 8, "ntypes": ["item", "user"]}}
    config = {"name": "shop", "graph": {"format": "tables", "path": "shop.yaml"}, "task": task}
    config |= {"model": model, "sampling": {"batch_size": 64}, "train": {"epochs": 1}}
    config |= {"cluster": {"workers": 2}}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(config))

    def run(*command: str, code: int = 0) -> str:
        status, out, err = Command([*command], tmp_path).finish(240)
        assert status == code, out + err
        return out + err

    run("train", "job.yaml")
    items = pandas.read_csv(tmp_path / "items.csv")["name"]
    bought = pandas.read_csv(tmp_path / "bought.csv")
    users = pandas.read_parquet(tmp_path / "users.parquet")["id"]
    (tmp_path / "few.txt").write_text(f"{users[4]}\n{users[1]}\n")
    items[:50].to_frame("node").to_parquet(tmp_path / "stock.parquet")
    asked = ["recommend", "shop", "--out", "top.parquet", "--ids", "few.txt"]
    run(*asked, "--candidates", "stock.parquet", "--k", "5")
    frame = pandas.read_parquet(tmp_path / "top.parquet")
    assert list(frame) == COLUMNS
    assert frame["source"].tolist() == [users[1]] * 5 + [users[4]] * 5
    assert set(frame["target"]) <= set(items[:50])
    assert not {*zip(frame["source"], frame["target"])} & {*zip(bought["user"], bought["item"])}
    found = open_run(tmp_path / "runs" / "shop").recommend(
        5, ids=[int(users[1]), int(users[4])], candidates=list(items[:50])
    )
    pandas.testing.assert_frame_equal(found, frame)
    (tmp_path / "stock.txt").write_text("item 3\nitem 999\n")
    said = run(*asked, "--overwrite", "--candidates", "stock.txt", code=2)
    assert "'item 999'" in said
    assert "number 2 of the list" in said
    lines = [line for line in said.splitlines() if "versions_supported" not in line]
    assert not [line for line in lines if "ranks" in line]
    pandas.testing.assert_frame_equal(pandas.read_parquet(tmp_path / "top.parquet"), frame)
