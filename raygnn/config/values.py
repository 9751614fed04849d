"""Types of configuration values: durations, times, URIs, paths, class names."""

from __future__ import annotations

import ast
import inspect
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder
from itertools import pairwise
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, Union, get_args, get_origin
from urllib.parse import unquote, urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    PlainSerializer,
    PlainValidator,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    WrapValidator,
)
from pydantic_core import CoreSchema, PydanticCustomError

from raygnn.config.places import SCHEMES, Uri
from raygnn.config.problems import Problem, dotted, show
from raygnn.config.yaml_text import KeyPath

# Key → another key of the section, and the values of that key with which the first one is read;
# without values it is read unless the other key is null.
Conditions: TypeAlias = Mapping[str, tuple[str | None, ...]]


@cache
def _descriptions(module: str) -> dict[tuple[str, str], str]:
    """Return class and key → string below the key, for the sections of a module. Only errors and
    the schema need them: pydantic's ``use_attribute_docstrings`` reads them at each import, which
    takes as long as all other imports of a configuration."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {
        (section.name, ast.unparse(key.target)): " ".join(ast.literal_eval(text.value).split())
        for section in tree.body
        if isinstance(section, ast.ClassDef)
        for key, text in pairwise(section.body)
        if isinstance(key, ast.AnnAssign) and isinstance(text, ast.Expr)
    }


class Section(BaseModel):
    """Base of all sections: frozen, no unknown keys, no silent conversions, finite numbers. The
    string below a key describes it in errors, in the JSON Schema and in docs/config.md."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
    kind_key: ClassVar[str] = "kind"  # key that decides which other keys a section has
    read_if: ClassVar[Conditions] = {}

    @classmethod
    def meaning(cls, key: str) -> str:
        """Return the description of a key, in one line; empty without one."""
        sections = [base for base in cls.__mro__ if issubclass(base, Section)]
        found = (_descriptions(base.__module__).get((base.__name__, key)) for base in sections)
        return cls.model_fields[key].description or next(filter(None, found), "")

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        schema = handler(core)
        for key, value in handler.resolve_ref_schema(schema).get("properties", {}).items():
            value["description"] = cls.meaning(key)
        return schema

    def problems(self, at: KeyPath) -> Iterator[Problem]:
        """Yield contradictions between the section's keys, and keys that nothing reads; ``at``: key
        path of the section."""
        for key, (other, *values) in self.read_if.items():
            value = getattr(self, str(other))
            if value in values or (not values and value is not None):
                continue
            name = dotted((*at, str(other)))
            why = f"{name} is {value if isinstance(value, str) else show(value)}"
            instead = f"set {name}"
            instead += f" to {' or '.join(v for v in values if v)}" * bool(values)
            if values == [None]:
                instead = f"remove {name}"
            yield from self.unused(at, key, why=why, instead=instead)
        yield from self._conflicts(at)

    def _conflicts(self, at: KeyPath) -> Iterator[Problem]:
        return iter(())

    def unused(self, at: KeyPath, *keys: str, why: str, instead: str = "") -> Iterator[Problem]:
        """Yield a problem for each key that is set although nothing reads it.

        Args:
            why: reason that nothing reads it.
            instead: alternative to removing the key.
        """
        for key in keys:
            value = getattr(self, key)
            if value != type(self).model_fields[key].default:
                remedy = f"remove {dotted((*at, key))}" + (f", or {instead}" if instead else "")
                named = key if isinstance(value, Section) else f"{key} {show(value)}"
                yield Problem((*at, key), f"{named} would be ignored: {why}", remedy)


def problems_of(value: Any, at: KeyPath = ()) -> Iterator[Problem]:
    """Yield `Section.problems` of all sections in a value at key path ``at``."""
    if isinstance(value, Section):
        yield from value.problems(at)
        value = vars(value)
    pairs = value.items() if isinstance(value, dict) else ()
    for key, inner in enumerate(value) if isinstance(value, tuple) else pairs:
        yield from problems_of(inner, (*at, key))


