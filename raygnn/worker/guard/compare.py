"""Comparison of the ranks' fingerprints.

While they agree, that takes one all-reduce of two numbers. Else each rank sends its fingerprint to
all ranks, some 100 bytes per parameter, and all raise the same error.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from raygnn.errors import GuardError
from raygnn.sampling.exchange import Exchange
from raygnn.worker.guard.fingerprint import Sections, hash64

LISTED = 10  # differences in a message
_LONGEST = 300  # characters of a key or a value that are sent

FingerprintEntry = tuple[str, str, str]  # section, key and value

REMEDIES = {
    "parameters": "build the same model on every rank: no dtype, layer or frozen parameter that "
    "depends on the rank, its files or its variables",
    "order": "register parameters in the same order on every rank: not in that of a set, or of "
    "a directory's files",
    "options": "give every rank the same options",
    "optimizers": "give every rank the same optimizer: the same kind, groups and learning rate",
    "numerics": "enter torch.autocast on every rank or on none, or leave it to `precision`; set "
    "torch's switches on every rank alike",
    "contents": "let your own code do the same to weights, gradients and losses on every rank: "
    "what it draws at random needs a torch.Generator of its own, with the same seed",
    "loop": "let callbacks decide alike on every rank: trainer.strategy.reduce_boolean_decision "
    "tells all ranks what one has found",
    "software": "install the same versions on every node",
    "batch": "make batches of the same arrays on every rank: convert all samples or none, and "
    "leave dtypes to `precision`",
    "position": "start all ranks from the same checkpoint, with the same data",
}


@dataclass(frozen=True)
class Difference:
    """Entry in which ranks differ. ``by_field``: field ("" = the whole value) → values with their
    ranks, the most frequent first."""

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
        """Rank to blame: the lowest one with the rarest value."""
        groups = next(iter(self.by_field.values()))
        return min((len(ranks), ranks[0]) for _, ranks in groups)[1]


def compare(exchange: Exchange, sections: Sections, where: str) -> None:
    """Raise on every rank if ranks differ. Collective; bounded by the group's timeout.

    Args:
        sections: this rank's fingerprint, see `raygnn.worker.guard.fingerprint`.
        where: point in training, for the message.

    Raises:
        GuardError: equal on all ranks: what differs, on which ranks, what to do.
    """
    if exchange.world.size == 1:
        return
    if not differ(_max(exchange, both_ends(hash64(entries(sections))))):
        return
    said = exchange.gather_json({"where": where, "entries": excerpt(sections)})
    raise disagreement([text["entries"] for text in said], [text["where"] for text in said])


def _max(exchange: Exchange, values: Tensor) -> Tensor:
    dist.all_reduce(values, op=dist.ReduceOp.MAX, group=exchange.group)
    return values


# The rest is pure, so that all ranks come to the same conclusion.


def both_ends(value: int) -> Tensor:
    """Return two numbers whose maxima over the ranks yield the largest and the smallest value."""
    return torch.tensor([value, ~value])  # ~v = -v - 1 reverses the order exactly


def differ(largest: Tensor) -> bool:
    """Return whether ranks differ; ``largest``: maxima of all ranks' `both_ends`."""
    return bool(largest[0] != ~largest[1])


def entries(sections: Sections) -> list[FingerprintEntry]:
    """Return section, key and value of all entries, in order."""
    return [(s, k, v) for s, section in sections.items() for k, v in section.items()]


def excerpt(sections: Sections) -> list[FingerprintEntry]:
    """Return the entries, with long texts cut."""
    return [
        (name, _cut(key), value if len(value) <= _LONGEST else json.dumps(_cut(value)))
        for name, key, value in entries(sections)
    ]


def differences(said: Sequence[Sequence[Sequence[str]]]) -> list[Difference]:
    """Return the differences between the ranks' entries, in the order of the first rank that has
    them; or, of equal entries in another order, the differences by position."""
    ranks: list[Mapping[tuple[str, str], str]] = [
        {(name, key): value for name, key, value in rank} for rank in said
    ]
    if all(rank == ranks[0] for rank in ranks):
        ranks = [_places(rank) for rank in ranks]
    differing = []
    for name, key in dict.fromkeys(entry for rank in ranks for entry in rank):
        if by_field := _by_field([rank.get((name, key)) for rank in ranks]):
            differing.append(Difference(name, key, by_field))
    return differing


def _places(rank: Mapping[tuple[str, str], str]) -> dict[tuple[str, str], str]:
    """Return position, counted by kind → name, as in "parameter 3"."""
    places: dict[tuple[str, str], str] = {}
    counts: Counter[str] = Counter()
    for _, key in rank:
        kind, _, name = key.partition(" ")
        places["order", f"{kind} {counts[kind]}"] = json.dumps(name)
        counts[kind] += 1
    return places


def disagreement(said: Sequence[Sequence[Sequence[str]]], where: Sequence[str]) -> GuardError:
    """Return the error about ranks that differ. ``said``: entries of each rank, as section, key and
    value; ``where``: point in training of each rank."""
    differing = differences(said)
    listed = [str(difference) for difference in differing[:LISTED]]
    if more := len(differing[LISTED:]):
        listed.append(f"and {more} more")
    sections = dict.fromkeys(difference.section for difference in differing[:LISTED])
    return GuardError(
        f"ranks differ: {'; '.join(listed)}",
        where=Counter(where).most_common(1)[0][0],
        remedy="; ".join(REMEDIES[name] for name in sections),
        rank=differing[0].odd,
    )


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ``[0]`` as "rank 0", ``[0, 1, 2, 5]`` as "ranks 0-2 and 5"; sorted input."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    texts: list[str] = []
    for run in runs:
        texts += map(str, run) if len(run) < 3 else [f"{run[0]}-{run[-1]}"]
    if len(texts) == 1:
        return f"{'rank' if len(ranks) == 1 else 'ranks'} {texts[0]}"
    return f"ranks {', '.join(texts[:-1])} and {texts[-1]}"


def _by_field(values: Sequence[str | None]) -> dict[str, list[tuple[str, list[int]]]]:
    """Return field → values with their ranks, of the fields in which ranks differ."""
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
    """Return each value (JSON) with its ranks: the most frequent first, then by rank."""
    by_text: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        by_text.setdefault(text, []).append(rank)
    groups = sorted(by_text.items(), key=lambda item: (-len(item[1]), item[1][0]))
    plain = [_unquoted(text) for text, _ in groups]
    if len(set(plain)) == len(groups):  # not if the number 1 differs from the text "1"
        groups = [(text, ranks) for text, (_, ranks) in zip(plain, groups)]
    return groups


def _unquoted(text: str) -> str:
    value = json.loads(text)
    return value if isinstance(value, str) else text


def _cut(text: str) -> str:
    if len(text) <= _LONGEST:
        return text
    return f"{text[: _LONGEST - 24]}… #{hash64(text) & (1 << 64) - 1:016x}"
