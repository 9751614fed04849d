"""Writes the files of a partition, all but where they go in the end."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

from raygnn.errors import DataError
from raygnn.graph.arrays import storable
from raygnn.graph.data import MASKS, GraphData, etype_str
from raygnn.graph.partition.assemble import Assembly
from raygnn.graph.partition.dgl_file import Written, write_graph, write_tensors
from raygnn.graph.partition.id_file import write_ids
from raygnn.graph.partition.layout import LAYOUT_VERSION, MANIFEST
from raygnn.graph.partition.manifest import feature, splits
from raygnn.util.files import sync_file

_MAX_THREADS = 16


def check_storable(data: GraphData) -> None:
    """Raise DataError for names and arrays that DGL's files cannot express."""
    for kind in (name for etype in data.edges for name in etype):
        if ":" in kind:
            raise DataError(
                f"the type name {kind!r} has a colon in it, which joins names in DGL's files",
                where=data.name,
                remedy="give the type another name",
            )
    frames = {ntype: frame.data for ntype, frame in data.nodes.items()}
    frames |= {etype_str(etype): frame.data for etype, frame in data.edges.items()}
    for kind, arrays in frames.items():
        for name, array in arrays.items():
            if not storable(array):
                key = f"{kind}/{name}"
                raise DataError(
                    f"{key} has the dtype {array.dtype}, which DGL's files cannot hold",
                    where=data.origin.get(key, data.name),
                    remedy="convert it to a floating-point or signed integer type",
                )


def write_parts(
    data: GraphData,
    assembly: Assembly,
    directory: Path,
    method: str,
    tell: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Write every part and DGL's json. Returns the manifest's facts about them.

    Args:
        tell: called with how many parts are written, when there is one more.
    """
    folders = [directory / f"part{part}" for part in range(assembly.parts)]
    for folder in folders:
        folder.mkdir()
    # A few more threads than cores, as some wait for the disk. Whatever their number, what they
    # hold is at most what all parts hold together.
    threads = min(2 * assembly.parts, (os.cpu_count() or 1) + 2, _MAX_THREADS)
    with ThreadPoolExecutor(threads, "write") as pool:
        arrays = [pool.submit(_write_arrays, assembly, *each) for each in enumerate(folders)]
        graphs = [pool.submit(_write_graph, assembly, *each) for each in enumerate(folders)]
        try:
            written = []
            for part in range(len(folders)):
                written.append((graphs[part].result(), arrays[part].result()))
                tell(f"{part + 1} of {len(folders)} parts")
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    files: dict[str, Written] = {}
    features: dict[str, Any] = {}
    parts = []
    for (graph_files, graph_facts), (array_files, array_facts, kinds) in written:
        own = graph_files | array_files
        files |= own
        features |= kinds
        parts.append(graph_facts | array_facts | {"bytes": sum(each.size for each in own.values())})
    files |= write_ids(data.ids, directory)
    config = _dgl_json(data, assembly, method)
    name = f"{config['graph_name']}.json"
    files[name] = write_json(directory / name, config)
    return {
        "layout": LAYOUT_VERSION,
        "graph_name": config["graph_name"],
        "num_parts": assembly.parts,
        "method": method,
        "features": features,
        "ids": list(data.ids),
        "names": data.names,
        "reverses": {etype_str(one): etype_str(other) for one, other in data.reverses.items()},
        "parts": parts,
        "files": {
            name: {"bytes": each.size, "sha256": each.sha256} for name, each in files.items()
        },
        "versions": {name: metadata.version(name) for name in ("dgl", "torch", "numpy")},
    }


def _write_graph(
    assembly: Assembly, part: int, folder: Path
) -> tuple[dict[str, Written], dict[str, Any]]:
    """Write a part's structure; returns the file, and facts for the manifest."""
    graph = assembly.part(part)
    written = write_graph(
        folder / "graph.dgl", graph.num_nodes, graph.src, graph.dst, graph.ndata, graph.edata
    )
    facts = {
        "nodes": assembly.num_nodes(part),
        "edges": {etype_str(t): count for t, count in assembly.num_edges(part).items()},
        "halo": graph.halo,
        "cut": graph.cut,
    }
    return {f"{folder.name}/graph.dgl": written}, facts


def _write_arrays(
    assembly: Assembly, part: int, folder: Path
) -> tuple[dict[str, Written], dict[str, Any], dict[str, Any]]:
    """Write a part's data and original ids; returns the files, facts, and kinds of data."""
    files: dict[str, Written] = {}
    kinds: dict[str, Any] = {}
    facts: dict[str, Any] = {}
    for name, choose in (
        ("node_feat.dgl", assembly.node_data),
        ("edge_feat.dgl", assembly.edge_data),
    ):
        chosen = choose(part)
        files[f"{folder.name}/{name}"] = write_tensors(folder / name, chosen)
        kinds |= {key: feature(rows) for key, rows in chosen.items()}
        if name == "node_feat.dgl":
            masks = {k: rows.whole() for k, rows in chosen.items() if k.rpartition("/")[2] in MASKS}
            facts = {"splits": splits(masks)}
        del chosen  # before the next are chosen
    for name, gather in (
        ("orig_nids.dgl", assembly.original_nodes),
        ("orig_eids.dgl", assembly.original_edges),
    ):
        files[f"{folder.name}/{name}"] = write_tensors(folder / name, gather(part))
    return files, facts, kinds


def write_json(path: Path, values: dict[str, Any]) -> Written:
    """Write a JSON file, durably."""
    text = json.dumps(values, indent=1).encode()
    with path.open("wb") as file:
        file.write(text)
        sync_file(file)
    return Written(len(text), hashlib.sha256(text).hexdigest())


def _dgl_json(data: GraphData, assembly: Assembly, method: str) -> dict[str, Any]:
    # a graph may be called raygnn, but its json may not be called as the manifest is
    name = data.name if f"{data.name}.json" != MANIFEST else f"{data.name}_graph"
    return {
        "graph_name": name,
        "num_nodes": data.num_nodes,
        "num_edges": data.num_edges,
        "part_method": method,
        "num_parts": assembly.parts,
        "halo_hops": 1,
        "node_map": {ntype: rows.tolist() for ntype, rows in assembly.node_map.items()},
        "edge_map": {etype_str(t): rows.tolist() for t, rows in assembly.edge_map.items()},
        "ntypes": {ntype: number for number, ntype in enumerate(data.nodes)},
        "etypes": {etype_str(etype): number for number, etype in enumerate(data.edges)},
    } | {
        f"part-{part}": {
            "node_feats": f"part{part}/node_feat.dgl",
            "edge_feats": f"part{part}/edge_feat.dgl",
            "part_graph": f"part{part}/graph.dgl",
        }
        for part in range(assembly.parts)
    }
