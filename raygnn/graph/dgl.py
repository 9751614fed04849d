"""The one door to DGL: a working DGL 2.1 to 2.4 on any torch, and what it can and cannot do here.

DGL need not be there: there is none for Python 3.13. Without it :func:`dgl` says so.

DGL's core library does not depend on the torch version, but three of its native add-ons do:
GraphBolt, dgl.sparse and tensoradapter exist only for the torch versions that DGL was built
with, and ``import dgl`` fails outright where GraphBolt's is missing. Here the add-ons that are
missing are replaced by placeholders before the first import, so that everything else of DGL
works, and using a missing one is a :class:`CapabilityError` that says what to do.

A model of the user's own may say ``import dgl.nn`` as always, once :func:`dgl` has been called
(our workers do so before they import any user code).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import os
import re
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

from raygnn.errors import CapabilityError
from raygnn.graph.arrays import IntArray

if TYPE_CHECKING:
    import torch

# add-on → where its native library lies inside the package, for one torch version
_LIBRARIES = {
    "graphbolt": "graphbolt/libgraphbolt_pytorch_{torch}",
    "sparse": "dgl_sparse/libdgl_sparse_pytorch_{torch}",
    "tensoradapter": "tensoradapter/pytorch/libtensoradapter_pytorch_{torch}",
}
_PLACEHOLDERS = ("graphbolt", "sparse")  # tensoradapter is no Python module: DGL does without it

_REMEDIES = {
    "graphbolt": "leave it out (raygnn's own sampler does not need it), or install a torch and a "
    "DGL build that belong together (DGL 2.1.0 has GraphBolt for torch 2.0.0 to 2.2.1)",
    "sparse": "write the layer with dgl.nn or torch operations, or install a torch and a DGL "
    "build that belong together (DGL 2.1.0 has dgl.sparse for torch 2.0.0 to 2.2.1)",
    "tensoradapter": "nothing to do: DGL falls back to its own memory allocator",
    "cuda": "keep DGL graphs on the CPU (raygnn's own models run on any device), or install a "
    "CUDA build of DGL",
}

# dgl.distributed: a partition book's look-ups, and what a DistGraph is asked of nodes and edges
_LOOK_UPS = (
    *("nid2partid", "eid2partid", "map_to_homo_nid", "map_to_homo_eid"),
    *("map_to_per_ntype", "map_to_per_etype"),
)
_SERVICES = ("_distributed_access", "_distributed_edge_access", "_distributed_get_node_property")

# "[12:34:56] /opt/dgl/src/graph/transform/metis_partition_hetero.cc:89: Partition a graph …"
_LOG_LINE = re.compile(rb"^\[\d\d:\d\d:\d\d\] \S+\.(cc|h|cu):\d+: ")

_lock = threading.RLock()
_stderr_lock = threading.Lock()
_module: ModuleType | None = None
_reasons: dict[str, str] = {}


def installed() -> bool:
    """Whether there is a DGL; imports nothing."""
    return _root() is not None


def dgl() -> ModuleType:
    """The working ``dgl`` module; imported at the first call, the same object ever after.

    Raises:
        CapabilityError: DGL is not installed, or its core cannot be loaded here.
    """
    global _module
    with _lock:
        if _module is None:
            _module = _load()
        return _module


def missing() -> dict[str, str]:
    """Capability → why DGL lacks it here. Imports DGL; raises CapabilityError as :func:`dgl`."""
    dgl()
    return dict(_reasons)


def require(capability: str) -> None:
    """Raise CapabilityError, saying why and what to do, if ``capability`` is missing here.

    Args:
        capability: ``"graphbolt"``, ``"sparse"``, ``"tensoradapter"`` or ``"cuda"``.
    """
    if capability not in _REMEDIES:
        raise ValueError(f"unknown capability {capability!r}; known: {', '.join(_REMEDIES)}")
    dgl()
    if capability in _reasons:
        raise _unavailable(capability, f"DGL's {capability}")


def metis(indptr: IntArray, indices: IntArray, parts: int, weights: IntArray) -> IntArray:
    """METIS with the edge cut as its objective (Karypis & Kumar 1998), DGL's.

    METIS seeds itself with a constant, and with one constraint the same input gives the same
    parts. With several it reads memory that it has not written, and the parts depend on what was
    there before.

    Args:
        indptr, indices: int64, a symmetric graph without loops and multiple edges; neighbours
            of node v are ``indices[indptr[v]:indptr[v+1]]``.
        parts: fewer than there are nodes.
        weights: int64 ``[nodes, constraints]``; each column is divided evenly.

    Returns:
        int64 ``[nodes]``, each node's part.

    Raises:
        RuntimeError: METIS failed.
    """
    import torch

    module = dgl()
    tensors = [torch.from_numpy(array) for array in (indptr, indices, weights.reshape(-1))]
    everything = torch.empty(0, dtype=torch.int64)
    graph = module.graph(("csc", (tensors[0], tensors[1], everything)), num_nodes=len(indptr) - 1)
    to_dgl = module.backend.zerocopy_to_dgl_ndarray
    # Up to 8 parts METIS's authors advise recursive bisection. DGL always takes the other; on
    # the Tolokers graph that cuts 13 % of the edges for 2 parts, bisection 7 %.
    mode = "recursive" if parts <= 8 else "k-way"
    try:
        # not metis_partition_assignment: that copies the graph once more, and prints
        function = module.partition._CAPI_DGLMetisPartition_Hetero
        with quiet():
            result = function(graph.formats("csc")._graph, parts, to_dgl(tensors[2]), mode, True)
    except module.DGLError as error:
        raise RuntimeError(str(error).splitlines()[0]) from error
    finally:
        # DGL has METIS put coarser graphs into files here, which it leaves when it fails
        for left in Path.cwd().glob(f"metis{os.getpid()}.*"):
            left.unlink(missing_ok=True)
    if len(result) != len(indptr) - 1:
        raise RuntimeError("it returned no parts; out of memory?")
    assigned: IntArray = module.backend.zerocopy_from_dgl_ndarray(result).numpy()
    return assigned


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep the log lines of DGL's C++ code off the terminal while the block runs.

    They go straight to file descriptor 2, so that is redirected, for the whole process. What
    else was written there meanwhile (other threads' logs) is passed on at the end.
    """
    with _stderr_lock, tempfile.TemporaryFile() as caught:
        sys.stderr.flush()
        saved = os.dup(2)
        try:
            os.dup2(caught.fileno(), 2)
            yield
        finally:
            sys.stderr.flush()
            os.dup2(saved, 2)
            caught.seek(0)
            others = b"".join(line for line in caught if not _LOG_LINE.match(line))
            if others:
                os.write(saved, others)
            os.close(saved)