def members(annotation: Any) -> list[Any]:
    """Return the members of a union, without annotations, or the type itself."""
    if get_origin(annotation) is Annotated:
        return members(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return [member for option in get_args(annotation) for member in members(option)]
    return [annotation]


def sections_in(annotation: Any) -> list[type[Section]]:
    """Return the sections that a key of this type can hold."""
    return [m for m in members(annotation) if isinstance(m, type) and issubclass(m, Section)]


USER_CLASS = "package.module:Class"  # the kind of all user classes


def classes_of(union: Any) -> dict[str, type[Section]]:
    """Return the sections of a union by kind."""
    found: dict[str, type[Section]] = {}
    for section in sections_in(union):
        options = members(section.model_fields[section.kind_key].annotation)
        named = [option for option in options if get_origin(option) is Literal]
        kinds = [kind for option in named for kind in get_args(option)] or [USER_CLASS]
        found |= dict.fromkeys(kinds, section)
    return found


def tag_of(kind: Any) -> str:
    """Return the kind, or the common placeholder of user classes."""
    return USER_CLASS if isinstance(kind, str) and ":" in kind else str(kind)


def by_kind(
    classes: Callable[[], Mapping[str, type[Section]]], default: str | None = None
) -> BeforeValidator:
    """Prepare a section whose keys depend on its kind (``default`` if it has none): omit keys of
    other kinds that have their default value, which older versions recorded."""

    def prepare(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        sections = classes()
        key = next(iter(sections.values())).kind_key
        if default is not None:
            value = {key: default, **value}
        ours = sections.get(tag_of(value.get(key)))
        if ours is None:
            return value
        others = {
            name: field.get_default()
            for section in sections.values()
            for name, field in section.model_fields.items()
            if name not in ours.model_fields
        }
        return {k: v for k, v in value.items() if k not in others or not _same(v, others[k])}

    return BeforeValidator(prepare)


def _same(value: Any, default: Any) -> bool:
    if isinstance(default, Section) and isinstance(value, dict):  # newer versions have more keys
        default = default.model_dump(mode="json")
        return {**default, **value} == default
    return value == default


_UNIT_SECONDS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
_DURATION = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,24})?)\s*([dhms])")
_SHORTEST, _LONGEST = 0.001, 10 * 365 * 86400


@dataclass(frozen=True, order=True, repr=False)
class Duration:
    """Positive length of time, in ``seconds``."""

    seconds: float

    @classmethod
    def parse(cls, value: str | int | float | timedelta | Duration) -> Duration:
        """Read ``"30m"``, ``"10s"``, ``"2h"``, ``"1d"``, or a number of seconds. Raises
        PydanticCustomError, a ValueError, if it is none of these, under a millisecond, or over ten
        years."""
        if isinstance(value, Duration):
            return value
        if isinstance(value, timedelta):
            seconds = value.total_seconds()
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            seconds = float(value) if abs(value) <= _LONGEST else math.inf
        elif isinstance(value, str) and (match := _DURATION.fullmatch(value.strip())):
            seconds = float(match[1]) * _UNIT_SECONDS[match[2]]
        else:
            seconds = math.nan
        if not _SHORTEST <= seconds <= _LONGEST:
            raise expected("a duration such as 30m, 10s, 2h, 1d, or a number of seconds")
        return cls(seconds)

    def __str__(self) -> str:
        """Shortest text that :meth:`parse` reads back, in the largest unit without a remainder."""
        for unit, length in _UNIT_SECONDS.items():
            if self.seconds % length == 0:
                return f"{int(self.seconds // length)}{unit}"
        return f"{Decimal(repr(self.seconds)):f}s"

    __repr__ = __str__


Span: TypeAlias = Annotated[
    Duration,
    PlainValidator(Duration.parse),
    PlainSerializer(str, return_type=str, when_used="json"),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "pattern": r"^\s*[0-9]{1,9}(\.[0-9]{1,24})?\s*[dhms]\s*$"},
                {"type": "number", "minimum": _SHORTEST, "maximum": _LONGEST},
            ]
        }
    ),
]


