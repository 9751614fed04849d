"""Arrays whose length is known when all of it has been read."""

from __future__ import annotations

from typing import Any

import numpy as np

from raygnn.config.places import size
from raygnn.graph.available_memory import memory

_LARGE = 1 << 28  # bytes, from which on growth is compared with the available memory


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
        """Add an array of rows, or of single values.

        Raises:
            MemoryError: there is no memory for them. Asked for it, the kernel may promise it all
                the same, and end the process when the promise is called in.
        """
        end = self.num + len(rows)
        if end > len(self._rows):
            rows_held = max(end, len(self._rows) * 3 // 2)
            more = (rows_held - len(self._rows)) * (self.width or 1) * self._rows.itemsize
            available = memory()[1] if more >= _LARGE else None
            if available is not None and more > available:
                raise MemoryError(f"{size(more)} more for {end:,} rows, {size(available)} are left")
            # not refchecked: nobody else has it before `take`
            self._rows.resize(self._shape(rows_held), refcheck=False)
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
