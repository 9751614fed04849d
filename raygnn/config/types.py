"""The types of single values in the configuration, each with one clear message when it is wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias
from urllib.parse import unquote, urlsplit

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainSerializer,
    PlainValidator,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    WrapValidator,
)
from pydantic_core import PydanticCustomError

from raygnn.config.duration import Duration
from raygnn.config.uri import SCHEMES, Uri

MODEL_FAMILIES = ("gcn", "sage", "gat", "gatv2", "gin", "rgcn", "hgt", "han")
NO_LAYERS = "none"  # the model.kind without message passing
LARGEST = 2**31 - 1
_MAX_VARIABLE = 100_000  # bytes; Linux takes 128 KiB with the name

# Set for every rank by Ray Train and torch; one value for the whole job would break it.
RESERVED_ENV = frozenset(
    f"{scope}{name}" for scope in ("", "LOCAL_") for name in ("RANK", "WORLD_SIZE")
) | {"MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "GROUP_RANK"}


def expected(what: str) -> PydanticCustomError:
    """The error of a value that is not ``what``; the reader of it adds the value itself."""
    return PydanticCustomError("expected", "expected {what}", {"what": what})


def _or_say(what: str) -> WrapValidator:
    """One message for a union, in place of one for each of its members."""

    def validate(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError:
            raise expected(what) from None

    return WrapValidator(validate)


def _must(holds: Callable[[Any], object], what: str) -> AfterValidator:
    def validate(value: Any) -> Any:
        if not holds(value):
            raise expected(what)
        return value

    return AfterValidator(validate)


def _not_a_number(value: Any) -> Any:
    if isinstance(value, (int, float)):
        raise expected("a unit, such as 10m")
    return value


def _to_path(value: Any) -> Path:
    # An empty path would mean the current directory, which nobody means.
    if not isinstance(value, (str, Path)) or not str(value) or "\0" in str(value):
        raise expected("a path")
    if "://" in str(value):  # as a path it would be a directory called "s3:"
        raise expected("a path on a disk of this machine, not a URI")
    return Path(value)


def _to_place(value: Any) -> Path | Uri:
    if isinstance(value, Uri):
        return value
    if not isinstance(value, str) or "://" not in value:
        return _to_path(value)
    uri = urlsplit(value)
    if (
        uri.scheme not in SCHEMES
        or not (uri.netloc.rpartition("@")[2] + uri.path).strip("/")
        or "\0" in value
    ):
        raise expected(f"a path, or a URI that begins with {', '.join(SCHEMES)}")
    return Uri(value)


def to_tuple(value: Any) -> Any:
    """What YAML and JSON have in place of a tuple."""
    return tuple(value) if isinstance(value, list) else value


def _to_directory(value: str) -> str:
    if not value or "\0" in value:
        raise expected("a directory")
    if "://" not in value:
        return value
    uri = urlsplit(value)
    if uri.scheme != "file" or uri.netloc not in ("", "localhost") or uri.path in ("", "/"):
        raise expected("a directory or file:///DIRECTORY (no other storage is supported yet)")
    return unquote(uri.path)


def _to_variable(value: Any) -> Any:
    # as people write OMP_NUM_THREADS; anything else has more than one spelling
    return str(value) if type(value) is int and value.bit_length() <= 64 else value


def _variable(value: str) -> str:
    """A value that a process can be started with: it would hang, or never start, otherwise."""
    if "\0" in value:
        raise expected("text without the character NUL")
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        raise expected("text that can be written as UTF-8") from None
    if size > _MAX_VARIABLE:
        raise expected(f"at most {_MAX_VARIABLE} bytes")
    return value


def _variable_name(name: str) -> str:
    if name in RESERVED_ENV:
        raise expected(f"another name: {name} is set for each rank by the launcher")
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise expected("a name of letters, digits and '_'")
    return name


def _json_values(value: dict[str, Any]) -> dict[str, Any]:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        raise expected("text, finite numbers, true, false, null, lists and sections") from None
    return value


_CLASS = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_TASK = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,49}")
_ADDRESS = re.compile(r"auto|local|([A-Za-z0-9][A-Za-z0-9_.-]*|\[[0-9a-fA-F:.]+\]):[0-9]{1,5}")

Count: TypeAlias = Annotated[int, Field(ge=1, le=LARGEST)]
Fraction: TypeAlias = Annotated[float, Field(ge=0, le=1)]
Text: TypeAlias = Annotated[str, Field(min_length=1)]
InputPath: TypeAlias = Annotated[Path, BeforeValidator(_to_path)]
Place: TypeAlias = Annotated[
    Path | Uri,
    PlainValidator(_to_place),
    PlainSerializer(str, return_type=str),
    WithJsonSchema({"type": "string", "format": "path"}),
]

AutoCount: TypeAlias = Annotated[
    Literal["auto"] | Count, _or_say(f"auto or a whole number from 1 to {LARGEST}")
]
AutoFlag: TypeAlias = Annotated[Literal["auto"] | bool, _or_say("auto, true or false")]
AutoFraction: TypeAlias = Annotated[
    Literal["auto"] | Fraction, _or_say("auto or a number from 0 to 1")
]
Workers: TypeAlias = Annotated[
    Literal["auto"]
    | Count
    | Annotated[
        tuple[Count, Count],
        BeforeValidator(to_tuple),
        _must(lambda limits: limits[0] <= limits[1], "[min, max]"),
    ],
    _or_say(f"auto, a whole number from 1 to {LARGEST}, or [min, max] of two such, min ≤ max"),
]
Fanout: TypeAlias = Annotated[
    Annotated[int, Field(ge=-1, le=LARGEST), _must(bool, "a number other than 0")],
    _or_say("-1 (all neighbours) or a whole number from 1"),
]
EdgeFanouts: TypeAlias = Annotated[
    dict[Annotated[str, Field(min_length=1)], Annotated[int, Field(ge=-1, le=LARGEST)]],
    Field(min_length=1),
]
HopFanout: TypeAlias = Annotated[
    Fanout | EdgeFanouts,
    _or_say(
        "-1 (all neighbours), a whole number from 1, or such a number (or 0) for each edge type"
    ),
]
Fanouts: TypeAlias = Annotated[
    tuple[HopFanout, ...], BeforeValidator(to_tuple), Field(min_length=1, max_length=64)
]
Names: TypeAlias = Annotated[
    Text
    | Annotated[tuple[Text, ...], BeforeValidator(to_tuple), Field(min_length=1, max_length=256)],
    _or_say("a name, or a list of names"),
]
Interval: TypeAlias = Annotated[
    Count | Annotated[Duration, BeforeValidator(_not_a_number)],
    _or_say("a whole number of steps, or a duration such as 10m"),
]
Share: TypeAlias = Annotated[float, Field(gt=0, lt=1)]
Stretch: TypeAlias = Annotated[
    Count | Share, _or_say("a whole number of steps, or a share of the run, above 0 and below 1")
]
Bounds: TypeAlias = Annotated[
    Annotated[
        tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]],
        BeforeValidator(to_tuple),
        _must(lambda bounds: bounds[0] < bounds[1], "[low, high]"),
    ],
    _or_say("[low, high] of two numbers from 0 to below 1, low < high"),
]
RunName: TypeAlias = Annotated[
    str,
    _must(_NAME.fullmatch, "a name of letters, digits, '.', '_' and '-', at most 100 of them"),
    _must(lambda name: name != "partitions", "another name: partitions are stored under this one"),
]
TaskName: TypeAlias = Annotated[
    str,
    _must(_TASK.fullmatch, "a letter, then letters, digits, '_' and '-', at most 50 in all"),
]
Storage: TypeAlias = Annotated[str, AfterValidator(_to_directory)]
ModelKind: TypeAlias = Annotated[
    str,
    _must(
        lambda kind: kind in (*MODEL_FAMILIES, NO_LAYERS) or _CLASS.fullmatch(kind),
        f"{', '.join(MODEL_FAMILIES)}, {NO_LAYERS} or package.module:Class",
    ),
]
UserClass: TypeAlias = Annotated[str, _must(_CLASS.fullmatch, "package.module:Class")]
Address: TypeAlias = Annotated[
    str, _must(_ADDRESS.fullmatch, "auto, local or HOST:PORT of a Ray head node")
]
Numbered: TypeAlias = Annotated[
    tuple[Annotated[int, Field(ge=-(2**63), lt=2**63)], ...],
    BeforeValidator(to_tuple),
    _must(lambda numbers: 0 < len(numbers) == len(set(numbers)), "a list of different numbers"),
]
JsonValues: TypeAlias = Annotated[dict[str, Any], AfterValidator(_json_values)]
Environment: TypeAlias = dict[
    Annotated[str, AfterValidator(_variable_name)],
    Annotated[
        str,
        BeforeValidator(_to_variable),
        AfterValidator(_variable),
        WithJsonSchema({"type": ["string", "integer"]}),
    ],
]
