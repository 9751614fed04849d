"""The YAML that describes tables: columns of ids, features, labels and edge ends. Errors name its
keys and lines."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field

from raygnn.config.load import read_file
from raygnn.config.problems import Problem, dotted, one_of, show
from raygnn.config.values import (
    CLASS_PATTERN,
    DATABASE,
    NO_DATABASE,
    Conditions,
    Count,
    Fraction,
    Section,
    Text,
    expected,
    must,
    or_say,
    parse_moment,
    problems_of,
    to_tuple,
)
from raygnn.config.yaml_text import KeyPath
from raygnn.errors import ConfigError
from raygnn.graph.data import MASKS, EdgeType, etype_str
from raygnn.graph.sources.input_files import check_file

ROW = "\0"  # name of a virtual column with the row's number
AVERAGES, SEED = ("mean", "median"), "seed"  # impute; since
MAX_WIDTH = 1 << 10  # features from one column, at most
_WIDTHS = range(2, MAX_WIDTH + 1)
HASHING, SENTENCES = "hashing", "sentence-transformers/"  # encoders of text
_MODEL_WIDTH = 1024  # estimated features of a text that a model encodes
_NAMES = "a letter, then letters, digits, '_', '.' and '-', at most 100 characters"


# Names of types and arrays become parts of file names, and of keys joined by ``:`` and ``/``.
_is_name = re.compile(r"[^\W\d][\w.-]{0,99}").fullmatch
_is_delimiter = re.compile(r'[^"\r\n\x80-\U0010ffff]').fullmatch
_is_encoder = re.compile(rf"(?s){HASHING}|{SENTENCES}.+|{CLASS_PATTERN.pattern}").fullmatch

Name: TypeAlias = Annotated[str, must(_is_name, _NAMES)]
Split: TypeAlias = Literal["train", "val", "test"]
LabelKind: TypeAlias = Literal["class", "number", "multi"]
Missing: TypeAlias = Literal["refuse", "drop", "add"]
Scale: TypeAlias = Literal["log", "standard", "minmax", "rank_gauss"]
Part: TypeAlias = Literal[
    "year", "quarter", "month", "week", "day", "weekday", "day_of_year", "hour", "minute", "second"
]


def _short_for(key: str) -> BeforeValidator:
    """Accept a plain value in place of a section that has only this key."""
    return BeforeValidator(lambda value: value if isinstance(value, dict) else {key: value})


_COLUMN = _short_for("column")


def _listed(value: Any) -> Any:
    return (value,) if isinstance(value, (str, dict)) else to_tuple(value)


_Names: TypeAlias = Annotated[
    tuple[Text, ...],
    BeforeValidator(_listed),
    Field(min_length=1, max_length=256),
    or_say("a name, or a list of names"),
]


def _feature_columns(value: Any) -> Any:
    """Return one entry per column; a mapping can name several columns with the same transform."""
    listed = _listed(value)
    if not isinstance(listed, tuple):
        return listed
    entries: list[Any] = []
    for entry in listed:
        several = isinstance(entry, dict) and isinstance(entry.get("column"), list)
        entries += [{**entry, "column": one} for one in entry["column"]] if several else [entry]
    return tuple(entries)


def _buckets(value: Any) -> Any:
    numbers = isinstance(value, list) and all(isinstance(bound, (int, float)) for bound in value)
    if not (numbers and value and value == sorted({*value})) and value not in _WIDTHS:
        raise expected(f"a number of buckets from 2 to {MAX_WIDTH}, or a list of ascending bounds")
    return to_tuple(value)


def _since(value: str) -> str:
    try:
        return str(parse_moment(value))
    except ValueError:
        return value


class TimeColumn(Section):
    """A column of times."""

    column: Text
    """Name of the column."""
    unit: Literal["d", "s", "ms", "us", "ns"] | None = None
    """Unit of numbers since 1970, converted to microseconds; fractions are allowed. null = integers
    are kept unchanged."""


class Category(Section):
    """A column of categories: text or integers, each with an embedding row, or a feature."""

    read_if: ClassVar[Conditions] = {"min_count": ("unknown", "bucket")}

    column: Text
    """Name of the column."""
    unknown: Literal["error", "bucket"] = "error"
    """Treatment of missing values and of categories unseen in training: error, or bucket = all
    share one embedding row or feature."""
    min_count: Count = 1
    """With bucket: categories in fewer rows join it."""


class FeatureColumn(Category):
    """A column of features, and its transforms, which apply in the order of these keys."""

    read_if: ClassVar[Conditions] = {}

    parts: Annotated[tuple[Part, ...], BeforeValidator(_listed)] = ()
    """For dates: a feature for each part (in UTC), such as weekday."""
    cyclic: Annotated[
        tuple[Literal["month", "weekday", "hour"], ...], BeforeValidator(_listed)
    ] = ()
    """For dates: sine and cosine of each part (in UTC)."""
    since: Annotated[Text, AfterValidator(_since)] | None = None
    """For dates: days since this date, or a column's; seed: see model.ages."""
    impute: Annotated[int | float | Text, or_say("mean, median, or the value itself")] | None = None
    """Replacement of missing values: mean, median, or a value."""
    indicator: bool = False
    """Add a feature: 1 if the value is missing, else 0."""
    scale: Annotated[tuple[Scale, ...], BeforeValidator(_listed)] = ()
    """log, standard, minmax or rank_gauss, or several in order."""
    bucket: Annotated[int | tuple[float, ...], BeforeValidator(_buckets)] | None = None
    """A 0/1 feature for each quantile (their number), or between bounds."""
    onehot: bool = False
    """A 0/1 feature for each category."""
    hash: Annotated[int, Field(ge=2, le=MAX_WIDTH)] | None = None
    """Number of 0/1 features that a hash assigns categories to."""
    separator: Text | None = None
    """Separator of several categories in one value, such as '|'."""

    @property
    def is_plain(self) -> bool:
        """True if the values are used unchanged."""
        return self == FeatureColumn(column=self.column)

    @property
    def of_words(self) -> bool:
        """True if the values are categories."""
        return self.onehot or self.hash is not None

    def _conflicts(self, at: KeyPath) -> Iterator[Problem]:
        for names in (("parts", "cyclic", "since"), ("bucket", "onehot", "hash", "scale")):
            what, remedy = f"the features of {self.column!r}", "name the column twice, or "
            yield from _several(at, self, names, what, remedy)
        if "log" in self.scale[1:]:
            message = "log applies to the values themselves, and must come first"
            yield Problem((*at, "scale"), message, "write it before the others")
        if not self.onehot:
            yield from self.unused(at, "unknown", "min_count", why="there is no onehot")
        elif self.unknown == "error":
            why, instead = "there is no bucket", "set unknown: bucket"
            yield from self.unused(at, "min_count", why=why, instead=instead)
        wrong, kind = ("indicator", "categories") if self.of_words else ("separator", "numbers")
        yield from self.unused(at, wrong, why=f"the values are {kind}")
        if self.since == SEED:
            steps = ("impute", "indicator", "scale", "bucket", "onehot", "hash")
            yield from self.unused(at, *steps, why="model.ages encodes it")
        if self.of_words and self.impute in AVERAGES:
            message, remedy = f"categories have no {self.impute}", "set it to a category"
            yield Problem((*at, "impute"), message, remedy)
        elif not self.of_words and isinstance(self.impute, str) and self.impute not in AVERAGES:
            message, remedy = f"{show(self.impute)} is not a number", "set mean, median or a number"
            yield Problem((*at, "impute"), message, remedy)


