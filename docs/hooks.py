"""What the site does to pages that are read in a checkout, too.

Links to files beside ``docs/`` become their names, since the site has only pages; of a fence such
as ``sh cloud`` the second word, which is for the tests, goes.
"""

from __future__ import annotations

import re
from typing import Any

_BESIDE = re.compile(r"\[([^\]]+)\]\(\.\./([^)#]+)(?:#[^)]*)?\)")


_FENCE = re.compile(r"^(```\w+) \S+$", re.MULTILINE)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by MkDocs with each page."""
    return _FENCE.sub(r"\1", _BESIDE.sub(_named, markdown))


def _named(link: re.Match[str]) -> str:
    text, path = link[1], link[2]
    return f"{text}" if path in text else f"{text} (`{path}` in the checkout)"
