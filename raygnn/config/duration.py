"""A length of time as people write it: ``30m``, ``10s``, ``1.5h``, ``2d``, or seconds."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal
from typing import Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import PydanticCustomError, core_schema

_UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
_PATTERN = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,24})?)\s*([dhms])")
_SHORTEST, _LONGEST = 0.001, 10 * 365 * 86400


@dataclass(frozen=True, order=True)
class Duration:
    """A positive length of time; ``seconds`` is what the rest of the program uses."""

    seconds: float

    @classmethod
    def parse(cls, value: str | int | float | timedelta | Duration) -> Duration:
        """Read ``"30m"``, ``"10s"``, ``"2h"``, ``"1d"``, or a number of seconds.

        Raises:
            ValueError: when it is none of these, under a millisecond, or over ten years.
        """
        if isinstance(value, Duration):
            return value
        if isinstance(value, timedelta):
            seconds = value.total_seconds()
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            seconds = float(value) if abs(value) <= _LONGEST else math.inf
        elif isinstance(value, str) and (match := _PATTERN.fullmatch(value.strip())):
            seconds = float(match[1]) * _UNITS[match[2]]
        else:
            raise ValueError(f"not a duration: {value!r}")
        if not _SHORTEST <= seconds <= _LONGEST:
            raise ValueError(f"duration out of range: {value!r}")
        return cls(seconds)

    def __str__(self) -> str:
        """The shortest text that :meth:`parse` reads back, in the largest whole unit."""
        for unit, length in _UNITS.items():
            if self.seconds % length == 0:
                return f"{int(self.seconds // length)}{unit}"
        return f"{Decimal(repr(self.seconds)):f}s"

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(
            cls._validate, serialization=core_schema.to_string_ser_schema()
        )

    @classmethod
    def _validate(cls, value: Any) -> Duration:
        try:
            return cls.parse(value)
        except ValueError as error:
            raise PydanticCustomError(
                "duration",
                "expected a duration such as 30m, 10s, 2h, 1d, or a number of seconds",
            ) from error

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {
            "anyOf": [
                {"type": "string", "pattern": r"^\s*[0-9]{1,9}(\.[0-9]{1,24})?\s*[dhms]\s*$"},
                {"type": "number", "minimum": _SHORTEST, "maximum": _LONGEST},
            ]
        }