class TextColumn(Section):
    """A column of text, and the encoder that converts it to features."""

    column: Text | None = None
    """Name of the column; null = the array's name."""
    encoder: Annotated[
        str, must(_is_encoder, f"{HASHING}, {SENTENCES}NAME, or package.module:Class")
    ] = HASHING
    """hashing = scikit-learn's HashingVectorizer; sentence-transformers/NAME, a model's name or
    directory; or package.module:Class: list of texts → float32 [n, d]."""
    dim: Annotated[int, Field(ge=2, le=1 << 16)] = 256
    """Features of hashing."""
    num_gpus: float = Field(0.0, ge=0)
    """GPUs of each process that encodes, if the encoder is a model."""

    @property
    def is_model(self) -> bool:
        """True if the encoder is a model, which actors hold in memory."""
        return self.encoder != HASHING

    @property
    def width(self) -> int:
        """Number of features; an estimate for models."""
        return _MODEL_WIDTH if self.is_model else self.dim

    def _conflicts(self, at: KeyPath) -> Iterator[Problem]:
        unused = "dim" if self.is_model else "num_gpus"
        yield from self.unused(at, unused, why=f"the encoder is {self.encoder}")


class RandomSplit(Section):
    """Random split: fractions of the rows, sampled by a keyed hash of the row number."""

    train: Fraction = Field(gt=0)
    """Training fraction of the labelled rows."""
    val: Fraction = 0.0
    """Validation fraction."""
    test: Fraction | None = None
    """Test fraction; null = all other rows."""
    seed: int = Field(0, ge=0, le=2**32 - 1)
    """Seed of the split."""

    def _conflicts(self, at: KeyPath) -> Iterator[Problem]:
        if self.train + self.val + (self.test or 0) > 1 + 1e-9:
            yield Problem(at, "the fractions sum to more than 1", "lower one of them")