def parse_moment(value: Any) -> int | str:
    """Return a time: an integer in the data's units, or a date or point in time as ISO text."""
    if isinstance(value, date):
        value = value.isoformat()
    if isinstance(value, str):
        try:
            return datetime.fromisoformat(value.strip().replace("Z", "+00:00")).isoformat()
        except ValueError:
            value = None
    if not isinstance(value, int) or isinstance(value, bool) or abs(value) >= 2**62:
        raise expected(
            "a time, such as 2026-01-31, or a whole number in the unit of the data's times"
        )
    return value


def in_utc(moment: str) -> datetime:
    """Return the point in time that `parse_moment` returned as text; UTC if it has no zone."""
    point = datetime.fromisoformat(moment)
    return point if point.tzinfo else point.replace(tzinfo=UTC)


def _stretch(value: Any) -> int | Duration:
    """Return a duration, or an integer in the data's units."""
    if isinstance(value, (str, timedelta, Duration)):
        with suppress(PydanticCustomError):
            return Duration.parse(value)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 2**62:
        raise expected("a duration such as 30d, or a whole number in the unit of the data's times")
    return value


def _share_or_moment(value: Any) -> float | int | str:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1:
        return float(value)
    return parse_moment(value)


_MOMENTS: dict[str, Any] = {"anyOf": [{"type": "string"}, {"type": "number"}]}
ShareOrMoment: TypeAlias = Annotated[
    float | int | str, PlainValidator(_share_or_moment), WithJsonSchema(_MOMENTS)
]
TimeSpan: TypeAlias = Annotated[
    int | Duration,
    PlainValidator(_stretch),
    PlainSerializer(
        lambda value: value if isinstance(value, int) else str(value), when_used="json"
    ),
    WithJsonSchema(_MOMENTS),
]

LARGEST = 2**31 - 1
MAX_PARTS = 1 << 20  # of a partition, and workers, since each has at least one part
_MAX_VARIABLE = 100_000  # bytes; Linux allows 128 KiB with the name

# Ray Train and torch set these for every rank; one value for all ranks would break a job.
RESERVED_ENV = frozenset(
    f"{scope}{name}" for scope in ("", "LOCAL_") for name in ("RANK", "WORLD_SIZE")
) | {"MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "GROUP_RANK"}


def expected(what: str) -> PydanticCustomError:
    """Return the error for a value that is not ``what``; the message later adds the value."""
    return PydanticCustomError("expected", "expected {what}", {"what": what})


def or_say(what: str) -> WrapValidator:
    """Validate a union with one message instead of one for each of its members."""

    def validate(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError:
            raise expected(what) from None

    return WrapValidator(validate)


def must(holds: Callable[[Any], object], what: str) -> AfterValidator:
    """Validate a condition, with the message "expected ``what``"."""

    def validate(value: Any) -> Any:
        if not holds(value):
            raise expected(what)
        return value

    return AfterValidator(validate)


def from_seconds(shortest: int, why: str) -> AfterValidator:
    """Refuse shorter durations."""
    return must(lambda duration: duration.seconds >= shortest, f"{shortest}s or longer: {why}")


def _not_a_number(value: Any) -> Any:
    if isinstance(value, (int, float)):
        raise expected("a unit, such as 10m")
    return value


def _to_path(value: Any) -> Path:
    # An empty path would mean the current directory, which is never intended.
    if not isinstance(value, (str, Path)) or not str(value) or _GARBLED.search(str(value)):
        raise expected("a path in UTF-8")
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
        or _GARBLED.search(value)
    ):
        raise expected(f"a path, or a URI that begins with {', '.join(SCHEMES)}")
    return Uri(value)


def to_tuple(value: Any) -> Any:
    """Return a list as a tuple, since YAML and JSON have no tuples."""
    return tuple(value) if isinstance(value, list) else value


def to_storage(value: Any) -> Path | Uri:
    """Return ``storage``, a path or URI, as one; a ``file:`` URI as a path."""
    place = _to_place(value)
    if isinstance(place, Path) or not place.text.startswith("file:"):
        return place
    uri = urlsplit(place.text)
    if uri.netloc not in ("", "localhost") or uri.path == "/":
        raise expected("a directory, file:///DIRECTORY, or another URI that pyarrow.fs opens")
    return Path(unquote(uri.path))


def _to_variable(value: Any) -> Any:
    # integers, as in OMP_NUM_THREADS; other numbers have more than one spelling
    return str(value) if type(value) is int and value.bit_length() <= 64 else value


def _variable_name(name: str) -> str:
    if name in RESERVED_ENV:
        raise expected(f"another name: {name} is set for each rank by the launcher")
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise expected("a name of letters, digits and '_'")
    return name


def with_arguments(value: Any) -> Any:
    """Return a list of names as a mapping of each to no arguments."""
    if isinstance(value, (list, tuple)) and all(isinstance(spec, str) for spec in value):
        if len(value) > len(set(value)):
            raise expected("each name once")
        return {spec: {} for spec in value}
    if not isinstance(value, dict):
        raise expected("a list of names, or a mapping of each to its arguments")
    return {spec: {} if args is None else args for spec, args in value.items()}


def _json_values(value: dict[str, Any]) -> dict[str, Any]:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        raise expected("text, finite numbers, true, false, null, lists and sections") from None
    return value


CLASS_PATTERN = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
_GARBLED = re.compile("[\0\ud800-\udfff]")  # NUL, and bytes that are not UTF-8
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_TASK = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,49}")
_ADDRESS = re.compile(r"auto|local|([A-Za-z0-9][A-Za-z0-9_.-]*|\[[0-9a-fA-F:.]+\]):[0-9]{1,5}")

