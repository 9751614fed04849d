"""LightGCN: PyG's on whole graphs, in the mean over samples, and without a batch's own edges."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from raygnn.config.model import read_model
from raygnn.errors import ConfigError
from raygnn.models.network import Network, Schema
from raygnn.models.registry import build_edge_model, build_model
from raygnn.sampling.batch import Adjacency, Block, EdgeType

PEOPLE, THINGS, LAYERS, WIDTH = 7, 5, 3, 4
LIKES: EdgeType = ("person", "likes", "thing")
LIKED: EdgeType = ("thing", "liked_by", "person")
PLAIN: EdgeType = ("_N", "_E", "_N")
CONFIG = read_model(kind="lightgcn", layers=LAYERS, embedding={"dim": WIDTH})


def edges() -> Tensor:
    """Return distinct pairs of a person and a thing; the last person and thing have none."""
    draw = torch.Generator().manual_seed(0)
    ends = [torch.randint(0, num - 1, (15,), generator=draw) for num in (PEOPLE, THINGS)]
    return torch.unique(torch.stack(ends), dim=1)


def net(schema: Schema) -> Network:
    model = build_model(CONFIG, schema)
    assert isinstance(model, Network)
    assert not list(model.parameters())
    return model


def whole(adj: dict[EdgeType, Adjacency], nums: dict[str, int]) -> tuple[Any, Any]:
    """Return the blocks and degrees of whole graphs."""
    return [Block(adj, nums, nums)] * LAYERS, {e: a.degree for e, a in adj.items()}


@pytest.mark.parametrize("typed", [False, True])
def test_outputs_and_gradients_are_those_of_pyg(typed: bool) -> None:
    """Two edge types, one the reverse of the other, are PyG's undirected graph."""
    pyg = pytest.importorskip("torch_geometric.nn.models")
    torch.manual_seed(0)
    likes = edges()
    both = torch.stack([likes[0], likes[1] + PEOPLE])
    both = torch.cat([both, both.flip(0)], 1)
    peer = pyg.LightGCN(PEOPLE + THINGS, WIDTH, LAYERS).double()
    rows, wanted = peer.embedding.weight, peer.get_embedding(both)
    if typed:
        nums = {"person": PEOPLE, "thing": THINGS}
        adj = {LIKES: Adjacency.of_edges(*likes, THINGS)}
        adj[LIKED] = Adjacency.of_edges(likes[1], likes[0], PEOPLE)
        schema = Schema(
            dict.fromkeys(nums, WIDTH), [LIKES, LIKED], WIDTH, target="person", others=("thing",)
        )
        blocks, degree = whole(adj, nums)
        x = {"person": rows[:PEOPLE], "thing": rows[PEOPLE:]}
        out = net(schema).represent(blocks, x, degree)
        found = torch.cat([out["person"], out["thing"]])
    else:
        schema = Schema({"_N": WIDTH}, [PLAIN], WIDTH, target="_N")
        adj = {PLAIN: Adjacency.of_edges(*both, PEOPLE + THINGS)}
        blocks, degree = whole(adj, {"_N": PEOPLE + THINGS})
        found = net(schema)(blocks, {"_N": rows}, degree)
    torch.testing.assert_close(found, wanted)
    gradients = [torch.autograd.grad(out.sin().sum(), rows)[0] for out in (found, wanted)]
    torch.testing.assert_close(*gradients)


def test_a_sampled_layer_has_the_full_one_as_its_mean() -> None:
    """The mean is over all samples of two of a node's five neighbours; degrees are true ones."""
    torch.manual_seed(0)
    config = CONFIG.model_copy(update={"layers": 1})
    model = build_model(config, Schema({"_N": WIDTH}, [PLAIN], WIDTH, target="_N"))
    x, degree = torch.randn(6, WIDTH).double(), torch.tensor([5, 3, 1, 4, 2, 6])

    def output(drawn: tuple[int, ...]) -> Tensor:
        adj = Adjacency(torch.tensor([0, len(drawn)]), torch.tensor(drawn))
        block = Block({PLAIN: adj}, {"_N": 6}, {"_N": 1})
        return model([block], {"_N": x}, {PLAIN: degree})

    full = output((1, 2, 3, 4, 5))
    norm = (5 * degree[1:].double()).rsqrt()
    torch.testing.assert_close(full, (x[:1] + norm @ x[1:]) / 2)
    draws = [output(drawn) for drawn in itertools.combinations(range(1, 6), 2)]
    torch.testing.assert_close(torch.stack(draws).mean(0), full)


def test_edges_that_a_batch_predicts_do_not_count() -> None:
    """The degree of a destination is that of the edges which the batch may sample."""
    torch.manual_seed(0)
    config = CONFIG.model_copy(update={"layers": 1})
    model = build_model(config, Schema({"_N": WIDTH}, [PLAIN], WIDTH, target="_N"))
    x, degree = torch.randn(4, WIDTH).double(), torch.tensor([4, 3, 1, 4])
    adj = Adjacency(torch.tensor([0, 2]), torch.tensor([1, 2]))
    adj = replace(adj, excluded=torch.tensor([2]))
    out = model([Block({PLAIN: adj}, {"_N": 4}, {"_N": 1})], {"_N": x}, {PLAIN: degree})
    norm = (2 * degree[1:3].double()).rsqrt()
    torch.testing.assert_close(out, (x[:1] + norm @ x[1:3]) / 2)


def test_a_type_without_in_edges_keeps_its_input() -> None:
    """Its layers are 0; as a source its degree counts as 1."""
    torch.manual_seed(0)
    config = CONFIG.model_copy(update={"layers": 1})
    schema = Schema(
        {"person": WIDTH, "thing": WIDTH}, [LIKES], WIDTH, target="person", others=("thing",)
    )
    adj = {LIKES: Adjacency.of_edges(torch.tensor([0, 1]), torch.tensor([0, 0]), 1)}
    nums = {"person": 2, "thing": 1}
    x = {t: torch.randn(num, WIDTH) for t, num in nums.items()}
    out = build_model(config, schema).represent(
        [Block(adj, nums, nums)], x, {LIKES: torch.tensor([2])}
    )
    torch.testing.assert_close(out["person"], x["person"] / 2)
    torch.testing.assert_close(out["thing"], (x["thing"] + x["person"].sum(0) / 2**0.5) / 2)


@pytest.mark.parametrize("kind", ["lightgcn", "none"])
def test_what_is_trained_are_embedding_tables(kind: str) -> None:
    """Optimizers and data-parallel training find a parameter, which has a gradient of 0."""
    schema = Schema({"_N": WIDTH}, [PLAIN], WIDTH, target="_N")
    config = read_model(kind=kind, embedding={"dim": WIDTH})
    model = build_edge_model(config, schema, PLAIN, "dot", 1, None)
    assert [p.numel() for p in model.parameters()] == [1]
    with pytest.raises(ConfigError, match="has no weights"):
        build_edge_model(read_model(kind="none"), schema, PLAIN, "dot", 1, None)


def test_rows_of_unequal_widths_are_refused() -> None:
    schema = Schema({"person": 4, "thing": 6}, [LIKES, LIKED], 4, target="person")
    with pytest.raises(ConfigError, match=r"\[4, 6\] numbers, and lightgcn"):
        build_model(CONFIG, schema)
