"""A cluster's jobs as rows of a table."""

from __future__ import annotations

from raygnn.errors import RaygnnError
from raygnn.jobs.handle import begun_by, opened
from raygnn.jobs.server import JobInfo, JobServer
from raygnn.runs.progress_line import ProgressLine
from raygnn.runs.run import age, progress, row_of
from raygnn.runs.run_directory import storage_path

_MOST = 100  # jobs
_MOST_READ = 10  # logs of jobs


def rows_of(server: JobServer) -> list[dict[str, str]]:
    """``job``, ``run``, ``state``, ``progress``, ``metric`` and ``age`` of the latest jobs that
    train, as text.

    How far one is comes from its run directory where that can be seen from here, else from what it
    has printed: of the ten latest.
    """
    jobs = [job for job in server.jobs() if job.trains][:_MOST]
    return [_row(server, job, read=number < _MOST_READ) for number, job in enumerate(jobs)]


def _row(server: JobServer, job: JobInfo, *, read: bool) -> dict[str, str]:
    far, metric = "", ""
    run = job.storage and job.run and opened(storage_path(job.storage) / job.run)
    if run and begun_by(run, job.id):
        shown = row_of(run)
        far, metric = shown["progress"], shown["metric"]
    elif read and (told := _told(server, job.id)) is not None:
        far, metric = progress(told.step, told.total), told.metric
    return {
        "job": job.id,
        "run": job.run or "",
        "state": job.state,
        "progress": far,
        "metric": metric,
        "age": age(job.started),
    }


def _told(server: JobServer, job: str) -> ProgressLine | None:
    try:
        lines = server.log(job).splitlines()
    except RaygnnError:  # it has gone
        return None
    return next((told for line in reversed(lines) if (told := ProgressLine.read(line))), None)
