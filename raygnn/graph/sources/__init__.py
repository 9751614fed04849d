"""Sources of graphs: one module for each format, imported on first use.

A format's module has ``files(graph)`` (input files, in a fixed order), ``read(graph)`` (the
:class:`~raygnn.graph.data.GraphData`) and ``VERSION``, which rises when the same input yields
another graph. ``reading_bytes(graph)`` estimates the memory if it differs from the size of the
files; ``identity(graph)`` returns what else determines the graph, beside files and options.

Readers raise DataError for input that is missing, damaged or inconsistent, with the file and, if
possible, the row; and ConfigError for a wrong key of the configuration.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import re
from types import ModuleType

from raygnn.config.graph import GraphConfig, GraphSplit, ReversibleGraph
from raygnn.graph import validate
from raygnn.graph.data import GraphData
from raygnn.graph.sources.input_files import out_of_memory, sha256, unpacked_size
from raygnn.graph.sources.transforms import add_reverses, normalize

# formats whose module has another name
_MODULES = {"dgl": "library_graphs", "tables": "table_graph", "dataset": "datasets"}


def load_graph(graph: GraphConfig, *, needs_masks: bool = True, trains: bool = True) -> GraphData:
    """Read, check (see `validate.check`) and normalise the graph that a config names, with its
    arrays: see `raygnn.graph.data.NodeFrame`."""
    try:
        data: GraphData = _module(graph.format).read(graph)
        data.name = re.sub(r"[^\w.-]", "_", data.name)  # it becomes part of file names
        validate.check(data, needs_masks=needs_masks, trains=trains)
        normalize(data, graph.normalize or "none")
        if _has_reverses(graph):
            add_reverses(data)
    except MemoryError as error:
        raise out_of_memory(str(getattr(graph, "path", graph.format)), error) from None
    return data


def digest(graph: GraphConfig) -> str:
    """Return the SHA-256, in hex, of all that determines the graph: the contents of the input
    files, wherever they are stored, and the options. Raises DataError for an unreadable file."""
    module = _module(graph.format)
    others = {"path", "vocabulary"}
    if isinstance(graph, GraphSplit):
        others |= GraphSplit.model_fields.keys()
    options = graph.model_dump(mode="json", exclude=others)
    options["normalize"] = graph.normalize or "none"
    options["version"] = module.VERSION
    if hasattr(module, "identity"):
        options |= module.identity(graph)
    if not _has_reverses(graph):  # digests from before there was the key stay the same
        options.pop("reverse", None)
    total = hashlib.sha256(json.dumps(options, sort_keys=True).encode())
    for file in module.files(graph):
        total.update(bytes.fromhex(sha256(file)))
    return total.hexdigest()


def reading_bytes(graph: GraphConfig) -> int:
    """Estimate the memory that :func:`load_graph` takes at most, in bytes, without reading the
    graph: from its options, or from the sizes and headers of its files."""
    module = _module(graph.format)
    if hasattr(module, "reading_bytes"):
        return int(module.reading_bytes(graph))
    return sum(map(unpacked_size, module.files(graph)))


def _has_reverses(graph: GraphConfig) -> bool:
    return isinstance(graph, ReversibleGraph) and graph.reverse


def _module(graph_format: str) -> ModuleType:
    name = _MODULES.get(graph_format, graph_format)
    return importlib.import_module(f"raygnn.graph.sources.{name}")
