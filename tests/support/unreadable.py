"""Tensors that are not on the CPU, on a machine where there is nothing else, for code in C.

They have no memory that anybody could read, and refuse what a CUDA tensor refuses: to become a
NumPy array, and to meet a tensor of the CPU. ``.cpu()`` and ``.to("cpu")`` bring their values back.
What hands them to C without that, as DGL's look-ups do, does not get away with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map


class Unreadable(Tensor):
    """See above."""

    _values: Tensor

    @staticmethod
    def __new__(cls, values: Tensor) -> Unreadable:
        made: Unreadable = Tensor._make_wrapper_subclass(cls, values.size(), dtype=values.dtype)  # type: ignore[attr-defined]
        made._values = values
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"unreadable: {self._values!r}"

    def cpu(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._values.clone()

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        where = [*args[:1], kwargs.get("device")]
        if any(isinstance(each, (str, torch.device)) and str(each) == "cpu" for each in where):
            return self._values.to(*args, **kwargs)
        return super().to(*args, **kwargs)

    def tolist(self) -> Any:
        return self._values.tolist()  # as a CUDA tensor does

    @classmethod
    def __torch_dispatch__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, Tensor)]
        plain = [each for each in given if type(each) is Tensor and each.dim()]
        may_meet = str(func).startswith("aten.index") and isinstance(args[0], Unreadable)
        if plain and not may_meet:  # a tensor elsewhere may be indexed by one of the CPU
            raise RuntimeError("expected all tensors to be on the same device")

        def bare(value: Any) -> Any:
            return value._values if isinstance(value, Unreadable) else value

        found = func(*tree_map(bare, args), **tree_map(bare, kwargs or {}))
        return tree_map(lambda each: Unreadable(each) if isinstance(each, Tensor) else each, found)


def unreadable(tensor: Tensor) -> Tensor:
    """The tensor, as if it were on another device."""
    return Unreadable(tensor.clone())
