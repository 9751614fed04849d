"""Showing a job of a cluster as if it ran here."""

from __future__ import annotations

from raygnn.jobs.server import JobInfo
from raygnn.jobs.submit import SubmittedJob
from raygnn.runs.display import Display

_SHOWN = 500  # characters of Ray's message


def follow(job: SubmittedJob, show: Display) -> JobInfo:
    """Show what a job prints until it is over: on a terminal, where it is in training is one line
    with a bar, as in `raygnn train`.

    Returns:
        What became of it.

    Raises:
        PreflightError: the job server does not answer any more; the job may go on.
    """
    told_why = False
    with show.remote_lines() as live:
        for line in job.lines():
            if line is not None:
                told_why |= line.startswith("error: ")
                live(line)
    info = job.info
    if info.state == "failed" and not told_why:
        show.note(f"{job.id}: {' '.join(info.message.split())[:_SHOWN]}")
    return info
