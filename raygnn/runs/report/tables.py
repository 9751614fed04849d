"""What a report says in words and numbers: tiles, preflight, events, advice, configuration."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from raygnn.config import places
from raygnn.config.yaml_text import write_yaml
from raygnn.runs.metrics_files import Record, number
from raygnn.runs.progress_line import clock
from raygnn.runs.report.source import Source

_GOOD, _BAD = "good", "bad"
_STATUS = {"done": _GOOD, "running": "", "failed": _BAD, "killed": _BAD, "interrupted": "warn"}
_SEVERITY = {"error": _BAD, "warn": "warn", "warning": "warn", "info": "", "hint": ""}
_ORDER = {"test": 0, "val": 1}
_MOST_METRICS = 6
_MOST_SLOW = 8


@dataclass(frozen=True)
class Tile:
    """One figure at the head of the page.

    Attributes:
        mood: ``good``, ``warn``, ``bad`` or nothing.
    """

    name: str
    value: str
    note: str = ""
    mood: str = ""


def tiles(source: Source) -> list[Tile]:
    """The figures of a run that matter most, as far as there are any."""
    summary, records = source.summary, source.records
    last = records[-1] if records else {}
    found = [Tile("status", source.status, mood=_STATUS.get(source.status, ""))]
    metrics = {k: number(v) for k, v in mapping(summary.get("metrics")).items()}
    metrics = {k: v for k, v in metrics.items() if math.isfinite(v)} or _latest(records)
    ranked = sorted(metrics, key=lambda key: _ORDER.get(key.split("/")[0], 2))
    for key in [key for key in ranked if not key.endswith("/loss")][:_MOST_METRICS]:
        found.append(Tile(key, _metric(metrics[key])))
    losses = [number(r["train/loss"]) for r in records if "train/loss" in r]
    if losses:
        finite = math.isfinite(losses[-1])
        found.append(Tile("training loss", f"{losses[-1]:.4g}", mood="" if finite else _BAD))
    step = summary.get("steps", last.get("step"))
    if step is not None:
        epochs = summary.get("epochs")
        found.append(Tile("steps", text(step), f"{text(epochs)} epochs" if epochs else ""))
    speed = number(summary.get("seeds_per_second", last.get("seeds_per_second")))
    if math.isfinite(speed):
        found.append(Tile("seeds/s", f"{speed:,.0f}"))
    seconds = mapping(summary.get("seconds"))
    took = number(seconds.get("total", last.get("time")))
    if math.isfinite(took):
        first = number(seconds.get("first_step"))
        note = f"first step after {clock(first)}" if math.isfinite(first) else ""
        found.append(Tile("time", clock(took), note))
    workers = summary.get("workers") or len(listing(summary.get("ranks"))) or None
    if workers:
        starts = number(summary.get("starts"))
        again = f"{starts:.0f} starts" if starts > 1 else ""
        found.append(Tile("workers", text(workers), again, "warn" if again else ""))
    skipped = number(mapping(summary.get("skipped")).get("steps"))
    if skipped > 0:
        found.append(Tile("steps left out", f"{skipped:,.0f}", "not finite", "warn"))
    return found


def _metric(value: float) -> str:
    usual = value == 0 or 1e-3 <= abs(value) < 1e4
    return f"{value:.4f}" if usual else f"{value:,.5g}"


def _latest(records: Sequence[Record]) -> dict[str, float]:
    """The newest value of each metric, of a run that has no summary yet."""
    return {
        key: number(value)
        for record in records
        for key, value in record.items()
        if key.startswith(("val/", "test/")) and math.isfinite(number(value))
    }


def findings(source: Source) -> list[dict[str, Any]]:
    """Those of the preflight: ``severity``, ``mood``, ``check``, ``what``, ``remedy``, ``nodes``
    (text, all of them)."""
    return [
        {
            "severity": text(each.get("severity")),
            "mood": _SEVERITY.get(text(each.get("severity")), ""),
            "check": text(each.get("check")),
            "what": text(each.get("what")),
            "remedy": text(each.get("remedy")),
            "nodes": ", ".join(map(text, listing(each.get("nodes")))),
        }
        for each in listing(source.preflight.get("findings"))
        if isinstance(each, dict)
    ]


def nodes(source: Source) -> list[dict[str, str]]:
    """Those that the preflight looked at, a row each: column → cell."""
    links = {
        text(link.get("source")): link
        for link in listing(source.preflight.get("links"))
        if isinstance(link, dict)
    }
    rows = []
    for node in listing(source.preflight.get("nodes")):
        if not isinstance(node, dict):
            continue
        gpus = [mapping(gpu).get("model") for gpu in listing(node.get("gpus"))]
        link = links.get(text(node.get("node")), {})
        bits = number(link.get("mbits"))
        rows.append(
            {
                "node": text(node.get("node")),
                "address": text(mapping(node.get("network")).get("address")),
                "processor": text(node.get("cpu")),
                "CPUs": text(node.get("cpus")),
                "GPUs": ", ".join(map(text, gpus)) or "none",
                "memory free": size(node.get("memory_available")),
                "disk free": size(node.get("disk_free")),
                "link to the next": f"{bits:,.0f} Mbit/s" if math.isfinite(bits) else "",
                "python": text(node.get("python")),
                "problem": text(node.get("problem")),
            }
        )
    used = [key for key in (rows[0] if rows else {}) if any(row[key] for row in rows)]
    return [{key: row[key] for key in used} for row in rows]


def events(source: Source) -> list[dict[str, str]]:
    """``when`` (UTC), ``after`` (since the first of them) and ``text``, in order."""
    times = [event["time"] for event in source.events if math.isfinite(event["time"])]
    return [
        {
            "when": _utc(event["time"]),
            "after": clock(event["time"] - times[0]) if math.isfinite(event["time"]) else "",
            "text": event["text"],
        }
        for event in source.events
    ]


def advice(source: Source) -> list[dict[str, Any]]:
    """What could be set otherwise: ``what``, ``expect``, ``options`` (arguments of a command),
    ``numerics`` (whether it changes what is computed), ``mood``."""
    return [
        {
            "mood": _SEVERITY.get(text(each.get("severity")), ""),
            "what": text(each.get("what")),
            "expect": text(each.get("expect")),
            "options": " ".join(
                f"--set {shlex.quote(text(key))}" for key in listing(each.get("set"))
            ),
            "numerics": each.get("numerics") is True,
        }
        for each in listing(source.summary.get("advice"))
        if isinstance(each, dict)
    ]


def slow_ranks(source: Source) -> list[dict[str, str]]:
    """Mean times of the ranks that were slow most often; column → cell."""
    ranks = [mapping(rank) for rank in listing(source.summary.get("ranks"))]
    ranks.sort(key=lambda rank: -number(rank.get("slow")))
    return [
        {
            "rank": text(rank.get("rank")),
            "host": text(rank.get("host")),
            "busy, ms a batch": _thousand(rank.get("busy")),
            "waits for batches, ms": _thousand(rank.get("wait")),
            "slow in": f"{number(rank.get('slow')):.0%} of the windows",
        }
        for rank in ranks[:_MOST_SLOW]
    ]


def hosts(source: Source) -> list[str]:
    """Where each rank ran, as far as that is known and tells ranks apart."""
    found = {
        rank["rank"]: text(rank.get("host"))
        for rank in listing(source.summary.get("ranks"))
        if isinstance(rank, dict) and isinstance(rank.get("rank"), int)
    }
    if len(set(found.values())) < 2 or not all(0 <= rank < 2**16 for rank in found):
        return []
    return [found.get(rank, "") for rank in range(max(found) + 1)]


def machine(source: Source) -> dict[str, str]:
    """Versions and how the ranks communicated."""
    rows = {
        f"version of {name}": text(version)
        for name, version in mapping(source.summary.get("versions")).items()
    }
    found = mapping(source.preflight.get("communication"))
    if found.get("backend"):
        rows["communication"] = f"{text(found['backend'])}: {text(found.get('why'))}"
    if source.summary.get("topology"):
        rows["topology"] = text(source.summary["topology"])
    return rows


def when(moment: Any) -> str:
    """A time in ISO 8601 in UTC, for people."""
    return text(moment).replace("T", " ").replace("+00:00", " UTC")


def config_text(source: Source) -> str:
    """The configuration as YAML."""
    return write_yaml(source.config) if source.config else ""


def mapping(value: Any) -> Mapping[str, Any]:
    """The value where it is a mapping; else an empty one."""
    return value if isinstance(value, dict) else {}


def listing(value: Any) -> list[Any]:
    """The value where it is a list; else an empty one."""
    return value if isinstance(value, list) else []


def text(value: Any) -> str:
    """For people: whole numbers grouped by thousands, nothing for None."""
    if value is None:
        return ""
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def size(value: Any) -> str:
    """Bytes with a unit."""
    count = number(value)
    return places.size(count) if math.isfinite(count) else ""


def _thousand(value: Any) -> str:
    return f"{1e3 * number(value):,.2f}"


def _utc(seconds: float) -> str:
    try:
        when = datetime.fromtimestamp(seconds, timezone.utc)
    except (ValueError, OverflowError, OSError):
        return ""
    return when.strftime("%Y-%m-%d %H:%M:%S")
