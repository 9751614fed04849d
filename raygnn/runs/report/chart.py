"""A chart: traces as plotly takes them, plain data that a page or a figure is made of."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from raygnn.runs.report.thin import Point, thin

Trace = dict[str, Any]

COLORS = (
    "#3f7fd1",
    "#d9822b",
    "#3aa17e",
    "#c9485b",
    "#8a6fd1",
    "#b59a2a",
    "#3fa3b8",
    "#8a929c",
)
PART_COLORS = {
    "wait": "#d9822b",
    "transfer": "#8a6fd1",
    "forward": "#6aa5e8",
    "backward": "#3568b8",
    "compute": "#3f7fd1",
    "communicate": "#c7a52a",
    "peers": "#c9485b",
    "optimizer": "#3aa17e",
    "rest": "#8a929c",
    "sample": "#3fa3b8",
    "features": "#b06fc0",
    "exchange": "#b59a2a",
}


@dataclass(frozen=True)
class Chart:
    """One chart of a page.

    Attributes:
        name: what the page calls it in its markup; letters and hyphens.
        title: what it shows, with the unit.
        traces: plotly's, as dicts of plain types.
        layout: more of plotly's layout.
        variants: other traces to choose instead, by what they show.
        about: one sentence on how to read it.
    """

    name: str
    title: str
    traces: Sequence[Trace]
    height: int = 260
    layout: Mapping[str, Any] = field(default_factory=dict)
    variants: Mapping[str, Sequence[Trace]] = field(default_factory=dict)
    about: str = ""

    @property
    def choices(self) -> list[str]:
        return list(self.variants)

    def data(self) -> dict[str, Any]:
        """What the page's script draws."""
        variants = list(self.variants.values()) or [self.traces]
        return {"variants": variants, "layout": dict(self.layout), "height": self.height}


def curve(name: str, points: Sequence[Point], color: str, **more: Any) -> Trace:
    """A line through the points; a marker where there is but one."""
    kept = thin(points)
    mode = "lines+markers" if len(kept) <= 30 else "lines"
    return {
        "type": "scatter",
        "mode": mode,
        "name": escape(name),
        "x": [step for step, _ in kept],
        "y": [rounded(value) for _, value in kept],
        "line": {"color": color, "width": 2},
        "marker": {"size": 5},
        **more,
    }


def rounded(value: float) -> float | None:
    """Five digits of it, which is more than a screen shows; None, a gap, where it is no number."""
    return float(f"{value:.5g}") if math.isfinite(value) else None


def as_json(value: Any) -> str:
    """JSON that can stand in a page: nothing in it ends a script."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text
