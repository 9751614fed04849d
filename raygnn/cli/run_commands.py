"""Commands about runs: runs, diagnose, report."""

from __future__ import annotations

import argparse
import os
from typing import Any

from raygnn.cli.options import command, print_json, print_result, run_command, storage
from raygnn.runs.output import say


def add(commands: Any) -> None:
    """Add them to the parser."""
    runs = command(
        commands,
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
    storage(runs, "where they are (default: runs)")
    run_command(commands, "diagnose", _diagnose, "say what happened to a run, and what to do")
    report = run_command(commands, "report", _report, "write a run's report.html as the run is now")
    report.add_argument(
        "--out", metavar="FILE", help="where to write it (default: report.html in the run)"
    )


def _runs(args: argparse.Namespace) -> int:
    from raygnn.runs.run import list_runs, row_of
    from raygnn.runs.run_directory import read_storage

    runs = list_runs(args.storage)
    facts: Any = [run.to_dict() for run in runs]
    tables = {f"runs in {read_storage(args.storage)}": [row_of(run) for run in runs]}
    if address := args.address or os.environ.get("RAY_API_SERVER_ADDRESS"):
        from raygnn.jobs.server import JobServer
        from raygnn.jobs.submit import rows_of

        server = JobServer(address)
        jobs = rows_of(server)
        facts = {"runs": facts, "jobs": jobs}
        tables = {f"jobs on {server.address}": jobs, **(tables if runs else {})}
    print_json(args, facts)
    if not args.json:
        for title, rows in tables.items():
            _table(title, rows)
    return 0


def _table(title: str, rows: list[dict[str, Any]]) -> None:
    from raygnn.runs.display import Display

    if rows:
        Display().table(title, list(rows[0]), [list(row.values()) for row in rows])
    else:
        say(f"no {title}")


def _diagnose(args: argparse.Namespace) -> int:
    from raygnn.runs.diagnose import diagnose

    diagnosis = diagnose(args.name, args.storage)
    if args.json:
        print_json(args, diagnosis.to_dict())
    else:
        from raygnn.runs.diagnose.diagnosis_display import show
        from raygnn.runs.display import Display

        show(diagnosis, Display())
    return 0


def _report(args: argparse.Namespace) -> int:
    from raygnn.runs.run import open_remains

    file = str(open_remains(args.name, args.storage).report(args.out))
    print_result(args, {"report": file}, file)
    return 0
