"""``report.html``: a run on one page that opens anywhere, without a network."""

from __future__ import annotations

from pathlib import Path

from raygnn.errors import InputError
from raygnn.runs.report.source import Source
from raygnn.runs.run_directory import REPORT, local_path
from raygnn.util.files import storage_errors, write_atomic


def write_report(run: Path, out: str | Path | None = None) -> Path:
    """Write the page of a run, whatever state it is in; an older page is replaced whole.

    Args:
        run: its directory.
        out: the file; by default ``report.html`` in the run directory.

    Returns:
        Its absolute path.

    Raises:
        InputError: it cannot be written, or is no path.
    """
    from raygnn.runs.report.page import html

    file = (run / REPORT) if out is None else local_path(str(out), "the report")
    # names of files may hold what is no character
    text = html(Source.read(run)).encode("utf-8", "replace").decode()
    with storage_errors(file, InputError, "write it elsewhere with --out"):
        write_atomic(file, text)
    return file
