"""Loggers: what they show after a resume, and runs that go on whatever becomes of them."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from raygnn.config.load import load_config
from raygnn.config.schema import Config
from raygnn.driver import loggers as module
from raygnn.driver.loggers import Backend, Loggers, LoggerThread, backend_of, check_packages
from raygnn.errors import ConfigError
from raygnn.runs.interrupts import stoppable
from raygnn.runs.run_directory import LOGGERS, METRICS, Events, RunDir
from tests.support.small_jobs import job, until

Record = dict[str, Any]


def make(storage: Path, **logging: Any) -> tuple[Config, RunDir]:
    config = load_config(job(storage, logging=logging))
    run = RunDir(str(storage), config.name)
    run.begin(config.recorded())
    return config, run


def records(steps: Iterable[int], **values: float) -> list[Record]:
    """Return records whose loss encodes the step, with more values in every fifth."""
    found = []
    for step in steps:
        found.append({"step": step, "epoch": 0, "time": 0.5 * step, "train/loss": 1 / step})
        if step % 5 == 0:
            found.append({"step": step, "epoch": 0, "time": 0.5 * step, "val/f1": 0.5})
    return [{**record, **values} for record in found]


def write(run: RunDir, lines: Iterable[Mapping[str, Any]], *, anew: bool = False) -> None:
    with open(run.path / "metrics.jsonl", "w" if anew else "a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def feed(run: RunDir, step: int, status: Any) -> None:
    """Run a run's loggers as a command would that began at this step and has ended."""
    events = Events(run.path / "logs" / LOGGERS)
    for name in load_config(run.path / "config.yaml").logging.loggers:
        thread = LoggerThread(backend_of(name, run.path), run.path, events.notify, step)
        thread.start()
        thread.finish(status)
        thread.join(60)
        assert thread.done


def shown(run: RunDir, tag: str) -> list[tuple[int, float]]:
    """Return a curve's steps and values as TensorBoard shows them: a start purges later ones."""
    from tensorboardX.proto.event_pb2 import Event, SessionLog

    points: dict[int, float] = {}
    for file in sorted((run.path / "loggers" / "tensorboard").glob("events.*")):
        data = file.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            event = Event.FromString(data[12 : 12 + length])
            data = data[16 + length :]
            if event.HasField("session_log") and event.session_log.status == SessionLog.START:
                points = {step: value for step, value in points.items() if step < event.step}
            for value in event.summary.value:
                if value.tag == tag:
                    points[event.step] = round(value.simple_value, 4)
    return sorted(points.items())


def test_a_run_and_its_resume_reach_tensorboard(tmp_path: Path) -> None:
    _, run = make(tmp_path, loggers=["tensorboard"])
    with run:
        write(run, records(range(1, 13)))
        feed(run, 1, "interrupted")
        assert shown(run, "train/loss") == [(n, round(1 / n, 4)) for n in range(1, 13)]
        assert shown(run, "val/f1") == [(5, 0.5), (10, 0.5)]
        # it resumes from a checkpoint at step 8, with other losses
        there = [r for r in records(range(1, 9)) if r["step"] <= 8]
        write(run, there, anew=True)
        write(run, [{**r, "train/loss": 9.0} for r in records(range(9, 11))])
        feed(run, 9, "done")
        losses = [(n, round(1 / n, 4)) for n in range(1, 9)] + [(9, 9.0), (10, 9.0)]
        assert shown(run, "train/loss") == losses
        assert not (run.path / "logs" / LOGGERS).exists()  # nothing went wrong
        assert "hidden" in (run.path / "loggers" / "tensorboard" / "hparams.yaml").read_text()


def test_all_is_logged_when_the_run_ends(tmp_path: Path) -> None:
    config, run = make(tmp_path, loggers=["tensorboard"])
    told: list[str] = []
    with run:
        write(run, records([1]))
        with Loggers(config, run.path, told.append) as loggers:
            loggers.start(1)
            write(run, records([2, 3, 4, 5]))
        assert shown(run, "val/f1") == [(5, 0.5)]
        assert [step for step, _ in shown(run, "train/loss")] == [1, 2, 3, 4, 5]
    assert told == []


def test_errors_of_a_logger_thread_are_reported(tmp_path: Path) -> None:
    config, run = make(tmp_path, loggers=["tensorboard"])
    with run:
        (run.path / "loggers").mkdir(exist_ok=True)
        (run.path / "loggers" / "tensorboard").write_text("in its way")
        write(run, records([1]))
        told: list[str] = []
        with Loggers(config, run.path, told.append) as loggers:
            loggers.start(1)
        first, *_ = (run.path / "logs" / LOGGERS).read_text().splitlines()
    assert json.loads(first)["text"].startswith("tensorboard receives no records: ")
    assert told == ["tensorboard did not receive all records; metrics.jsonl has them"]


