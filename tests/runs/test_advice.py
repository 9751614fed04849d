"""Advice follows from what was measured, names a key, and says what it does to results."""

from __future__ import annotations

from typing import Any

import pytest

from raygnn.config.load import load_config
from raygnn.runs.advice import Advice, advise
from raygnn.runs.metrics_files import LOADER, STEP

MB = 2**20


def config(**sections: Any) -> dict[str, Any]:
    return load_config(
        {
            "name": "x",
            "graph": {"format": "planted", "nodes": 1000},
            "model": {"kind": "gcn"},
            "cluster": {"workers": 2},
            **sections,
        }
    ).to_dict()


def windows(world: int = 2, count: int = 12, **seconds: Any) -> list[dict[str, Any]]:
    """``count`` records, each with these seconds: of all ranks, or a list with one for each."""
    usual = {"forward": 0.04, "backward": 0.05, "optimizer": 0.01}
    row = {
        name: value if isinstance(value, list) else [value] * world
        for name, value in (dict.fromkeys((*STEP, *LOADER), 0.0) | usual | seconds).items()
    }
    first = {"step": 1, "time": 0.0, "seconds": row | {"wait": [9.0] * world}}
    return [first] + [{"step": i, "time": i, "seconds": row} for i in range(2, count + 2)]


def only(advice: list[Advice], name: str) -> list[Advice]:
    return [a for a in advice if a.name == name]


def test_nothing_to_say() -> None:
    quiet = config(train={"lr_scaling": "linear"})
    assert advise(quiet, {}, windows()) == []
    assert advise(quiet, {}, []) == []
    assert advise(config(), {"steps": 20}, windows(communicate=9.0)) == []  # a trial
    assert advise(config(), {"steps": 21}, windows(communicate=9.0)) != []
    assert advise(quiet, {}, windows(count=1, communicate=9.0)) == []  # too few to judge
    assert advise(quiet, {}, [{"step": 1, "seconds": None}, {"odd": 1}]) == []


def test_communication_that_nothing_hides() -> None:
    facts = {"gradients": {"bytes": 50 * MB, "buckets": [25 * MB, 25 * MB]}}
    found = advise(config(), facts, windows(communicate=0.3))
    first, second = only(found, "communication")
    assert first.set == ("comm.compression=bf16",)
    assert first.numerics
    assert "300.0 ms a batch that nothing hides, 75% of it; 50.0 MB in 2 buckets" in first.what
    assert "about 150 ms a batch less" in first.expect
    assert second.set == ("train.accumulate=2",)
    assert found[0] == first  # the most urgent one
    less = config(comm={"compression": "bf16"})
    assert [
        a.set for a in only(advise(less, facts, windows(communicate=0.3)), "communication")
    ] == [("train.accumulate=2",)]
    assert not only(advise(config(), facts, windows(communicate=0.02)), "communication")
    late = config(comm={"overlap": False})
    exact = [a for a in advise(late, facts, windows(communicate=0.3)) if not a.numerics]
    assert exact[0].set == ("comm.overlap=true",)


@pytest.mark.parametrize(("count", "seconds"), [(1000, 0.3), (50 * MB, 0.0009)])
def test_an_exchange_of_next_to_nothing_is_not_worth_advice(count: int, seconds: float) -> None:
    facts = {"gradients": {"bytes": count, "buckets": [count]}}
    usual = {"forward": seconds / 10, "backward": seconds / 10, "optimizer": seconds / 10}
    found = advise(config(), facts, windows(communicate=seconds, **usual))
    assert not only(found, "communication")


def test_buckets() -> None:
    facts = {"gradients": {"bytes": 50 * MB, "buckets": [50 * MB]}}
    (large,) = only(
        advise(config(comm={"bucket_cap_mb": 100}), facts, windows(communicate=0.04)),
        "large_buckets",
    )
    assert large.set == ("comm.bucket_cap_mb=12",)
    assert not large.numerics
    tiny = {"gradients": {"bytes": 50 * MB, "buckets": [MB] * 50}}
    (small,) = only(
        advise(config(comm={"bucket_cap_mb": 1}), tiny, windows(communicate=0.04)), "small_buckets"
    )
    assert small.set == ("comm.bucket_cap_mb=25",)


