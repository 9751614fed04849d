"""Fingerprints of ranks, and the error if they differ."""

from __future__ import annotations

import copy
import pickle
import re
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from raygnn.errors import GuardError
from raygnn.sampling.batch import Adjacency, Batch, Block, GraphBatch, Part
from raygnn.worker.comm import fingerprint

EDGE = ("user", "buys", "item")


def make_batch(rows: int = 3, dtype: torch.dtype = torch.float32, **changes: Any) -> Batch:
    adjacency = Adjacency(torch.arange(rows + 1), torch.zeros(rows, dtype=torch.int64))
    values: dict[str, Any] = {
        "blocks": [Block({EDGE: adjacency}, {"user": rows, "item": rows}, {"item": rows})],
        "x": {"item": torch.zeros(rows, 4, dtype=dtype)},
        "combined": {EDGE: torch.zeros(rows, 2)},
        "degree": {},
        "categories": {"item": {"kind": torch.zeros(rows, dtype=torch.int64)}},
        "seeds": torch.arange(rows),
        "pairs": torch.zeros(2, rows, dtype=torch.int64),
        "y": torch.zeros(rows, dtype=torch.int64),
        "weight": torch.ones(rows),
        "total": 7,
        "window": 9,
        "epoch": 1,
        "step": 2,
    }
    return Batch(**{**values, **changes})


def explain(ranks: list[fingerprint.Sections]) -> GuardError:
    """Return the error that `compare` raises once hashes differ, with the exchange simulated."""
    return fingerprint.disagreement(list(map(fingerprint.entries, ranks)), ["here"] * len(ranks))


class NormNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 3)
        self.norm = nn.BatchNorm1d(3)


# fingerprints


def test_parameters_and_buffers_in_order() -> None:
    net = NormNet()
    net.first.weight.requires_grad_(False)
    section = fingerprint.parameters(net)
    assert list(section) == [
        "parameter first.weight",
        "parameter first.bias",
        "parameter norm.weight",
        "parameter norm.bias",
        "buffer norm.running_mean",
        "buffer norm.running_var",
        "buffer norm.num_batches_tracked",
    ]
    assert section["parameter first.weight"] == (
        '{"dtype": "torch.float32", "shape": [3, 2], "device": "cpu", "requires_grad": false}'
    )


def test_rows_do_not_count_and_all_else_does() -> None:
    schema = fingerprint.batch(make_batch(3))
    assert schema == fingerprint.batch(make_batch(8)) == fingerprint.batch(make_batch(0))
    assert set(schema) >= {
        "batch blocks/0/adj/user:buys:item/indptr",
        "batch x/item",
        "batch combined/user:buys:item",
        "batch categories/item/kind",
        "batch pairs",
    }
    others = [
        make_batch(0, torch.bfloat16),
        make_batch(x={"item": torch.zeros(3, 5)}),
        make_batch(x={"item": torch.zeros(3)}),
        make_batch(x={}),
        make_batch(pairs=None),
        make_batch(blocks=[]),
    ]
    for other in others:
        assert fingerprint.batch(other) != schema


def test_rows_do_not_count_in_shares_of_several_tasks() -> None:
    def share(rows: int, ends: int = 2) -> Batch:
        empty = torch.empty(0)
        part = Part(
            seeds=torch.arange(rows),
            y=torch.zeros(rows),
            weight=torch.ones(rows),
            total=7,
            window=9,
            pairs=torch.zeros(ends, rows, dtype=torch.int64),
        )
        own = {"pairs": None, "seeds": empty, "y": empty, "weight": empty}
        return make_batch(3, **own, parts={"pairs": part})

    schema = fingerprint.batch(share(3))
    assert "batch parts/pairs/pairs" in schema
    assert schema == fingerprint.batch(share(4))
    assert schema != fingerprint.batch(share(3, ends=3))


