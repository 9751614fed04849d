"""Text columns of tables: the encoders that turn text into features, and their stages."""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raygnn.config.graph import GraphConfig, TablesGraph
from raygnn.config.values import find_module, find_user_modules
from raygnn.errors import CapabilityError, ConfigError, DataError
from raygnn.graph.arrays import Array
from raygnn.graph.outofcore.disk_graph import Appended, DiskArray
from raygnn.graph.outofcore.workspace import Workspace
from raygnn.graph.sources.input_files import sha256
from raygnn.graph.tables.databases import description_of
from raygnn.graph.tables.description import HASHING, SENTENCES, Table, TextColumn
from raygnn.graph.tables.frames import FitTo
from raygnn.graph.tables.reader import TableReader
from raygnn.storage.remote import AnyPath

_BATCH = 256  # texts in a call of an encoder
_ATTEMPTS = 3  # processes per file: Ray would restart one that runs out of memory forever
_ROWS = 1 << 16  # rows joined at once
_PROBE = "A probe: naïve 自然 text, of 2 lines\nand 1,234.5 words."

Encode: TypeAlias = Callable[[list[str]], Any]


def _tables(graph: GraphConfig | None) -> dict[str, Table]:
    """Return the tables with text columns, by ``nodes.<type>`` or ``edges.<key>``."""
    if not isinstance(graph, TablesGraph):
        return {}
    return {key: table for key, table in description_of(graph).tables.items() if table.text}


def needs_model(graph: GraphConfig | None) -> bool:
    """Return True if a model encodes a text column of a graph."""
    return any(text.is_model for table in _tables(graph).values() for text in table.text.values())


def identity(graph: TablesGraph) -> dict[str, Any]:
    """Return the encoders of text columns for the graph's digest: names, versions and digests by
    key in the description. Raises InputError or CapabilityError if an encoder is missing."""
    found = {
        f"{key}.text.{name}": _identity(column, Path(graph.path), f"{key}.text.{name}")
        for key, table in _tables(graph).items()
        for name, column in table.text.items()
    }
    return {"text": found} if found else {}


def _identity(column: TextColumn, file: Path, key: str) -> dict[str, Any]:
    where, name = f"{file}: {key}.encoder", column.encoder
    if name == HASHING:
        version = _version("scikit-learn", "sklearn", "raygnn[text]", where)
        digest = hashlib.sha256(_hashing(column.dim)([_PROBE]).tobytes()).hexdigest()
        return {"encoder": name, "dim": column.dim, "version": version, "digest": digest}
    if not name.startswith(SENTENCES):
        module = find_module(name.partition(":")[0])
        if isinstance(module, str):
            raise ConfigError(f"{name}: there is no module {module}", where=where)
        return {"encoder": name, "digest": sha256(Path(module.origin)) if module.origin else ""}
    package = "sentence-transformers"
    version = _version(package, "sentence_transformers", package, where)
    try:
        directory = _directory(name, file.parent)
    except (OSError, ValueError) as error:
        message = f"there is no such directory, and no model to download: {_line(error)}"
        remedy = "correct the name; without a network, name the directory of a model"
        raise DataError(message, where=where, remedy=remedy) from None
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    listed = [f"{one.relative_to(directory)}: {sha256(one)}" for one in files]
    digest = hashlib.sha256("\n".join(listed).encode()).hexdigest()
    return {"encoder": name, "version": version, "digest": digest}


def _version(package: str, module: str, installs: str, where: str) -> str:
    try:
        importlib.import_module(module)
    except ImportError as error:
        message = f"{package} cannot be imported: {error}"
        raise CapabilityError(message, where=where, remedy=f'pip install "{installs}"') from None
    return f"{package} {importlib.metadata.version(package)}"


def _directory(encoder: str, base: Path) -> Path:
    """Return the directory of a sentence-transformers model, which is downloaded if necessary."""
    name = encoder.removeprefix(SENTENCES)
    if (base / name).is_dir():
        return base / name
    hub = importlib.import_module("huggingface_hub")
    return Path(hub.snapshot_download(name if "/" in name else encoder))


def _line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def _hashing(dim: int) -> Encode:
    module = importlib.import_module("sklearn.feature_extraction.text")
    vectorizer = module.HashingVectorizer(n_features=dim, dtype=np.float32)
    return lambda texts: vectorizer.transform(texts).toarray()


@lru_cache(maxsize=1)  # one model in memory
def _loaded(encoder: str, dim: int, on_gpu: bool, base: Path) -> Encode:
    if encoder == HASHING:
        return _hashing(dim)
    if not encoder.startswith(SENTENCES):
        find_user_modules()
        module, _, name = encoder.partition(":")
        made: Encode = getattr(importlib.import_module(module), name)()
        return made
    package, device = importlib.import_module("sentence_transformers"), "cuda" if on_gpu else "cpu"
    model = package.SentenceTransformer(str(_directory(encoder, base)), device=device)
    return lambda texts: model.encode(texts, show_progress_bar=False)


