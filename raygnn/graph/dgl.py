"""Import of DGL 2.1 to 2.4 with any version of torch; DGL is optional, and :func:`dgl` raises
without it.

DGL's core library does not depend on the torch version, but GraphBolt and dgl.sparse exist only
for the torch versions that DGL was built with, and ``import dgl`` fails if GraphBolt's library is
missing. Here missing add-ons are replaced by placeholders before the first import, so that the
rest of DGL works; using a placeholder raises a :class:`CapabilityError` with the remedy. User code
can ``import dgl.nn`` as usual after that, as workers do it before they import any user code.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

from raygnn.errors import CapabilityError

if TYPE_CHECKING:
    import torch

# add-on → path of its native library in the package, for one torch version
_LIBRARIES = {
    "graphbolt": "graphbolt/libgraphbolt_pytorch_{torch}",
    "sparse": "dgl_sparse/libdgl_sparse_pytorch_{torch}",
}

_INSTEAD = (
    "use raygnn's sampler, dgl.nn or torch operations, or install a DGL build for this torch "
    "version (DGL 2.1.0 has both add-ons for torch 2.0.0 to 2.2.1)"
)

# dgl.distributed: look-ups of a partition book, and functions of a DistGraph that take ids
_LOOK_UPS = (
    *("nid2partid", "eid2partid", "map_to_homo_nid", "map_to_homo_eid"),
    *("map_to_per_ntype", "map_to_per_etype"),
)
_SERVICES = ("_distributed_access", "_distributed_edge_access", "_distributed_get_node_property")

_lock = threading.RLock()
_reasons: dict[str, str] = {}


def installed() -> bool:
    """Return True if DGL is installed, without importing it."""
    return _root() is not None


def dgl() -> ModuleType:
    """Return the ``dgl`` module, imported at the first call. Raises CapabilityError if DGL is not
    installed or cannot be loaded."""
    with _lock:
        return _load()


def missing() -> dict[str, str]:
    """Return missing add-on → reason. Imports DGL; raises CapabilityError as :func:`dgl`."""
    dgl()
    return dict(_reasons)


@functools.cache
def _load() -> ModuleType:
    """Import DGL, with placeholders for native add-ons that do not fit this torch."""
    already = sys.modules.get("dgl")
    if already is not None and not hasattr(already, "DGLGraph"):
        message, where = "a module named 'dgl' is not DGL", str(getattr(already, "__file__", "dgl"))
        remedy = "rename the file or package that hides the installed DGL"
        raise CapabilityError(message, where=where, remedy=remedy)
    root = _root()
    if root is None:
        raise CapabilityError(
            "DGL is not installed",
            remedy="pip install dgl, with Python 3.12 or older, since there is none for newer "
            "ones; built-in models, file formats and partition methods do not need it",
        )
    # Otherwise DGL prints its backend on the terminal and writes ~/.dgl/config.json.
    os.environ["DGLBACKEND"] = "pytorch"
    _forget()  # an earlier import that failed leaves some of the submodules behind
    for name in _LIBRARIES:
        if reason := _no_library(root, name):
            _install_placeholder(name, reason)
    while True:
        try:
            return _import_quietly()
        except Exception as error:
            if "graphbolt" in _reasons:
                raise CapabilityError(
                    f"DGL is installed but cannot be loaded: {type(error).__name__}: {error}",
                    where=str(root),
                    remedy="reinstall it (pip install --force-reinstall dgl==2.1.0) and check that "
                    "its shared libraries fit this system",
                ) from error
            # GraphBolt's library exists, but does not load (no torchdata, another ABI, …).
            _forget()
            _install_placeholder("graphbolt", f"{type(error).__name__}: {error}")


def _root() -> Path | None:
    """Return DGL's directory; None if it is not installed, or is a file or a plain directory."""
    spec = importlib.util.find_spec("dgl")
    if spec is None or spec.origin is None or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0])


def _import_quietly() -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations of torch that DGL 2.1 triggers
        module = importlib.import_module("dgl")
        for part in ("nn", "distributed"):  # DGL 2.4 does not import them by itself
            importlib.import_module(f"dgl.{part}")
    for name in _reasons:
        setattr(module, name, sys.modules[f"dgl.{name}"])
    _accept_any_device(module.distributed)
    return module


def _forget() -> None:
    if "dgl" not in sys.modules:
        for name in [name for name in sys.modules if name.startswith("dgl.")]:
            del sys.modules[name]


def _no_library(root: Path, name: str) -> str | None:
    """Return why the native library of an add-on cannot be loaded; None if it exists."""
    import torch

    version = torch.__version__.split("+")[0]
    suffix = ".dylib" if sys.platform == "darwin" else ".so"
    path = root / (_LIBRARIES[name].format(torch=version) + suffix)
    if path.exists():
        return None
    return f"DGL has no native {name} library for torch {version} ({path.name})"


def _install_placeholder(name: str, reason: str) -> None:
    _reasons[name] = reason
    sys.modules[f"dgl.{name}"] = _Placeholder(name)


class _PlaceholderMeta(type):
    """Metaclass of classes that isinstance() accepts and that raise on any other use."""

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        raise _unusable(cls)

    def __getattr__(cls, attribute: str) -> NoReturn:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        raise _unusable(cls)


def _unusable(cls: type) -> CapabilityError:
    add_on = cls.__module__.rpartition(".")[2]
    message = f"{cls.__module__}.{cls.__name__} is not available here: {_reasons[add_on]}"
    return CapabilityError(message, remedy=_INSTEAD)


class _Placeholder(ModuleType):
    """Placeholder of an add-on module that cannot be loaded. Every public name is a class, because
    dgl.distributed calls ``isinstance(x, gb.Something)``."""

    def __init__(self, name: str):
        super().__init__(f"dgl.{name}", f"dgl.{name} is not available here.")
        self.__all__: list[str] = []

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _PlaceholderMeta(name, (), {"__module__": self.__name__})
        setattr(self, name, made)
        return made


def _accept_any_device(distributed: ModuleType) -> None:
    """Let every look-up of ``dgl.distributed`` accept ids on any device.

    DGL 2.1 looks ids up with NumPy and crashes on CUDA tensors
    (https://github.com/dmlc/dgl/issues/7333). Partitions, features and the graph are on the CPU
    anyway, so ids are copied there, and results back to the device of the ids. This covers
    partition books, DistTensor and DistEmbedding, and sampling, subgraphs, ends and degrees of a
    DistGraph. Graphs stay on the CPU.
    """
    stores = distributed.kvstore.KVClient, distributed.standalone_kvstore.KVClient
    for place, names in (
        (distributed.graph_partition_book.RangePartitionBook, _LOOK_UPS),
        *((store, ("push", "pull")) for store in stores),
        (distributed.graph_services, _SERVICES),
    ):
        for name in names:
            setattr(place, name, _by_cpu(getattr(place, name)))


def _by_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that it gets tensors of any device as copies on the CPU."""
    import torch

    @functools.wraps(function)
    def on_cpu(*args: Any, **kwargs: Any) -> Any:
        tensors = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, torch.Tensor)]
        cpu = torch.device("cpu")
        kwargs = {key: _to(value, cpu) for key, value in kwargs.items()}
        result = function(*(_to(arg, cpu) for arg in args), **kwargs)
        return _to(result, tensors[0].device) if tensors else result

    return on_cpu


def _to(value: Any, device: torch.device) -> Any:
    import torch

    if type(value) is tuple:
        return tuple(_to(item, device) for item in value)
    return value.to(device) if isinstance(value, torch.Tensor) else value