def test_a_share_of_whole_graphs() -> None:
    def share(graphs: int, nodes: int, dtype: torch.dtype) -> GraphBatch:
        common = make_batch(graphs)
        return GraphBatch(
            seeds=common.seeds,
            y=common.y,
            weight=common.weight,
            total=7,
            window=7,
            epoch=0,
            step=0,
            sizes={"item": torch.ones(graphs, dtype=torch.int64)},
            edge_sizes={EDGE: torch.ones(graphs, dtype=torch.int64)},
            edges={EDGE: (torch.arange(nodes), torch.arange(nodes))},
            x={"item": torch.zeros(nodes, 4)},
            categories={},
            node_data={"item": {"pos": torch.zeros(nodes, 3, dtype=dtype)}},
            edge_data={},
        )

    schema = fingerprint.batch(share(2, 5, torch.float32))
    assert schema == fingerprint.batch(share(1, 0, torch.float32))
    other = fingerprint.batch(share(2, 5, torch.float16))
    assert {key for key in schema if schema[key] != other[key]} == {"batch node_data/item/pos"}
    assert "batch edges/user:buys:item/1" in schema


def test_position_tells_which_batch() -> None:
    one = fingerprint.position(2, 5, make_batch())
    assert one["global step"] == "5"
    for name in ("epoch", "step", "total", "window"):
        other = fingerprint.position(2, 5, make_batch(**{name: 100}))
        assert {key for key in one if one[key] != other[key]} == {f"batch {name}"}


def test_optimizers_tell_hyperparameters_and_groups() -> None:
    net = NormNet()

    def describe(*groups: dict[str, Any], kind: Any = torch.optim.AdamW) -> dict[str, str]:
        return fingerprint.optimizers([kind(groups)], net)

    first, norm = list(net.first.parameters()), list(net.norm.parameters())
    base = describe({"params": first}, {"params": norm, "lr": torch.tensor(0.5)})
    assert base["optimizer parameter norm.bias"] == '"group 1"'
    assert base == describe({"params": first}, {"params": norm, "lr": torch.tensor(0.5)})
    others = [
        describe({"params": first}, {"params": norm, "lr": 0.25}),
        describe({"params": first, "weight_decay": 0.3}, {"params": norm, "lr": 0.5}),
        describe({"params": first[:1]}, {"params": first[1:] + norm, "lr": 0.5}),
        describe({"params": first}, {"params": norm, "lr": 0.5}, kind=torch.optim.SGD),
    ]
    assert all(other != base for other in others)


def test_options_are_told_by_value_and_objects_by_name() -> None:
    def hook() -> None: ...

    one, two = object(), object()
    values = {"clip": None, "accumulate": 2, "rate": 0.1, "hook": hook, "other": one}
    section = fingerprint.options({**values, "device": torch.device("cuda", 1)})
    assert section["option accumulate"] == "2"
    assert section["option device"] == '"cuda"'
    assert section["option hook"].endswith('hook"')
    moved = {**values, "other": two, "hook": partial(hook), "device": torch.device("cuda", 0)}
    assert fingerprint.options(moved)["option other"] == section["option other"]
    assert fingerprint.options(moved)["option device"] == section["option device"]


def test_numerics_are_those_of_the_place() -> None:
    outside = fingerprint.numerics()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = fingerprint.numerics()
    assert (outside["autocast cpu"], inside["autocast cpu"]) == ('"off"', '"torch.bfloat16"')
    torch.set_default_dtype(torch.float64)
    try:
        assert fingerprint.numerics()["default dtype"] == '"torch.float64"'
    finally:
        torch.set_default_dtype(torch.float32)


# comparison


def entry_sections(words: dict[str, str]) -> fingerprint.Sections:
    return {"parameters": {f"parameter {k}": f'{{"dtype": "{v}"}}' for k, v in words.items()}}


NAMES = st.text("abcdefgh.", min_size=1, max_size=6)
DESCRIPTIONS = st.dictionaries(NAMES, st.sampled_from(["f32", "f16", "bf16"]), max_size=30)


@given(DESCRIPTIONS, DESCRIPTIONS)
def test_hash_differs_exactly_where_descriptions_do(
    one: dict[str, str], other: dict[str, str]
) -> None:
    same = list(one.items()) == list(other.items())
    assert (fingerprint.hash64(one) == fingerprint.hash64(other)) is same
    assert fingerprint.hash64(one) == fingerprint.hash64(copy.deepcopy(one))


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=6))
def test_extremes_of_hashes_are_exact(hashes: list[int]) -> None:
    largest = torch.stack([fingerprint.both_ends(value) for value in hashes]).amax(0)
    assert fingerprint.differ(largest) is (len(set(hashes)) > 1)


