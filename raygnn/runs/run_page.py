"""``report.html``: a run on one page that opens anywhere, without a network. Files of the run may
be damaged."""

from __future__ import annotations

import base64
import gzip
import json
import math
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from decimal import ROUND_FLOOR, Context
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from raygnn import __version__
from raygnn.config.places import Uri, size
from raygnn.config.yaml_text import write_yaml
from raygnn.errors import DataError, InputError
from raygnn.runs import charts
from raygnn.runs.charts import Chart
from raygnn.runs.display import Display
from raygnn.runs.metrics_files import (
    RANKS,
    Record,
    last_lines,
    number,
    of_class,
    parse,
    split_order,
)
from raygnn.runs.output import as_text
from raygnn.runs.progress_line import clock
from raygnn.runs.run_directory import (
    EVENTS,
    LOGGERS,
    LOGS,
    METRICS,
    PARTITION,
    PREFLIGHT,
    REPORT,
    SCALING,
    TOLD,
    Events,
    RunDir,
    local_path,
    read_config,
    read_status,
    read_summary,
)
from raygnn.util.files import open_regular, read_json, storage_errors, write_atomic

_GOOD, _WARN, _BAD = "good", "warn", "bad"
_PAGE = Path(__file__).parent / "page"
_STATUS = {"done": _GOOD, "running": "", "failed": _BAD, "killed": _BAD, "interrupted": _WARN}
_MOST_METRICS = 6
_MOST_SLOW = 8
_MOST_PARTS = 512
# counts of a part of the graph
PART_COUNTS = {
    "nodes": "nodes",
    "edges": "in-edges",
    "training_nodes": "training nodes",
    "halo": "nodes of others",
    "cut": "edges from others",
}
# bytes of a file's records that are used; of a larger file, every n-th line
_MOST, MOST_OF_RANKS = 32 * 2**20, 16 * 2**20
_LONGEST = 16 * 2**20  # bytes of a line
_EVALUATED = (b'"val/', b'"test/')  # of few lines
_MOST_EVENTS = 1000

T = TypeVar("T")


def write_report(run: Path, out: str | Path | None = None) -> Path:
    """Write the page of a run in any state to ``out``, or ``report.html`` in the run directory, and
    return its absolute path; an older page is replaced atomically. Raises InputError if it cannot
    be written, or is not a valid path."""
    file = (run / REPORT) if out is None else local_path(str(out), "the report")
    # file names may contain bytes that are not UTF-8
    text = html(Source.read(run)).encode("utf-8", "replace").decode()
    with storage_errors(file, InputError, "write it elsewhere with --out"):
        write_atomic(file, text)
    return file


@contextmanager
def reported(run: RunDir, show: Display) -> Iterator[Callable[[], None]]:
    """Write a report after the block, also after an error, if a run began. Yields a function that
    records all later notes for the report; commands that resume the run add more."""
    notes = Events(run.path / LOGS / TOLD)

    def record_notes() -> None:
        notes.notify(f"a command of process {os.getpid()} on {socket.gethostname()} began")
        show.on_note = notes.notify

    try:
        yield record_notes
    finally:
        show.on_note = None
        notes.close()
        if run.begun and run.lost is None:
            with suppress(Exception):  # it can be written again, and must not hide an error
                write_report(run.path)


def html(source: Source) -> str:
    """Return the page. All text from files is escaped."""
    training = charts.training_charts(source.records)
    steps = charts.step_charts(source.ranks, hosts(source))
    used = charts.usage_charts(source.ranks)
    return render(
        "page.html",
        [*training, *steps, *used],
        name=source.path.name,
        path=source.shown,
        faults=source.faults,
        tiles=tiles(source),
        started=when(source.summary.get("started")),
        training=training,
        steps=steps,
        used=used,
        threshold_tables=threshold_tables(source),
        slow_ranks=slow_ranks(source),
        part_rows=part_table(source),
        partition=source.partition,
        preflight=source.preflight,
        summary=source.summary,
        nodes=nodes(source),
        events=events(source),
        config=write_yaml(source.config) if source.config else "",
    )


def render(template: str, plotted: Sequence[Chart], **facts: Any) -> str:
    """Return the page of a template with its variables ``facts``; ``plotted`` are all charts of the
    page. All text is escaped."""
    import jinja2
    from markupsafe import Markup

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_PAGE),
        autoescape=True,
        undefined=jinja2.ChainableUndefined,  # missing facts are omitted
        finalize=as_text,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(
        **facts,
        written=when(datetime.now(UTC).isoformat(timespec="seconds")),
        version=__version__,
        style=Markup((_PAGE / "page.css").read_text(encoding="utf-8")),
        script=Markup((_PAGE / "page.js").read_text(encoding="utf-8")),
        plotly=Markup(_plotly() if plotted else ""),
        data=Markup(as_json({chart.name: asdict(chart) for chart in plotted})),
    )


