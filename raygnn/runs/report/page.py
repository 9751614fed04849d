"""``report.html``: a run on one page that opens anywhere, without a network."""

from __future__ import annotations

import base64
import gzip
import json
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from raygnn import __version__
from raygnn.config.yaml_text import write_yaml
from raygnn.errors import InputError
from raygnn.runs.display import Display
from raygnn.runs.output import as_text
from raygnn.runs.report import charts, sections
from raygnn.runs.report.charts import Chart
from raygnn.runs.report.sections import Source
from raygnn.runs.run_directory import LOGS, REPORT, TOLD, Events, RunDir, local_path
from raygnn.util.files import storage_errors, write_atomic

_PAGE = Path(__file__).parent / "page"


def write_report(run: Path, out: str | Path | None = None) -> Path:
    """Write the page of a run in any state to ``out``, or ``report.html`` in the run directory, and
    return its absolute path; an older page is replaced atomically. Raises InputError if it cannot
    be written, or is no path."""
    file = (run / REPORT) if out is None else local_path(str(out), "the report")
    # file names may hold bytes that are no characters
    text = html(Source.read(run)).encode("utf-8", "replace").decode()
    with storage_errors(file, InputError, "write it elsewhere with --out"):
        write_atomic(file, text)
    return file


def record_notes(run: RunDir, show: Display) -> None:
    """Record all notes from now on for the run's report; commands that resume the run add more."""
    told = Events(run.path / LOGS / TOLD)
    told.tell(f"a command of process {os.getpid()} on {socket.gethostname()} began")
    show.on_note = told.tell


@contextmanager
def reported(run: RunDir, show: Display) -> Iterator[None]:
    """Write a report after the block, also after an error, if a run began."""
    try:
        yield
    finally:
        show.on_note = None
        if run.begun and run.lost is None:
            with suppress(Exception):  # it can be written again, and must not hide an error
                write_report(run.path)


def html(source: Source) -> str:
    """Return the page. All text from files is escaped."""
    training = charts.training_charts(source.records)
    steps = charts.step_charts(source.ranks, sections.hosts(source))
    used = charts.usage_charts(source.ranks)
    return render(
        "page.html",
        [*training, *steps, *used],
        name=source.path.name,
        path=source.shown,
        faults=source.faults,
        tiles=sections.tiles(source),
        started=sections.when(source.summary.get("started")),
        training=training,
        steps=steps,
        used=used,
        threshold_tables=sections.threshold_tables(source),
        slow_ranks=sections.slow_ranks(source),
        part_rows=sections.part_table(source),
        partition=source.partition,
        preflight=source.preflight,
        summary=source.summary,
        nodes=sections.nodes(source),
        events=sections.events(source),
        config=write_yaml(source.config) if source.config else "",
    )


def render(template: str, drawn: Sequence[Chart], **facts: Any) -> str:
    """Return the page of a template with its variables ``facts``; ``drawn`` are all charts of the
    page. All text is escaped."""
    import jinja2
    from markupsafe import Markup

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_PAGE),
        autoescape=True,
        undefined=jinja2.ChainableUndefined,  # what a file lacks is left out
        finalize=as_text,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(
        **facts,
        written=sections.when(datetime.now(UTC).isoformat(timespec="seconds")),
        version=__version__,
        style=Markup((_PAGE / "page.css").read_text(encoding="utf-8")),
        script=Markup((_PAGE / "page.js").read_text(encoding="utf-8")),
        plotly=Markup(_plotly() if drawn else ""),
        data=Markup(as_json({chart.name: asdict(chart) for chart in drawn})),
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
