"""The command line: exit codes, signals, what is printed where."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import raygnn
import raygnn.driver
from raygnn.cli import main
from raygnn.config.load import json_schema
from raygnn.config.rules import contradictions
from raygnn.config.yaml_text import read_yaml
from raygnn.errors import (
    CapabilityError,
    ConfigError,
    DataError,
    Interrupted,
    PreflightError,
    RaygnnError,
    TrainingError,
)
from raygnn.runs.run_directory import RunDir

CHECKOUT = Path(__file__).resolve().parents[1]
JOB = (
    "name: small\ngraph: {format: planted, nodes: 400, degree: 8, classes: 4}\nmodel: {kind: gcn}\n"
)


class Driver(SimpleNamespace):
    """Stands in for the driver: notes its calls; each raises ``error`` if there is one."""

    error: BaseException | None = None
    ok = True

    def __init__(self) -> None:
        super().__init__(calls=[])

    def _called(self, name: str, config: raygnn.Config, **options: Any) -> Any:
        options.pop("started", None)
        self.calls.append((name, config.name, options))
        if self.error:
            raise self.error
        return SimpleNamespace(to_dict=lambda: {"status": "done"}, ok=self.ok)

    def train(self, config: raygnn.Config, **options: Any) -> Any:
        return self._called("train", config, **options)

    def check(self, config: raygnn.Config, **options: Any) -> Any:
        self.address = config.cluster.address
        return self._called("check", config, **options)

    def inspect(self, address: str | None, overrides: list[str], **options: Any) -> Any:
        self.address, self.overrides = address, overrides
        return self._called("inspect", SimpleNamespace(name=None), **options)


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Driver:
    """The stand-in, with a job in the current directory."""
    fake = Driver()
    monkeypatch.setitem(sys.modules, "raygnn.driver.train", fake)  # type: ignore[arg-type]
    monkeypatch.setattr(raygnn.driver, "train", fake, raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text(JOB)
    return fake


# ── arguments ────────────────────────────────────────────────────────────────────────────────


def test_train_passes_its_arguments(driver: Driver) -> None:
    assert main(["train", "job.yaml"]) == 0
    assert main(["train", "job.yaml", "--overwrite", "-v", "--set", "name=b", "--json"]) == 0
    assert main(["train", "job.yaml", "--resume", "--set", "name=a", "--set", "name=c"]) == 0
    off = {"overwrite": False, "resume": False, "verbose": False, "display": True}
    assert driver.calls == [
        ("train", "small", off),
        ("train", "b", {**off, "overwrite": True, "verbose": True, "display": False}),
        ("train", "c", {**off, "resume": True}),
    ]


def test_json_is_all_that_is_printed(driver: Driver, capsys: pytest.CaptureFixture[str]) -> None:
    for verb in ("train", "check"):
        assert main([verb, "job.yaml"]) == 0
        assert capsys.readouterr().out == ""
        assert main([verb, "job.yaml", "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == {"status": "done"}


def test_the_exit_code_of_check(driver: Driver) -> None:
    driver.ok = False
    assert main(["check", "job.yaml"]) == 3
    assert main(["check", "--set", "name=b"]) == 2  # there is no job to change


def test_check_is_told_of_the_cluster(driver: Driver) -> None:
    assert main(["check", "--address", "head:6379", "--set", "cluster.probe_timeout=20"]) == 0
    assert (driver.address, driver.overrides) == ("head:6379", ["cluster.probe_timeout=20"])
    assert main(["check"]) == 0
    assert (driver.address, driver.overrides) == (None, [])
    assert [name for name, *_ in driver.calls] == ["inspect", "inspect"]
    assert main(["check", "job.yaml", "--address", "head:6379"]) == 0
    assert driver.address == "head:6379"


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["fit", "job.yaml"],
        ["train"],
        ["train", "job.yaml", "--overwrite", "--resume"],
        ["train", "job.yaml", "--over"],
        ["train", "job.yaml", "--epochs", "3"],
        ["train", "job.yaml", "--set"],
        ["runs", "job.yaml"],
        ["tune", "job.yaml", "--overwrite", "--resume"],
        ["submit", "job.yaml", "--follow", "--detach"],
        ["predict", "first"],
        ["predict", "first", "--out", "a.parquet", "--fanout", "5;5"],
    ],
)
def test_bad_arguments(
    arguments: list[str], driver: Driver, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert "usage: raygnn" in capsys.readouterr().err
    assert driver.calls == []


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    for option in ("--version", "--help"):
        with pytest.raises(SystemExit) as stopped:
            main([option])
        assert stopped.value.code == 0
    said = capsys.readouterr().out
    assert raygnn.__version__ in said
    assert "3 preflight refused" in said


def test_own_classes_are_found_where_the_user_stands(driver: Driver, tmp_path: Path) -> None:
    (tmp_path / "my_model_for_test.py").write_text("class Net: ...\n")
    assert main(["train", "job.yaml", "--set", "model.kind=my_model_for_test:Net"]) == 0
    assert sys.path[0] == str(tmp_path)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Calls of the functions behind `predict`, `embed`, `evaluate`, `export` and `tune`."""
    calls: list[Any] = []

    def note(name: str, result: Any) -> Any:
        def call(what: Any, **options: Any) -> Any:
            options.pop("started", None)
            calls.append((name, what, options))
            return result

        return call

    written = SimpleNamespace(path="a", programs={}, to_dict=lambda: {"rows": 3})
    for module, results in {
        "raygnn.prediction.driver_side": {
            **dict.fromkeys(("predict", "recommend", "embed"), written),
            "evaluate": {"val/loss": 0.5},
        },
        "raygnn.prediction.export": {"export": written},
        "raygnn.search.run_search": {"tune": written},
    }.items():
        functions = {name: note(name, result) for name, result in results.items()}
        fake = SimpleNamespace(**functions)
        monkeypatch.setitem(sys.modules, module, fake)  # type: ignore[arg-type]
        package, _, last = module.rpartition(".")
        monkeypatch.setattr(import_module(package), last, fake, raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return calls


def test_predictions_are_given_their_arguments(
    calls: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    what = {"new_data": False, "trust": False, "storage": "runs", "verbose": False}
    what |= {"overrides": [], "display": True, "at": None}
    file = {"out": "a.parquet", "overwrite": False}
    every: dict[str, Any] = {
        "split": None,
        "since": None,
        "task": None,
        "scores": False,
        "calibrated": False,
        "ids": None,
        "rows": None,
        "fanout": None,
    }
    assert main(["predict", "first", "--out", "a.parquet"]) == 0
    assert calls.pop() == ("predict", "first", {**what, **file, **every})
    argv = ["predict", "first", "--out", "a.parquet", "--overwrite", "--scores", "--task", "kind"]
    argv += [
        "--ids",
        "ids.txt",
        "--fanout",
        "5,-1",
        "--split",
        "val",
        "--new-data",
        "-v",
        "--at",
        "7",
    ]
    assert main([*argv, "--storage", "there", "--set", "graph.path=b", "--json"]) == 0
    changed = {"overwrite": True, "scores": True, "task": "kind", "ids": "ids.txt"}
    changed |= {"fanout": [5, -1], "split": "val", "new_data": True, "verbose": True, "at": "7"}
    changed |= {"storage": "there", "overrides": ["graph.path=b"], "display": False}
    assert calls.pop() == ("predict", "first", {**what, **file, **every, **changed})
    assert json.loads(capsys.readouterr().out) == {"rows": 3}
    argv = ["recommend", "first", "--out", "a.parquet", "--k", "3", "--known", "keep"]
    assert main([*argv, "--candidates", "array:new", "--relation", "likes"]) == 0
    every = {"k": 3, "known": "keep", "candidates": "array:new", "relation": "likes"}
    every |= {"ids": None, "task": None}
    assert calls.pop() == ("recommend", "first", {**what, **file, **every})
    assert main(["embed", "first", "--out", "a.parquet", "--ntype", "item"]) == 0
    assert calls.pop() == ("embed", "first", {**what, **file, "split": "all", "ntype": "item"})
    assert main(["evaluate", "first", "--task", "kind", "--json"]) == 0
    asked = {"split": None, "task": "kind", "rows": None, "display": False}
    assert calls.pop() == ("evaluate", "first", {**what, **asked})
    printed = {"split": "val", "metrics": {"val/loss": 0.5}}
    assert json.loads(capsys.readouterr().out) == printed
    assert main(["export", "first", "--out", "a.pt2", "--overwrite", "--storage", "there"]) == 0
    given = {"out": "a.pt2", "overwrite": True, "storage": "there"}
    assert calls == [("export", "first", given)]


def test_tune_is_given_its_arguments(
    calls: list[Any], driver: Driver, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", "job.yaml"]) == 0
    more = ["--resume", "-v", "--set", "name=b", "--json", "--objective", "speed"]
    assert main(["tune", "job.yaml", *more]) == 0
    plain = {"overwrite": False, "resume": False, "verbose": False, "display": True}
    assert [(config.name, options) for _, config, options in calls] == [
        ("small", {**plain, "objective": None}),
        ("b", {"objective": "speed", **plain, "resume": True, "verbose": True, "display": False}),
    ]
    assert json.loads(capsys.readouterr().out) == {"rows": 3, "path": "a"}


def test_submit_passes_its_arguments(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[Any] = []
    contents = SimpleNamespace(files=["a"], size=10, directory="w", left_out=[], secrets=[".env"])
    over = SimpleNamespace(state="failed", code=4)
    job = SimpleNamespace(id="j-1", name="small", follow=lambda display: over)

    def prepare(*given: Any) -> Any:
        calls.append(given)
        return SimpleNamespace(contents=contents)

    def send(package: Any, server: Any, **options: Any) -> Any:
        calls.append((server.address, options["overwrite"], options["resume"]))
        return job

    def connect(address: str | None) -> Any:
        return SimpleNamespace(address=address, warnings=["others can read"])

    modules: dict[str, Any] = {
        "raygnn.jobs.submit": SimpleNamespace(prepare=prepare, send=send),
        "raygnn.jobs.server": SimpleNamespace(JobServer=connect),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(sys, "path", list(sys.path))
    argv = ["submit", "job.yaml", "--address", "http://h:1", "--set", "name=b"]
    assert main([*argv, "--working-dir", "w", "--overwrite", "--detach"]) == 0
    assert calls == [("job.yaml", ["name=b"], "w"), ("http://h:1", True, False)]
    said = capsys.readouterr().out
    for part in ("warning: others can read", "job j-1 on http://h:1", ".env", "logs j-1 --follow"):
        assert part in said
    assert main([*argv, "--resume", "--json"]) == 0
    assert calls[2:] == [("job.yaml", ["name=b"], None), ("http://h:1", False, True)]
    sent = {"job": "j-1", "run": "small", "address": "http://h:1"}
    assert json.loads(capsys.readouterr().out) == sent
    assert main([*argv, "--follow", "--json"]) == 4  # as the job does
    ended = {"job": "j-1", "run": "small", "state": "failed", "code": 4}
    assert json.loads(capsys.readouterr().out) == ended


# ── errors ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("what", where="where", remedy="remedy"), 2),
        (DataError("what", where="where", remedy="remedy"), 2),
        (PreflightError("what", where="where", remedy="remedy"), 3),
        (CapabilityError("what", where="where", remedy="remedy"), 3),
        (TrainingError("what", where="where", remedy="remedy"), 4),
        (Interrupted("what", where="where", remedy="remedy"), 130),
    ],
)
def test_exit_codes(
    error: RaygnnError, code: int, driver: Driver, capsys: pytest.CaptureFixture[str]
) -> None:
    driver.error = error
    assert main(["train", "job.yaml"]) == code
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == "error: what\n  at where\n  → remedy\n"


def test_errors_as_json(driver: Driver, capsys: pytest.CaptureFixture[str]) -> None:
    driver.error = TrainingError("what", where="where", remedy="remedy", rank=0)
    driver.error.run = "runs/small"
    assert main(["train", "job.yaml", "--json"]) == 4
    said = capsys.readouterr()
    error = {"what": "what", "where": "where", "remedy": "remedy", "rank": 0, "run": "runs/small"}
    assert json.loads(said.out) == {"ok": False, "error": error}
    assert said.err.startswith("error: what\n")
    assert main(["check", "nowhere.yaml", "--json"]) == 2
    assert "nowhere.yaml" in json.loads(capsys.readouterr().out)["error"]["where"]


def test_values_are_not_markup(driver: Driver, capsys: pytest.CaptureFixture[str]) -> None:
    driver.error = DataError("[bold]x[/bold] [/nothing] :smile:", where="\x1b[31mfile")
    assert main(["train", "job.yaml"]) == 2
    said = capsys.readouterr().err
    assert "[bold]x[/bold] [/nothing] :smile:" in said
    assert "\x1b" not in said


TRACE = """Traceback (most recent call last):
  File "/x/raygnn/worker/main.py", line 104, in recorded
    yield
  File "/v/site-packages/lightning/trainer.py", line 9, in fit
    self._run()
  File "/home/me/nets.py", line 12, in forward
    return self.layers(x)
  File "/home/me/layers.py", line 3, in forward
    return F.linear(x, self.weight)
  File "/v/site-packages/torch/nn/functional.py", line 2, in linear
    raise RuntimeError
RuntimeError: sizes differ
"""


def test_of_a_trace_the_users_frames_are_shown(
    driver: Driver, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank-1.log").touch()
    driver.error = error = TrainingError("RuntimeError: sizes differ", rank=1, trace=TRACE)
    error.run = str(tmp_path)
    assert main(["train", "job.yaml"]) == 4
    said = capsys.readouterr().err
    assert said.splitlines()[1:5] == [
        "",
        "  /home/me/nets.py:12 in forward",
        "  /home/me/layers.py:3 in forward",
        f"  the complete trace is in {tmp_path}/logs/rank-1.log",
    ]
    assert main(["train", "job.yaml", "-v"]) == 4
    said = capsys.readouterr().err
    assert 0 <= said.index("sizes differ") < said.index(TRACE)


def test_of_a_trace_without_the_users_the_innermost_frames_are_shown(
    driver: Driver, capsys: pytest.CaptureFixture[str]
) -> None:
    others = TRACE.replace("/home/me", "/v/site-packages/theirs")
    driver.error = TrainingError("no", trace=others)
    assert main(["train", "job.yaml"]) == 4
    said = capsys.readouterr().err
    assert "worker.py" not in said
    assert "trainer.py" not in said
    assert said.count(" in forward\n") == 2
    assert "functional.py:2 in linear\n  the complete trace is shown with -v\n" in said


def test_an_error_ends_with_what_says_more(
    driver: Driver, capsys: pytest.CaptureFixture[str]
) -> None:
    error = TrainingError("no", trace="Traceback …")
    error.run = "my runs/small"
    driver.error = error
    assert main(["train", "job.yaml"]) == 4
    assert capsys.readouterr().err.endswith("\n\n  → raygnn diagnose 'my runs/small'\n")


def test_bug_shows_its_trace_only_when_asked(
    driver: Driver, capsys: pytest.CaptureFixture[str]
) -> None:
    driver.error = ZeroDivisionError("by zero")
    assert main(["train", "job.yaml"]) == 4
    said = capsys.readouterr().err
    assert said.startswith("error: internal error: ZeroDivisionError: by zero")
    assert "Traceback" not in said
    assert "-v" in said
    assert main(["train", "job.yaml", "-v"]) == 4
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("as_input", [False, True])
def test_unavailable_storage_is_no_bug_and_no_bad_input(
    driver: Driver, capsys: pytest.CaptureFixture[str], as_input: bool
) -> None:
    driver.error = OSError(errno.EIO, "Input/output error", "/runs/r/.run-1")
    if as_input:
        away, driver.error = driver.error, DataError("Input/output error", where="/runs/r/.run-1")
        driver.error.__cause__ = away
    assert main(["train", "job.yaml"]) == 4
    said = capsys.readouterr().err
    assert "internal error" not in said
    assert "Input/output error" in said
    assert "/runs/r/.run-1" in said
    assert "--resume" in said


def test_ctrl_c(driver: Driver, capsys: pytest.CaptureFixture[str]) -> None:
    driver.error = KeyboardInterrupt()
    assert main(["train", "job.yaml"]) == 130
    assert capsys.readouterr().err == "error: interrupted\n"


def test_signal_handlers_are_put_back(driver: Driver) -> None:
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    main(["train", "job.yaml"])
    assert [signal.getsignal(number) for number in numbers] == before


_SLEEPER = """
import sys, time, types, raygnn.driver, raygnn.cli
def train(config, **options):
    try:
        print("training", flush=True)
        time.sleep(60)
    finally:
        print("ending", flush=True)
        if sys.argv[1:] == ["slow"]:
            sys.stdin.readline()
        print("ended", flush=True)
sys.modules["raygnn.driver.train"] = types.SimpleNamespace(train=train)
raygnn.driver.train = sys.modules["raygnn.driver.train"]
sys.exit(raygnn.cli.main(["train", "job.yaml"]))
"""


def _sleeper(tmp_path: Path, *args: str, before: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    """Start a command that trains until it is stopped; return it once it has begun."""
    (tmp_path / "job.yaml").write_text(JOB)
    process = subprocess.Popen(
        [*before, sys.executable, "-c", _SLEEPER, *args],
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "training\n"
    return process


@pytest.mark.parametrize(
    ("first", "second"),
    [("SIGTERM", "SIGINT"), ("SIGINT", "SIGHUP"), ("SIGHUP", "SIGTERM"), ("SIGINT", "SIGINT")],
)
def test_signals_end_a_command(first: str, second: str, tmp_path: Path) -> None:
    """A second signal does not disturb the shutdown."""
    with _sleeper(tmp_path, "slow") as process:
        assert process.stdout is not None
        process.send_signal(signal.Signals[first])
        assert process.stdout.readline() == "ending\n"
        process.send_signal(signal.Signals[second])
        out, err = process.communicate("\n", timeout=30)
    assert process.returncode == 130
    assert (out, err) == ("ended\n", "error: interrupted\n")


def test_nohup_is_respected(tmp_path: Path) -> None:
    ignore = ("sh", "-c", 'trap "" HUP; exec "$@"', "sh")
    with _sleeper(tmp_path, before=ignore) as process:
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGTERM)  # delivered after the lower number
        out, err = process.communicate(timeout=30)
    assert (out, err) == ("ending\nended\n", "error: interrupted\n")
    assert process.returncode == 130


# ── an output that is not there ──────────────────────────────────────────────────────────────


def _command(*argv: str, cwd: Path | None = None, **streams: Any) -> subprocess.Popen[str]:
    command = argv if argv[0] == "sh" else (sys.executable, "-m", "raygnn", *argv)
    env = {**os.environ, "PYTHONPATH": str(CHECKOUT)}
    return subprocess.Popen(command, cwd=cwd, env=env, text=True, **streams)


def _to(output: Any, *argv: str) -> tuple[int, str]:
    """Return the exit code and the errors of a command that prints to this file."""
    with _command(*argv, stdout=output, stderr=subprocess.PIPE) as process:
        _, errors = process.communicate()
    return process.returncode, errors


def _commands(storage: Path) -> list[list[str]]:
    listing = ["runs", "--storage", str(storage)]
    return [["config-schema"], listing, [*listing, "--json"]]


def test_closed_pipe_is_quiet(storage: Path) -> None:
    for argv in _commands(storage):
        read, write = os.pipe()
        os.close(read)
        with os.fdopen(write, "w") as pipe:
            assert _to(pipe, *argv) == (128 + signal.SIGPIPE, ""), argv


def test_a_full_disk_is_said(storage: Path) -> None:
    for argv in _commands(storage):
        with open("/dev/full", "w") as full:
            code, errors = _to(full, *argv)
        assert code == 130
        assert errors.startswith(
            "error: standard output cannot be written: No space left on device\n"
        ), argv
        assert "Exception ignored" not in errors


def test_commands_work_with_closed_streams(storage: Path) -> None:
    for argv in _commands(storage):
        command = ["sh", "-c", '"$@" <&- >&- 2>&-', "sh", sys.executable, "-m", "raygnn", *argv]
        assert subprocess.run(command, check=False).returncode == 0, argv


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_an_error_that_cannot_be_printed_keeps_its_exit_code(stream: str, tmp_path: Path) -> None:
    argv = ["train", "nowhere.yaml", "--json"]
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with open("/dev/full", "w") as full:
        process = _command(*argv, cwd=tmp_path, **{**streams, stream: full})
        texts = process.communicate()
    assert process.returncode == 2
    assert "nowhere.yaml" in "".join(text or "" for text in texts)


def test_a_working_directory_that_is_gone(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    shell = f"cd {gone} && rmdir {gone} && exec {sys.executable} -m raygnn check job.yaml"
    code, errors = _to(subprocess.PIPE, "sh", "-c", shell)
    assert code == 2
    assert errors.startswith("error: the working directory is gone: ")


# ── verbs that need no job ───────────────────────────────────────────────────────────────────


def test_config_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config-schema"]) == 0
    assert json.loads(capsys.readouterr().out) == json_schema()


@pytest.fixture
def storage(tmp_path: Path) -> Path:
    """A storage with one finished run, ``first``."""
    with RunDir(str(tmp_path / "runs"), "first") as run:
        run.begin({"name": "first"})
        run.update_summary(status="done", steps=1234, metrics={"test/accuracy": 0.8149})
    return tmp_path / "runs"


def test_runs(storage: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "--storage", str(storage)]) == 0
    said = capsys.readouterr().out
    for fragment in ("first", "done", "1,234", "test/accuracy 0.8149"):
        assert fragment in said
    assert main(["runs", "--storage", str(storage), "--json"]) == 0
    (run,) = json.loads(capsys.readouterr().out)
    assert (run["name"], run["metrics"]) == ("first", {"test/accuracy": 0.8149})


def test_no_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "--storage", str(tmp_path)]) == 0
    assert str(tmp_path) in capsys.readouterr().out
    assert main(["runs", "--storage", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []


def test_the_tasks_metric_is_listed(storage: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RunDir(str(storage), "third") as run:
        run.begin({"name": "third"})
        metrics = {"test/hits@1": 0.25, "test/mrr": 0.5, "val/mrr": 0.75}
        run.update_summary(status="done", metrics=metrics, metric="mrr")
    assert main(["runs", "--storage", str(storage)]) == 0
    assert "test/mrr 0.5000" in capsys.readouterr().out


def test_diagnose(storage: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in (["first", "--storage", str(storage)], [str(storage / "first")]):
        assert main(["diagnose", *name]) == 0
        assert "none: the run is done" in capsys.readouterr().out
        assert main(["diagnose", *name, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["status"], found["cause"]["kind"], found["ranks"]) == ("done", "none", [])
        assert found["first_difference"] is None
        assert set(found["cause"]) >= {
            *("kind", "rank", "where", "what", "remedy", "confidence", "evidence")
        }
    assert main(["diagnose", "fist", "--storage", str(storage)]) == 2
    assert "first" in capsys.readouterr().err


# ── with the real driver ─────────────────────────────────────────────────────────────────────


@pytest.mark.system
def test_a_job_on_molecules_is_ready(data_dir: Path, tmp_path: Path) -> None:
    """Its class is read, and its atoms have categories alone."""
    at = [f"graph.args.path={data_dir}/molecules/bbbp.csv", f"storage={tmp_path}"]
    command = [sys.executable, "-m", "raygnn", "check", "jobs/bbbp-gine.yaml"]
    command += [f"--set={each}" for each in at]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ready" in done.stdout


@pytest.mark.system
def test_partition(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB + "partition: {parts: 2, method: random}\n")
    command = [sys.executable, "-m", "raygnn", "partition", "job.yaml"]
    first = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert first.returncode == 0, first.stderr
    assert "halo" in first.stdout
    assert "training nodes" in first.stdout
    assert "exists already" not in first.stdout
    again = subprocess.run(
        [*command, "--json"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert again.returncode == 0, again.stderr
    facts = json.loads(again.stdout)
    assert facts["parts"][-1]["nodes"] == 400
    assert [row["part"] for row in facts["parts"]] == [0, 1, "total"]
    assert Path(facts["directory"]).is_relative_to(tmp_path / "runs")


JOBS = [job for job in sorted((CHECKOUT / "jobs").glob("*.yaml")) if job.stem != "runtime-env"]


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.stem)
def test_jobs_of_the_checkout_are_valid(job: Path) -> None:
    config = raygnn.Config.model_validate(read_yaml(job.read_text(), job.name)[0])
    assert config.name == job.stem
    assert contradictions(config) == []


def test_a_run_that_is_over_is_not_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with RunDir(str(tmp_path), "ended") as run:
        run.begin({"name": "ended"})
        run.update_summary(status="done")
    assert main(["stop", "ended", "--storage", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "no command trains this run: done" in said
    assert str(tmp_path / "ended") in said


def test_a_run_here_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kill, sent = os.kill, list[int]()
    with ExitStack() as command:
        run = command.enter_context(RunDir(str(tmp_path), "going"))
        run.begin({"name": "going"})

        def end(process: int, number: int) -> None:
            if not number:
                return kill(process, number)
            assert process == os.getpid()
            sent.append(number)
            run.update_summary(status="interrupted")
            command.close()

        monkeypatch.setattr("os.kill", end)
        assert main(["stop", "going", "--storage", str(tmp_path), "--json"]) == 0
    assert sent == [signal.SIGTERM]
    facts = json.loads(capsys.readouterr().out)
    assert facts == {"run": "going", "path": str(tmp_path / "going"), "state": "interrupted"}


@pytest.mark.parametrize("lock", ["nobody has", "another process has"])
def test_only_the_process_that_holds_a_run_is_stopped(
    lock: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The owner of a run can write any process into its lock file."""
    with RunDir(str(tmp_path), "made") as run:
        run.begin({"name": "made"})
    file = run.path / ".lock"
    with open(file, "r+") as held:
        # a process that has the file open only counts if the file is not locked
        opened = held if lock == "nobody has" else subprocess.DEVNULL
        if lock != "nobody has":
            fcntl.flock(held, fcntl.LOCK_EX)
        command = [sys.executable, "-c", "print(flush=True); import time; time.sleep(60)"]
        with subprocess.Popen(command, stdin=opened, stdout=subprocess.PIPE) as other:
            assert other.stdout is not None
            other.stdout.readline()
            ticks = Path(f"/proc/{other.pid}/stat").read_text().rpartition(")")[2].split()[19]
            facts = {"host": socket.gethostname(), "pid": other.pid, "started": int(ticks)}
            file.write_text(json.dumps(facts))
            assert main(["stop", "made", "--storage", str(tmp_path)]) == 2
            assert other.poll() is None
            other.kill()
    assert f"process {other.pid}, which its lock names, does not hold" in capsys.readouterr().err


def test_control_characters_of_a_jobs_output_are_escaped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = SimpleNamespace(id="job-1", logs=lambda: "\x1b]0;title\x07 done\n")
    monkeypatch.setattr("raygnn.cli.job_commands._job", lambda args: job)
    assert main(["logs", "job-1", "--address", "http://127.0.0.1:1"]) == 0
    assert capsys.readouterr().out == "\\x1b]0;title\\x07 done\n"
