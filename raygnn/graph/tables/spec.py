"""What a description of tables may hold: which columns are ids, features, labels, ends."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field

from raygnn.config.values import Count, Fraction, Names, Section, Text, expected

NAMES = "a letter, then letters, digits, '_', '.' and '-', at most 100 of them"


def is_name(text: str) -> bool:
    """Whether a type or array may be called so: names are part of file names, and of keys that
    ``:`` and ``/`` join."""
    return re.fullmatch(r"[^\W\d][\w.-]{0,99}", text) is not None


def _name(value: str) -> str:
    if not is_name(value):
        raise expected(NAMES)
    return value


def _delimiter(value: str) -> str:
    if len(value) != 1 or value in '"\r\n' or not value.isascii():
        raise expected("one character, such as ';'")
    return value


Name: TypeAlias = Annotated[str, AfterValidator(_name)]
Columns: TypeAlias = dict[Name, Names]
Delimiter: TypeAlias = Annotated[str, AfterValidator(_delimiter)]
Split: TypeAlias = Literal["train", "val", "test"]


class RandomSplit(Section):
    """Shares of the rows, drawn by a keyed hash of the row's number."""

    train: Fraction = Field(gt=0, description="Share of the rows with a label to train on.")
    val: Fraction = Field(0.0, description="Share to validate on.")
    test: Fraction | None = Field(None, description="Share to test on; null: all others.")
    seed: int = Field(0, ge=0, le=2**32 - 1, description="Seed of the split.")


class Masks(Section):
    """One column of truth values for each split."""

    train: Text = Field(description="Column that is true for the rows to train on.")
    val: Text | None = Field(None, description="Column of those to validate on.")
    test: Text | None = Field(None, description="Column of those to test on.")


class Target(Section):
    """What is to be predicted of the rows of a table, and which of them are for what."""

    label: Text | None = Field(
        None, description="Column of what is to be predicted: classes or numbers; empty = unknown."
    )
    label_kind: Literal["class", "number"] = Field(
        "class", description="What a label is: a class, a word or whole number; or a number."
    )
    split: Text | None = Field(None, description="Column with train, val, test, or nothing.")
    split_words: dict[str, Split] = Field(
        {}, description="Other words of that column → train, val or test."
    )
    masks: Masks | None = Field(None, description="Columns of truth values in place of split.")
    splits: RandomSplit | None = Field(None, description="Random shares in place of split.")


class _Table(Target):
    files: Names = Field(description="A file or pattern such as users/*.parquet, or several.")
    delimiter: Delimiter | None = Field(
        None, description="What separates columns of a CSV; null: ',', in .tsv files a tab."
    )
    features: Columns = Field({}, description="Array name → column or columns of numbers.")
    fill: float | None = Field(None, description="Number in place of missing features.")


class Category(Section):
    """A column of words or whole numbers, each of which gets a learned row."""

    column: Text = Field(description="Name of the column.")
    unknown: Literal["error", "bucket"] = Field(
        "error",
        description="What words that the training does not have do, and missing values: error, or "
        "bucket, one learned row for all of them.",
    )
    min_count: Count = Field(
        1, description="With bucket: words in fewer rows are in the bucket, too, when training."
    )


def _category(value: Any) -> Any:
    return value if isinstance(value, dict) else {"column": value}


class NodeTable(_Table):
    """The nodes of one type, a row each."""

    id: Text = Field(description="Column of ids: whole numbers or text, each once.")
    categories: dict[Name, Annotated[Category, BeforeValidator(_category)]] = Field(
        {}, description="Array name → column of words or whole numbers, for model.categories."
    )


class EdgeTable(_Table):
    """The edges of one type, a row each."""

    source: Text = Field(description="Column with the id of the source node.")
    target: Text = Field(description="Column with the id of the target node.")
    weight: Text | None = Field(None, description="Column of numbers from 0: array weight.")
    time: Text | None = Field(
        None, description="Column of whole numbers, or of points in time: array time."
    )
    missing: Literal["refuse", "drop", "add"] = Field(
        "refuse", description="What an end that no node table has does: refuse, drop or add."
    )
    reverse: Name | None = Field(None, description="Also the reversed edges, as this relation.")
    undirected: bool = Field(False, description="Each row is an edge in both directions.")


class Spec(Section):
    """A graph as tables."""

    nodes: dict[Name, NodeTable] = Field(min_length=1, description="Node type → its table.")
    edges: dict[Text, EdgeTable] = Field(
        min_length=1, description="source:relation:target → its table."
    )
