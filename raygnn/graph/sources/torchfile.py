"""Dictionaries of NumPy arrays in files of ``torch.save``, read without torch and without trust.

Such a file is a zip archive with a pickle in it, or, from before torch 1.6, four pickles one
after the other: a number, a version, facts of the machine, and the value. Arrays lie within the
pickle; tensors would lie beside it, and are refused.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from raygnn.errors import DataError
from raygnn.graph.sources.convert import Array
from raygnn.graph.sources.files import check_file, check_fits_memory
from raygnn.graph.sources.pickle_machine import Malformed, brief, to_array
from raygnn.graph.sources.pickled import interpret

_LEGACY = 0x1950A86A20F9469CFC6C  # the first pickle of files from before torch 1.6
_REMEDY = "The file is damaged, or not of this dataset: get it again."


class SavedDict:
    """A dictionary in a file of ``torch.save``; its arrays are decoded when they are asked for."""

    def __init__(self, path: Path, values: Mapping[Any, Any]):
        self.path, self._values = path, values

    def __contains__(self, key: str) -> bool:
        return key in self._values

    @property
    def keys(self) -> list[str]:
        return [str(key) for key in self._values]

    def integers(self, key: str, below: int | None = None) -> Array:
        """An array of integers as int64, of any shape.

        Args:
            below: its values run from 0 to less than this.

        Raises:
            DataError: there is none, or the first value out of range is named with its row.
        """
        array = self.numbers(key)
        if array.dtype.kind not in "iu":
            raise self._wrong(key, f"it has dtype {array.dtype}, not integers")
        if below is not None and array.size and not 0 <= array.min() <= array.max() < below:
            row = int(np.argwhere((array < 0) | (array >= below))[0, 0])
            what = f"it holds {array[row].tolist()}; ids run from 0 to {below - 1}"
            raise DataError(what, where=f"{self.path}: {key!r}, row {row + 1}", remedy=_REMEDY)
        return array.astype(np.int64, copy=False)

    def numbers(self, key: str) -> Array:
        """An array of numbers as it is; raises DataError if there is none."""
        if key not in self._values:
            found = ", ".join(map(repr, self.keys[:20])) or "none"
            raise self._wrong(key, f"there is no array {key!r}; there are: {found}")
        try:
            return to_array(self._values[key])
        except (Malformed, ValueError) as error:
            raise self._wrong(key, f"it holds {error}") from None

    def _wrong(self, key: str, what: str) -> DataError:
        return DataError(what, where=f"{self.path}: {key!r}", remedy=_REMEDY)


def load(path: Path) -> SavedDict:
    """The dictionary of arrays that ``torch.save`` wrote to ``path``.

    Raises:
        DataError: the file is missing or damaged, holds something else, or refers to any class
            or function that arrays do not need; nothing in it is run.
    """
    check_file(path)
    try:
        with path.open("rb") as file:
            value = _zipped(path, file) if zipfile.is_zipfile(file) else _legacy(path, file)
    except (OSError, zipfile.BadZipFile, EOFError) as error:
        raise DataError(f"it cannot be read: {error}", where=str(path), remedy=_REMEDY) from None
    if not isinstance(value, dict):
        what = f"it holds {brief(value)} where a dict of arrays was due"
        raise DataError(what, where=str(path), remedy=_REMEDY)
    return SavedDict(path, value)


def _zipped(path: Path, file: BinaryIO) -> Any:
    with zipfile.ZipFile(file) as archive:
        found = [each for each in archive.infolist() if each.filename.endswith("/data.pkl")]
        if len(found) != 1:
            raise zipfile.BadZipFile("torch.save wrote no such archive")
        # torch.save does not compress: a small archive that claims to be large is none of its own
        if found[0].compress_type != zipfile.ZIP_STORED:
            raise zipfile.BadZipFile("torch.save does not compress")
        check_fits_memory(found[0].file_size, "its pickle", str(path))
        return interpret(archive.read(found[0]), path)


def _legacy(path: Path, file: BinaryIO) -> Any:
    file.seek(0)
    if interpret(file, path) != _LEGACY:
        raise zipfile.BadZipFile("it is not a file of torch.save")
    interpret(file, path)
    interpret(file, path)
    return interpret(file, path)
