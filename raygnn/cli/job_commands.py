"""Commands about jobs on a cluster: submit, logs, stop; the last one also for local runs."""

from __future__ import annotations

import argparse
import os
import signal
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from raygnn.cli.options import (
    command,
    job_command,
    overwrite_or_resume,
    print_json,
    print_result,
    storage,
)
from raygnn.errors import InputError, Interrupted, TrainingError
from raygnn.runs.output import say
from raygnn.util.locks import LOCK, is_held_by

if TYPE_CHECKING:
    from raygnn.jobs.submit import SubmittedJob

_ADDRESS = """the head node's job server, http://HOST:8265 (default: RAY_API_SERVER_ADDRESS, else
this machine's)"""
_STOP = 300.0  # seconds
_NAMED = 8  # skipped files in a message


def add(commands: Any) -> None:
    """Add them to the parser."""
    text = "submit a job to a cluster, and show its progress"
    submit = job_command(commands, "submit", _submit, text)
    text = (
        "directory that is uploaded with the job: your modules, small data (default: ., or the "
        "directory of CONFIG if that is elsewhere)"
    )
    submit.add_argument("--working-dir", metavar="DIR", help=text)
    overwrite_or_resume(submit)
    shown = submit.add_mutually_exclusive_group()
    text = "show its output until it ends, and exit with its exit code (the default)"
    shown.add_argument("--follow", action="store_true", help=text)
    shown.add_argument("--detach", action="store_true", help="return as soon as it is submitted")

    logs = command(commands, "logs", _logs, "show the output of a job")
    logs.add_argument("-f", "--follow", action="store_true", help="until the job ends")
    stop = command(commands, "stop", _stop, "let a job or a run write a checkpoint and end")
    storage(stop, "without --address: storage of a run of this machine (default: runs)")
    for parser in (logs, stop):
        parser.add_argument("job", metavar="JOB", help="its id, or the name of its run")
    for parser in (submit, logs, stop):
        parser.add_argument("--address", metavar="URL", help=_ADDRESS)


def _submit(args: argparse.Namespace) -> int:
    from raygnn.config.places import size
    from raygnn.config.values import find_user_modules
    from raygnn.jobs.server import JobServer
    from raygnn.jobs.submit import prepare, send

    find_user_modules()
    package = prepare(args.config, args.set, args.working_dir)
    server = JobServer(args.address)
    notify = (lambda text: None) if args.json else say
    for warning in server.warnings:
        notify(f"warning: {warning}")
    contents = package.contents
    notify(f"uploading {len(contents.files)} files, {size(contents.size)}: {contents.directory}")
    for name in contents.left_out[:_NAMED]:
        notify(f"skipped: {name}: a link to elsewhere, or not packable")
    if secrets := contents.secrets:
        names = ", ".join(secrets[:_NAMED]) + ", …" * (len(secrets) > _NAMED)
        notify(f"skipped, likely secrets: {names} (!NAME in a .rayignore includes one)")
    job = send(package, server, overwrite=args.overwrite, resume=args.resume)
    notify(f"job {job.id} on {server.address}")
    if args.detach or (args.json and not args.follow):
        notify(f"follow it with raygnn logs {job.id} --follow, end it with raygnn stop {job.id}")
        print_json(args, {"job": job.id, "run": job.name, "address": server.address})
        return 0
    return _follow(args, job)


def _follow(args: argparse.Namespace, job: SubmittedJob) -> int:
    from raygnn.runs.display import Display, NullDisplay

    try:
        info = job.follow(NullDisplay() if args.json else Display())
    except KeyboardInterrupt:
        what = "no longer following; the job still runs"
        remedy = f"raygnn logs {job.id} --follow, or raygnn stop {job.id}"
        raise Interrupted(what, where=job.id, remedy=remedy) from None
    print_json(args, {"job": job.id, "run": job.name, "state": info.state, "code": info.code})
    return info.code or 0


def _job(args: argparse.Namespace) -> SubmittedJob:
    from raygnn.jobs.server import JobServer
    from raygnn.jobs.submit import SubmittedJob

    return SubmittedJob.of(JobServer(args.address), args.job)


def _logs(args: argparse.Namespace) -> int:
    job = _job(args)
    if args.follow:
        return _follow(args, job)
    log = job.logs()
    print_result(args, {"job": job.id, "log": log}, log.removesuffix("\n"))
    return 0


def _stop(args: argparse.Namespace) -> int:
    if args.address is None and _stop_here(args):
        return 0
    job = _job(args)
    if job.info.over:
        raise InputError(f"the job is over: {job.info.state}", where=job.id)
    job.stop(_STOP)
    info = job.info
    facts = {"job": job.id, "run": job.name, "state": info.state}
    print_result(args, facts, f"{job.id}: {info.state}; resume it with raygnn submit --resume")
    return 0


def _stop_here(args: argparse.Namespace) -> bool:
    """Interrupt the command that trains a local run; returns False if there is none."""
    from raygnn.runs.run import open_run

    try:
        run = open_run(args.job, args.storage)
    except InputError:
        return False
    process = run.holder
    if process is None:
        raise InputError(f"no command trains this run: {run.status}", where=run.shown)
    if not process.local:
        return False
    if not is_held_by(process.pid, run.path / LOCK):
        what = f"process {process.pid}, which its lock names, does not hold that lock for this user"
        remedy = "find out what that process is; end it yourself if it trains this run"
        raise InputError(what, where=run.shown, remedy=remedy)
    with suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGTERM)
    deadline = time.monotonic() + _STOP
    while run.holder == process and time.monotonic() < deadline:
        time.sleep(0.2)
    if run.holder == process:
        what = f"process {process.pid} has not ended within {_STOP:g} s"
        remedy = "wait for its checkpoint, or kill it: the run can resume from an older one"
        raise TrainingError(what, where=run.shown, remedy=remedy)
    facts = {"run": run.name, "path": run.shown, "state": run.status}
    text = f"{run.shown}: {run.status}; resume it with raygnn train CONFIG --resume"
    print_result(args, facts, text)
    return True