@cache
def _plotly() -> str:
    """Return plotly's script, gzipped, as base64: 2.0 MB in place of 4.8."""
    from plotly.offline import get_plotlyjs

    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), mtime=0)).decode()


def as_json(value: Any) -> str:
    """Return JSON that can be embedded in a page: nothing in it ends a script."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


@dataclass(frozen=True)
class Source:
    """Readable contents of a run."""

    path: Path
    status: str
    config: dict[str, Any]
    summary: dict[str, Any]
    preflight: dict[str, Any]
    partition: dict[str, Any]
    records: list[Record]  # of ``metrics.jsonl``, those with a step
    ranks: list[Record]  # of ``ranks.jsonl``, likewise
    # ``time`` (seconds since the epoch) and ``text``, in order
    events: list[dict[str, Any]]
    faults: list[str] = field(default_factory=list)  # descriptions of unreadable files

    @property
    def shown(self) -> str:
        """Path or URI of the run."""
        storage = str(self.config.get("storage"))
        return str(self.path) if "://" not in storage else (Uri(storage) / self.path.name).shared

    @classmethod
    def read(cls, path: Path) -> Source:
        faults: list[str] = []

        def read(get: Callable[[], T], otherwise: T) -> T:
            try:
                return get()
            except DataError as error:
                faults.append(str(error))
                return otherwise

        return cls(
            path=path,
            status=read(lambda: read_status(path), "unknown"),
            config=read(lambda: read_config(path), {}),
            summary=read(lambda: read_summary(path), {}),
            preflight=read(lambda: read_json(path / PREFLIGHT), {}),
            partition=read(lambda: read_json(path / PARTITION), {}),
            records=read_some(path / METRICS, _MOST, _EVALUATED),
            ranks=read_some(path / RANKS, MOST_OF_RANKS),
            events=_events(path / LOGS),
            faults=faults,
        )


def read_some(path: Path, most: int, special: Sequence[bytes] = ()) -> list[Record]:
    """Read the records with a step from a file of any length; other lines are skipped. Of a file of
    more than ``most`` bytes, every n-th line is used, and the last, and lines with ``special``
    texts, if they are not as many."""
    kept, last, left = list[bytes](), b"", 2 * most
    with suppress(OSError), open_regular(path) as file:
        every = os.fstat(file.fileno()).st_size // most + 1
        for index, line in enumerate(iter(lambda: file.readline(_LONGEST), b"")):
            if not line.endswith(b"\n"):
                break  # incomplete, perhaps only so far
            last = line
            if index % every == 0 or (left > 0 and any(word in line for word in special)):
                kept.append(line)
                left -= len(line)
    if kept and kept[-1] is not last:
        kept.append(last)
    return [r for r in map(parse, kept) if r and type(r.get("step")) is int]


def _events(logs: Path) -> list[dict[str, Any]]:
    events = _lines(logs / TOLD)
    reported = {event["text"] for event in events}
    for name in (EVENTS, SCALING, LOGGERS):
        events += [event for event in _lines(logs / name) if event["text"] not in reported]
    return sorted(events, key=lambda event: event["time"])[-_MOST_EVENTS:]


def _lines(path: Path) -> list[dict[str, Any]]:
    records = map(parse, last_lines(path, _MOST))
    return [record for record in records if record and record.keys() >= {"time", "text"}]


@dataclass(frozen=True)
class Tile:
    """One figure at the head of the page."""

    name: str
    value: str
    note: str = ""
    mood: str = ""  # ``good``, ``warn``, ``bad`` or nothing


def tiles(source: Source) -> Iterator[Tile]:
    """Yield the most important figures of a run, as far as available."""
    summary, records = source.summary, source.records
    last = records[-1] if records else {}
    yield Tile("status", source.status, mood=_STATUS.get(source.status, ""))
    metrics = {key: number(value) for key, value in (summary.get("metrics") or {}).items()}
    metrics = {k: v for k, v in metrics.items() if math.isfinite(v)} or _latest(records)
    names = [name for name in sorted(metrics, key=split_order) if not name.endswith("/loss")]
    for key in names[:_MOST_METRICS]:
        usual = metrics[key] == 0 or 1e-3 <= abs(metrics[key]) < 1e4
        value = f"{metrics[key]:.4f}" if usual else f"{metrics[key]:,.5g}"
        yield Tile(key + of_class(key, summary), value)
    losses = [number(record["train/loss"]) for record in records if "train/loss" in record]
    if losses:
        mood = "" if math.isfinite(losses[-1]) else _BAD
        yield Tile("training loss", f"{losses[-1]:.4g}", mood=mood)
    step = summary.get("steps", last.get("step"))
    if step is not None:
        epochs = summary.get("epochs")
        yield Tile("steps", as_text(step), f"{as_text(epochs)} epochs" if epochs else "")
    speed = number(summary.get("seeds_per_second", last.get("seeds_per_second")))
    if math.isfinite(speed):
        yield Tile("seeds/s", f"{speed:,.0f}")
    seconds = summary.get("seconds") or {}
    took = number(seconds.get("total", last.get("time")))
    if math.isfinite(took):
        first = number(seconds.get("first_step"))
        note = f"first step after {clock(first)}" if math.isfinite(first) else ""
        yield Tile("time", clock(took), note)
    if workers := summary.get("workers") or len(summary.get("ranks") or ()):
        starts = summary.get("starts") or 1
        note = f"{starts} starts" if starts > 1 else ""
        yield Tile("workers", as_text(workers), note, _WARN if note else "")
    if skipped := (summary.get("skipped") or {}).get("steps"):
        yield Tile("skipped steps", f"{skipped:,}", "not finite", _WARN)


def _latest(records: Sequence[Record]) -> dict[str, float]:
    return {
        key: number(value)
        for record in records
        for key, value in record.items()
        if key.startswith(("val/", "test/")) and math.isfinite(number(value))
    }


def nodes(source: Source) -> list[dict[str, str]]:
    """Return the table of nodes in the preflight's report, without empty columns."""
    rows = source.preflight.get("table") or []
    used = [key for key in (rows[0] if rows else ()) if any(row.get(key) for row in rows)]
    return [{key: as_text(row.get(key)) for key in used} for row in rows]


