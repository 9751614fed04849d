"""Arguments and output that commands share."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

from raygnn.runs.output import printable, say

Handler = Callable[[argparse.Namespace], int]

JSON = """print the result as JSON alone; of an error, {"ok": false, "error": {"what": …, "where":
…, "remedy": …, "rank": …, "run": …}}"""


def command(commands: Any, name: str, run: Handler, text: str) -> argparse.ArgumentParser:
    """Add a command with ``--json``."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=text, description=text, allow_abbrev=False
    )
    parser.add_argument("--json", action="store_true", help=JSON)
    parser.set_defaults(run=run, verb=name)
    return parser


def job_command(
    commands: Any, name: str, run: Handler, text: str, *, optional: bool = False
) -> argparse.ArgumentParser:
    """Add a command with a configuration."""
    parser = command(commands, name, run, text)
    number = "?" if optional else None
    parser.add_argument("config", metavar="CONFIG", nargs=number, help="the job's YAML file")
    text = "override a key, such as train.lr=0.1; may be repeated"
    overrides(parser, text + ("; without CONFIG, a key of cluster" if optional else ""))
    return parser


def run_command(commands: Any, name: str, run: Handler, text: str) -> argparse.ArgumentParser:
    """Add a command about a run."""
    parser = command(commands, name, run, text)
    text = "its directory or URI, or its name in the storage"
    parser.add_argument("name", metavar="RUN", help=text)
    storage(parser, "the storage (default: runs)")
    return parser


def overrides(parser: argparse.ArgumentParser, text: str) -> None:
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help=text)
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="show Ray's and Lightning's logs"
    )


def storage(parser: argparse.ArgumentParser, text: str) -> None:
    parser.add_argument("--storage", default="runs", metavar="PLACE", help=text)


def overwrite_or_resume(parser: argparse.ArgumentParser) -> None:
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--overwrite", action="store_true", help="replace a run of the same name")
    choice.add_argument(
        "--resume", action="store_true", help="continue an earlier run of the same name"
    )


def load(args: argparse.Namespace, **sections: Any) -> Any:
    from raygnn.config.load import load_config
    from raygnn.config.values import find_user_modules

    find_user_modules()
    return load_config(args.config, args.set, **sections)


def print_json(args: argparse.Namespace, facts: Any) -> None:
    if args.json:
        say(json.dumps(facts, indent=2))


def print_result(args: argparse.Namespace, facts: Any, text: str) -> None:
    """Print the facts with ``--json``, else the text."""
    say(json.dumps(facts, indent=2) if args.json else printable(text))
