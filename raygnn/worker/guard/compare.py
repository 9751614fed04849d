"""Whether all ranks say the same of themselves, and, where they do not, who says what.

As long as they agree, one all-reduce of two numbers says so. Else they find together which
entries differ: each rank adds the hashes of its entries up in a table, by the hash of their keys;
where the tables differ, and only there, ranks exchange the entries themselves. So what travels
is bounded by the description of one rank and a few entries of each, whatever their sizes.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist

from raygnn.errors import GuardError
from raygnn.sampling.exchange import Exchange
from raygnn.worker.guard.fingerprint import Sections, hash64

LISTED = 10  # differences in a message
_SENT = 16  # places of the tables whose entries are exchanged
_LONGEST = 300  # characters of a key or a value that travel
_NOWHERE = 1 << 62

REMEDIES = {
    "parameters": "build the same model on every rank: no dtype, layer or frozen parameter that "
    "depends on the rank, its files or its variables",
    "order": "register parameters in the same order on every rank: not in that of a set, or of "
    "a directory's files",
    "options": "give every rank the same options",
    "optimizers": "give every rank the same optimizer: the same kind, groups and learning rate",
    "numerics": "enter torch.autocast on every rank or on none, or leave it to `precision`; set "
    "torch's switches on every rank alike",
    "software": "install the same versions on every node",
    "batch": "make batches of the same arrays on every rank: convert all samples or none, and "
    "leave dtypes to `precision`",
    "position": "start all ranks from the same checkpoint, with the same data",
}


@dataclass(frozen=True)
class Difference:
    """What ranks say of one thing, where they do not say the same.

    Attributes:
        by_field: field ("" = the whole) → texts and the ranks that say them; what most say
            comes first.
    """

    section: str
    key: str
    by_field: dict[str, list[tuple[str, list[int]]]]

    def __str__(self) -> str:
        phrases = []
        for name, groups in self.by_field.items():
            said = ", ".join(f"{text} on {ranks_text(ranks)}" for text, ranks in groups)
            phrases.append(f"{name} {said}" if name else said)
        verb = " is" if self.section == "order" else ":"
        return f"{self.key}{verb} {' and '.join(phrases)}"

    @property
    def odd(self) -> int:
        """The rank to blame: of the fewest that say something, the lowest."""
        groups = next(iter(self.by_field.values()))
        return min((len(ranks), ranks[0]) for _, ranks in groups)[1]


def compare(exchange: Exchange, sections: Sections, where: str) -> None:
    """Raise on every rank if not all ranks describe the same. Collective; bounded by the
    group's timeout.

    Args:
        sections: what this rank says of itself (see :mod:`fingerprint`).
        where: when this is, for the message.

    Raises:
        GuardError: the same on all ranks: what differs, on which ranks, what to do.
    """
    if exchange.world.size == 1:
        return
    own = np.array([hash64(_entries(sections))])
    if not differ(_max(exchange, both_ends(own))).any():
        return
    _explain(exchange, sections, where)


def _explain(exchange: Exchange, sections: Sections, where: str) -> NoReturn:
    places = table_size(exchange.max(count(sections)))
    chosen, total = suspects(_max(exchange, table(sections, places)))
    entries = excerpt(sections, chosen, places)
    if not total:  # the same entries in another order
        length = exchange.max(count(sections))
        chosen, total = moved(_max(exchange, sequence(sections, length)))
        entries = order_excerpt(sections, chosen)
    said = _gather(exchange, {"where": where, "entries": entries})
    raise disagreement(
        [text["entries"] for text in said], [text["where"] for text in said], total - len(chosen)
    )


def _max(exchange: Exchange, values: np.ndarray) -> np.ndarray:
    """The largest of any rank, elementwise; int64, the same shape on all ranks."""
    tensor = torch.from_numpy(values)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=exchange.group)
    return tensor.numpy()


def _gather(exchange: Exchange, value: Any) -> list[Any]:
    """What each rank has to say, as JSON."""
    return exchange.gather_json(value)


# What follows is pure, so that ranks come to the same conclusion from the same numbers.


def both_ends(values: np.ndarray) -> np.ndarray:
    """``[2, n]`` such that the largest of any rank's tells the largest and the smallest value."""
    return np.stack([values, ~values])  # ~v = -v - 1: the order turned round, exactly


def differ(largest: np.ndarray) -> np.ndarray:
    """Where ranks differ, bool ``[n]``; ``largest``: of all ranks' `both_ends`."""
    return largest[0] != ~largest[1]


def count(sections: Sections) -> int:
    """Number of entries."""
    return sum(map(len, sections.values()))


def table_size(entries: int) -> int:
    """Places enough that few entries share one."""
    return 1 << (4 * entries + 64).bit_length()


def table(sections: Sections, places: int) -> np.ndarray:
    """int64 ``[3, places]``: both ends of the sums of hashes, and minus each place's first entry.

    Sums wrap around; the order of entries has no influence on them.
    """
    keys, hashes = _hashes(sections)
    at = keys & (places - 1)
    sums = np.zeros(places, dtype=np.int64)
    np.add.at(sums, at, hashes)
    first = np.full(places, _NOWHERE, dtype=np.int64)
    np.minimum.at(first, at, np.arange(len(at)))
    return np.concatenate([both_ends(sums), -first[None]])


def suspects(largest: np.ndarray) -> tuple[np.ndarray, int]:
    """The places to look at, in the order of their entries, and how many there were in all."""
    found = np.flatnonzero(differ(largest[:2]))
    first = -largest[2][found]
    return found[np.argsort(first, kind="stable")][:_SENT], len(found)