class Texts:
    """Encodes the text columns of a graph's tables, in one task per file and column. ``to`` has the
    encoders of the training, which must be the same for new data."""

    def __init__(self, graph: TablesGraph, to: FitTo, work: Workspace):
        self._file, self._trained, self._work = Path(graph.path), to.trained, work
        self._identities, self._num = identity(graph).get("text", {}), 0

    def arrays(
        self,
        kind: str,
        place: str,
        table: Table,
        files: Sequence[AnyPath],
        num: int,
        kept: Sequence[DiskArray] = (),
    ) -> tuple[dict[str, DiskArray], dict[str, Any]]:
        """Encode the text columns of a table.

        Args:
            num: number of nodes or edges; rows beyond those of the files get the empty text.
            kept: masks of the rows to keep, if some were dropped.

        Returns:
            The arrays by name, and the encoders as transforms for the manifest.
        """
        arrays, made = dict[str, DiskArray](), dict[str, Any]()
        for name, column in table.text.items():
            key, where = f"{kind}/{name}", f"{self._file}: {place}.text.{name}"
            made[key] = {"text": self._identities[f"{place}.text.{name}"]}
            if self._trained is not None and self._trained.get(key) != made[key]:
                then = (self._trained.get(key) or {}).get("text", "no text column")
                message = f"the encoder is {made[key]['text']}; in training it was {then}"
                remedy = "restore that encoder, install that version, or train again"
                raise DataError(message, where=where, remedy=remedy)
            directory = self._work.directory(f"text-{self._num}")
            tasks = [
                (file, table.delimiter, column, name, directory / str(at), self._file, where)
                for at, file in enumerate(files)
            ]
            gpus = column.num_gpus if column.is_model else None
            sizes = [file.stat().st_size for file in files]
            found = self._work.run(directory.name, encode, tasks, sizes, gpus)
            encoded = [directory / str(at) for at in range(len(files))]
            joined = self._work.directory(f"joined-{self._num}")
            arrays[name] = DiskArray(joined / "vectors", "float32", (found[0]["width"],))
            self._work.run(joined.name, _join, [(encoded, arrays[name], num, kept)], [num])
            self._work.drop(directory.name)
            self._num += 1
        _loaded.cache_clear()  # otherwise this process would hold the model in memory
        return arrays, made


def encode(
    file: AnyPath,
    delimiter: str | None,
    column: TextColumn,
    name: str,
    to: Path,
    described: Path,
    where: str,
) -> dict[str, int]:
    """Encode a file's texts, after those that an earlier attempt wrote. The first vector in the
    output is that of the empty text. Returns the number of rows and of features."""
    attempts = to.with_suffix(".attempts")
    with attempts.open("a") as counted:
        counted.write(".")
    if attempts.stat().st_size > _ATTEMPTS:
        attempts.unlink()
        message = f"the process that encodes {file} was killed {_ATTEMPTS} times at the same texts"
        raise DataError(message, where=where, remedy="give it more memory, or use a smaller model")

    def vectors(texts: list[str], width: int | None = None) -> Array:
        try:
            loaded = _loaded(column.encoder, column.dim, column.num_gpus > 0, described.parent)
            rows = np.asarray(loaded(texts), np.float32)
            wanted = (len(texts), width or max(rows.shape[-1:], default=0) or 1)
            if rows.shape != wanted or not np.isfinite(rows).all():
                expected = f"[{len(texts)}, {width or 'd'}]"
                message = f"it returned shape {list(rows.shape)}, or NaN or infinity"
                raise ValueError(f"{message}, expected finite numbers of shape {expected}")
            return rows
        except Exception as error:
            message = f"{column.encoder} failed: {_line(error)}"
            raise DataError(message, where=where, remedy="correct the encoder") from None

    try:
        empty, done = vectors([""]), 0
        reader = TableReader([file], [column.column or name], delimiter)
        with to.open("ab") as out:
            there = out.tell() // empty.nbytes - 1
            if there < 0:
                out.truncate(0)
                out.write(empty.tobytes())
            for chunk in reader.chunks():
                texts = chunk.columns[reader.columns[0]]
                if not (chunk.text(reader.columns[0]) or pa.types.is_null(texts.type)):
                    remedy = "list it under features, or write it as text"
                    message = f"the values are {texts.type}, not text"
                    raise chunk.error(0, reader.columns[0], message, remedy)
                texts = pc.fill_null(pc.cast(texts, pa.large_string()), "")
                for start in range(0, len(texts), _BATCH):
                    batch = texts[start : start + _BATCH].to_pylist()
                    if done + len(batch) > there:
                        out.truncate((1 + done) * empty.nbytes)
                        out.write(vectors(batch, empty.shape[1]).tobytes())
                        out.flush()
                        attempts.write_text(".")  # only attempts without progress count
                    done += len(batch)
        return {"rows": done, "width": empty.shape[1]}
    finally:
        attempts.unlink(missing_ok=True)


def _join(files: Sequence[Path], to: DiskArray, num: int, kept: Sequence[DiskArray]) -> None:
    """Concatenate the vectors of files, only rows to keep if masks are passed, up to ``num``."""
    keep = np.concatenate([np.ones(0, bool), *(array.map() for array in kept)])
    rows, at = [DiskArray(file, "float32", to.row_shape).map() for file in files], 0
    with Appended(to.path, to.dtype, to.row_shape) as out:
        for vectors in rows:
            for start in range(1, len(vectors), _ROWS):
                block = vectors[start : start + _ROWS]
                out.add(block[keep[at : at + len(block)]] if kept else block)
                at += len(block)
        while not kept and out.num < num:
            out.add(np.repeat(rows[0][:1], min(num - out.num, _ROWS), axis=0))