class Label(Section):
    """Target of each row."""

    column: _Names
    """See label."""
    kind: LabelKind = "class"
    """See label_kind."""


class Table(Section):
    """Common fields of tables of nodes and of edges."""

    read_if: ClassVar[Conditions] = {
        "url": ("sql",),
        "label_kind": ("label",),
        "split_words": ("split",),
    }

    files: _Names = ()
    """A file or a pattern such as users/*.parquet, or a list."""
    sql: Text | None = None
    """Instead of files: a SELECT over files, relative to the YAML, and over its other tables."""
    url: Text | None = None
    """With sql: database that runs it: env:NAME, an environment variable with its URL, or
    sqlite:///FILE; null = DuckDB, over files."""
    delimiter: Annotated[str, must(_is_delimiter, "one character, such as ';'")] | None = None
    """Column separator of CSV files; null = ',', or a tab in .tsv files."""
    features: dict[
        Name,
        Annotated[
            tuple[Annotated[FeatureColumn, _COLUMN], ...],
            BeforeValidator(_feature_columns),
            must(len, "a column, or a list of columns"),
        ],
    ] = Field({})
    """Array name → columns of numbers, with transforms or without."""
    text: dict[Name, TextColumn] = Field({})
    """Array name → column of text to encode."""
    time: Annotated[TimeColumn, _COLUMN] | None = None
    """Column of integers or dates, which becomes the array time. All tables of a graph need the
    same unit; name the unit of numbers if other tables have dates."""
    fill: float | None = None
    """Replacement of missing features."""
    label: _Names | None = None
    """Column to predict; empty = unknown. Numbers and multi-label targets may be several columns,
    or one column of lists."""
    label_kind: LabelKind = "class"
    """Kind of the label: class = a category or integer; number = for regression; multi =
    multi-label: 0, 1 or unknown (-1, NaN or empty) for each."""
    labels: dict[Name, Annotated[Label, _COLUMN]] = Field({})
    """Instead of label, for several targets: array name → column, or {column: …, kind: …}.
    task.target names the array; a row in a split needs at least one label."""
    split: Text | None = None
    """Column with train, val, test, or nothing."""
    split_words: dict[str, Split] = Field({})
    """Other values of that column → train, val or test."""
    splits: RandomSplit | None = None
    """Random split, instead of split."""

    @property
    def targets(self) -> dict[str, Label]:
        """Array name → its label."""
        if self.label is None:
            return self.labels
        return {"label": Label(column=self.label, kind=self.label_kind)}

    def _conflicts(self, at: KeyPath) -> Iterator[Problem]:
        if bool(self.files) == (self.sql is not None):
            message = "files and sql are both set" if self.files else "neither files nor sql is set"
            yield Problem(at, message, "set one of them")
        if self.sql is not None:
            yield from self.unused(at, "delimiter", why="sql is set")
        if self.url is not None and not DATABASE.fullmatch(self.url):
            yield Problem((*at, "url"), *NO_DATABASE)
        yield from _several(at, self, ("split", "splits"), "the split of the rows")
        yield from _several(at, self, ("label", "labels"), "the target")
        for name, label in self.targets.items():
            if len(label.column) > 1 and label.kind == "class":
                message = f"a class label needs one column, and {show(label.column)} are several"
                place = ("label",) if self.label is not None else ("labels", name)
                remedy = "set label_kind, or its kind in labels, to multi or number"
                yield Problem((*at, *place), message, remedy)
        for name, columns in self.features.items():
            if SEED in [c.since for c in columns] and (columns[1:] or isinstance(self, EdgeTable)):
                message = "since: seed needs a separate array, in a table of nodes"
                yield Problem((*at, "features", name), message, "move the column to another array")
        taken = dict.fromkeys(("label", *MASKS), "label and split define")
        named = [name for name in ("weight", "time") if getattr(self, name, None) is not None]
        taken |= {name: f"{name} defines" for name in named}
        for section in ("features", "categories", "text", "labels"):
            for name in getattr(self, section, ()):
                if name in taken and (section, name) != ("labels", "label"):
                    message = f"{taken[name]} an array {name!r} already"
                    yield Problem((*at, section), message, "give it another name")
                taken[name] = f"{section} defines"


