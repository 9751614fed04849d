"""A headless Chromium, spoken to over the pipes of its DevTools protocol."""

from __future__ import annotations

import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

_WAIT = 60.0  # seconds for an answer
_OPTIONS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--remote-debugging-pipe",
)


def find_chromium() -> str:
    """Return Chromium's path; skip the test if there is none."""
    found = shutil.which("chromium") or shutil.which("chromium-browser")
    if found is None:
        pytest.skip("no chromium here (Debian: apt-get install chromium)")
    return found


class Browser:
    """A page of a headless browser; a context manager that leaves no process.

    Attributes:
        requests: URLs that the page asked for.
        complaints: what it wrote to the console as an error or a warning, and its exceptions.
    """

    def __init__(self, profile: Path, *, dark: bool = False):
        self.requests: list[str] = []
        self.complaints: list[str] = []
        ours, theirs = os.pipe(), os.pipe()  # the browser's input and output
        profile.mkdir()

        def join() -> None:
            # the browser uses descriptors 3 and 4, of which either may be one of the pipes
            reads, writes = (fcntl.fcntl(end, fcntl.F_DUPFD, 5) for end in (ours[0], theirs[1]))
            os.dup2(reads, 3)
            os.dup2(writes, 4)

        self._process = subprocess.Popen(
            [find_chromium(), *_OPTIONS, f"--user-data-dir={profile}", "about:blank"],
            preexec_fn=join,
            pass_fds=(3, 4),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(ours[0])
        os.close(theirs[1])
        self._write, self._read = ours[1], theirs[0]
        self._rest = b""
        self._count = 0
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a command of the protocol, and return its result."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            found = self._next()
            if found.get("id") == self._count:
                assert "error" not in found, found
                result: dict[str, Any] = found["result"]
                return result
            self._note(found)

    def open(self, file: Path) -> None:
        """Load a file and wait until the page says that all of its charts are drawn."""
        self.call("Page.navigate", url=file.as_uri())
        self.wait("document.readyState === 'complete' && 'drawn' in document.body.dataset")

    def wait(self, expression: str) -> None:
        deadline = time.monotonic() + _WAIT
        while not self.ask(expression):
            assert time.monotonic() < deadline, (expression, self.complaints)
            time.sleep(0.1)

    def ask(self, expression: str) -> Any:
        """Return the value of a JavaScript expression, decoded from JSON."""
        found = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._write)
        os.close(self._read)
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._read], [], [], _WAIT)
            assert ready, "Chromium does not answer"
            chunk = os.read(self._read, 1 << 16)
            assert chunk, "Chromium has gone"
            self._rest += chunk
        message, _, self._rest = self._rest.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found

    def _note(self, event: dict[str, Any]) -> None:
        method, parameters = event.get("method"), event.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(parameters["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning"):
            self.complaints.append(json.dumps(parameters["args"]))
        elif method == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
            self.complaints.append(parameters["entry"]["text"])
