"""Ray's own validation of a `ray up` file: the only place here that imports ray.

Ray prints, warns and ends the command on what it does not like; here all of that becomes texts.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raygnn.clusters.facts import Text
from raygnn.config.yaml_text import KeyPath

# Ray asks the cloud's SDK for these when they are missing.
_FILLED_IN = ("aws", "gcp")


@dataclass(frozen=True)
class Look:
    """What Ray thinks of a configuration.

    Attributes:
        keys: the sections that it knows, or reads before it looks at its schema.
        defaults: what it takes for the sections that are missing; empty for an unknown provider.
        refused: the first thing that it refuses, and the key; empty where it takes all.
    """

    keys: frozenset[str]
    defaults: Mapping[str, Any]
    refused: tuple[Text, ...]


def look(config: Mapping[str, Any]) -> Look:
    """Have Ray look at a `ray up` file, offline; what it prints is dropped.

    Sections that it does not know are left out, so that it says what else there is.
    """
    with _silence():
        import ray.autoscaler
        from ray.autoscaler._private.providers import _get_default_config
        from ray.autoscaler._private.util import prepare_config, validate_config

        file = Path(ray.autoscaler.__file__).parent / "ray-schema.json"
        keys = frozenset(json.loads(file.read_text())["properties"])
        keys |= {"min_workers", "head_node", "worker_nodes"}
        wanted = copy.deepcopy({name: value for name, value in config.items() if name in keys})
        defaults: Mapping[str, Any] = {}
        try:
            defaults = _get_default_config(wanted["provider"])
            if wanted["provider"]["type"] in _FILLED_IN:
                for node_type in wanted.get("available_node_types", {}).values():
                    node_type.setdefault("resources", {})
            validate_config(prepare_config(wanted))
        except Exception as error:  # whatever Ray stumbles over where a value is not of its type
            return Look(keys, defaults, (_refusal(error, config),))
    return Look(keys, defaults, ())


def _refusal(error: Exception, config: Mapping[str, Any]) -> Text:
    key: KeyPath = tuple(getattr(error, "absolute_path", ()))
    text = str(getattr(error, "message", "") or error).strip().split("\n")[0]
    if isinstance(error, KeyError) and error.args:
        text = f"{error.args[0]!r} is missing"
        key = ("provider",) if "provider" in config else ()
    return Text(key, text or type(error).__name__)


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Drop what Ray prints and logs in the block."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(before)