@pytest.mark.parametrize(
    ("sampling", "made", "changes"),
    [
        ({"prefetch": 0}, {"sample": 0.05}, ("sampling.prefetch=2",)),
        ({"cache": 0.1}, {"exchange": 0.05}, ("sampling.cache=0.2",)),
        ({}, {"exchange": 0.05}, ("sampling.cache=1",)),
        ({"cache": 0.7}, {"exchange": 0.05}, ("sampling.cache=1",)),
        ({"topology": "partitioned"}, {"exchange": 0.05}, ("sampling.cache=1",)),
        ({}, {"sample": 0.05, "features": 0.01}, ("cluster.cpus_per_worker=2",)),
    ],
)
def test_a_starving_loader(
    sampling: dict[str, Any], made: dict[str, float], changes: tuple[str, ...]
) -> None:
    facts = {"remote": {"rows": 900, "cache_hits": 100}}
    found = advise(config(sampling=sampling), facts, windows(wait=[0.01, 0.06], **made))
    first = only(found, "starving_loader")[0]
    assert first.what.startswith("rank 1 waits for its next batch 4")
    assert first.set == changes
    assert not first.numerics
    for change in changes:  # each is a key that there is
        load_config({**config(sampling=sampling)}, [change])


@pytest.mark.parametrize("rows", [0, 900])
def test_a_cache_that_fetches_nothing_is_left_as_it_is(rows: int) -> None:
    """All ranks are on one host, or their cache has all rows of the others."""
    facts = {"remote": {"rows": rows, "cache_hits": rows}}
    near = config(sampling={"cache": 0.1, "topology": "partitioned"})
    found = only(advise(near, facts, windows(wait=0.06, exchange=0.05)), "starving_loader")
    assert [a.set for a in found] == [("sampling.topology=replicated",)]


def test_a_straggler_and_where_its_time_goes() -> None:
    facts = {
        "ranks": [
            {"rank": 0, "host": "a", "busy": 0.1, "wait": 0.0, "slow": 0.0},
            {"rank": 1, "host": "b", "busy": 0.3, "wait": 0.0, "slow": 0.9},
        ]
    }
    (found,) = only(
        advise(config(), facts, windows(forward=[0.04, 0.24], peers=[0.2, 0.0])), "stragglers"
    )
    assert found.what == (
        "rank 1 on b holds up the others in 90% of the windows: its forward takes 200.0 ms a batch "
        "more than theirs"
    )
    assert found.set == ()
    assert "the others wait for 200.0 ms a batch" in found.expect
    (found,) = only(advise(config(), facts, windows(wait=[0.0, 0.2])), "stragglers")
    assert found.set == ("sampling.prefetch=4",)


def test_use_that_swings() -> None:
    records = windows(wait=0.02)
    for i, record in enumerate(records):
        record["use"] = {"cpu": [0.9 - 0.5 * (i % 2), None], "gpu": [None, None]}
    (found,) = only(advise(config(), {}, records), "swinging_use")
    assert "busy between 40% and 90%" in found.what
    for record in records:
        record["use"] = {"cpu": [0.8, 0.85]}
    assert not only(advise(config(), {}, records), "swinging_use")


def test_memory_and_rate() -> None:
    records = windows()
    for record in records:
        record["memory"] = {"gpu_share": [0.2, 0.3]}
    (found,) = only(advise(config(), {}, records), "unused_memory")
    assert found.set == ("sampling.batch_size=1024", "train.lr_scaling=sqrt")
    (found,) = only(
        advise(config(train={"optimizer": "sgd"}), {}, windows(world=4)), "learning_rate"
    )
    assert "2,048 seeds" in found.what
    assert found.set[0] == "train.lr_scaling=linear"
    assert found.numerics
    assert not only(advise(config(), {}, windows(world=1)), "learning_rate")
    one = {"global_batch": 512}  # as one worker began it, and so did the others go on
    assert not only(advise(config(), one, windows(world=4)), "learning_rate")
    assert only(advise(config(), {"global_batch": 2048}, windows(world=4)), "learning_rate")


def test_a_run_on_fewer_ranks_than_before() -> None:
    """Only the windows of the last start count."""
    records = windows(world=3, communicate=5.0) + windows(world=2)[1:]
    assert not only(advise(config(), {}, records), "communication")
    records = windows(communicate=5.0, count=100) + windows()
    assert not only(advise(config(), {}, records), "communication")
