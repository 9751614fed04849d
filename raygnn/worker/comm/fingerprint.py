"""Comparison of the ranks' fingerprints: sections of ``key -> value`` texts about the next steps.

While ranks agree, that takes one all-reduce of two numbers. Else each rank sends its fingerprint to
all ranks, some 100 bytes per parameter, and all raise the same error.

A key names an object ("parameter model.layers.0.weight", "batch x/_N"). A value is JSON: one value,
or an object whose fields are compared one by one. It holds only what must be equal on all ranks,
and so no rank, no number of a device, and no number of rows of a batch.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn

from raygnn import __version__
from raygnn.errors import GuardError
from raygnn.sampling.batch import Share
from raygnn.sampling.exchange import Exchange

FingerprintSection = dict[str, str]  # the order is compared, too
Sections = dict[str, FingerprintSection]

# dimension of a share's tensor that counts rows, and so differs between ranks, if not the first
_ROWS = {"pairs": 1}
_PART = re.compile(r"^parts/[^/]*/")  # tensors of several tasks have the same names


def hash64(value: Any) -> int:
    """Return the hash of a JSON value as a signed 64-bit number; the order of keys counts."""
    digest = hashlib.blake2b(json.dumps(value).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def parameters(module: nn.Module) -> FingerprintSection:
    """Describe parameters and buffers, in the order in which DDP reduces them."""
    named: dict[str, Tensor] = {f"parameter {n}": p for n, p in module.named_parameters()}
    named |= {f"buffer {name}": buffer for name, buffer in module.named_buffers()}
    return {
        key: _text(
            {
                "dtype": str(tensor.dtype),
                "shape": list(tensor.shape),
                "device": tensor.device.type,
                "requires_grad": tensor.requires_grad,
            }
        )
        for key, tensor in named.items()
    }


def contents(named: Iterable[tuple[str, Tensor | None]]) -> FingerprintSection:
    """Return a sum over the bits of each tensor, which differs if a number does."""
    found = {name: _bits(tensor) for name, tensor in named if tensor is not None}
    sums = torch.stack(list(found.values())).tolist() if found else []  # at once
    return {name: _text(total) for name, total in zip(found, sums)}


def _bits(tensor: Tensor) -> Tensor:
    values = (tensor.coalesce().values() if tensor.is_sparse else tensor).detach().contiguous()
    values = torch.view_as_real(values) if values.is_complex() else values
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()]
    return values.view(whole).sum(dtype=torch.int64)


def options(values: Mapping[str, Any]) -> FingerprintSection:
    """Describe options of DDP and the trainer: numbers, texts, functions by their names."""
    return {f"option {name}": _text(_plain(values[name])) for name in sorted(values)}


def optimizers(found: Sequence[torch.optim.Optimizer], module: nn.Module) -> FingerprintSection:
    """Describe each optimizer: its kind, and hyperparameters and parameters of each group."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    section: FingerprintSection = {}
    for number, optimizer in enumerate(found):
        head = "optimizer" if len(found) == 1 else f"optimizer {number}"
        section[head] = _text(_qualified(type(optimizer)))
        for place, group in enumerate(optimizer.param_groups):
            held = group["params"]
            values = {name: _plain(group[name]) for name in sorted(group) if name != "params"}
            section[f"{head} group {place}"] = _text({**values, "parameters": len(held)})
            for at, parameter in enumerate(held):
                name = names.get(id(parameter), f"{at} of group {place}, not the module's")
                section[f"{head} parameter {name}"] = _text(f"group {place}")
    return section


def numerics() -> FingerprintSection:
    """Describe the current autocast, and torch's other switches of arithmetic."""
    section = {}
    for device in ("cpu", "cuda"):
        enabled = torch.is_autocast_enabled(device)
        state = str(torch.get_autocast_dtype(device)) if enabled else "off"
        section[f"autocast {device}"] = _text(state)
    switches = {
        "default dtype": str(torch.get_default_dtype()),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "float32 matmul precision": torch.get_float32_matmul_precision(),
    }
    return section | {name: _text(value) for name, value in switches.items()}


def software() -> FingerprintSection:
    return {"torch": _text(torch.__version__), "raygnn": _text(__version__)}


def batch(share: Share) -> FingerprintSection:
    """Describe every tensor in a share: dtype, dimensions, shape of a row, kind of device.

    The number of rows may differ between ranks.
    """
    section = {}
    for path, tensor in tensors(share):
        rows = _ROWS.get(_PART.sub("", path), 0)
        section[f"batch {path}"] = _text(
            {
                "dtype": str(tensor.dtype),
                "dimensions": tensor.dim(),
                "row": [n for d, n in enumerate(tensor.shape) if d != rows],
                "device": tensor.device.type,
            }
        )
    return dict(sorted(section.items()))


def position(world: int, step: int, share: Share | None = None) -> FingerprintSection:
    """Describe a rank's position; ``step``: optimizer steps so far."""
    section = {"world size": _text(world), "global step": _text(step)}
    if share is not None:
        for name in ("epoch", "step", "total", "window"):
            section[f"batch {name}"] = _text(_plain(getattr(share, name)))
    return section