def events(source: Source) -> list[dict[str, str]]:
    """Return ``when`` (UTC), ``after`` (since the first) and ``text`` of each event, in order."""
    return [
        {
            "when": datetime.fromtimestamp(event["time"], UTC).strftime("%Y-%m-%d %H:%M:%S"),
            "after": clock(event["time"] - source.events[0]["time"]),
            "text": event["text"],
        }
        for event in source.events
    ]


def slow_ranks(source: Source) -> list[dict[str, str]]:
    """Return mean times of the ranks that were slow most often: column → cell."""
    ranks = sorted(source.summary.get("ranks") or [], key=lambda rank: -rank.get("slow", 0.0))
    return [
        {
            "rank": as_text(rank["rank"]),
            "host": as_text(rank.get("host")),
            "busy, ms a batch": f"{1e3 * rank.get('busy', 0.0):,.2f}",
            "waits for batches, ms": f"{1e3 * rank.get('wait', 0.0):,.2f}",
            "slow in": f"{rank.get('slow', 0.0):.0%} of the windows",
        }
        for rank in ranks[:_MOST_SLOW]
    ]


def threshold_tables(source: Source) -> list[tuple[str, list[dict[str, str]]]]:
    """Return precision and recall at thresholds on a class's probability: heading and rows, for
    each task that has some."""
    tables = []
    classes = source.summary.get("positive") or {}
    for task, rows in (source.summary.get("thresholds") or {}).items():
        heading = f"Thresholds on the probability of {classes.get(task, 1)}, validation split"
        cells = [
            {
                **{key: _floor(row.get(key)) for key in ("threshold", "calibrated")},
                **{key: f"{number(row.get(key)):.1%}" for key in ("precision", "recall")},
                "selected": f"{number(row.get('share')):.2%}",
            }
            for row in rows
        ]
        if cells:
            tables.append((f"{heading}: {task}" if task else heading, cells))
    return tables


def hosts(source: Source) -> list[str]:
    """Return the host of each rank; none if they are unknown, or all the same."""
    ranks = source.summary.get("ranks") or []
    by_rank = {rank["rank"]: as_text(rank.get("host")) for rank in ranks}
    several = len({*by_rank.values()}) > 1
    return [by_rank.get(rank, "") for rank in range(max(by_rank) + 1)] if several else []


def part_table(source: Source) -> list[dict[str, Any]]:
    """Return a row for each part, with counts over all types, and the total: column → cell."""
    parts = source.partition.get("parts") or []
    if not parts:
        return []
    total = {key: sum(part[key] for part in parts) for key in (*PART_COUNTS, "bytes")}
    return [
        {
            "part": name,
            **{title: f"{counts[key]:,}" for key, title in PART_COUNTS.items()},
            "bytes": size(counts["bytes"]),
        }
        for name, counts in [*enumerate(parts[:_MOST_PARTS]), ("total", total)]
    ]


def when(moment: Any) -> str:
    """Format a time that is in ISO 8601."""
    return as_text(moment).replace("T", " ").replace("+00:00", " UTC")


def _floor(value: Any) -> str:
    """Format a float32 number, rounded down to digits that tell it from the next lower one."""
    found = Context(prec=9, rounding=ROUND_FLOOR).create_decimal_from_float(number(value))
    return f"{found:.9g}" if found.is_finite() else ""
