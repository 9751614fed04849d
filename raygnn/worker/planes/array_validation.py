"""Whether the values of a shard's arrays are what they are used for."""

from __future__ import annotations

from collections.abc import Mapping

from raygnn.errors import DataError
from raygnn.graph.staging.shard import Shard
from raygnn.graph.validate import check_weights
from raygnn.sampling.features import SCALE, Inputs, row_width


def check_scales(shard: Shard, inputs: Mapping[str, Inputs]) -> None:
    """That scaled features have one scale for each node.

    Raises:
        DataError: they have not.
    """
    for ntype, chosen in inputs.items():
        for name in chosen.scaled:
            scale = shard.node_data[ntype][name + SCALE]
            if row_width(scale) > 1:
                raise DataError(
                    f"array {name + SCALE!r} of node type {ntype!r} has rows of "
                    f"{list(scale.shape[1:])}, expected one number for each node",
                    remedy=f"give each node one scale, or rename it so that {name!r} has none",
                )


def check_edge_weights(shard: Shard, name: str | None) -> None:
    """That neighbours can be drawn in proportion to an edge array; see `check_weights`.

    Args:
        name: of the array; None = they are drawn alike.
    """
    for etype, rows in shard.topology.items():
        if name is not None and name in rows.data:
            check_weights(name, etype, rows.data[name])