@settings(deadline=None)
@given(DESCRIPTIONS.filter(lambda d: len(d) >= 2), st.integers(2, 6), st.data())
def test_planted_differences_are_named(
    words: dict[str, str], size: int, data: st.DataObject
) -> None:
    names = list(words)
    planted = data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=8, unique=True))
    ranks = [dict(words) for _ in range(size)]
    expected = {}
    for name in planted:
        at = data.draw(st.sets(st.integers(0, size - 1), min_size=1, max_size=size - 1))
        missing = data.draw(st.booleans())
        for rank in at:
            if missing:
                del ranks[rank][name]
            else:
                ranks[rank][name] = "odd"
        rest = sorted(set(range(size)) - at)
        here, there = ("missing", "present") if missing else ("odd", words[name])
        groups = [(here, sorted(at)), (there, rest)]
        groups.sort(key=lambda group: (-len(group[1]), group[1][0]))
        said = ", ".join(f"{text} on {fingerprint.ranks_text(who)}" for text, who in groups)
        expected[f"parameter {name}"] = said if missing else f"dtype {said}"
    error = explain([entry_sections(own) for own in ranks])
    phrases = error.what.removeprefix("ranks differ: ").split("; ")
    assert Counter(phrases) == Counter(f"{key}: {said}" for key, said in expected.items())
    assert (error.where, error.exit_code) == ("here", 4)
    assert isinstance(error.rank, int)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_first_differences_are_listed_and_the_rest_counted() -> None:
    names = [f"layer.{number}" for number in range(1000)]
    ranks = [entry_sections(dict.fromkeys(names, "f32")) for _ in range(3)]
    odd = entry_sections(dict.fromkeys(names, "f32") | dict.fromkeys(names[100:200], "f16"))
    error = explain([*ranks, odd])
    listed = re.findall(r"parameter layer\.(\d+)", error.what)
    assert listed == [str(number) for number in range(100, 110)]
    assert error.what.endswith("and 90 more")
    assert error.rank == 3


def test_descriptions_of_very_different_sizes() -> None:
    many = {f"layer.{number}": "f32" for number in range(5000)}
    error = explain([entry_sections(many), entry_sections({}), entry_sections({"layer.7": "f32"})])
    assert "parameter layer.0: missing on ranks 1 and 2, present on rank 0" in error.what
    assert len(error.what) < 1500


def test_a_difference_in_order_only() -> None:
    names = ["a", "b", "c", "d"]
    swapped = ["a", "c", "b", "d"]
    ranks = [entry_sections(dict.fromkeys(order, "f32")) for order in (names, names, swapped)]
    error = explain(ranks)
    assert error.what == (
        "ranks differ: parameter 1 is b on ranks 0 and 1, c on rank 2; "
        "parameter 2 is c on ranks 0 and 1, b on rank 2"
    )
    assert (error.rank, error.remedy) == (2, fingerprint.REMEDIES["order"])


def test_only_the_fields_that_differ_are_told() -> None:
    one, two = NormNet(), NormNet().half()
    error = explain([{"parameters": fingerprint.parameters(net)} for net in (one, two)])
    assert (
        "parameter first.weight: dtype torch.float32 on rank 0, torch.float16 on rank 1;"
        in error.what
    )
    assert "shape" not in error.what
    two.first = nn.Linear(2, 4).half()
    error = explain([{"parameters": fingerprint.parameters(net)} for net in (one, two)])
    assert "torch.float16 on rank 1 and shape [3, 2] on rank 0, [4, 2] on rank 1" in error.what


def test_a_number_and_its_text_are_told_apart() -> None:
    error = explain([{"options": {"option a": text}} for text in ("1", '"1"', "1")])
    assert error.what == 'ranks differ: option a: 1 on ranks 0 and 2, "1" on rank 1'


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([3], "rank 3"),
        ([0, 2], "ranks 0 and 2"),
        (list(range(15)), "ranks 0-14"),
        ([0, 1, 2, 3, 7, 9, 10], "ranks 0-3, 7, 9 and 10"),
    ],
)
def test_ranks_in_runs(ranks: list[int], text: str) -> None:
    assert fingerprint.ranks_text(ranks) == text


@pytest.mark.parametrize(
    ("values", "odd"), [("aab", 2), ("ab", 0), ("abbbcc", 0), ("bbacb", 2), ("aabb", 0)]
)
def test_the_odd_one_out(values: str, odd: int) -> None:
    ranks = [entry_sections({"w": value}) for value in values]
    assert explain(ranks).rank == odd
