"""``raygnn explain``: contributions to the predictions for nodes."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import ValidationError

from raygnn.errors import InputError
from raygnn.prediction.merge import OTHER, free_file
from raygnn.runs.run import Run
from raygnn.serving.node_answers import NodeAnswers
from raygnn.serving.questions import LARGEST_TREE, NodeQuestion, UserId
from raygnn.serving.served_run import Served, ServedModel
from raygnn.util.files import replacing, storage_errors
from raygnn.worker.planes.prediction_rows import read_wanted

if TYPE_CHECKING:
    import pandas

_COLUMNS = (
    *("node", "prediction", "score", "without", "kind", "type"),
    *("feature", "source", "target", "contribution"),
)


def explain(
    run: str | Path | Run,
    ids: str | PathLike[str] | Sequence[UserId],
    *,
    out: str | PathLike[str] | None = None,
    k: int = 20,
    fanout: Sequence[int] | None = None,
    at: Any = None,
    task: str | None = None,
    storage: str = "runs",
    trust: bool = False,
    overrides: Sequence[str] = (),
    overwrite: bool = False,
) -> pandas.DataFrame:
    """Explain a run's predictions for nodes, by integrated gradients of their neighbourhoods.

    The highest class probability, or the first of several targets, is explained, in this process,
    one node at a time.

    Args:
        run, at, task, storage, trust, overrides: see `raygnn.serving.app`.
        ids: ids of nodes, or a file of ids as for `raygnn.predict`.
        out: Parquet file to write.
        k: number of contributions of features, of nodes and of edges to return for each node, the
            ones of the largest magnitude.
        fanout: sampled neighbours per layer, from the nodes outward; None = all.
        overwrite: replace the file.

    Returns:
        Columns ``node``, ``prediction``; ``score``, the explained number; ``without``, its value if
        all features of the neighbourhood were 0; ``kind``: feature, node or edge; ``type`` of the
        node or edge; ``feature``, its name; ``source`` and ``target``, ids; ``contribution``.
        The contributions of all features, or of all nodes, add up to ``score`` - ``without``.

    Raises:
        InputError: there is no such run or node, its predictions are not for nodes, a node's
            neighbourhood is too large, the file cannot be written, or Captum is missing.
    """
    if not 1 <= k <= LARGEST_TREE:
        raise InputError(f"k is {k}", where="--k", remedy=f"give a number from 1 to {LARGEST_TREE}")
    file = None if out is None else free_file(Path(out).expanduser().absolute(), overwrite)
    if isinstance(ids, (str, PathLike)):
        nodes: list[Any] = read_wanted(Path(ids).expanduser(), "node").to_pylist()
    else:
        nodes = [*ids]
    found = Served.find(run, task=task, storage=storage, at=at, trust=trust, overrides=overrides)
    found = [served for served in found if not served.one.task.of_links]
    if len(found) != 1:
        what = "the run has several tasks" if found else "only predictions for nodes are explained"
        raise InputError(what, where="explain", remedy="choose a --task that predicts for nodes")
    model = NodeAnswers(ServedModel(found[0]))
    if model.ids.whole:  # a file has ids as text
        nodes = [int(one) if str(one).isdecimal() else one for one in nodes]
    rows: list[dict[str, Any]] = []
    asked = None if fanout is None else tuple(fanout)
    for one in nodes:
        try:
            question = NodeQuestion([one], asked, explain=k)
        except ValidationError as error:
            what, remedy = error.errors()[0]["msg"], "give ids and numbers of neighbours"
            raise InputError(what, where=f"node {one!r}", remedy=remedy) from None
        (answer,) = model.answer([question])
        if isinstance(answer, InputError):
            raise InputError(answer.what, where=f"node {one!r}", remedy=answer.remedy)
        rows += _rows(answer[0])
    table = pa.table({name: _column([row.get(name) for row in rows]) for name in _COLUMNS})
    if file is not None:
        with storage_errors(file, InputError, OTHER), replacing(file) as draft:
            pq.write_table(table, draft)
    frame: pandas.DataFrame = table.to_pandas()
    return frame


def _rows(answer: dict[str, Any]) -> list[dict[str, Any]]:
    found, shared = answer["explanation"], {"prediction": answer.get("prediction")}
    shared |= {"node": answer["node"], "score": found["score"], "without": found["without"]}
    return [
        {"source": one.get("node"), **one, **shared, "kind": kind}
        for kind in ("feature", "node", "edge")
        for one in found[f"{kind}s"]
    ]


def _column(values: list[Any]) -> pa.Array:
    """Return a column; a mixture of numbers and text as text."""
    texts = any(isinstance(value, str) for value in values)
    return pa.array([str(v) if texts and v is not None else v for v in values])