Count: TypeAlias = Annotated[int, Field(ge=1, le=LARGEST)]
Fraction: TypeAlias = Annotated[float, Field(ge=0, le=1)]
Text: TypeAlias = Annotated[str, Field(min_length=1)]
DATABASE = re.compile(r"env:[A-Za-z_]\w*|sqlite:///.+")
NO_DATABASE = (  # message and remedy, which do not show the URL
    "the URL is neither env:NAME nor sqlite:///FILE: a password written here would be stored",
    "set an environment variable to the URL, and name it, such as env:DATABASE_URL",
)

InputPath: TypeAlias = Annotated[Path, BeforeValidator(_to_path)]
Place: TypeAlias = Annotated[
    Path | Uri,
    PlainValidator(_to_place),
    PlainSerializer(str, return_type=str),
    WithJsonSchema({"type": "string", "format": "path"}),
]

Parts: TypeAlias = Annotated[int, Field(ge=1, le=MAX_PARTS)]
AutoParts: TypeAlias = Annotated[
    Literal["auto"] | Parts, or_say(f"auto or a whole number from 1 to {MAX_PARTS}")
]
Fanout: TypeAlias = Annotated[
    Annotated[int, Field(ge=-1, le=LARGEST), must(bool, "a number other than 0")],
    or_say("-1 (all neighbours) or a whole number from 1"),
]
EdgeFanouts: TypeAlias = Annotated[
    dict[Annotated[str, Field(min_length=1)], Annotated[int, Field(ge=-1, le=LARGEST)]],
    Field(min_length=1),
]
HopFanout: TypeAlias = Annotated[
    Fanout | EdgeFanouts,
    or_say(
        "-1 (all neighbours), a whole number from 1, or such a number (or 0) for each edge type"
    ),
]
Fanouts: TypeAlias = Annotated[
    tuple[HopFanout, ...], BeforeValidator(to_tuple), Field(min_length=1, max_length=64)
]
AutoCount: TypeAlias = Annotated[Literal["auto"] | Count, or_say("auto or a whole number from 1")]
AutoFraction: TypeAlias = Annotated[
    Literal["auto"] | Fraction, or_say("auto or a number from 0 to 1")
]
Workers: TypeAlias = Annotated[
    Literal["auto"]
    | Parts
    | Annotated[
        tuple[Parts, Parts],
        BeforeValidator(to_tuple),
        must(lambda limits: limits[0] <= limits[1], "[min, max]"),
    ],
    or_say(f"auto, a whole number from 1 to {MAX_PARTS}, or [min, max] of two such, min ≤ max"),
]
Names: TypeAlias = Annotated[
    Text
    | Annotated[tuple[Text, ...], BeforeValidator(to_tuple), Field(min_length=1, max_length=256)],
    or_say("a name, or a list of names"),
]
DifferentNames: TypeAlias = Annotated[
    tuple[Text, ...],
    BeforeValidator(to_tuple),
    must(lambda names: 0 < len(names) == len(set(names)), "a list of different names"),
]
Interval: TypeAlias = Annotated[
    Count | Annotated[Span, BeforeValidator(_not_a_number)],
    or_say("a whole number of steps, or a duration such as 10m"),
]
Wait: TypeAlias = Annotated[Literal[0] | Span, or_say("0, or a duration such as 15m")]
Share: TypeAlias = Annotated[float, Field(gt=0, lt=1)]
Stretch: TypeAlias = Annotated[
    Count | Share, or_say("a whole number of steps, or a share of the run, above 0 and below 1")
]
RunName: TypeAlias = Annotated[
    str,
    must(_NAME.fullmatch, "a name of letters, digits, '.', '_' and '-', at most 100 of them"),
    must(lambda name: name != "partitions", "another name: partitions are stored under this one"),
]
TaskName: TypeAlias = Annotated[
    str, must(_TASK.fullmatch, "a letter, then letters, digits, '_' and '-', at most 50 in all")
]
Storage: TypeAlias = Annotated[
    Path | Uri,
    PlainValidator(to_storage),
    PlainSerializer(lambda place: getattr(place, "shared", str(place)), return_type=str),
    WithJsonSchema({"type": "string"}),
]
UserClass: TypeAlias = Annotated[
    str,
    must(CLASS_PATTERN.fullmatch, "package.module:Class"),
    WithJsonSchema({"type": "string", "pattern": "^[^:]+:[^:]+$"}),
]
UserFunction: TypeAlias = UserClass  # unions with it have their own message
Address: TypeAlias = Annotated[
    str, must(_ADDRESS.fullmatch, "auto, local or HOST:PORT of a Ray head node")
]
JsonValues: TypeAlias = Annotated[dict[str, Any], AfterValidator(_json_values)]
Classes: TypeAlias = Annotated[
    dict[UserClass, JsonValues],
    BeforeValidator(with_arguments),
    WithJsonSchema({"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "object"}]}),
]
Environment: TypeAlias = dict[
    Annotated[str, AfterValidator(_variable_name)],
    Annotated[
        str,
        BeforeValidator(_to_variable),
        must(lambda value: not _GARBLED.search(value), "text in UTF-8, without the character NUL"),
        must(lambda value: len(value.encode()) <= _MAX_VARIABLE, f"at most {_MAX_VARIABLE} bytes"),
        WithJsonSchema({"type": ["string", "integer"]}),
    ],
]


def find_user_modules() -> None:
    """Let imports find package.module:Class in the current directory, as in a script."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


def find_module(module: str) -> ModuleSpec | str:
    """Return a module's spec, or the dotted name that was not found; import nothing."""
    path: list[str] | None = [str(Path.cwd()), *sys.path]
    parts = module.split(".")
    spec: ModuleSpec | None = None
    for depth in range(1, len(parts) + 1):
        # Only the last name: for a dotted name, a namespace package looks up its parent among the
        # imported modules.
        spec = PathFinder.find_spec(parts[depth - 1], path) if path is not None else None
        if spec is None:
            return ".".join(parts[:depth])
        inside = spec.submodule_search_locations
        path = list(inside) if inside is not None else None
    assert spec is not None
    return spec
