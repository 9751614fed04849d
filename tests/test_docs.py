"""The documentation as a site: it builds, leads nowhere that is not there, and fetches nothing."""

from __future__ import annotations

import ast
import os
import re
import runpy
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from raygnn.config.execution import ALLOWABLE, BINDING
from raygnn.preflight.report import CHECKS
from tests.support.browser import Browser
from tests.support.pages import CHECKOUT

DOCS = CHECKOUT / "docs"
SOURCES = [*(CHECKOUT / "raygnn").rglob("*.py")]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site as `make docs` builds it, where a broken link or anchor is an error."""
    place = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(place)],
        cwd=CHECKOUT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return place


def test_every_page_is_there(site: Path) -> None:
    pages = {path.stem for path in site.glob("*.html")} - {"404"}
    assert pages == {path.stem for path in DOCS.glob("*.md")}
    assert not [*site.glob("*.py")]
    for page in pages:
        assert "in the checkout" not in (DOCS / f"{page}.md").read_text()  # the site's wording


def test_all_blocks_are_blocks(site: Path) -> None:
    for page in site.glob("*.html"):
        assert "```" not in page.read_text(), page


def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    for page in site.glob("*.html"):
        text = page.read_text()
        assert not re.findall(r"<(?:script|img|iframe)[^>]*src=.?(?:https?:)?//", text), page
        assert not re.findall(r"<link[^>]*href=.?(?:https?:)?//", text), page


@pytest.fixture
def address(site: Path) -> Iterator[str]:
    """Address of a server of the site, which the search needs."""
    handler = partial(QuietHandler, directory=str(site))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


def test_pages_in_a_browser(address: str, tmp_path: Path) -> None:
    with Browser(tmp_path / "profile") as browser:
        for page in ("index", "failures", "quick-start"):
            browser.call("Page.navigate", url=f"{address}/{page}.html")
            browser.wait(f"document.readyState == 'complete' && /{page}/.test(location.pathname)")
            assert browser.ask("document.querySelectorAll('h1').length") == 1
        assert browser.complaints == []
        assert all(url.startswith((address, "data:", "blob:")) for url in browser.requests)


def test_findings_are_up_to_date() -> None:
    """The page has a section for every existing check, and no other sections."""
    made = runpy.run_path(str(DOCS / "findings.py"))
    page = (DOCS / "failures.md").read_text()
    assert made["markdown"]() == page, "run python docs/findings.py"
    sections = re.findall(r"^### `(\w+)`$", page, re.MULTILINE)
    assert len(sections) == len(set(sections))
    assert set(sections) == {*ALLOWABLE, *BINDING} == made["ABOUT"].keys()


def test_every_finding_in_the_code_has_a_section() -> None:
    """Findings in the code are the checks' names and those built outside of preflight."""
    page = (DOCS / "failures.md").read_text()
    sections = set(re.findall(r"^### `(\w+)`$", page, re.MULTILINE))
    emitted = {check.__name__ for check in CHECKS} | {
        node.args[0].value
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "Finding"
        and node.args
        and isinstance(node.args[0], ast.Constant)
        and node.args[0].value
    }
    assert len(emitted) > 20
    assert emitted <= sections


def literals() -> set[str]:
    """Yield the texts in the source, without interpolated values."""
    return {
        node.value
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


def test_messages_of_ours_are_in_the_code() -> None:
    page = (DOCS / "failures.md").read_text().partition("## Errors by their text")[2]
    ours, _, others = page.partition("### Errors of other libraries")
    others = others.partition("\n## ")[0]
    quoted = re.findall(r"^\| `([^`]+)` \|", ours, re.MULTILINE)
    assert len(quoted) + len(re.findall(r"^\| `", others, re.MULTILINE)) > 45
    found = literals()
    for message in quoted:
        for piece in filter(None, (part.strip(" :") for part in message.split("…"))):
            known = any(piece in text for text in found)
            assert known or piece == "***" or _across(piece, found), message


def _across(piece: str, found: set[str]) -> bool:
    """Return True for a message that begins with a constant of its own."""
    return piece.startswith("*** ") and any(piece[4:] in text for text in found)


def test_the_pages_that_troubleshooting_sends_to_have_those_sections() -> None:
    """Links in a checkout are checked here; the site's builder checks its own."""
    for page in DOCS.glob("*.md"):
        for name, anchor in re.findall(r"\]\(([\w-]+\.md)#([\w-]+)\)", page.read_text()):
            headings = re.findall(r"^#+ (.*)$", (DOCS / name).read_text(), re.MULTILINE)
            slugs = {re.sub(r"[^\w -]", "", h).strip().lower().replace(" ", "-") for h in headings}
            assert anchor in slugs, f"{page.name}: {name}#{anchor}"


@pytest.mark.parametrize("name", ["college", "customers", "gowalla"])
def test_an_example_without_arguments_shows_how_it_is_called(name: str) -> None:
    script = CHECKOUT / "examples" / f"{name}.py"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"{name}.py" in done.stderr
    assert "Traceback" not in done.stderr


def test_every_path_that_is_named_exists() -> None:
    """A rename leaves no old path in the pages, the Makefile or the CI script."""
    folders = [f.name for f in CHECKOUT.iterdir() if f.is_dir() and f.name.isalpha()]
    named = re.compile(rf"(?<![\w./-])(?:{'|'.join(folders)})/[\w./*-]*\w")
    pages = [
        CHECKOUT / "README.md",
        CHECKOUT / "CONTRIBUTING.md",
        CHECKOUT / ".ci" / "run",
        *DOCS.glob("*.md"),
    ]
    texts = {page.name: page.read_text() for page in pages}
    targets = re.findall(r"^([\w-]+):", (CHECKOUT / "Makefile").read_text(), re.M)
    dry = ["make", "--dry-run", "--always-make", *targets]
    texts["Makefile"] = subprocess.run(
        dry, cwd=CHECKOUT, capture_output=True, text=True, check=True, timeout=60
    ).stdout
    for name, text in texts.items():
        made = {"build", "data", "dist", "runs"}
        for path in set(named.findall(re.sub(r"\S*\$\S*", "", text))):
            assert path.split("/")[0] in made or list(CHECKOUT.glob(path)), f"{name}: {path}"
    assert len(named.findall(texts["Makefile"])) > 20


def test_every_module_of_the_walks_exists() -> None:
    text = (DOCS / "architecture.md").read_text()
    text = text[text.index("## Walks") : text.index("## The same model")]
    groups = re.findall(r"`([\w/]+/)`{([^}]*)}", text)
    modules = [folder + name for folder, names in groups for name in re.findall(r"\w+", names)]
    modules += re.findall(r"`(\w+/[\w/]*\w)`", text)
    assert len(modules) > 50
    for module in modules:
        assert (CHECKOUT / "raygnn" / module).with_suffix(".py").is_file() or (
            CHECKOUT / "raygnn" / module / "__init__.py"
        ).is_file(), module