class Key(Section):
    """A foreign key: a column with ids of a node type, its own or another."""

    table: Name
    """Node type that the ids refer to; empty values make no edge."""
    missing: Missing = "refuse"
    """See missing of edges."""


class NodeTable(Table):
    """The nodes of one type, one per row."""

    id: Text | None = None
    """Column of unique ids: integers or text; null = rows are numbered from 0."""
    keys: dict[Text, Annotated[Key, _short_for("table")]] = Field({})
    """Foreign keys: column with ids → their node type, or {table: …, missing: …}. Each creates
    edges TYPE:COLUMN:OTHER and reverse edges OTHER:rev_COLUMN:TYPE, with the rows' times."""
    categories: dict[Name, Annotated[Category, _COLUMN]] = Field({})
    """Array name → column of text or integers, for model.categories."""


class EdgeTable(Table):
    """The edges of one type, one per row."""

    source: Text
    """Column with the id of the source node."""
    target: Text
    """Column with the id of the target node."""
    weight: Text | None = None
    """Column of numbers ≥ 0, the array weight."""
    missing: Missing = "refuse"
    """Edges to unknown nodes: refuse, drop the edge, or add the node."""
    reverse: Name | None = None
    """Relation of reverse edges to add."""
    undirected: bool = False
    """Each row is an edge in both directions."""

    def _conflicts(self, at: KeyPath) -> Iterator[Problem]:
        yield from super()._conflicts(at)
        yield from _several(at, self, ("undirected", "reverse"), "the other direction")


class KeyTable(EdgeTable):
    """The edges of a foreign key, in the files of its node type; empty values make no edge."""


_OF_ROWS = ("files", "sql", "url", "delimiter", "time")  # keys that edges of a foreign key share


class Description(Section):
    """A graph as tables."""

    nodes: dict[Name, NodeTable] = Field(min_length=1)
    """Node type → its table."""
    edges: dict[Text, EdgeTable] = Field({})
    """source:relation:target → its table; not needed if nodes have keys."""

    def edge_type(self, key: str) -> EdgeType:
        """Return the edge type of a key such as ``"user:bought:item"``, or ``"cites"`` with one
        node type. Raises ValueError for invalid keys, which `read_description` refuses."""
        parts = key.split(":")
        if len(parts) == 1 and len(self.nodes) == 1:
            (ntype,) = self.nodes
            parts = [ntype, key, ntype]
        if len(parts) != 3 or not all(parts):
            raise ValueError(key)
        return parts[0], parts[1], parts[2]

    @property
    def edge_tables(self) -> dict[KeyPath, tuple[EdgeType, EdgeTable]]:
        """Key path → type and table of edges, foreign keys included."""
        found: dict[KeyPath, tuple[EdgeType, EdgeTable]] = {
            ("edges", key): (self.edge_type(key), table) for key, table in self.edges.items()
        }
        for ntype, nodes in self.nodes.items():
            for column, key in nodes.keys.items():
                relation = re.sub(r"[^\w.-]", "_", column)[:90]
                relation = relation if _is_name(relation) else f"key_{relation}"
                table = KeyTable.model_construct(
                    **{name: getattr(nodes, name) for name in _OF_ROWS},
                    source=nodes.id or ROW,
                    target=column,
                    missing=key.missing,
                    reverse=f"rev_{relation}",
                )
                found["nodes", ntype, "keys", column] = (ntype, relation, key.table), table
        return found

    @property
    def tables(self) -> dict[str, Table]:
        """Tables by key, such as ``nodes.user``, without edges of foreign keys."""
        tables: dict[str, Table] = {f"nodes.{ntype}": table for ntype, table in self.nodes.items()}
        return tables | {f"edges.{key}": table for key, table in self.edges.items()}

    def reading(self, files: Mapping[str, Path]) -> Description:
        """Return a copy of the description in which some tables, by key, are read from files."""
        changed: dict[str, dict[str, Any]] = {"nodes": {**self.nodes}, "edges": {**self.edges}}
        for key, file in files.items():
            section, _, name = key.partition(".")
            update = {"sql": None, "files": (str(file),)}
            changed[section][name] = changed[section][name].model_copy(update=update)
        return self.model_copy(update=changed)

    @property
    def microseconds(self) -> list[str]:
        """Types whose table names the unit of its times; see `GraphData`."""
        edges = {etype_str(etype): table for etype, table in self.edge_tables.values()}
        tables: dict[str, Table] = {**self.nodes, **edges}
        return [kind for kind, one in tables.items() if one.time and one.time.unit]