def excerpt(sections: Sections, chosen: np.ndarray, places: int) -> list[list[str]]:
    """Section, key and value of the entries in the chosen places, cut to a length."""
    keys, _ = _hashes(sections)
    wanted = np.isin(keys & (places - 1), chosen)
    return [
        [name, _cut(key), value if len(value) <= _LONGEST else json.dumps(_cut(value))]
        for (name, key, value), want in zip(_entries(sections), wanted)
        if want
    ]


def sequence(sections: Sections, length: int) -> np.ndarray:
    """int64 ``[2, length]``: both ends of the hashes of keys, in order."""
    keys = np.zeros(length, dtype=np.int64)
    own, _ = _hashes(sections)
    keys[: len(own)] = own
    return both_ends(keys)


def moved(largest: np.ndarray) -> tuple[np.ndarray, int]:
    """The positions to look at, and how many there were in all."""
    found = np.flatnonzero(differ(largest))
    return found[:_SENT], len(found)


def order_excerpt(sections: Sections, chosen: np.ndarray) -> list[list[str]]:
    """What stands in the chosen positions, counted by kind: "parameter 3" → its name."""
    wanted = set(chosen.tolist())
    entries = []
    position = 0
    for section in sections.values():
        seen: Counter[str] = Counter()
        for key in section:
            kind, _, name = key.partition(" ")
            if position in wanted:
                entries.append(["order", f"{kind} {seen[kind]}", json.dumps(_cut(name))])
            seen[kind] += 1
            position += 1
    return entries


def differences(said: Sequence[Sequence[Sequence[str]]]) -> list[Difference]:
    """What differs between the ranks' entries, in the order of the first rank that has them."""
    ranks: list[Mapping[tuple[str, str], str]] = [
        {(name, key): value for name, key, value in entries} for entries in said
    ]
    known = dict.fromkeys(entry for entries in ranks for entry in entries)
    found = []
    for name, key in known:
        values = [entries.get((name, key)) for entries in ranks]
        if by_field := _by_field(values):
            found.append(Difference(name, key, by_field))
    return found


def disagreement(
    said: Sequence[Sequence[Sequence[str]]], where: Sequence[str], unseen: int
) -> GuardError:
    """The error that tells what ranks differ in.

    Args:
        said: per rank, its entries as section, key and value.
        where: per rank, when it spoke.
        unseen: how many more entries differ, at least.
    """
    found = differences(said)
    listed = [str(difference) for difference in found[:LISTED]]
    if more := len(found[LISTED:]) + unseen:
        listed.append(f"and {more} more")
    concerned = dict.fromkeys(difference.section for difference in found[:LISTED])
    return GuardError(
        f"ranks differ: {'; '.join(listed)}",
        where=Counter(where).most_common(1)[0][0],
        remedy="; ".join(REMEDIES[name] for name in concerned),
        rank=found[0].odd,
    )


def ranks_text(ranks: Sequence[int]) -> str:
    """``[0]`` → "rank 0", ``[0, 1, 2, 5]`` → "ranks 0-2 and 5"; sorted input."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    texts = [text for run in runs for text in _run_texts(run)]
    if len(texts) == 1:
        return f"{'rank' if len(ranks) == 1 else 'ranks'} {texts[0]}"
    return f"ranks {', '.join(texts[:-1])} and {texts[-1]}"


def _run_texts(run: list[int]) -> list[str]:
    if run[-1] - run[0] < 2:
        return [str(rank) for rank in run]
    return [f"{run[0]}-{run[-1]}"]


def _entries(sections: Sections) -> list[tuple[str, str, str]]:
    """Section, key and value, in order."""
    return [(s, k, v) for s, section in sections.items() for k, v in section.items()]


def _hashes(sections: Sections) -> tuple[np.ndarray, np.ndarray]:
    """int64 ``[n]`` each: of the entries' keys, and of keys with values."""
    entries = _entries(sections)
    keys = np.array([hash64(entry[:2]) for entry in entries], dtype=np.int64)
    return keys, np.array([hash64(entry) for entry in entries], dtype=np.int64)


def _by_field(values: Sequence[str | None]) -> dict[str, list[tuple[str, list[int]]]]:
    """Field → who says what, of the fields in which ranks differ."""
    if len(set(values)) == 1:
        return {}
    if None in values:
        return {"": _groups(['"missing"' if value is None else '"there"' for value in values])}
    parsed = [json.loads(value) for value in values if value is not None]
    by_name = {}
    if all(isinstance(value, dict) for value in parsed):
        for name in dict.fromkeys(name for value in parsed for name in value):
            texts = [json.dumps(value.get(name, "missing")) for value in parsed]
            if len(set(texts)) > 1:
                by_name[name] = _groups(texts)
    return by_name or {"": _groups([json.dumps(value) for value in parsed])}


def _groups(texts: Sequence[str]) -> list[tuple[str, list[int]]]:
    """Each value, given as JSON, with the ranks that say it; the most first, then the lowest."""
    by_text: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        by_text.setdefault(text, []).append(rank)
    groups = sorted(by_text.items(), key=lambda item: (-len(item[1]), item[1][0]))
    plain = [_unquoted(text) for text, _ in groups]
    if len(set(plain)) == len(groups):  # not where the number 1 is held against the text "1"
        groups = [(text, ranks) for text, (_, ranks) in zip(plain, groups)]
    return groups


def _unquoted(text: str) -> str:
    value = json.loads(text)
    return value if isinstance(value, str) else text


def _cut(text: str) -> str:
    """The text, or its beginning and a hash of all of it."""
    if len(text) <= _LONGEST:
        return text
    return f"{text[: _LONGEST - 24]}… #{hash64(text) & (1 << 64) - 1:016x}"
