"""A cluster's job server: Ray's client with timeouts, errors with a remedy, and a job's output
line by line."""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from raygnn.config.places import without_users
from raygnn.errors import InputError, PreflightError, RaygnnError, wrong_token

if TYPE_CHECKING:
    from ray.job_submission import JobDetails, JobSubmissionClient

_VARIABLE = "RAY_API_SERVER_ADDRESS"

_REACH, _ANSWER = 30.0, 120.0  # seconds for a first answer, and for each one after
_UPLOAD = 1800.0  # seconds for a job's files
_AWAY = 120.0  # seconds that the server may be unreachable
_SHOWN = 500  # characters of an answer
_LOOPBACK = re.compile(r"localhost|127(\.\d+){3}|::1")
_OURS = re.compile(r"\braygnn\b|\bjobs/train\.py\b")
_STATES = {
    "PENDING": "pending",
    "RUNNING": "running",
    "SUCCEEDED": "done",
    "FAILED": "failed",
    "STOPPED": "interrupted",
}
_INTERRUPTED, _FAILED = 130, 4  # exit codes of jobs without one

# keys of the metadata of our jobs
RUN, STORAGE, VERSION = "raygnn.run", "raygnn.storage", "raygnn.version"

# loggers with a line for each package and connection
_TALKATIVE = ("ray", "ray.dashboard.modules.dashboard_sdk", "ray.dashboard.modules.job.sdk")

# seconds between requests for a job's output, ten times the duration of the last one, since each
# returns all output
_OFTENEST, _RAREST = 1.0, 30.0

T = TypeVar("T")


@dataclass(frozen=True)
class JobInfo:
    id: str  # its submission id
    state: str  # ``pending``, ``running``, ``done``, ``failed`` or ``interrupted``
    code: int | None  # its exit code, once it has ended
    run: str | None  # name of its run, for jobs of `raygnn submit`
    storage: str | None  # location of that run
    command: str  # its entry point
    message: str  # Ray's
    started: float | None  # seconds since the epoch

    @property
    def trains(self) -> bool:
        """True if it is a job of raygnn, by its metadata or command."""
        return self.run is not None or _OURS.search(self.command) is not None

    @property
    def over(self) -> bool:
        return self.state not in ("pending", "running")


class JobServer:
    """Job server of a cluster's head node. ``address``: ``http://HOST:8265``; None =
    RAY_API_SERVER_ADDRESS or RAY_ADDRESS, else this machine's. Raises InputError if that is not the
    address of a job server, and PreflightError if it does not answer, or the token is wrong."""

    def __init__(self, address: str | None = None):
        self.address = _url(address)  # its URL
        _use_token()
        import ray.job_submission  # noqa: F401 - takes seconds, which are not the server's

        for name in _TALKATIVE:
            logging.getLogger(name).setLevel(logging.ERROR)
        self._client: JobSubmissionClient = self._ask(lambda: _client(self.address), most=_REACH)

    @property
    def warnings(self) -> list[str]:
        """Warnings about its security."""
        import requests

        texts = [text] if (text := unencrypted(self.address)) else []
        with suppress(requests.RequestException):
            if requests.get(f"{self.address}/api/jobs/", timeout=_REACH).ok:
                texts.append(
                    f"{self.address} requires no token: anyone who reaches it can run code there; "
                    "start Ray with RAY_AUTH_MODE=token on every node"
                )
        return texts

    def submit(self, **job: Any) -> None:
        """Upload and start a job; ``job``: arguments of Ray's `submit_job`. Raises PreflightError
        if the server refuses it."""
        self._ask(lambda: self._client.submit_job(**job), most=_UPLOAD)

    def info(self, job: str) -> JobInfo:
        """Return the job of this id. Raises InputError if there is none."""
        return _info(self._ask(lambda: self._client.get_job_info(job), job))

    def jobs(self) -> list[JobInfo]:
        """Return all submitted jobs, the latest first."""
        jobs = [_info(job) for job in self._ask(self._client.list_jobs) if job.submission_id]
        return sorted(jobs, key=lambda job: -(job.started or 0))

    def find(self, name: str) -> JobInfo:
        """Return the job of this id, or of a run of this name: one in progress, else the latest.
        Raises InputError if there is none."""
        jobs = self.jobs()
        of_run = sorted((job for job in jobs if job.run == name), key=lambda job: job.over)
        for job in (*(job for job in jobs if job.id == name), *of_run):
            return job
        what = f"there is no job or run {name!r}"
        remedy = f"raygnn runs --address {self.address} lists them"
        raise InputError(what, where=self.address, remedy=remedy)

    def stop(self, job: str) -> None:
        """Interrupt a job."""
        self._ask(lambda: self._client.stop_job(job), job)

    def log(self, job: str) -> str:
        """Return the output of a job."""
        return self._ask(lambda: str(self._client.get_job_logs(job)), job)

    def _ask(self, act: Callable[[], T], job: str | None = None, most: float = _ANSWER) -> T:
        """Call Ray's client, which has no timeouts, for at most ``most`` seconds."""
        answers: list[T] = []
        errors: list[Exception] = [TimeoutError("timed out")]

        def ask() -> None:
            try:
                answers.append(act())
            except Exception as error:
                errors.append(error)

        thread = threading.Thread(target=ask, name="raygnn-job-server", daemon=True)
        thread.start()
        thread.join(most)
        if answers:
            return answers[0]
        raise _error(errors[-1], self.address, job)


