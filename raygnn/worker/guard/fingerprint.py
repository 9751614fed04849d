"""Fingerprint of what a rank is about to do: sections of ``key -> value`` texts.

A key names an object ("parameter model.layers.0.weight", "batch x/_N"). A value is JSON: one value,
or an object whose fields are compared one by one. It holds only what must be equal on all ranks,
and so no rank, no number of a device, and no number of rows of a batch.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from raygnn import __version__
from raygnn.sampling.batch import Share

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
    named: list[tuple[str, str, Tensor]] = [
        ("parameter", *pair) for pair in module.named_parameters()
    ]
    named += [("buffer", *pair) for pair in module.named_buffers()]
    return {
        f"{kind} {name}": _text(
            {
                "dtype": str(tensor.dtype),
                "shape": list(tensor.shape),
                "device": tensor.device.type,
                "requires_grad": tensor.requires_grad,
            }
        )
        for kind, name, tensor in named
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
    section["default dtype"] = _text(str(torch.get_default_dtype()))
    section["deterministic algorithms"] = _text(torch.are_deterministic_algorithms_enabled())
    section["float32 matmul precision"] = _text(torch.get_float32_matmul_precision())
    return section


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
    """Return what callbacks may change of how training goes on: whether it stops, the loop's
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