def read_description(file: Path) -> Description:
    """Read a description of tables, without its tables. Raises ConfigError if it is invalid."""
    check_file(file)
    if file.suffix in (".csv", ".parquet"):
        message = "this is a table, expected a YAML file that describes tables"
        remedy = "write one whose sections nodes and edges name it, as in docs/data.md"
        raise ConfigError(message, where=str(file), remedy=remedy)
    document = read_file(file, "describe the tables in the sections nodes and edges")
    described = document.checked(Description)
    if problems := [*problems_of(described), *_edge_problems(described)]:
        raise document.error(problems)
    return described


def _several(
    key: KeyPath, section: Section, names: Sequence[str], what: str, remedy: str = ""
) -> Iterator[Problem]:
    """Yield a problem if several of these keys are set, which define the same thing."""
    if len(given := [name for name in names if getattr(section, name)]) > 1:
        message = f"{' and '.join(given)} both define {what}"
        yield Problem((*key, given[1]), message, f"{remedy}keep one of them")


def _edge_problems(described: Description) -> Iterator[Problem]:
    """Yield contradictions between edge types, and between edges and their nodes."""
    wrong = False
    for name in described.edges:
        try:
            described.edge_type(name)
        except ValueError:
            wrong, remedy = True, "write source:relation:target, such as user:bought:item"
            yield Problem(("edges", name), f"{show(name)} is no edge type", remedy)
    if wrong:
        return
    tables = described.edge_tables
    if not tables:
        remedy = "add edges, or keys to the nodes, which make edges"
        yield Problem(("edges",), "there are no edges", remedy)
    key_of: dict[EdgeType, str] = {}
    for key, (etype, edges) in tables.items():
        missing = [ntype for ntype in (etype[0], etype[2]) if ntype not in described.nodes]
        if missing:
            message = f"there is no node type {show(missing[0])}"
            yield Problem(key, message, one_of(missing[0], described.nodes))
            continue
        if not _is_name(etype[1]):
            yield Problem(key, f"{show(etype[1])} is not a valid name", f"use {_NAMES}")
        if edges.undirected and etype[0] != etype[2]:
            message = f"undirected, but {etype[0]} and {etype[2]} are two types"
            yield Problem((*key, "undirected"), message, "name the other direction with reverse")
        added = etype[2:] if isinstance(edges, KeyTable) else (etype[0], etype[2])
        for ntype in dict.fromkeys(added) if edges.missing == "add" else ():
            for lacking in _lacking(described.nodes[ntype]):
                message = f"an added node of type {ntype} would have {lacking}"
                yield Problem((*key, "missing"), message, "choose drop or refuse")
        reverses = [(etype[2], edges.reverse, etype[0])] if edges.reverse else []
        for made in (etype, *reverses):
            if made in key_of:
                message = f"{key_of[made]} already defines the edge type {etype_str(made)}"
                yield Problem(key, message, "give one of them another relation")
            key_of[made] = dotted(key)


def _lacking(nodes: NodeTable) -> Iterator[str]:
    """Yield what a node without a row would lack, and how to set it if that is possible."""
    if not all(column.is_plain for columns in nodes.features.values() for column in columns):
        yield "no values to transform"
    if nodes.time is not None:
        yield "no time"
    if not all(category.unknown == "bucket" for category in nodes.categories.values()):
        yield "no category: set unknown: bucket for each"
    if nodes.features and nodes.fill is None:
        yield "no features: set fill"
