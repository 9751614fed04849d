"""Edge lists: undirected pairs to directed edges."""

from __future__ import annotations

import numpy as np

from raygnn.graph.sources.convert import Array


def both_directions(a: Array, b: Array, num: int) -> tuple[Array, Array]:
    """Each pair ``(a[i], b[i])`` as two directed edges, every edge once.

    Args:
        a, b: int64 ``[P]``, ids in ``0 … num-1``; duplicates and either order are fine.
        num: number of nodes, below 2^31.

    Returns:
        Sources and destinations, int64 ``[E]``, in order of destination, then source. A
        self-loop is one edge.
    """
    keys = np.concatenate((a * num + b, b * num + a))
    keys.sort()
    fresh = np.empty(len(keys), dtype=bool)
    fresh[:1] = True
    np.not_equal(keys[1:], keys[:-1], out=fresh[1:])
    keys = keys[fresh]
    target = keys // num
    keys -= target * num
    return keys, target
