"""Private names of torch and torchmetrics."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import os
import socket
import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

from raygnn.compat.fallbacks import nothing, private


def _import_torchmetrics() -> None:
    import torchmetrics  # noqa: F401


@private("torchmetrics<1.10", otherwise=_import_torchmetrics, loses="every rank starts 1 s later")
def import_torchmetrics() -> None:
    """Import torchmetrics without scipy.signal, which takes 0.8 to 1.0 of its 1.0 to 1.2 s in every
    rank (torchmetrics 1.4 to 1.9). torchmetrics only checks whether an old name exists there, for a
    speech package. Later imports of scipy.signal work as usual."""
    wanted_by = ("librosa", "pesq", "pystoi", "gammatone", "srmrpy")  # through torchmetrics
    known = "scipy.signal" in sys.modules or "torchmetrics" in sys.modules
    if known or any(importlib.util.find_spec(name) for name in wanted_by):
        return
    stand_in = ModuleType("scipy.signal")
    stand_in.hamming = None  # type: ignore[attr-defined]
    sys.modules["scipy.signal"] = stand_in
    try:
        _import_torchmetrics()
    finally:
        del sys.modules["scipy.signal"]


def _shared_store() -> Any:
    """Return a separate store that all ranks share. Collective."""
    import torch.distributed as dist

    host, master = os.environ.get("MASTER_ADDR", "localhost"), dist.get_rank() == 0
    store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False) if master else None
    port: list[Any] = [None if store is None else store.port]
    dist.broadcast_object_list(port)
    return store or dist.TCPStore(host, port[0], is_master=False)


@private(
    "torch.distributed.distributed_c10d:_get_default_store()",
    otherwise=_shared_store,
    loses="ranks report failures to each other over an additional port",
)
def default_store() -> Any:
    """Return the store of the default process group. Call it on all ranks: its fallback is
    collective."""
    import torch.distributed as dist

    return dist.distributed_c10d._get_default_store()


@private(
    "torch.distributed.rendezvous:TCPStore",
    otherwise=nothing,
    loses="rank 0's store listens on every address of its machine, not only on the planned one",
)
def listen_on_own_address() -> None:
    """Have the stores that this process creates from now on listen only on their own address."""
    # torch.distributed.rendezvous is also the name of a function
    module: Any = importlib.import_module("torch.distributed.rendezvous")
    module.TCPStore = _store


def _store(host_name: str, port: int, **options: Any) -> Any:
    """Return a TCPStore; on rank 0 with a socket that is bound to ``host_name``."""
    from torch.distributed import TCPStore

    if options.get("is_master") and (listener := _bound(host_name, port)) is not None:
        options["master_listen_fd"] = listener.detach()  # the store owns it
    return TCPStore(host_name, port, **options)


def _bound(host: str, port: int) -> socket.socket | None:
    """Return a listening socket; None if the address is not this machine's (as behind address
    translation) or is in use, which torch then reports."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address, family=family)
    except OSError:
        return None


@private(
    "torch._C:_distributed_c10d",
    otherwise=list,
    loses="the collective that a rank hangs in is not named",
)
def flight_recorders() -> list[Callable[..., bytes]]:
    """Return torch's functions that dump a rank's collectives, for gloo and NCCL."""
    import torch

    names = ("_dump_fr_trace", "_dump_nccl_trace")
    dumps = [getattr(torch._C._distributed_c10d, name, None) for name in names]
    return [dump for dump in dumps if dump is not None]


@private(
    "torch.optim.adam:_fused_adam",
    otherwise=lambda optimizer, bad: False,
    loses="every step on a GPU waits for the check for gradients that are not finite",
)
def skip_step_where(optimizer: Any, bad: Any) -> bool:
    """Have a fused Adam skip its next step on the GPU if the tensor ``bad`` is not zero. Return
    True if it will. torch's gradient scalers pass it the same way."""
    optimizer.found_inf = bad
    return True


@private(
    "torch.nn.parallel:DistributedDataParallel._check_reducer_finalized(self)",
    otherwise=nothing,
    loses="a parameter without a gradient on one rank is reported by DDP one step later",
)
def check_reduced(ddp: Any) -> None:
    """Raise RuntimeError with the numbers of parameters without a gradient. DDP reports them in
    the next forward pass, when the other ranks already wait."""
    ddp._check_reducer_finalized()


BUCKET_ORDER = "the first step after a resume may round differently from three workers on"


@private(
    "torch.distributed:Reducer._rebuild_buckets",
    otherwise=lambda ddp, parameters: False,
    loses=BUCKET_ORDER,
)
def lay_out_buckets(ddp: Any, parameters: Iterable[Any]) -> bool:
    """Have DDP build its buckets as if gradients had arrived in this order in a backward pass.
    Return True if it did. Collective."""
    import torch

    ddp.reducer.prepare_for_backward([])
    for parameter in parameters:
        parameter.backward(torch.zeros_like(parameter))
    ddp.reducer._rebuild_buckets()
    ddp.zero_grad()
    return True


@private("torch:Tensor._base", otherwise=lambda tensor: True, loses="one more copy in typed layers")
def is_view(tensor: Any) -> bool:
    """True if a tensor may share the memory of another one, and must not be written to."""
    return tensor._base is not None


def with_model(module: Any, model: Any) -> Any:
    """Return a shallow copy of a module with ``model`` in place of its submodule of this name."""
    other = copy.copy(module)
    other._modules = {**module._modules, "model": model}
    return other


def _public_linear(x: Any, weight: Any, bias: Any) -> Any:
    import torch

    return torch.nn.functional.linear(x, weight, bias)


@private(
    "torch:ops.mkldnn._linear_pointwise",
    otherwise=_public_linear,
    loses="linear layers on a CPU take longer",
)
def linear_of_mkldnn(x: Any, weight: Any, bias: Any) -> Any:
    """Return ``x @ weight.T + bias`` computed by oneDNN, which adds the bias in the same pass;
    torch's compiler calls it the same way. Raises RuntimeError without oneDNN, or on a processor
    that oneDNN does not support."""
    import torch

    if not torch.backends.mkldnn.is_available():
        raise NotImplementedError("torch was built without oneDNN")
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], None)


@private(
    "torch:ops.aten._embedding_bag_per_sample_weights_backward",
    otherwise=lambda grad, rows, index, start, bag: (grad[bag] * rows[index]).sum(1),
    loses="gradients of edge weights take more memory",
)
def weight_gradient_of_bags(grad: Any, rows: Any, index: Any, start: Any, bag: Any) -> Any:
    """Return the gradient ``[E]`` of the weights of an ``embedding_bag`` sum: dot products of
    ``grad[bag]`` and ``rows[index]``, without allocating these ``[E, F]`` arrays."""
    import torch

    dtype = grad.dtype
    if grad.is_cuda and dtype == torch.bfloat16:  # CUDA has no kernel for it (pytorch#185808)
        grad, rows = grad.float(), rows.float()
    return torch.ops.aten._embedding_bag_per_sample_weights_backward(
        grad, rows, index, start, bag, 0
    ).to(dtype)
