"""Curves of any length, drawn with so many points that a page stays small."""

from __future__ import annotations

import math
from collections.abc import Sequence

Point = tuple[float, float]  # step, value

MOST = 2000  # points of a curve


def thin(points: Sequence[Point], most: int = MOST) -> list[Point]:
    """At most ``most`` of the points: of each stretch the lowest and the highest, and the first
    and the last of all, so that no spike is lost. A NaN stays where a whole stretch has nothing
    else, as a gap.
    """
    if len(points) <= most:
        return list(points)
    stretches = max(1, (most - 2) // 2)
    inner = points[1:-1]
    found = [points[0]]
    for part in _chunks(len(inner), stretches):
        stretch = inner[part.start : part.stop]
        finite = [index for index, (_, value) in enumerate(stretch) if math.isfinite(value)]
        if not finite:
            found.append(stretch[0])
            continue
        low = min(finite, key=lambda index: stretch[index][1])
        high = max(finite, key=lambda index: stretch[index][1])
        found += [stretch[index] for index in sorted({low, high})]
    return [*found, points[-1]]


def _chunks(number: int, most: int) -> list[range]:
    """``range(number)`` in at most ``most`` stretches of nearly equal length, none empty."""
    count = min(number, most)
    return [range(i * number // count, (i + 1) * number // count) for i in range(count)]
