"""What verbs have in common: their arguments, the configuration, the printing of facts."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

from raygnn.runs.output import say

JSON = """print the result as JSON alone; of an error, {"ok": false, "error": {"what": …, "where":
…, "remedy": …, "rank": …, "run": …}}"""


def count(text: str) -> int:
    value = int(text) if text.isdecimal() else 0
    if not 1 <= value <= 1000:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1 to 1000, got {text}")
    return value


def seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.1 <= value <= 600:
        raise argparse.ArgumentTypeError(f"expected seconds from 0.1 to 600, got {text}")
    return value


def verb(verbs: Any, name: str, run: Any, text: str) -> argparse.ArgumentParser:
    made: argparse.ArgumentParser = verbs.add_parser(
        name, help=text, description=text, allow_abbrev=False
    )
    made.set_defaults(run=run)
    return made


def job_verb(
    verbs: Any, name: str, run: Any, text: str, *, optional: bool = False
) -> argparse.ArgumentParser:
    made = verb(verbs, name, run, text)
    made.add_argument(
        "config", metavar="CONFIG", nargs="?" if optional else None, help="the job's YAML file"
    )
    text = "override a key, such as train.lr=0.1; may be repeated"
    overrides(made, text + ("; without CONFIG, a key of cluster" if optional else ""))
    made.add_argument("--json", action="store_true", help=JSON)
    return made


def overrides(verb: argparse.ArgumentParser, text: str) -> None:
    verb.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help=text)
    verb.add_argument(
        "-v", "--verbose", action="store_true", help="show Ray's and Lightning's logs"
    )


def run_verb(verbs: Any, name: str, run: Any, text: str) -> argparse.ArgumentParser:
    made = verb(verbs, name, run, text)
    made.add_argument("name", metavar="RUN", help="its directory, or its name in the storage")
    made.add_argument(
        "--storage", default="runs", metavar="DIR", help="where a name is (default: runs)"
    )
    made.add_argument("--json", action="store_true", help=JSON)
    return made


def load(args: argparse.Namespace, **sections: Any) -> Any:
    from raygnn.config.load import load_config

    here()
    return load_config(args.config, args.set, **sections)


def here() -> None:
    """Find package.module:Class where the user stands, as Python does for a script."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


def print_json(args: argparse.Namespace, facts: Any) -> None:
    if args.json:
        say(json.dumps(facts, indent=2))