def tensors(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor in nested dataclasses, mappings, lists and tuples, with its key path."""
    if isinstance(value, Tensor):
        yield path, value
        return
    pairs: Iterator[tuple[Any, Any]] = iter(())
    if is_dataclass(value):
        pairs = ((f.name, getattr(value, f.name)) for f in fields(value))
    elif isinstance(value, Mapping):
        pairs = iter(value.items())
    elif isinstance(value, (list, tuple)):
        pairs = iter(enumerate(value))
    for key, inner in pairs:
        name = ":".join(map(str, key)) if isinstance(key, tuple) else str(key)
        yield from tensors(inner, f"{path}/{name}" if path else name)


def _plain(value: Any) -> Any:
    """Return a value as plain JSON; objects by their type, since a repr may hold an address."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return repr(value)  # also if it is not finite
    if isinstance(value, torch.device):
        return value.type
    if isinstance(value, torch.dtype):
        return str(value)
    if isinstance(value, Tensor) and value.numel() == 1:
        return _plain(value.item())
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return _qualified(value if hasattr(value, "__qualname__") else type(value))


def _qualified(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"


def loop(trainer: pl.Trainer, module: nn.Module) -> FingerprintSection:
    """Describe the state of the loop that callbacks may change: whether training stops, the loop's
    counts, and which modules are in evaluation mode."""
    frozen = [name or "all" for name, each in module.named_modules() if not each.training]
    counts = ["global_step", "current_epoch", "max_epochs", "max_steps"]
    counts += ["accumulate_grad_batches", "num_training_batches"]
    return {
        "trainer.should_stop": _text(bool(trainer.should_stop)),
        **{f"trainer.{name}": _text(getattr(trainer, name)) for name in counts},
        "batch_idx of the epoch loop": _text(trainer.fit_loop.batch_idx),
        "modules in evaluation mode": _text(", ".join(frozen[:3]) or "none"),
    }


def _text(value: Any) -> str:
    return json.dumps(value)


LISTED = 10  # differences in a message

FingerprintEntry = tuple[str, str, str]  # section, key and value

REMEDIES = {
    "parameters": "build the same model on every rank: no dtype, layer or frozen parameter that "
    "depends on the rank, its files or its variables",
    "order": "register parameters in the same order on every rank: not in the order of a set, or "
    "of a directory's files",
    "options": "give every rank the same options",
    "optimizers": "give every rank the same optimizer: the same kind, groups and learning rate",
    "numerics": "enter torch.autocast on every rank or on none, or leave it to `precision`; set "
    "torch's switches on every rank alike",
    "contents": "let your own code do the same to weights, gradients and losses on every rank: "
    "random numbers need a separate torch.Generator, with the same seed",
    "loop": "let callbacks decide alike on every rank: trainer.strategy.reduce_boolean_decision "
    "shares one rank's decision with all ranks",
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
        sections: this rank's fingerprint.
        where: point in training, for the message.

    Raises:
        GuardError: equal on all ranks: what differs, on which ranks, what to do.
    """
    if exchange.world.size == 1:
        return
    if not differ(_max(exchange, both_ends(hash64(entries(sections))))):
        return
    said = exchange.gather_json({"where": where, "entries": entries(sections)})
    raise disagreement([text["entries"] for text in said], [text["where"] for text in said])


def _max(exchange: Exchange, values: Tensor) -> Tensor:
    dist.all_reduce(values, op=dist.ReduceOp.MAX, group=exchange.group)
    return values


# The rest is pure, so that all ranks reach the same conclusion.


def both_ends(value: int) -> Tensor:
    """Return two numbers whose maxima over the ranks yield the largest and the smallest value."""
    return torch.tensor([value, ~value])  # ~v = -v - 1 reverses the order exactly


def differ(largest: Tensor) -> bool:
    """Return whether ranks differ; ``largest``: maxima of all ranks' `both_ends`."""
    return bool(largest[0] != ~largest[1])


def entries(sections: Sections) -> list[FingerprintEntry]:
    """Return section, key and value of all entries, in order."""
    return [(s, k, v) for s, section in sections.items() for k, v in section.items()]


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
    listed = " and ".join(filter(None, (", ".join(texts[:-1]), texts[-1])))
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {listed}"


def _by_field(values: Sequence[str | None]) -> dict[str, list[tuple[str, list[int]]]]:
    """Return field → values with their ranks, of the fields in which ranks differ."""
    if len(set(values)) == 1:
        return {}
    if None in values:
        return {"": _groups(['"missing"' if value is None else '"present"' for value in values])}
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
    values = [json.loads(text) for text, _ in groups]
    shown = [v if isinstance(v, str) else text for v, (text, _) in zip(values, groups)]
    if len(set(shown)) < len(groups):  # the number 1 differs from the text "1"
        return groups
    return [(text, ranks) for text, (_, ranks) in zip(shown, groups)]