def unencrypted(address: str) -> str | None:
    """Return a warning if the connection to the address is not encrypted."""
    url = urlsplit(address)
    if url.scheme == "https" or _LOOPBACK.fullmatch(url.hostname or ""):
        return None
    return (
        f"{address} is not encrypted: the token and the job can be read on the way; use https, or "
        "a tunnel (ray dashboard, ssh -L 8265:127.0.0.1:8265, kubectl port-forward)"
    )


def _client(address: str) -> JobSubmissionClient:
    """Return Ray's client, which prefers a variable to the address that is passed."""
    from ray.job_submission import JobSubmissionClient

    before = os.environ.get(_VARIABLE)
    os.environ[_VARIABLE] = address
    try:
        return JobSubmissionClient(address)
    finally:
        if before is None:
            del os.environ[_VARIABLE]
        else:
            os.environ[_VARIABLE] = before


def _url(address: str | None) -> str:
    given = address or os.environ.get(_VARIABLE)
    if not given and "://" in os.environ.get("RAY_ADDRESS", ""):
        given = os.environ["RAY_ADDRESS"]
    url = (given or "http://127.0.0.1:8265").strip()
    if "://" not in url:
        url = f"http://{url}"
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        valid = valid and not parts.query and not parts.fragment and not re.search(r"\s", url)
    except ValueError:
        valid = False
    if not valid:
        what = "this is not the address of a job server"
        remedy = "give http://HOST:8265 of the head node's dashboard"
        raise InputError(what, where=without_users(url).partition("?")[0][:_SHOWN], remedy=remedy)
    if "@" in parts.netloc:
        raise InputError(
            "the address contains a user",
            where=without_users(url)[:_SHOWN],
            remedy="set RAY_AUTH_TOKEN_PATH or RAY_AUTH_TOKEN instead",
        )
    return url.rstrip("/")


def _use_token() -> None:
    """Set RAY_AUTH_MODE if there is a token: it is easily forgotten."""
    default = os.path.expanduser("~/.ray/auth_token")
    names = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
    if any(os.environ.get(name) for name in names) or os.path.isfile(default):
        os.environ.setdefault("RAY_AUTH_MODE", "token")


def _info(job: JobDetails) -> JobInfo:
    state = _STATES.get(job.status, "running")
    code = job.driver_exit_code
    if state == "done":
        code = 0
    elif state == "interrupted" or code == _INTERRUPTED:  # by the server; by a signal
        state, code = "interrupted", _INTERRUPTED
    elif state == "failed" and not code:
        code = _FAILED
    elif state in ("pending", "running"):
        code = None
    metadata = job.metadata or {}
    return JobInfo(
        id=str(job.submission_id),
        state=state,
        # of a shell that a signal terminated
        code=128 - code if code is not None and code < 0 else code,
        run=metadata.get(RUN),
        storage=metadata.get(STORAGE),
        command=job.entrypoint,
        message=job.message or "",
        started=None if job.start_time is None else job.start_time / 1000,
    )


def _error(error: Exception, address: str, job: str | None) -> RaygnnError:
    import requests
    from ray.exceptions import AuthenticationError

    said = " ".join(str(error).split())
    if isinstance(error, AuthenticationError):
        sent = "Forbidden" in said or "invalid" in said
        return wrong_token("the job server refused us", address, sent=sent)
    if isinstance(error, (requests.RequestException, ConnectionError, TimeoutError)):
        slow = isinstance(error, TimeoutError) or "timed out" in said.lower()
        return PreflightError(
            f"no {'answer' if slow else 'connection'} from a job server",
            where=address,
            remedy="give the head node's dashboard, port 8265 (not Ray's own 6379); it listens on "
            "loopback, so that a tunnel leads there: ssh -L 8265:127.0.0.1:8265 HEAD",
        )
    if job is not None and ("status code 404" in said or "does not exist" in said):
        return InputError(
            f"there is no job {job!r}", where=address, remedy="raygnn runs --address lists them"
        )
    remedy = (
        "the head node's dashboard agent does not run: its port, 52365 unless it was changed, is "
        "likely in use there; give Ray another one (ray start --head "
        "--dashboard-agent-listen-port=PORT), and read dashboard_agent.log in its logs"
    )
    hint = remedy if "No available agent" in said else None
    return PreflightError(f"the job server: {said[:_SHOWN]}", where=address, remedy=hint)


def tail(server: JobServer, job: str) -> Iterator[str]:
    """Yield the lines of a job's output until it is over. Raises PreflightError if the server is
    unreachable for two minutes, and InputError if there is no such job."""
    seen = 0
    for over in states(server, job):
        began = time.monotonic()
        try:
            *lines, rest = ("" if over is None else server.log(job)).split("\n")
        except PreflightError:  # it fails at bytes that are not UTF-8
            lines, rest = [], "(the job server cannot read the rest of the output)"
        yield from lines[seen:]
        seen = max(seen, len(lines))
        if over:
            yield from filter(None, [rest])
            return
        time.sleep(min(max(_OFTENEST, 10 * (time.monotonic() - began)), _RAREST))


def states(server: JobServer, job: str) -> Iterator[bool | None]:
    """Yield True if a job is over, False if not, None if the server does not answer. Raises
    PreflightError if the server is unreachable for two minutes, and InputError if there is no such
    job."""
    answered = time.monotonic()
    while True:
        over: bool | None = None
        with suppress(PreflightError):
            over = server.info(job).over
            answered = time.monotonic()
        if over is None and time.monotonic() - answered > _AWAY:
            what = f"the job server has not answered for {_AWAY:g} s"
            remedy = "the job may still run: raygnn logs --follow shows it later"
            raise PreflightError(what, where=server.address, remedy=remedy)
        yield over
