"""A cluster's job server: Ray's client for it, with an end to every wait and errors that say what
to do."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from raygnn.config.places import without_users
from raygnn.errors import InputError, PreflightError, RaygnnError

if TYPE_CHECKING:
    from ray.job_submission import JobDetails, JobSubmissionClient

DEFAULT_ADDRESS = "http://127.0.0.1:8265"

_REACH, _ANSWER = 10.0, 120.0  # seconds to connect, and without a word of an answer
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
_INTERRUPTED, _FAILED = 130, 4  # exit codes of jobs that tell none

# of a job's metadata, by which we know our own
RUN, STORAGE, VERSION = "raygnn.run", "raygnn.storage", "raygnn.version"

# loggers that tell of each package and connection
_TALKATIVE = ("ray", "ray.dashboard.modules.dashboard_sdk", "ray.dashboard.modules.job.sdk")

T = TypeVar("T")


@dataclass(frozen=True)
class JobInfo:
    """A job as the server knows it.

    Attributes:
        id: its submission id.
        state: ``pending``, ``running``, ``done``, ``failed`` or ``interrupted``.
        code: its exit code, once it has ended.
        run, storage: the name of its run and where it lies, for jobs of `raygnn submit`.
        command: what it runs.
        message: what Ray says of it.
        started: seconds since the epoch.
    """

    id: str
    state: str
    code: int | None
    run: str | None
    storage: str | None
    command: str
    message: str
    started: float | None

    @property
    def trains(self) -> bool:
        """Whether it is one of ours, as far as can be told."""
        return self.run is not None or _OURS.search(self.command) is not None

    @property
    def over(self) -> bool:
        """Whether it has ended."""
        return self.state not in ("pending", "running")


class JobServer:
    """The job server of a cluster's head node.

    Args:
        address: ``http://HOST:8265``; None = as RAY_API_SERVER_ADDRESS or RAY_ADDRESS say, else
            this machine's.

    Attributes:
        address: its URL.

    Raises:
        InputError: the address is none of a job server.
        PreflightError: nobody answers there, or the token is wrong.
    """

    def __init__(self, address: str | None = None):
        self.address = _url(address)
        _use_token()
        self._client: JobSubmissionClient = self._ask(lambda: _client(self.address))

    @property
    def warnings(self) -> list[str]:
        """What is not secure about it."""
        found = [unencrypted(self.address), self._open()]
        return [text for text in found if text is not None]

    def _open(self) -> str | None:
        """A warning, if it asks nobody for a token."""
        import requests

        with suppress(requests.RequestException):
            answer = requests.get(f"{self.address}/api/jobs/", timeout=_REACH)
            if answer.ok:
                return (
                    f"{self.address} asks for no token: whoever reaches it runs what they like "
                    "there; start Ray with RAY_AUTH_MODE=token on every node"
                )
        return None

    def submit(
        self,
        entrypoint: str,
        directory: Path,
        *,
        job: str,
        env: Mapping[str, str],
        metadata: Mapping[str, str],
    ) -> None:
        """Upload the directory, and have the command run in a copy of it on the head node.

        Args:
            job: the id that it gets.

        Raises:
            PreflightError: the server refuses it.
        """
        self._ask(
            lambda: self._client.submit_job(
                entrypoint=entrypoint,
                submission_id=job,
                metadata=dict(metadata),
                runtime_env={"working_dir": str(directory), "env_vars": dict(env)},
            )
        )

    def info(self, job: str) -> JobInfo:
        """What is known of a job.

        Raises:
            InputError: there is no such job.
        """
        return _info(self._ask(lambda: self._client.get_job_info(job), job))

    def jobs(self) -> list[JobInfo]:
        """All jobs that were submitted, the latest first."""
        found = [_info(job) for job in self._ask(self._client.list_jobs) if job.submission_id]
        return sorted(found, key=lambda job: -(job.started or 0))

    def find(self, name: str) -> JobInfo:
        """The job of this id, or of a run of this name: the one that is not over, else the latest.

        Raises:
            InputError: there is none.
        """
        jobs = self.jobs()
        found = [job for job in jobs if job.id == name]
        found += [job for job in jobs if job.run == name and not job.over]
        found += [job for job in jobs if job.run == name]
        if found:
            return found[0]
        raise InputError(
            f"there is no job or run {name!r}",
            where=self.address,
            remedy=f"raygnn runs --address {self.address} lists them",
        )

    def stop(self, job: str) -> bool:
        """Have it stopped; returns whether it was running."""
        return self._ask(lambda: bool(self._client.stop_job(job)), job)

    def log(self, job: str) -> str:
        """All that it has printed."""
        return self._ask(lambda: str(self._client.get_job_logs(job)), job)

    def tail(self, job: str) -> Any:
        """What it prints from its beginning on, as an asynchronous iterator of text."""
        return self._client.tail_job_logs(job)

    def _ask(self, act: Callable[[], T], job: str | None = None) -> T:
        try:
            return act()
        except RaygnnError:
            raise
        except Exception as error:
            raise _error(error, self.address, job) from None


def unencrypted(address: str) -> str | None:
    """A warning, if what is sent to the address can be read on the way."""
    url = urlsplit(address)
    if url.scheme == "https" or _LOOPBACK.fullmatch(url.hostname or ""):
        return None
    return (
        f"{address} is not encrypted: the token and the job can be read on the way; use https, or "
        "a tunnel (ray dashboard, ssh -L 8265:127.0.0.1:8265, kubectl port-forward)"
    )


def _client(address: str) -> JobSubmissionClient:
    from ray.job_submission import JobSubmissionClient

    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(logging.ERROR)

    class Client(JobSubmissionClient):
        """Ray's, which waits for ever for an answer."""

        def _do_request(self, *args: Any, **options: Any) -> Any:
            return super()._do_request(*args, timeout=(_REACH, _ANSWER), **options)

    # Ray takes these instead of the address that it is given
    names = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, address))
    try:
        return Client(address)
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _url(address: str | None) -> str:
    given = address or os.environ.get("RAY_API_SERVER_ADDRESS")
    if not given and "://" in os.environ.get("RAY_ADDRESS", ""):
        given = os.environ["RAY_ADDRESS"]
    url = (given or DEFAULT_ADDRESS).strip()
    if "://" not in url:
        url = f"http://{url}"
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        known = known and not parts.query and not parts.fragment and not re.search(r"\s", url)
    except ValueError:
        known = False
    if not known:
        raise InputError(
            "this is not the address of a job server",
            where=without_users(url).partition("?")[0][:_SHOWN],
            remedy="give http://HOST:8265 of the head node's dashboard",
        )
    if "@" in parts.netloc:
        raise InputError(
            "an address with a user in it",
            where=without_users(url)[:_SHOWN],
            remedy="set RAY_AUTH_TOKEN_PATH or RAY_AUTH_TOKEN instead",
        )
    return url.rstrip("/")


