"""``dgl.distributed`` with ids on any device: the bridge for scripts that were written for it.

DGL 2.1 looks ids up with NumPy, on the CPU, and crashes on those of a CUDA tensor
(https://github.com/dmlc/dgl/issues/7333). Partitions, features and the graph lie on the CPU anyway,
so ids are copied there, once and explicitly, and what is found is copied back to where they were.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_LOOK_UPS = (
    *("nid2partid", "eid2partid", "map_to_homo_nid", "map_to_homo_eid"),
    *("map_to_per_ntype", "map_to_per_etype"),
)
# All that is asked of a DistGraph about nodes or edges goes through these three.
_SERVICES = ("_distributed_access", "_distributed_edge_access", "_distributed_get_node_property")


def accept_any_device(module: ModuleType) -> None:
    """Let every look-up of ``dgl.distributed`` take ids of any device.

    These are the partition book's, which part owns a node or edge and what it is called there;
    reading and writing of DistTensor and DistEmbedding; and sampling, subgraphs, ends and degrees
    of a DistGraph. Answers are on the device of the ids; graphs stay on the CPU.

    Args:
        module: ``dgl``, imported.
    """
    distributed = module.distributed
    book = distributed.graph_partition_book.RangePartitionBook
    for name in _LOOK_UPS:
        setattr(book, name, _by_cpu(getattr(book, name)))
    for store in (distributed.kvstore.KVClient, distributed.standalone_kvstore.KVClient):
        for name in ("push", "pull"):
            setattr(store, name, _by_cpu(getattr(store, name)))
    for name in _SERVICES:
        services = distributed.graph_services
        setattr(services, name, _by_cpu(getattr(services, name)))


def _by_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function on tensors of any device, of which it sees copies on the CPU."""
    import torch

    @functools.wraps(function)
    def on_cpu(*args: Any, **kwargs: Any) -> Any:
        given = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)]
        found = function(*map(_to_cpu, args), **{key: _to_cpu(kwargs[key]) for key in kwargs})
        return _back(found, given[0].device) if given else found

    return on_cpu


def _to_cpu(value: Any) -> Any:
    import torch

    return value.cpu() if isinstance(value, torch.Tensor) else value


def _back(found: Any, device: torch.device) -> Any:
    import torch

    if isinstance(found, tuple):
        return tuple(_back(each, device) for each in found)
    return found.to(device) if isinstance(found, torch.Tensor) else found
