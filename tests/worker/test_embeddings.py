"""Learned rows of nodes: what plain torch learns in one process, however they are spread."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from raygnn.checkpoint import store, weights
from raygnn.checkpoint.learned_rows import RowState
from raygnn.config.load import load_config
from raygnn.config.schema import Config
from raygnn.errors import DataError
from raygnn.graph.partition.manifest import checksum
from raygnn.sampling.exchange import Exchange
from raygnn.tasks import embeddings
from raygnn.tasks.embeddings import Embeddings, kept
from raygnn.worker.job import Job
from raygnn.worker.rank import Rank
from tests.driver.test_resume import stopped
from tests.prediction.test_predict import ask
from tests.support.pages import CHECKOUT, blocks
from tests.support.plain_embeddings import PlainSage, learned_rows, rows_in
from tests.support.small_jobs import JobFactory, job, runtime, train_on_ranks
from tests.worker.test_numerics import losses

pytestmark = pytest.mark.long

DIM = 8
STEPS = 30


REGULAR = {"weight_decay": 0.5, "dropout": 0.3}


def options(
    workers: int, *, optimizer: str = "adam", regular: bool = False, **train: Any
) -> dict[str, Any]:
    """Return options of one layer over all neighbours, with a global batch of 120 seeds."""
    more = REGULAR if regular else {}
    return {
        "graph": {"nodes": 600, "degree": 4},
        "model": {
            "layers": 1,
            "embedding": {"dim": DIM, "ntypes": ["_N"], "optimizer": optimizer, "lr": 0.02, **more},
        },
        "sampling": {"fanout": [-1], "batch_size": 120 // workers},
        "train": {
            "epochs": STEPS,
            "max_steps": STEPS,
            "eval_every": STEPS,
            "select": "last",
            **train,
        },
        "cluster": {"workers": workers},
    }


@pytest.fixture(params=["in place", "moved"])
def moved(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Train the rows in the tables' memory, or in memory of their own, as on a GPU."""
    if request.param == "moved":
        monkeypatch.setattr(embeddings, "_fits", lambda rows, device: True)


@pytest.mark.parametrize(
    ("optimizer", "train"),
    [
        ("adam", {}),
        ("adagrad", {"accumulate": 3, "clip": 0.3, "schedule": {"kind": "constant"}}),
        ("adam", {"accumulate": 2, "clip": 0.3, "regular": True}),
    ],
)
def test_embeddings_equal_those_of_plain_torch(
    optimizer: str, train: dict[str, Any], make_job: JobFactory
) -> None:
    """Rows, weights and losses equal `nn.Embedding` with `SparseAdam` or sparse `Adagrad` to 1e-5
    after 30 steps, with 2 and 3 workers in either topology."""
    plain = PlainSage(make_job(**options(1, optimizer=optimizer, **train)))
    expected = plain.train(STEPS)
    assert expected[-1] < 0.8 * expected[0]
    moved = set(np.concatenate(plain.touched).tolist())
    before = PlainSage(plain.config).rows.weight.detach()
    for workers in (2, 3):
        config = make_job(name=f"w{workers}", **options(workers, optimizer=optimizer, **train))
        run = train_on_ranks(config, replicated=workers % 2 == 0)
        rows = learned_rows(run)["_N"]
        assert np.abs(rows - plain.rows.weight.detach().numpy()).max() < 1e-5, workers
        state = torch.load(run.path / "checkpoints" / "selected.pt")
        for name, value in plain.dense.items():
            assert (state[name] - value).abs().max() < 1e-5, (workers, name)
        assert np.allclose(losses(run), expected, atol=1e-5)
        still = sorted(set(range(len(rows))) - moved)
        assert still
        assert (rows[still] == before[still].numpy()).all()


@pytest.mark.parametrize("workers", [1, 2])
def test_bytes_grow_with_the_rows_that_are_read(workers: int, make_job: JobFactory) -> None:
    """A remote row is received once and its gradient sent once, whatever the graph's size."""
    for number, (nodes, dim) in enumerate([(600, 8), (600, 16), (2400, 8)]):
        wanted = options(workers)
        wanted["graph"]["nodes"] = nodes
        wanted["model"]["embedding"]["dim"] = dim
        wanted["train"]["max_steps"] = 1
        config = make_job(name=f"run-{number}", **wanted)
        counted = train_on_ranks(config).summary["embeddings"]
        assert counted["bytes"] == 2 * 4 * dim * counted["remote"]
        assert (counted["remote"] == 0) == (workers == 1)
        plain = PlainSage(config)
        plain.train(1)
        (touched,) = plain.touched
        # a row that several ranks read is read by each
        assert len(touched) <= counted["rows"] <= workers * len(touched)
        assert workers > 1 or counted["rows"] == len(touched)
        assert counted["rows"] < 0.8 * nodes


