"""Verbs about runs that there are: runs, diagnose, report."""

from __future__ import annotations

import argparse
import os
from typing import Any

from raygnn.cli.options import JSON, print_json, run_verb, verb
from raygnn.runs.output import say


def add(verbs: Any) -> None:
    """Add them to the parser."""
    runs = verb(
        verbs,
        "runs",
        _runs,
        "list the runs in a storage, the latest first, and a cluster's jobs: their state, how far "
        "they are, a metric, and how long ago they began",
    )
    runs.add_argument(
        "--address",
        metavar="URL",
        help="of a cluster's job server: list its jobs, too (default: RAY_API_SERVER_ADDRESS)",
    )
    runs.add_argument(
        "--storage", default="runs", metavar="DIR", help="where they are (default: runs)"
    )
    runs.add_argument("--json", action="store_true", help=JSON)

    run_verb(verbs, "diagnose", _diagnose, "say what happened to a run, and what to do")
    report = run_verb(verbs, "report", _report, "write a run's report.html as the run is now")
    report.add_argument(
        "--out", metavar="FILE", help="where to write it (default: report.html in the run)"
    )


def _runs(args: argparse.Namespace) -> int:
    from raygnn.runs.run import list_runs, row_of

    runs = list_runs(args.storage)
    address = args.address or os.environ.get("RAY_API_SERVER_ADDRESS")
    if not address:
        if args.json:
            print_json(args, [run.to_dict() for run in runs])
        else:
            _table(f"runs in {os.path.abspath(args.storage)}", [row_of(run) for run in runs])
        return 0
    from raygnn.jobs.server import JobServer
    from raygnn.jobs.submit import rows_of

    server = JobServer(address)
    jobs = rows_of(server)
    if args.json:
        print_json(args, {"runs": [run.to_dict() for run in runs], "jobs": jobs})
        return 0
    _table(f"jobs on {server.address}", jobs)
    if runs:
        _table(f"runs in {os.path.abspath(args.storage)}", [row_of(run) for run in runs])
    return 0


def _table(title: str, rows: list[dict[str, Any]]) -> None:
    from raygnn.runs.display import Display

    if rows:
        Display().table(title, list(rows[0]), [list(row.values()) for row in rows])
    else:
        say(f"no {title}")


def _diagnose(args: argparse.Namespace) -> int:
    from raygnn.runs.diagnose import diagnose

    found = diagnose(args.name, args.storage)
    if args.json:
        print_json(args, found.to_dict())
    else:
        from raygnn.runs.diagnose.diagnosis_display import show
        from raygnn.runs.display import Display

        show(found, Display())
    return 0


def _report(args: argparse.Namespace) -> int:
    from raygnn.runs.run import open_remains

    file = open_remains(args.name, args.storage).report(args.out)
    if args.json:
        print_json(args, {"report": str(file)})
    else:
        say(str(file))
    return 0
