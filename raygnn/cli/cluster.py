"""Verbs about clusters, before there is one: cluster check."""

from __future__ import annotations

import argparse
from typing import Any

from raygnn.cli.options import JSON, print_json, verb
from raygnn.errors import PreflightError
from raygnn.runs.output import say


def add(verbs: Any) -> None:
    """Add them to the parser."""
    cluster = verb(verbs, "cluster", None, "look at what describes a cluster")
    inner = cluster.add_subparsers(title="commands", metavar="COMMAND", required=True)
    check = verb(
        inner,
        "check",
        _check,
        "check a file for `ray up`, or manifests for KubeRay; offline, and nothing is started",
    )
    check.add_argument("file", metavar="FILE", help="the YAML file")
    check.add_argument("--json", action="store_true", help=JSON)


def _check(args: argparse.Namespace) -> int:
    from raygnn.clusters.check import check

    report = check(args.file)
    if args.json:
        print_json(args, report.to_dict())
    else:
        for found in report.findings:
            place = f"line {found.values['line']}: {found.values['key']}".rstrip(": ")
            say(f"{found.severity} [{found.check}] {place}: {found.what}\n  → {found.remedy}")
        say(report.verdict)
    return 0 if report.ok else PreflightError.exit_code
