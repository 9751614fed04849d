"""What the arguments of loggers must be."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from raygnn.config.places import is_secret
from raygnn.config.problems import Problem, show
from raygnn.config.schema import Config

# What a logger is given by us: where the run lies, and what it goes on with after a resume.
_OURS = {
    "mlflow": ("save_dir", "run_id"),
    "wandb": ("save_dir", "dir", "id", "version", "resume", "experiment"),
}
_VARIABLES = {
    "mlflow": "MLFLOW_TRACKING_TOKEN, or MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD,",
    "wandb": "WANDB_API_KEY",
}


def loggers(config: Config) -> Iterator[Problem]:
    """Arguments of loggers that are not used, that are ours to give, or that are secrets."""
    logging = config.logging
    if len(set(logging.loggers)) < len(logging.loggers):
        yield Problem(
            ("logging", "loggers"),
            f"a logger is named twice: {', '.join(logging.loggers)}",
            "name each once",
        )
    for name, ours in _OURS.items():
        arguments: Mapping[str, Any] = getattr(logging, name)
        if arguments and name not in logging.loggers:
            yield Problem(
                ("logging", name),
                f"these arguments are for a logger that logging.loggers does not name: {name}",
                f"add {name} to logging.loggers, or remove them",
            )
        for key, value in arguments.items():
            if key in ours:
                yield Problem(
                    ("logging", name, key),
                    f"{key} is set by raygnn, so that a resumed run goes on where it was",
                    "remove it",
                )
            elif secret := _secret(key, value):
                yield Problem(
                    ("logging", name, key),
                    f"{secret} looks like a secret, which a run's config.yaml would keep",
                    f"remove it, and set {_VARIABLES[name]} in the environment of the command",
                )


def _secret(key: str, value: Any) -> str | None:
    """What of an argument is a secret, by its name or as a URI with a user in it."""
    if is_secret(key):
        return show(key)
    if isinstance(value, dict):
        found = (_secret(str(inner), item) for inner, item in value.items())
        return next((secret for secret in found if secret), None)
    if isinstance(value, list):
        return next((secret for item in value if (secret := _secret(key, item))), None)
    return f"a value of {show(key)}" if is_secret("", json.dumps(value)) else None
