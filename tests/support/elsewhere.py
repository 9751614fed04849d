"""Tensors as they are on a GPU: nothing takes them out of there but an explicit transfer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, ValuesView
from typing import Any

import torch
from torch import Tensor

CPU = torch.device("cpu")


class Elsewhere(Tensor):
    """A stand-in for a CUDA tensor, on a machine without one.

    Says that it is on ``cuda:0``, has no ``numpy()`` and no ``__array__``, and goes into no
    operation with a tensor of the CPU; ``cpu()`` and ``to("cpu")`` give a plain tensor.

    Attributes:
        transfers: how often that happened, of all of them.
    """

    transfers = 0

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func == Tensor.device.__get__:  # type: ignore[attr-defined]
            return torch.device("cuda", 0)
        if func == Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            return True
        if func in (Tensor.numpy, Tensor.__array__):
            raise TypeError(
                "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the "
                "tensor to host memory first."
            )
        if func is Tensor.cpu or (func is Tensor.to and CPU in _devices(args[1:], kwargs)):
            Elsewhere.transfers += 1
            dtypes = [a for a in (*args[1:], *kwargs.values()) if isinstance(a, torch.dtype)]
            moved = args[0].as_subclass(Tensor).clone()
            return moved.to(dtypes[0]) if dtypes else moved
        if func is not Tensor.copy_ and any(_is_plain(a) for a in _tensors((args, kwargs))):
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, "
                "cuda:0 and cpu!"
            )
        made = super().__torch_function__(func, types, args, kwargs)
        if CPU in _devices((), kwargs):
            return made.as_subclass(Tensor)
        return made


class Cudart:
    """A stand-in for torch's module of CUDA's runtime.

    Args:
        most: ranges that it locks before it refuses; None = any number.

    Attributes:
        locked: address → bytes that are page-locked.
    """

    def __init__(self, most: int | None = None):
        self._most = most
        self.locked: dict[int, int] = {}

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        assert size > 0
        assert flags == 0
        if address in self.locked or len(self.locked) == self._most:
            return 2
        self.locked[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.locked[address]
        return 0

    def cudaGetErrorString(self, status: int) -> str:
        return f"error {status}"


def elsewhere(tensor: Tensor) -> Tensor:
    """Return the tensor on a GPU, or a stand-in for that."""
    return tensor.as_subclass(Elsewhere)


def on_cuda(tensor: Tensor) -> Tensor:
    return tensor.to("cuda")


# name → function that moves a tensor there
PLACES: dict[str, Callable[[Tensor], Tensor]] = {"stand-in": elsewhere, "cuda": on_cuda}


def _devices(args: Any, kwargs: Mapping[str, Any]) -> list[torch.device]:
    named = [*args, kwargs.get("device")]
    return [torch.device(each) for each in named if isinstance(each, (str, torch.device))]


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = value.values()
    if isinstance(value, (list, tuple, ValuesView)):
        return [tensor for each in value for tensor in _tensors(each)]
    return []


def _is_plain(tensor: Tensor) -> bool:
    """Return True for a number without dimensions, which may come from the CPU also with a GPU."""
    return type(tensor) is Tensor and tensor.dim() > 0
