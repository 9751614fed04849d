"""METIS: which of the two that may be here divides a graph, and the call of pymetis's.

DGL brings a METIS that drops edges as it coarsens a graph: of 30 million directed edges it takes
0.8 GB where pymetis's takes 3.0. That one cuts fewer edges among many parts (of the same graph,
16 parts, nodes and training nodes shared out: 24.6 instead of 31.2 %) and gives the same parts for
the same graph, whatever memory held before. So whole graphs are DGL's where it is installed, and
what is small or has to come out the same everywhere is pymetis's.
"""

from __future__ import annotations

import ctypes
import importlib
from functools import cache
from typing import Any

import numpy as np

from raygnn.errors import CapabilityError
from raygnn.graph import dgl
from raygnn.graph.arrays import IntArray

BY_PYMETIS = {"metis": "pymetis"}

# METIS's authors advise recursive bisection for so many parts at most.
_BISECTED = 8
_OK = 1
_FAILURES = {-2: "its input is not as it should be", -3: "out of memory"}


def made_by(method: str) -> dict[str, str]:
    """What the name of a partition says of the METIS that makes it: nothing of DGL's."""
    by_dgl = method == "random" or (method == "metis" and dgl.installed())
    return {} if by_dgl else BY_PYMETIS


def metis(indptr: IntArray, indices: IntArray, parts: int, weights: IntArray) -> IntArray:
    """METIS with the edge cut as its objective (Karypis & Kumar 1998), pymetis's.

    pymetis's own function takes one weight for each node, METIS's takes several: this calls the
    latter, in pymetis's library (seen in 2025.2 to 2025.2.2). Arguments and errors are those of
    :func:`raygnn.graph.dgl.metis`. The same input gives the same parts.

    Raises:
        CapabilityError: pymetis is not there, or not as it was.
    """
    library, index = _library()
    function = (
        library.METIS_PartGraphRecursive if parts <= _BISECTED else library.METIS_PartGraphKway
    )
    num_nodes, constraints = weights.shape
    number = np.ctypeslib.as_ctypes_type(index)
    assigned, cut = np.empty(num_nodes, index), number()
    given = [np.ascontiguousarray(array, index) for array in (indptr, indices, weights)]
    pointers = [array.ctypes.data_as(ctypes.c_void_p) for array in given]
    sizes = [ctypes.byref(number(value)) for value in (num_nodes, constraints, parts)]
    # left out: sizes and weights of edges, the parts' shares, the tolerances, the options
    status = function(
        *sizes[:2], *pointers, None, None, sizes[2], None, None, None, ctypes.byref(cut),
        assigned.ctypes.data_as(ctypes.c_void_p),
    )  # fmt: skip
    if status != _OK:
        raise RuntimeError(_FAILURES.get(status, f"it ended with status {status}"))
    return assigned.astype(np.int64, copy=False)


@cache
def _library() -> tuple[Any, np.dtype[Any]]:
    """pymetis's library, and the integers that it was built for."""
    try:
        pymetis = importlib.import_module("pymetis")
        library = ctypes.CDLL(importlib.import_module("pymetis._internal").__file__)
        _ = library.METIS_PartGraphRecursive, library.METIS_PartGraphKway
        return library, pymetis.zero_copy_dtype()
    except (ImportError, AttributeError, OSError) as error:
        raise CapabilityError(
            f"METIS is not available here: {error}",
            remedy="pip install pymetis==2025.2.2 (which takes a C++ compiler where there is no "
            "wheel for the processor), or set partition.method to random",
        ) from error