def test_a_typed_graph(make_job: JobFactory) -> None:
    """One type has rows beside its features, the other none; results equal with 1 and 3
    workers."""
    curves, scores = [], []
    for workers in (1, 3):
        config = make_job(
            name=f"typed-{workers}",
            graph={"typed": True},
            model={"embedding": {"dim": 4, "ntypes": ["user", "item"]}},
            sampling={"fanout": [-1, 5], "batch_size": 120 // workers},
            cluster={"workers": workers},
        )
        run = train_on_ranks(config, replicated=workers == 1)
        curves.append(losses(run))
        scores.append(run.summary["metrics"]["test/loss"])
        assert {t: r.shape[1] for t, r in learned_rows(run).items()} == {"user": 4, "item": 4}
    assert np.allclose(*curves, atol=1e-5)
    assert np.allclose(*scores, atol=1e-4)


@pytest.mark.parametrize(("moved", "workers"), [("in place", 1), ("moved", 3)], indirect=["moved"])
def test_without_layers(moved: None, workers: int, make_job: JobFactory) -> None:
    """A node has only its embedding, so only trained nodes are predicted well; no other row is
    read."""
    base = job(make_job().run_dir.parent, cluster={"workers": workers})
    base["model"] = {"kind": "none", "embedding": {"dim": 4, "ntypes": ["_N"], "lr": 0.1}}
    base["sampling"] = {"batch_size": 120 // workers}
    base["train"] |= {"epochs": 10, "lr": 0.1}
    run = train_on_ranks(load_config(base))
    assert losses(run)[-1] < 0.5 * losses(run)[0]
    assert run.summary["embeddings"]["rows"] == 400 * 10


@pytest.mark.parametrize(("optimizer", "precision"), [("adam", "bf16"), ("adagrad", "bf16-mixed")])
def test_rows_stay_in_fp32(optimizer: str, precision: str, make_job: JobFactory) -> None:
    config = make_job(precision=precision, **options(2, optimizer=optimizer))
    run = train_on_ranks(config)
    assert losses(run)[-1] < 0.6 * losses(run)[0]
    rows = torch.from_numpy(learned_rows(run)["_N"])
    assert (rows != rows.bfloat16().float()).any(dim=1).float().mean() > 0.9


@pytest.mark.parametrize(
    ("moved", "workers", "again", "regular", "optimizer"),
    [
        ("in place", 2, 2, False, "adam"),
        ("moved", 2, 2, True, "adagrad"),
        ("in place", 2, 3, True, "adam"),
        ("moved", 4, 1, False, "adagrad"),
    ],
    indirect=["moved"],
)
def test_a_resumed_run(
    moved: None, workers: int, again: int, regular: bool, optimizer: str, make_job: JobFactory
) -> None:
    """Rows, optimizer state and best rows are bitwise identical with the same two workers, else
    equal up to rounding, also with another partition. With three, gloo adds up gradients in another
    order once DDP has rebuilt its buckets."""
    exact = workers == again == 2
    more = {"fault": {"checkpoint_every": 3, "keep": 20}}

    def config(name: str, workers: int) -> Config:
        wanted = options(workers, optimizer=optimizer, regular=regular)
        wanted["train"] |= {"epochs": 12, "eval_every": 3, "select": "best"}
        return make_job(name=name, **wanted, **more)

    whole = train_on_ranks(config("whole", workers))
    resumed = train_on_ranks(stopped(whole, config("part", again), 6), resume=True)
    old, new = (run.path / "checkpoints" / "step-0000000012" for run in (whole, resumed))
    state = {"adam": {"exp_avg", "exp_avg_sq"}, "adagrad": {"sum"}}[optimizer]
    for name in ("row", "best", *state):
        values = []
        for place in (old, new):
            files = store.read_manifest(place).manifest.rows
            assert files is not None
            assert files.steps == 12
            values.append(rows_in(place, files, name)["_N"])
        same = np.array_equal(*values) if exact else np.allclose(*values, atol=1e-6)
        assert same, name
    rows = [learned_rows(run)["_N"] for run in (whole, resumed)]
    assert np.abs(rows[0] - rows[1]).max() <= (0 if exact else 1e-5)
    assert not exact or whole.summary["metrics"] == resumed.summary["metrics"]


def test_dropout_depends_on_the_node_only() -> None:
    """The kept elements of a node do not depend on the other requested nodes, and their fraction is
    the requested one."""
    ids = np.arange(2000)
    left = kept(ids, 7, 10, 0.3)
    assert set(left.unique().tolist()) == {0.0, np.float32(1 / 0.7)}
    assert abs(float((left == 0).float().mean()) - 0.3) < 0.01
    columns, rows = (left == 0).float().mean(0), (left == 0).float().mean(1)
    assert (columns - 0.3).abs().max() < 0.06
    assert rows.std() < 1.2 * (0.3 * 0.7 / 10) ** 0.5  # numbers of a row are independent
    assert torch.equal(kept(ids[::-3], 7, 10, 0.3), left[torch.from_numpy(ids[::-3].copy())])
    assert not torch.equal(kept(ids, 8, 10, 0.3), left)


def test_predictions_drop_nothing(make_job: JobFactory) -> None:
    """The metrics of a run are those of its complete rows."""
    wanted = options(2, regular=True)
    wanted["train"] |= {"epochs": 3, "max_steps": None}
    config = make_job(**wanted)
    run = train_on_ranks(config)
    plain = make_job(**options(2))  # which knows of no dropout
    assert ask(run, plain, 1, split="val", rows=False, scores=False) == pytest.approx(
        {n: v for n, v in run.summary["metrics"].items() if n.startswith("val/")}, abs=1e-5
    )


def test_the_best_rows_are_tested(make_job: JobFactory) -> None:
    """The tested rows are those of the best epoch, together with its weights."""
    wanted = options(2)
    wanted["train"] |= {"epochs": 12, "max_steps": None, "eval_every": 1, "lr": 0.3}
    wanted["train"]["select"] = "best"
    wanted["model"]["embedding"]["lr"] = 0.3
    run = train_on_ranks(make_job(**wanted))
    seen = run.metrics["val/accuracy"].dropna()
    assert seen.iloc[-2] < seen.max()  # the last is of the weights that were put back
    assert run.summary["metrics"]["val/accuracy"] == seen.max()


@pytest.mark.usefixtures("moved")
def test_predictions_are_those_of_the_run(make_job: JobFactory) -> None:
    """Predictions from the files are the same for any number of workers."""
    config = make_job(**options(2))
    run = train_on_ranks(config)
    for workers in (1, 2, 3):
        for split in ("val", "test"):
            found = ask(run, config, workers, split=split, rows=False, scores=False)
            for name, value in found.items():
                assert value == pytest.approx(run.summary["metrics"][name], abs=1e-5)


def test_the_example_of_the_page(make_job: JobFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's config is valid, and its lines of Python read the files."""
    page = CHECKOUT / "docs" / "models.md"
    (section,) = (yaml.safe_load(b) for b in blocks("yaml", page) if "ntypes:" in b)
    config = make_job(graph={"typed": True}, **section)
    assert config.model.embedding is not None
    assert config.model.embedding.dim == 64
    run = train_on_ranks(make_job(name="small", **options(2)))
    monkeypatch.chdir(run.path.parent)
    (code,) = (block for block in blocks("py", page) if "runs/NAME" in block)
    found: dict[str, Any] = {}
    exec(code.replace("runs/NAME", "small"), found)
    ids, values = map(np.concatenate, zip(*found["rows"]["_N"]))
    assert np.array_equal(values[np.argsort(ids)], learned_rows(run)["_N"])


def test_files_of_rows_that_are_damaged_or_gone(make_job: JobFactory) -> None:
    wanted = {**options(2), "fault": {"checkpoint_every": 5, "keep": 3}}
    wanted["train"] |= {"max_steps": 10}
    config = make_job(**wanted)
    run = train_on_ranks(config)
    place = run.path / "checkpoints"
    selected = place / "selected-rows" / "rows-1-0.bin"
    whole = selected.read_bytes()
    selected.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    with pytest.raises(DataError, match=r"rows-1-0\.bin has changed"):
        weights.find(place)
    selected.write_bytes(whole[:-1])
    with pytest.raises(DataError, match=r"rows-1-0\.bin has .* bytes"):
        weights.find(place)
    selected.unlink()
    with pytest.raises(DataError, match="cannot be read"):
        weights.find(place)
    newest = place / "step-0000000010" / "rows-0-0.bin"
    newest.write_bytes(newest.read_bytes()[:-4] + b"\0\0\0\1")
    found, rejected = store.find(place, config)
    assert found is not None
    assert found.name == "step-0000000005"
    assert "rows-0-0.bin has changed" in rejected[0]
    manifest = place / "step-0000000005" / "manifest.json"
    said = json.loads(manifest.read_text())

    def say(files: list[dict[str, Any]]) -> None:
        values = {**said, "rows": {**said["rows"], "files": files}}
        digest = checksum({k: v for k, v in values.items() if k != "digest"})
        manifest.write_text(json.dumps({**values, "digest": digest}))

    files = said["rows"]["files"]
    say(files[1:])
    with pytest.raises(RuntimeError, match="has no embedding rows of"):
        train_on_ranks(config, resume=True)
    say([{**files[0], "name": "../../../etc/passwd"}, *files[1:]])
    found, rejected = store.find(place, config)
    assert found is None
    assert "manifest.json is damaged" in rejected[1]


def _full(exchange: Exchange, job: Job) -> dict[str, Any]:
    """Fill the storage of rank 1 at the second checkpoint."""
    write, calls = RowState._put, []

    def fail(self: RowState, *args: Any) -> Any:
        calls.append(1)
        if exchange.world.rank == 1 and len(calls) == 2:
            raise OSError(28, "No space left on device")
        return write(self, *args)

    RowState._put = fail  # type: ignore[method-assign]
    return Rank(job, runtime(exchange)).run()


def test_storage_that_is_full_costs_a_checkpoint(
    make_job: JobFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.support import small_jobs

    monkeypatch.setattr(small_jobs, "_train", _full)
    wanted = {**options(2), "fault": {"checkpoint_every": 4}}
    wanted["train"] |= {"max_steps": 12}
    run = train_on_ranks(make_job(**wanted))
    assert run.summary["checkpoints"] == {"saved": 2, "failed": 1, "skipped": 0}
    there = sorted(path.name for path in (run.path / "checkpoints").iterdir())
    assert there == ["selected-rows", "selected.json", "selected.pt"] + [
        f"step-{step:010d}" for step in (4, 12)
    ]
    events = (run.path / "logs" / "events.jsonl").read_text()
    assert "the disk or the quota is full: No space left on device (rank 1)" in events


def _poison(exchange: Exchange, job: Job) -> dict[str, Any]:
    """Make a row's gradient non-finite on rank 1 in the third step."""
    send, calls = Embeddings.send_back, []

    def poisoned(self: Embeddings, parameters: Any) -> None:
        calls.append(1)
        if exchange.world.rank == 1 and len(calls) == 3:
            _, leaf = self._joined
            leaf.grad[0, 0] = torch.inf
        send(self, parameters)

    Embeddings.send_back = poisoned  # type: ignore[method-assign]
    return Rank(job, runtime(exchange)).run()


def test_a_gradient_that_is_not_finite_leaves_the_step_out(
    make_job: JobFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks skip the step, for rows and weights alike."""
    from tests.support import small_jobs

    monkeypatch.setattr(small_jobs, "_train", _poison)
    wanted = {**options(2), "fault": {"checkpoint_every": 1, "keep": 9}}
    wanted["train"] |= {"max_steps": 4}
    run = train_on_ranks(make_job(**wanted))
    assert run.summary["skipped"]["steps"] == 1
    places = [run.path / "checkpoints" / f"step-{step:010d}" for step in (2, 3, 4)]
    states = [store.read_manifest(place).manifest.rows for place in places]
    assert [s.steps for s in states if s] == [2, 2, 3]
    found = [rows_in(place, files)["_N"] for place, files in zip(places, states) if files]
    assert (found[0] == found[1]).all()
    assert np.isfinite(found[2]).all()
    assert (found[1] != found[2]).any()


def test_sharded_optimizers_change_nothing(make_job: JobFactory) -> None:
    curves = []
    for shard in ("none", "optimizer"):
        wanted = options(2)
        wanted["train"] |= {"max_steps": 20, "clip": 0.3}
        curves.append(losses(train_on_ranks(make_job(name=shard, comm={"shard": shard}, **wanted))))
    assert np.allclose(*curves, atol=1e-6)
