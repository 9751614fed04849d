from __future__ import annotations

import pytest

from raygnn.errors import ConfigError
from raygnn.sampling.plan import resolve_fanouts
from tests.graphs import TYPED

ALSO, BUYS, BOUGHT_BY, HAS = TYPED


def test_one_number_is_for_all() -> None:
    assert resolve_fanouts([3, -1], TYPED) == [dict.fromkeys(TYPED, 3), dict.fromkeys(TYPED, -1)]


def test_names() -> None:
    (found,) = resolve_fanouts([{"*": 1, "also": 2, "user:buys:item": 0}], TYPED)
    assert found == {ALSO: 2, BUYS: 0, BOUGHT_BY: 1, HAS: 1}


def test_a_whole_name_goes_before_a_relation() -> None:
    twice = [("a", "r", "b"), ("b", "r", "a")]
    for hop in ({"r": 5, "b:r:a": 2}, {"b:r:a": 2, "r": 5}):
        assert resolve_fanouts([hop], twice) == [{("a", "r", "b"): 5, ("b", "r", "a"): 2}]


@pytest.mark.parametrize(
    ("hop", "words"), [({"*": 1, "bys": 2}, "'bys' is no edge type"), ({"also": 2}, "no number")]
)
def test_what_is_not_there(hop: dict[str, int], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        resolve_fanouts([4, hop], TYPED)
    assert "sampling.fanout[1]" in str(caught.value)
