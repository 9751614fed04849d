"""Problems of a configuration, each of one key, and their messages."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticUndefined

from raygnn.config.yaml_text import KeyPath

# Pydantic's error types → our messages; fields are keys of the error's context.
_EXPECTATIONS = {
    "int_type": "expected a whole number",
    "float_type": "expected a number",
    "finite_number": "expected a finite number",
    "bool_type": "expected true or false",
    "string_type": "expected text",
    "string_too_short": "expected text that is not empty",
    "dict_type": "expected a section of keys and values",
    "model_type": "expected a section of keys and values",
    "model_attributes_type": "expected a section of keys and values",
    "tuple_type": "expected a list",
    "list_type": "expected a list",
    "greater_than": "expected a number above {gt:g}",
    "greater_than_equal": "expected a number of at least {ge}",
    "less_than": "expected a number below {lt:g}",
    "less_than_equal": "expected a number of at most {le}",
    "too_short": "expected a list of at least {min_length}",
    "too_long": "expected a list of at most {max_length}",
    "literal_error": "expected {expected}",
}


@dataclass(frozen=True)
class Problem:
    """Problem with the value at ``key``, and its remedy."""

    key: KeyPath
    what: str
    remedy: str


def dotted(key: KeyPath) -> str:
    """Return ``("sampling", "fanout", 0)`` as ``sampling.fanout[0]``, printable."""
    text = ""
    for part in key:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += ("." if text else "") + (part if part.isprintable() else ascii(part))
    return _short(text, 200)


def show(value: Any) -> str:
    """Return a value as a user would write it, shortened and printable."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return "a section" if value else "{}"
    if isinstance(value, (list, tuple)):
        if len(value) > 8:
            return f"a list of {len(value)}"
        return _short("[" + ", ".join(show(item) for item in value) + "]")
    if isinstance(value, int) and value.bit_length() > 200:
        return "a huge number"  # Python refuses to print the largest ones
    text = repr(value)
    text = re.sub(r"://[^/@\s]+@", "://***@", text)  # a URI's user and password
    return _short(text if text.isprintable() else ascii(value))


def _short(text: str, limit: int = 60) -> str:
    return text if len(text) <= limit else text[:limit] + "…"


def nearest(word: Any, known: Iterable[str]) -> str | None:
    """Return the known word most similar to ``word``; None without a similar one."""
    by_letters = {other.casefold(): other for other in known}
    close = difflib.get_close_matches(str(word)[:100].casefold(), by_letters, n=1, cutoff=0.6)
    return by_letters[close[0]] if close else None


def unknown_key(key: KeyPath, known: Iterable[str]) -> Problem:
    """Return the problem of a key that its section does not have."""
    names = list(known)
    if close := nearest(key[-1], names):
        remedy = f"did you mean {dotted((*key[:-1], close))}? known here: {', '.join(names)}"
    else:
        remedy = f"remove it; known here: {', '.join(names)}"
    return Problem(key, f"unknown key {show(key[-1])}", remedy)


def wrong_value(
    key: KeyPath, detail: ErrorDetails, field: FieldInfo | None, meaning: str
) -> Problem:
    """Return the problem of a wrong value; ``meaning``: description of the key."""
    what = f"{wanted(detail)}, got {show(detail['input'])}"
    return Problem(key, what, _for_value(detail, field, meaning))


def wanted(detail: ErrorDetails) -> str:
    template = _EXPECTATIONS.get(detail["type"])
    return template.format(**detail.get("ctx", {})) if template else detail["msg"]


def one_of(word: Any, known: Iterable[str]) -> str:
    close = nearest(word, known)
    return f"did you mean {close}? " * bool(close) + f"known: {', '.join(known)}"


def _for_value(detail: ErrorDetails, field: FieldInfo | None, meaning: str) -> str:
    """Return the remedy: the nearest choice if any, else the key's meaning and default."""
    kind, value = detail["type"], detail["input"]
    if field is None:
        return "correct the value"
    if close := nearest(
        value, _choices(field.annotation) * (kind in ("literal_error", "expected"))
    ):
        return f"did you mean {close}?"
    if kind == "model_type" and isinstance(field.default, BaseModel):
        return f"give its keys: {', '.join(type(field.default).model_fields)}"
    if field.default is PydanticUndefined or isinstance(field.default, BaseModel):
        return f"correct it: {meaning}"
    return f"correct it or leave it out (default {show(field.default)}): {meaning}"


def _choices(annotation: Any) -> list[str]:
    """Return the text that the Literals in an annotation allow."""
    if isinstance(annotation, str):
        return [annotation]
    return [choice for argument in get_args(annotation) for choice in _choices(argument)]
