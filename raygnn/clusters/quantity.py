"""Amounts of memory as Kubernetes and docker write them."""

from __future__ import annotations

import re

_UNITS = {unit: 1024**i for i, unit in enumerate(("", "k", "m", "g", "t", "p"))}
_DECIMAL = {unit: 1000**i for i, unit in enumerate(("", "k", "m", "g", "t", "p"))}


def quantity(value: object, *, decimal: bool = False) -> int | None:
    """Bytes of ``"8Gi"``, ``"512m"``, ``"1.5g"`` or a number; None where it is no amount.

    Args:
        decimal: whether a unit without ``i`` is one of 1000, as in Kubernetes; else of 1024, as in
            docker.
    """
    found = re.fullmatch(
        r"\s*([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([kmgtp]?)(i?)b?\s*", str(value), re.IGNORECASE
    )
    if found is None:
        return None
    number, unit, binary = found.groups()
    return int(float(number) * (_DECIMAL if decimal and not binary else _UNITS)[unit.lower()])
