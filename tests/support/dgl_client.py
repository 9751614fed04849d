"""A script for ``dgl.distributed`` over a partition, with ids on another device throughout.

It is its own server, too, as with DGL's launcher: ``python dgl_client.py GRAPH CONFIG SOURCE``
under DGL's environment variables. ``SOURCE`` holds the edges and features that the graph must have.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from raygnn.graph.dgl import dgl
from tests.support.unreadable import unreadable

DGL = dgl()  # before any script of DGL's, and where its sampler processes come by, too


def check_look_ups(graph: Any, ntype: str, etype: tuple[str, str, str]) -> None:
    book, nids = graph.get_partition_book(), torch.arange(0, graph.num_nodes(ntype), 7)
    eids = torch.arange(0, graph.num_edges(etype), 5)
    for name, ids, kind in (
        ("nid2partid", nids, [ntype]),
        ("eid2partid", eids, [etype]),
        ("map_to_homo_nid", nids, [ntype]),
        ("map_to_homo_eid", eids, [etype]),
        ("map_to_per_ntype", nids, []),
        ("map_to_per_etype", eids, []),
    ):
        expected = getattr(book, name)(ids, *kind)
        found = getattr(book, name)(unreadable(ids), *kind)
        for one, other in zip(np.atleast_2d(found), np.atleast_2d(expected), strict=True):
            np.testing.assert_array_equal(one, other)


def check_tensors(graph: Any, ntype: str) -> None:
    ids = torch.tensor([3, 1, 3, 0])
    feat = graph.nodes[ntype].data["feat"]
    assert torch.equal(feat[unreadable(ids)], feat[ids])
    policy = graph.get_node_partition_policy(ntype)
    shape = (graph.num_nodes(ntype), 2)
    tensor = DGL.distributed.DistTensor(shape, torch.float32, "mine", part_policy=policy)
    tensor[unreadable(ids[:2])] = unreadable(torch.tensor([[1.0, 2], [3, 4]]))
    assert tensor[torch.tensor([1, 2, 3])].tolist() == [[3, 4], [0, 0], [1, 2]]

    learned = DGL.distributed.DistEmbedding(*shape, "learned", part_policy=policy)
    optimizer = DGL.distributed.optim.SparseAdam([learned], lr=0.5)
    learned(unreadable(ids)).sum().backward()
    optimizer.step()
    moved = learned.weight[torch.arange(5)]
    assert (moved[[0, 1, 3]] < -0.4).all()
    assert not moved[[2, 4]].any()


def check_structure(graph: Any, source: Any) -> None:
    """Check a graph of one type: sampled edges are edges of the original graph."""
    names, eids = graph.ndata["raygnn_id"], torch.arange(graph.num_edges())
    found = graph.find_edges(unreadable(eids))
    ends = [names[each].numpy() for each in found]
    both = [pairs[np.lexsort(pairs.T)] for pairs in (np.stack(ends, 1), source["edges"])]
    np.testing.assert_array_equal(*both)

    nodes = torch.arange(0, graph.num_nodes(), 3)
    degrees = np.bincount(source["edges"][:, 1], minlength=graph.num_nodes())
    originals = names[nodes].numpy()
    np.testing.assert_array_equal(graph.in_degrees(unreadable(nodes)), degrees[originals])
    if graph.get_partition_book().num_partitions() == 1:  # of a remote part DGL 2.1's is broken
        everything = DGL.distributed.in_subgraph(graph, unreadable(nodes))
        assert everything.num_edges() == degrees[originals].sum()
    some = DGL.distributed.sample_neighbors(graph, unreadable(nodes), 2)
    assert some.num_edges() == np.minimum(degrees[originals], 2).sum()
    np.testing.assert_array_equal(graph.ndata["feat"][nodes], source["feat"][originals])

    train = DGL.distributed.node_split(graph.ndata["train_mask"], force_even=True)
    sampler = DGL.dataloading.NeighborSampler([3, 3])
    loader = DGL.dataloading.DistNodeDataLoader(graph, train, sampler, batch_size=50)
    seen = []
    for inputs, seeds, blocks in loader:
        assert graph.ndata["feat"][unreadable(inputs)].shape[0] == blocks[0].num_src_nodes()
        seen.append(seeds)
    assert torch.equal(torch.cat(seen).sort().values, train.sort().values)


def main(name: str, config: str, source: str) -> None:
    DGL.distributed.initialize("ip_config.txt")  # a server stays in here until the end
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    graph = DGL.distributed.DistGraph(name, part_config=config)
    for ntype in graph.ntypes:
        etype = next(each for each in graph.canonical_etypes if ntype in each)
        check_look_ups(graph, ntype, etype)
        check_tensors(graph, ntype)
    if len(graph.ntypes) == 1:
        check_structure(graph, np.load(source))
    else:
        ids = {ntype: unreadable(torch.arange(5)) for ntype in graph.ntypes}
        frontier = DGL.distributed.sample_neighbors(graph, ids, 3)
        assert frontier.num_edges() > 0
    print("checked", os.environ.get("DGL_DIST_MODE", "standalone"), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
