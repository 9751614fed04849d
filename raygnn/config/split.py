"""Splits of seeds into training, validation and test, and tables of seeds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal, TypeAlias

from pydantic import Field

from raygnn.config.problems import Problem, dotted
from raygnn.config.values import (
    DATABASE,
    NO_DATABASE,
    Conditions,
    InputPath,
    Names,
    Section,
    ShareOrMoment,
    Text,
    in_utc,
    or_say,
)
from raygnn.config.yaml_text import KeyPath


class SplitConfig(Section):
    """Random or temporal split of a task's seeds into training, validation and test."""

    read_if: ClassVar[Conditions] = {"seed": ("by", "random"), "time": ("by", "time")}

    by: Literal["random", "time"] = "random"
    """random = uniformly at random (edges only); time = the earliest for training, the latest for
    test."""
    val: ShareOrMoment = 0.1
    """Validation fraction; by time also the start of the validation period (2026-01-31)."""
    test: ShareOrMoment = 0.1
    """Test fraction; by time also the start of the test period (2026-02-28)."""
    seed: int = Field(0, ge=0, le=2**32 - 1)
    """Random seed of the split."""
    time: Text | None = None
    """Array with the seeds' times; null = that of sampling.time."""

    def _conflicts(self, at: KeyPath) -> Iterator[Problem]:
        name, val, test = dotted(at), self.val, self.test
        begin, end = (in_utc(v) if isinstance(v, str) else v for v in (val, test))
        kinds = {type(val), type(test)}
        if len(kinds) > 1 or (self.by == "random" and kinds != {float}):
            message = f"val {val} and test {test} are not two shares, or by time two times"
            remedy = "give both as shares from 0.0 to 1.0, both as dates, or both as whole numbers"
            yield Problem((*at, "val"), message, remedy)
        elif kinds != {float} and begin > end:  # type: ignore[operator]
            message = f"val begins at {val}, after test at {test}"
            yield Problem((*at, "val"), message, f"let {name}.val begin before {name}.test")
        elif isinstance(val, float) and isinstance(test, float) and val + test >= 1:
            message = f"val {val:g} + test {test:g} leaves nothing to train on"
            remedy = f"lower {name}.val or {name}.test until they sum to less than 1"
            yield Problem((*at, "val"), message, remedy)


Files: TypeAlias = Annotated[
    InputPath | Annotated[dict[Literal["train", "val", "test"], InputPath], Field(min_length=1)],
    or_say("a file or a pattern, or {train: …, val: …, test: …}"),
]


class TrainingTable(Section):
    """Training table (Robinson et al. 2024, RelBench): rows of an entity, a time and a target, each
    of which is a seed. A row sees what was known at its time, which includes edges of that time."""

    files: Files | None = None
    """CSV or Parquet: a file or a pattern such as rows/*.parquet, or one for each split: {train: …,
    val: …, test: …}."""
    sql: Text | None = None
    """In place of files: a SELECT over the tables of graph.path, by their names, and over files,
    relative to it."""
    url: Text | None = None
    """With sql: the database that runs it, env:NAME or sqlite:///FILE; null = DuckDB, over tables
    and files."""
    entity: Text
    """Column with the id of a node of task.ntype."""
    time: Text | None = None
    """Column with the time of a row; needed with sampling.time."""
    target: Names
    """Column to predict, empty = unknown; of numbers and labels also several, or one of lists."""
    split: Text | None = None
    """Column with train, val, test or nothing, if one file or pattern has all rows and task.split
    does not split them by time."""

    def _conflicts(self, at: KeyPath) -> Iterator[Problem]:
        if (self.files is None) == (self.sql is None):
            both = "neither says" if self.sql is None else "both say"
            yield Problem(at, f"files and sql: {both} where the rows are", "give one of them")
        if self.sql is None:
            yield from self.unused(at, "url", why="there is no sql")
        if self.url is not None and not DATABASE.fullmatch(self.url):
            yield Problem((*at, "url"), *NO_DATABASE)
        if self.split is not None and isinstance(self.files, dict):
            message = "split would be ignored: each split has files of its own"
            yield Problem((*at, "split"), message, "remove it, or name one file or pattern")
