"""Verbs about runs that there are: runs, diagnose, report."""

from __future__ import annotations

import argparse
import os
from typing import Any

from raygnn.cli.options import JSON, print_json, run_verb, verb
from raygnn.errors import InputError
from raygnn.runs.output import say


def add(verbs: Any) -> None:
    """Add them to the parser."""
    runs = verb(verbs, "runs", _runs, "list the runs in a storage, the latest first")
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
    from raygnn.runs.display import Display
    from raygnn.runs.run import list_runs

    runs = [run.to_dict() for run in list_runs(args.storage)]
    if args.json:
        print_json(args, runs)
    elif not runs:
        say(f"no runs in {os.path.abspath(args.storage)}")
    else:
        columns = ("name", "status", "started", "steps")
        rows = [(*(run.get(column) for column in columns), _metrics(run)) for run in runs]
        Display().table(f"runs in {os.path.abspath(args.storage)}", (*columns, "metrics"), rows)
    return 0


def _diagnose(args: argparse.Namespace) -> int:
    from raygnn.runs.diagnose import diagnose

    found = diagnose(args.name, args.storage)
    if args.json:
        print_json(args, found.to_dict())
    else:
        from raygnn.runs.diagnose.text import show
        from raygnn.runs.display import Display

        show(found, Display())
    return 0


def _report(args: argparse.Namespace) -> int:
    from raygnn.runs.run import open_run, remains

    try:
        run = open_run(args.name, args.storage)
    except InputError:
        left = remains(args.name, args.storage)
        if left is None:
            raise
        run = left
    file = run.report(args.out)
    if args.json:
        print_json(args, {"report": str(file)})
    else:
        say(str(file))
    return 0


def _metrics(run: dict[str, Any]) -> str:
    numbers = (run.get("metrics") or {}).items()
    return ", ".join(f"{key} {value:.4f}" for key, value in numbers if isinstance(value, float))