def _use_token() -> None:
    """Send the token if there is one: to set RAY_AUTH_MODE as well is easily forgotten."""
    default = os.path.expanduser("~/.ray/auth_token")
    names = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
    if any(os.environ.get(name) for name in names) or os.path.isfile(default):
        os.environ.setdefault("RAY_AUTH_MODE", "token")


def _info(job: JobDetails) -> JobInfo:
    state = _STATES.get(getattr(job.status, "value", str(job.status)), "running")
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
        # of a shell that was ended by a signal
        code=128 - code if code is not None and code < 0 else code,
        run=metadata.get(RUN),
        storage=metadata.get(STORAGE),
        command=job.entrypoint,
        message=job.message or "",
        started=None if job.start_time is None else job.start_time / 1000,
    )


def _error(error: Exception, address: str, job: str | None) -> RaygnnError:
    """Ray's and requests' exceptions in our words."""
    import requests
    from ray.exceptions import AuthenticationError

    said = " ".join(str(error).split())
    if isinstance(error, AuthenticationError):
        if "Forbidden" in said or "invalid" in said:
            told = "its token is another one"
        else:
            told = "it asks for a token, and there is none here"
        return PreflightError(
            f"the job server refused us: {told}",
            where=address,
            remedy="set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH, to what "
            "the head node was started with",
        )
    if isinstance(error, (requests.RequestException, ConnectionError, TimeoutError)):
        what = "no answer" if "timed out" in said.lower() else "no connection"
        return PreflightError(
            f"{what} from a job server",
            where=address,
            remedy="give the head node's dashboard, port 8265 (not Ray's own 6379); it listens on "
            "loopback, so that a tunnel leads there: ssh -L 8265:127.0.0.1:8265 HEAD",
        )
    if job is not None and ("status code 404" in said or "does not exist" in said):
        return InputError(
            f"there is no job {job!r}", where=address, remedy="raygnn runs --address lists them"
        )
    remedy = None
    if "No available agent" in said:
        remedy = (
            "the head node's dashboard agent does not run: its port, 52365 unless it was changed, "
            "is likely taken there; give Ray another one (ray start --head "
            "--dashboard-agent-listen-port=PORT), and look at dashboard_agent.log in its logs"
        )
    return PreflightError(f"the job server: {said[:_SHOWN]}", where=address, remedy=remedy)
