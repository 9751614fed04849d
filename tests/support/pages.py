"""README and docs, and what is fenced in them."""

from __future__ import annotations

import re
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
PAGES = [CHECKOUT / "README.md", *sorted((CHECKOUT / "docs").glob("*.md"))]


def blocks(language: str, page: Path = PAGES[0]) -> list[str]:
    """Return the fenced blocks of a language on a page."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)


def commands_of(page: Path, *languages: str) -> list[str]:
    """Return every command in the ``sh`` blocks of a page, or in the named blocks, without its
    comment."""
    lines = [
        line
        for language in languages or ("sh",)
        for block in blocks(language, page)
        for line in block.splitlines()
    ]
    return [command for line in lines if (command := line.split(" #")[0].strip())]