def test_files_are_written_without_lightning() -> None:
    """Importing it takes as long as a short run."""
    code = (
        "import sys, raygnn.driver.loggers\n"
        "from raygnn.driver.loggers import TensorBoard\n"
        "import tempfile, pathlib\n"
        "with tempfile.TemporaryDirectory() as place:\n"
        "    logger = TensorBoard(pathlib.Path(place), {}, {'name': 'a'})\n"
        "    logger.open(1)\n"
        "    logger.log({'step': 1, 'train/loss': 0.5})\n"
        "    logger.close('done')\n"
        "assert 'lightning' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], timeout=120, check=True)


@pytest.mark.parametrize("stop", [False, True])
def test_a_logger_that_hangs_holds_nothing_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: bool
) -> None:
    """The wait for a logger is bounded; Ctrl-C cuts it short and ends nothing else."""
    config, run = make(tmp_path, loggers=["wandb", "tensorboard"])
    monkeypatch.setattr(module, "_LAST", 60.0 if stop else 0.4)
    monkeypatch.setattr(module, "_QUICK", 0.2)
    monkeypatch.setattr(module.Wandb, "open", lambda self, step: threading.Event().wait())
    told: list[str] = []

    def notify(text: str) -> None:
        told.append(text)
        if stop and text.startswith("waiting"):
            signal.raise_signal(signal.SIGINT)

    with run:
        write(run, records([1]))
        with stoppable(), Loggers(config, run.path, notify) as loggers:
            loggers.start(1)
        assert shown(run, "train/loss") == [(1, 1.0)]  # the other logger has all records
    waiting, missing = told
    assert " s for wandb to receive the last records; Ctrl-C ends only the wait" in waiting
    assert f"{run.path / 'metrics.jsonl'} has all of them, and the run is unaffected" in waiting
    assert missing == "wandb did not receive all records; metrics.jsonl has them"


