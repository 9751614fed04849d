"""Numbers with their units, as people read them."""

from __future__ import annotations


def size(count: float | None) -> str:
    """Bytes: ``512 MiB``, ``1.4 GiB``; empty for None."""
    if count is None:
        return ""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.1f} {unit}" if unit == "GiB" else f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:,.1f} TiB"