def _unavailable(capability: str, what: str) -> CapabilityError:
    return CapabilityError(
        f"{what} is not available here: {_reasons[capability]}", remedy=_REMEDIES[capability]
    )


def _load() -> ModuleType:
    already = sys.modules.get("dgl")
    if already is not None and not hasattr(already, "DGLGraph"):
        raise CapabilityError(
            "a module named 'dgl' is loaded already, and it is not DGL",
            where=str(getattr(already, "__file__", "dgl")),
            remedy="rename the file or package that hides the installed DGL",
        )
    module = _import()
    if "device_api.cuda" not in module.list_global_func_names():
        _reasons["cuda"] = "this is a CPU build of DGL"
    for name in _LIBRARIES:
        if name not in _reasons and (reason := _no_library(Path(module.__path__[0]), name)):
            _reasons[name] = reason
    _accept_any_device(module.distributed)
    return module


def _root() -> Path | None:
    """Where DGL is installed; None also for a file or a plain directory of that name."""
    spec = importlib.util.find_spec("dgl")
    if spec is None or spec.origin is None or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0])


def _import() -> ModuleType:
    """Import DGL, with placeholders where its native add-ons do not fit this torch."""
    root = _root()
    if root is None:
        raise CapabilityError(
            "DGL is not installed",
            remedy="pip install dgl, with Python 3.12 or older, as there is none for newer ones; "
            "built-in models, formats of files and ways to partition need none",
        )
    # Otherwise DGL announces its backend on the terminal and writes ~/.dgl/config.json.
    os.environ["DGLBACKEND"] = "pytorch"
    _forget()  # an import that failed before us leaves half of the submodules behind
    for name in _PLACEHOLDERS:
        if reason := _no_library(root, name):
            _install_placeholder(name, reason)
    try:
        return _import_quietly()
    except Exception as error:
        if "graphbolt" in _reasons:
            raise _broken(root, error) from error
        # GraphBolt's library is there, but it does not load (no torchdata, another ABI, …).
        _forget()
        _install_placeholder("graphbolt", f"{type(error).__name__}: {error}")
    try:
        return _import_quietly()
    except Exception as error:
        raise _broken(root, error) from error


def _import_quietly() -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations of torch that DGL 2.1 triggers
        module = importlib.import_module("dgl")
        for part in ("nn", "distributed"):  # which DGL 2.4 does not import by itself
            importlib.import_module(f"dgl.{part}")
    for name in _PLACEHOLDERS:
        if name in _reasons:
            setattr(module, name, sys.modules[f"dgl.{name}"])
    return module


def _broken(root: Path, error: Exception) -> CapabilityError:
    return CapabilityError(
        f"DGL is installed but cannot be loaded: {type(error).__name__}: {error}",
        where=str(root),
        remedy="reinstall it (pip install --force-reinstall dgl==2.1.0) and check that its "
        "shared libraries fit this system",
    )


def _forget() -> None:
    if "dgl" not in sys.modules:
        for name in [name for name in sys.modules if name.startswith("dgl.")]:
            del sys.modules[name]


def _no_library(root: Path, name: str) -> str | None:
    """Why the native library of an add-on cannot be loaded; None where it exists."""
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
    """Classes that isinstance() accepts, and that cannot be used in any other way."""

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        raise _unusable(cls)

    def __getattr__(cls, attribute: str) -> NoReturn:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        raise _unusable(cls)


def _unusable(cls: type) -> CapabilityError:
    return _unavailable(cls.__module__.rpartition(".")[2], f"{cls.__module__}.{cls.__name__}")


class _Placeholder(ModuleType):
    """Stands in for an add-on module of DGL that cannot be loaded here.

    Every public name is a class, since dgl.distributed asks ``isinstance(x, gb.Something)``.
    """

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
    """Let every look-up of ``dgl.distributed`` take ids of any device.

    DGL 2.1 looks ids up with NumPy, on the CPU, and crashes on those of a CUDA tensor
    (https://github.com/dmlc/dgl/issues/7333). Partitions, features and the graph lie on the CPU
    anyway, so ids are copied there, and answers copied back to where the ids were. That holds for
    which part owns a node or edge and what it is called there; for DistTensor and DistEmbedding;
    and for sampling, subgraphs, ends and degrees of a DistGraph. Graphs stay on the CPU.
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
    """The function on tensors of any device, of which it sees copies on the CPU."""
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