def test_a_command_ends_beside_a_library_that_hangs() -> None:
    code = (
        "import sys, threading, raygnn.cli as cli\n"
        "hang = threading.Event().wait\n"
        "threading.Thread(target=hang, name=cli.LOGGER_THREAD + 'wandb', daemon=True).start()\n"
        "threading.Thread(target=hang).start()  # of the library\n"
        "cli.carry_out = lambda args: print('the end', end='') or 4\n"
        "sys.argv = ['raygnn', 'runs']\n"
        "sys.exit(cli.main())"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, timeout=120, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (4, "the end")


@pytest.mark.parametrize("name", ["mlflow", "wandb"])
def test_a_missing_package_is_refused(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(job(tmp_path, logging={"loggers": [name]}))
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda module: None)
    with pytest.raises(ConfigError, match=f"pip install {name}"):
        check_packages(config)


class _Flaky(Backend):
    """Logger that keeps its records, and fails or hangs for as long as it is set to."""

    name = "flaky"
    fresh = False
    remote = True

    def __init__(self) -> None:
        super().__init__(Path(), {}, {})
        self.got: list[int] = []
        self.opened: list[int] = []
        self.ends: list[str | None] = []
        self.broken = threading.Event()
        self.hang: Callable[[], object] = lambda: None

    def make(self, step: int) -> Any:
        self.opened.append(step)
        return object()

    def describe(self) -> None: ...

    def log(self, record: Mapping[str, Any]) -> None:
        self.hang()
        if self.broken.is_set():
            raise OSError("no server")
        self.got.append(record["step"])

    def flush(self) -> None: ...

    def end(self, logger: Any, status: str | None) -> None:
        self.ends.append(status)


@pytest.fixture
def flaky(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[_Flaky, Any]]:
    """Return a logger, and a function that starts a thread with it."""
    monkeypatch.setattr(module, "_POLL", 0.01)
    monkeypatch.setattr(module, "_PAUSE", 0.01)
    kind, begun = _Flaky(), list[LoggerThread]()

    def begin(notify: Callable[[str], object], step: int = 1) -> LoggerThread:
        begun.append(LoggerThread(kind, tmp_path, notify, step))
        begun[-1].start()
        return begun[-1]

    yield kind, begin
    for thread in begun:
        thread.finish("done")
        thread.join(10)
        assert not thread.is_alive()


def put(place: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    with open(place / METRICS, "a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def test_a_logger_that_fails_gets_all_later(tmp_path: Path, flaky: tuple[_Flaky, Any]) -> None:
    kind, begin = flaky
    told = list[str]()
    kind.broken.set()
    thread = begin(told.append)
    put(tmp_path, records([1, 2]))
    until(lambda: bool(told))
    put(tmp_path, records([3]))
    time.sleep(0.1)
    assert told == ["flaky receives no records: OSError: no server; training continues"]
    kind.broken.clear()
    thread.finish("done")
    thread.join(10)
    assert kind.got == [1, 2, 3]
    assert kind.ends == ["done"]
    assert told[1:] == ["flaky receives records again"]
    assert thread.done


def test_passwords_are_removed_from_a_loggers_errors(
    tmp_path: Path, flaky: tuple[_Flaky, Any]
) -> None:
    kind, begin = flaky
    told = list[str]()

    def fail() -> None:
        raise OSError("no answer from https://me:sesame@mlflow.example/api")

    kind.hang = fail
    put(tmp_path, records([1]))
    thread = begin(told.append)
    thread.finish("failed")
    thread.join(10)
    assert "mlflow.example" in told[0]
    assert "sesame" not in told[0]
    assert not thread.done


def test_a_logger_that_hangs_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flaky: tuple[_Flaky, Any]
) -> None:
    monkeypatch.setattr(module, "_SILENT", 0.05)
    kind, begin = flaky
    told, go = list[str](), threading.Event()
    kind.hang = lambda: go.wait(60)
    put(tmp_path, records([1]))
    thread = begin(told.append)
    until(lambda: (thread.poll(), bool(told))[1])
    thread.poll()
    assert len(told) == 1
    go.set()
    thread.finish("done")
    thread.join(10)
    assert kind.got == [1]


def test_a_run_that_goes_back_opens_the_logger_anew(
    tmp_path: Path, flaky: tuple[_Flaky, Any]
) -> None:
    kind, begin = flaky
    put(tmp_path, records([1, 2, 3]))
    thread = begin(print)
    until(lambda: kind.got == [1, 2, 3])
    first = (tmp_path / METRICS).read_bytes().splitlines(keepends=True)[0]
    os.truncate(tmp_path / METRICS, len(first))  # as a run that resumes from step 1 does
    put(tmp_path, [{"step": 2, "time": 9.0, "epoch": 0, "train/loss": 9.0}])
    until(lambda: len(kind.got) == 4)
    thread.finish("interrupted")
    thread.join(10)
    assert kind.opened == [1, 2]
    assert kind.got == [1, 2, 3, 2]
    assert kind.ends == [None, "interrupted"]


def test_a_step_that_comes_again_is_noticed(tmp_path: Path, flaky: tuple[_Flaky, Any]) -> None:
    """A step whose evaluation alone is repeated is noticed, too."""
    kind, begin = flaky
    validated = {"step": 5, "val/f1": 1.0, "epoch": 0, "time": 1.0}
    put(tmp_path, [*records([4, 5]), {**validated, "test/f1": 1.0}])
    begin(print)
    until(lambda: kind.got == [4, 5, 5, 5])
    assert kind.opened == [4]
    put(tmp_path, [{**validated, "time": 3.0}])
    until(lambda: len(kind.got) == 5)
    assert kind.opened == [4, 5]


def test_an_earlier_commands_records_are_not_logged_again(
    tmp_path: Path, flaky: tuple[_Flaky, Any]
) -> None:
    kind, begin = flaky
    put(tmp_path, records([1, 2, 3, 4]))
    begin(print, step=3)
    until(lambda: kind.got == [3, 4])
    assert kind.opened == [3]


def test_a_file_that_may_be_torn_is_followed_by_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an error such as a full disk's, the records go on in a new file."""
    monkeypatch.setattr(module, "_POLL", 0.01)
    monkeypatch.setattr(module, "_PAUSE", 0.01)
    _, run = make(tmp_path, loggers=["tensorboard"])
    with run:
        kind, failures = backend_of("tensorboard", run.path), [3, 3, 5]
        log = kind.log

        def fail(record: Record) -> None:
            log(record)
            if failures and record["step"] == failures[0]:
                failures.pop(0)
                raise OSError("No space left on device")

        monkeypatch.setattr(kind, "log", fail)
        write(run, records(range(1, 9)))
        told: list[str] = []
        thread = LoggerThread(kind, run.path, told.append, 1)
        thread.start()
        until(lambda: len(told) == 2)
        thread.finish("done")
        thread.join(10)
        assert thread.done
        assert len([*(run.path / "loggers" / "tensorboard").glob("events.*")]) > 1
        assert shown(run, "train/loss") == [(n, round(1 / n, 4)) for n in range(1, 9)]


def test_wandb_resumes_its_run(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    _, run = make(tmp_path, loggers={"wandb": {"offline": True}})
    with run:
        write(run, records(range(1, 4)))
        feed(run, 1, "interrupted")
        identity = json.loads((run.path / "loggers" / "wandb.json").read_text())["id"]
        write(run, records([4]))
        feed(run, 4, "done")
        made = sorted((run.path / "loggers" / "wandb").glob("offline-run-*"))
        assert [path.name.rpartition("-")[2] for path in made] == [identity, identity]
        assert not (run.path / "logs" / LOGGERS).exists()


def test_mlflow_resumes_its_run(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    place = f"sqlite:///{tmp_path}/mlflow.db"
    _, run = make(tmp_path, loggers={"mlflow": {"tracking_uri": place}})
    with run:
        write(run, records(range(1, 4)))
        feed(run, 1, "interrupted")
        write(run, records([4]))
        feed(run, 4, "done")
        assert not (run.path / "logs" / LOGGERS).exists()
        identity = json.loads((run.path / "loggers" / "mlflow.json").read_text())["id"]
    client = mlflow.MlflowClient(place)
    assert [m.step for m in client.get_metric_history(identity, "train/loss")] == [1, 2, 3, 4]
    assert client.get_run(identity).info.status == "FINISHED"
    assert client.get_run(identity).data.params["model/kind"] == "sage"
