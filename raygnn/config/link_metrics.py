"""Metrics of link prediction, and among which nodes an evaluation ranks true edges."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal, TypeAlias, get_args

from pydantic import BeforeValidator, Field, WithJsonSchema

from raygnn.config.problems import Problem, dotted
from raygnn.config.values import Conditions, Count, InputPath, Section, must, or_say, to_tuple
from raygnn.config.yaml_text import KeyPath

RankMetric: TypeAlias = Literal[
    "mrr", "hits@1", "hits@3", "hits@10", "hits@20", "hits@50", "hits@100", "average_precision"
]
TOP_METRICS = ("recall", "ndcg", "map", "precision", "hit_rate")  # of the best K of each source
TopMetric: TypeAlias = Annotated[
    str,
    must(re.compile(f"({'|'.join(TOP_METRICS)})@[1-9][0-9]{{0,8}}").fullmatch, "recall@K"),
    WithJsonSchema({"type": "string", "pattern": f"^({'|'.join(TOP_METRICS)})@[1-9][0-9]*$"}),
]
LinkMetric: TypeAlias = Annotated[
    RankMetric | TopMetric,
    or_say(f"{', '.join(get_args(RankMetric))}, or {'@K, '.join(TOP_METRICS)}@K"),
]

_Tops: TypeAlias = Annotated[
    Count | Annotated[tuple[Count, ...], BeforeValidator(to_tuple), Field(min_length=1)],
    or_say("a whole number from 1, or a list of them"),
]
_Candidates: TypeAlias = Annotated[
    Literal["destinations"] | Count, or_say("destinations, or a whole number from 1")
]


class RankingConfig(Section):
    """Candidates among which each true edge is ranked in an evaluation."""

    read_if: ClassVar[Conditions] = {"edges": ("candidates", "destinations")}

    candidates: _Candidates | None = Field(
        None,
        description="Number of candidates sampled uniformly for each edge and end; null = all "
        "nodes, exactly, and 1 with temporal sampling; destinations = all targets of the edge "
        "type's edges, at the edge's time, without other true ones.",
    )
    edges: Annotated[int, Field(ge=2)] | None = Field(
        None, description="Edges of a split, chosen at random, that are ranked; null = all."
    )
    file: InputPath | None = Field(
        None,
        description="File of candidates for each edge, or of negative edges that all edges "
        "share (npz, parquet, csv: see docs/models.md).",
    )
    top: _Tops | None = Field(
        None,
        description="K, or several, of the metrics per source (recall@K, ndcg@K, map@K, "
        "precision@K, hit_rate@K); null = that of task.metric, if it is one of these.",
    )

    def _conflicts(self, at: KeyPath) -> Iterator[Problem]:
        if self.file is not None and self.candidates is not None:
            message = f"candidates {self.candidates} would be ignored: there is a file of them"
            yield Problem((*at, "candidates"), message, f"remove it, or {dotted(at)}.file")

    @property
    def tops(self) -> tuple[int, ...]:
        """Each K of `top`."""
        return (self.top,) if isinstance(self.top, int) else self.top or ()
