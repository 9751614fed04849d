"""Arrays whose length is known when all of it has been read."""

from __future__ import annotations

from typing import Any

import numpy as np


class Growing:
    """Rows that are appended, in memory that grows by a half where it lies.

    Args:
        width: of a row; None = single values.
    """

    def __init__(self, dtype: Any, width: int | None = None):
        self.width = width
        self.num = 0
        self._rows = np.empty(self._shape(0), dtype)

    def _shape(self, rows: int) -> tuple[int, ...]:
        return (rows,) if self.width is None else (rows, self.width)

    def append(self, rows: Any) -> None:
        """Add an array of rows, or of single values."""
        end = self.num + len(rows)
        if end > len(self._rows):
            # not refchecked: nobody else has it before `take`
            self._rows.resize(self._shape(max(end, len(self._rows) * 3 // 2)), refcheck=False)
        self._rows[self.num : end] = rows
        self.num = end

    def pad(self, num: int, value: Any) -> None:
        """Fill up to so many rows."""
        if num > self.num:
            self.append(np.full(self._shape(num - self.num), value, self._rows.dtype))

    def take(self) -> Any:
        """The array, ``[num]`` or ``[num, width]``; nothing can be appended after that."""
        self._rows.resize(self._shape(self.num), refcheck=False)
        return self._rows
