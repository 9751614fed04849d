"""Showing a handle's training while it goes on: a card in a notebook, lines elsewhere."""

from __future__ import annotations

import sys
import threading
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raygnn.jobs.handle import Handle

_BETWEEN = 1.0  # seconds between two pictures


class View(ABC):
    """What is told of a training."""

    @abstractmethod
    def line(self, text: str) -> None:
        """Take in a line that it has printed."""

    @abstractmethod
    def end(self) -> None:
        """It is over."""


def view(handle: Handle) -> View:
    """What suits this process: a notebook, or standard output."""
    return Notebook(handle) if in_notebook() else Lines()


def in_notebook() -> bool:
    """Whether what is displayed here is shown in a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


class Lines(View):
    """Prints each line as it comes."""

    def line(self, text: str) -> None:
        with suppress(OSError, ValueError):  # nobody reads it any more
            print(text, flush=True)

    def end(self) -> None:
        pass


class Notebook(View):
    """A card in the cell that began the training, drawn anew once a second where it changed."""

    def __init__(self, handle: Handle):
        from IPython.display import HTML, display

        self._html = HTML
        self._handle = handle
        self._last = handle._repr_html_()
        self._shown: Any = display(HTML(self._last), display_id=True)
        self._over = threading.Event()
        self._lock = threading.Lock()
        threading.Thread(target=self._draw, name="raygnn-card", daemon=True).start()

    def line(self, text: str) -> None:
        pass  # the card is drawn from the handle

    def end(self) -> None:
        self._over.set()
        self._update()

    def _draw(self) -> None:
        while not self._over.wait(_BETWEEN):
            self._update()

    def _update(self) -> None:
        with self._lock, suppress(Exception):  # a picture must not end anything
            html = self._handle._repr_html_()
            if html != self._last:
                self._shown.update(self._html(html))
                self._last = html
