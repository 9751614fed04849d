"""Draws ``docs/train.svg``: what ``raygnn train`` shows on a terminal of 100 columns.

Runs the real command under a pseudo terminal and reads what it writes as a terminal would. The
picture is the screen half-way through the training, then what the end added to it::

    python docs/record.py
"""

from __future__ import annotations

import codecs
import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import tempfile
import termios
from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

CHECKOUT = Path(__file__).resolve().parents[1]
JOB = "jobs/products-100k.yaml"
WIDTH, HEIGHT = 100, 50
BAR = "━"

# Dark enough to read on a light page, light enough on a dark one.
THEME = TerminalTheme(
    (30, 34, 42),
    (205, 211, 222),
    [(60, 66, 78), (224, 108, 117), (126, 184, 118), (209, 164, 92)]
    + [(97, 150, 224), (190, 120, 210), (86, 182, 194), (205, 211, 222)],
    [(110, 118, 132), (240, 130, 138), (150, 205, 140), (229, 192, 123)]
    + [(120, 175, 245), (215, 150, 230), (110, 205, 215), (255, 255, 255)],
)

# Rich's own frame fetches a font from the web, which a picture in a page cannot do.
SVG = """\
<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{
  font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  font-size: {char_height}px; line-height: {line_height}px;
}}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/>
</clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""

_TOKEN = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|([\r\n])|([^\x1b\r\n])")
_STEP = re.compile(r"step (\d+)/(\d+)")
_INCOMPLETE = re.compile(r"\x1b(\[[0-9;?]*)?\Z")


class Screen:
    """As much of a terminal as rich's live displays need: text, colours, up, erase, wrap."""

    def __init__(self, width: int):
        self._width = width
        self._lines: list[list[tuple[str, str]]] = [[]]  # (style, character)
        self._row = self._column = 0
        self._style = ""
        self._pending = ""

    def feed(self, text: str) -> None:
        """Take in output; an escape sequence that is cut off waits for its rest."""
        text = self._pending + text
        cut = _INCOMPLETE.search(text)
        self._pending = text[cut.start() :] if cut else ""
        for token in _TOKEN.finditer(text[: cut.start()] if cut else text):
            number, command, move, character = token.groups()
            if character:
                self._put(character)
            elif move == "\r":
                self._column = 0
            elif move == "\n":
                self._down()
            elif command == "m":
                self._style = "" if number in ("", "0") else f"{self._style}\x1b[{number}m"
            elif command == "A":
                self._row = max(0, self._row - int(number or 1))
            elif command == "K":
                kept = 0 if number == "2" else self._column
                del self._lines[self._row][kept:]

    def lines(self) -> list[str]:
        """The lines with their colours as escape sequences, without empty ones at the end."""
        shown = [
            "".join(_styled(style, "".join(c for _, c in group)) for style, group in runs).rstrip()
            for runs in (groupby(line, key=itemgetter(0)) for line in self._lines)
        ]
        while shown and not shown[-1]:
            shown.pop()
        return shown

    def _put(self, character: str) -> None:
        if self._column == self._width:
            self._column = 0
            self._down()
        line = self._lines[self._row]
        line.extend([("", " ")] * (self._column + 1 - len(line)))
        line[self._column] = (self._style, character)
        self._column += 1

    def _down(self) -> None:
        self._row += 1
        if self._row == len(self._lines):
            self._lines.append([])


def _styled(style: str, text: str) -> str:
    return f"{style}{text}\x1b[0m" if style else text


def run(command: list[str], cwd: Path) -> Iterator[str]:
    """What a command writes to a terminal, piece by piece.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", HEIGHT, WIDTH, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color"}
    for name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR"):
        environment.pop(name, None)
    child = subprocess.Popen(
        command, cwd=cwd, env=environment, stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    decode = codecs.getincrementaldecoder("utf-8")().decode
    try:
        while piece := os.read(ours, 65536):
            yield decode(piece)
    except OSError:
        pass  # how Linux says that the other side has closed
    finally:
        os.close(ours)
    if code := child.wait():
        raise subprocess.CalledProcessError(code, command)


def record(command: list[str], cwd: Path) -> list[str]:
    """The screen half-way through the training, and the lines that the end added to it."""
    screen = Screen(WIDTH)
    half: list[str] = []
    for piece in run(command, cwd):
        screen.feed(piece.replace(f"{cwd}/", ""))
        lines = screen.lines()
        progress = [found for line in lines if BAR in line and (found := _STEP.search(line))]
        if progress and 2 * int(progress[-1][1]) <= int(progress[-1][2]):
            half = lines
    end = screen.lines()
    same = next((i for i, (a, b) in enumerate(zip(half, end)) if a != b), len(half))
    return [*half, *(["\x1b[2m…\x1b[0m"] if half else []), *end[same:]]


def draw(lines: list[str], title: str) -> str:
    """The lines as an SVG."""
    with open(os.devnull, "w") as nowhere:
        console = Console(
            record=True,
            width=WIDTH + 2,  # fonts differ in width, and what sticks out is cut off
            file=nowhere,
            force_terminal=True,
            color_system="truecolor",
        )
        for line in [*lines, ""]:
            console.print(Text.from_ansi(line), soft_wrap=True, highlight=False)
        return console.export_svg(title=title, theme=THEME, code_format=SVG, unique_id="raygnn")


def main() -> int:
    raygnn = Path(sys.executable).with_name("raygnn")
    with tempfile.TemporaryDirectory() as directory:
        lines = record([str(raygnn), "train", str(CHECKOUT / JOB)], Path(directory).resolve())
    lines = [f"\x1b[2m$\x1b[0m raygnn train {JOB}", "", *lines]
    svg = draw(lines, "raygnn train")
    (CHECKOUT / "docs" / "train.svg").write_text(svg, encoding="utf-8")
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
