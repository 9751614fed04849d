"""Run directories of strangers, made to do harm: reading one runs nothing that it brings."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import raygnn
from raygnn.checkpoint import weights
from raygnn.cli import main
from raygnn.config.load import load_config
from raygnn.config.places import Uri
from raygnn.errors import DataError, InputError
from raygnn.prediction import request as asking
from raygnn.runs import trust
from raygnn.runs.run import Run
from raygnn.runs.run_directory import MARK
from raygnn.runs.run_page import PART_COUNTS
from tests.checkpoint.test_hostile_checkpoints import states
from tests.prediction.test_predict import ask
from tests.support.hostile import ROOT, tree
from tests.support.made_runs import make_run
from tests.support.small_jobs import job

pytestmark = pytest.mark.long

ESCAPES = "\x1b]0;owned\x07\x1b[2J\u202e<script>owned()</script><img src=x onerror=owned()>"


@pytest.fixture
def foreign(trained: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """The same run as downloaded by a user who has trained nothing, in the working directory."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "theirs").mkdir()
    monkeypatch.chdir(tmp_path / "theirs")
    shutil.copytree(trained.path, tmp_path / "theirs" / "test")
    return Run(tmp_path / "theirs" / "test")


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    """File that exists once hostile code has been executed."""
    return tmp_path / "marker"


def change(run: Run, **sections: Any) -> None:
    """Merge sections into the run's configuration."""
    values = run.config
    for name, section in sections.items():
        both = isinstance(section, dict) and isinstance(values.get(name), dict)
        values[name] = {**values[name], **section} if both else section
    (run.path / "config.yaml").write_text(MARK + yaml.safe_dump(values))


def write_module(file: Path, marker: Path) -> None:
    """Write a module that marks that it was imported."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"open({str(marker)!r}, 'w').close()\nclass Evil: pass\ndef evil(*_): pass\n")


def swear(run: Run, state: bytes) -> None:
    """Replace a run's weights, and their digest in its records."""
    place = run.path / "checkpoints"
    (place / "selected.pt").write_bytes(state)
    about = json.loads((place / "selected.json").read_text())
    about |= {"bytes": len(state), "sha256": hashlib.sha256(state).hexdigest()}
    (place / "selected.json").write_text(json.dumps(about))


# --- environment and classes ---------------------------------------------------------------------


@pytest.mark.system
@pytest.mark.usefixtures("shared_ray")
@pytest.mark.slow
def test_no_variable_of_a_run_reaches_a_process(
    foreign: Run, marker: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Variables of the user's own runs do not either; those that the user passes do."""
    evil = tmp_path / "evil"
    write_module(evil / "sitecustomize.py", marker)
    change(foreign, comm={"env": {"PYTHONPATH": str(evil), "RAY_DEBUG": "1"}})
    raygnn.evaluate(foreign)
    assert "not used: PYTHONPATH, RAY_DEBUG; give those" in " ".join(
        capsys.readouterr().out.split()
    )
    assert not (tmp_path / "state").exists(), "only training makes a run the user's own"
    trust.record(foreign.config)
    assert asking.config_of(foreign, [], trust=True).comm.env == {}
    assert not marker.exists()
    raygnn.evaluate(foreign, overrides=[f"comm.env.PYTHONPATH={evil}"], display=False)
    assert marker.exists(), "else this test could not fail"


def test_a_run_with_an_unknown_format_uses_its_partition(foreign: Run, trained: Run) -> None:
    (place,) = (trained.path.parent / "partitions").iterdir()
    made = {"directory": str(place), "parts": [{}, {}]}
    (foreign.path / "partition.json").write_text(json.dumps(made))
    change(foreign, graph=None)
    change(foreign, graph={"format": "planetoid", "path": "data", "name": "cora"})
    config = asking.config_of(foreign, [])
    assert config.graph is None
    assert len(ask(foreign, config, 1))
    (foreign.path / "partition.json").write_text(json.dumps({**made, "directory": "/gone"}))
    with pytest.raises(InputError, match="unknown format 'planetoid'"):
        asking.config_of(foreign, [])


def test_a_strangers_cluster_is_not_connected_to(foreign: Run) -> None:
    """A foreign cluster would receive the user's token, and its answers would be unpickled."""
    change(
        foreign,
        cluster={"address": "evil.example:6379", "num_cpus": None},
        staging={"path": "/evil"},
    )
    config = asking.config_of(foreign, [])
    assert (config.cluster.address, config.staging.path) == ("auto", None)
    trusted = asking.config_of(foreign, [], trust=True)
    assert trusted.cluster.address == "evil.example:6379"
    assert str(trusted.staging.path) == "/evil"


def test_a_strangers_store_is_not_connected_to(foreign: Run) -> None:
    """A foreign store would receive requests signed with the user's key."""
    uri = "s3://bucket/partition?endpoint_override=evil.example"
    change(foreign, partition={"path": uri})
    with pytest.raises(InputError, match=r"(?s)connect to .s3://bucket.*--trust"):
        asking.config_of(foreign, [])
    assert asking.config_of(foreign, [], trust=True).partition.path == Uri(uri)


@pytest.mark.parametrize(
    ("rows", "place"),
    [
        ('files: ["s3:\\x2F/bucket/u.csv?endpoint_override=evil"]', "s3://bucket/u.csv"),
        ('sql: select pg_sleep(9), url: "env:DATABASE_URL"', "env:DATABASE_URL"),
    ],
)
def test_tables_of_a_stranger_are_not_fetched(rows: str, place: str, foreign: Run) -> None:
    file = foreign.path.parent / "tables.yaml"
    file.write_text(f"nodes: {{user: {{{rows}}}}}")
    change(foreign, graph={"format": "tables", "path": str(file)})
    with pytest.raises(InputError, match=rf"connect to .{place}.*graph.path"):
        trust.usable(foreign.config, foreign.shown, False, foreign.path)
    trust.usable(foreign.config, foreign.shown, True, foreign.path)


def test_a_run_with_a_logger_of_an_earlier_version_is_read(foreign: Run) -> None:
    change(foreign, logging={"loggers": {"tensorboard": {}, "csv": {}}})
    assert asking.config_of(foreign, [], trust=True).logging.loggers == {}


def test_a_link_does_not_lead_a_partition_elsewhere(foreign: Run, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (foreign.path.parent / "partitions").symlink_to(tmp_path / "mine")
    with pytest.raises(InputError, match="write its partition to"):
        asking.config_of(foreign, [])
    asking.config_of(foreign, [], trust=True)


@pytest.mark.parametrize("name", ["pyarrow.py", "pydantic/__init__.py"])
def test_modules_beside_a_strangers_run_are_not_imported(
    name: str, foreign: Run, marker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray puts the working directory on its workers' path."""
    monkeypatch.chdir(foreign.path)
    write_module(foreign.path / name, marker)
    with pytest.raises(InputError, match="import modules from the current directory"):
        asking.config_of(foreign, [])
    monkeypatch.chdir(foreign.path.parent.parent)
    asking.config_of(foreign, [])


CLASSES: dict[str, dict[str, Any]] = {
    "model.kind": {"model": {"kind": "evil:Evil", "layers": 2}},
    "task.kind": {"task": {"kind": "evil:Evil", "like": "node_classification"}},
    "task.metric": {"task": {"metric": "evil:evil"}},
    "task.loss": {"task": {"loss": "evil:evil"}},
    "tasks.one.loss": {"task": None, "tasks": {"one": {"loss": "evil:evil"}}},
    "tasks.args.loss": {"task": None, "tasks": {"args": {"loss": "evil:evil"}}},
    "tasks.env.loss": {"task": None, "tasks": {"env": {"loss": "evil:evil"}}},
    "train.callbacks": {"train": {"callbacks": {"evil:Evil": {}}}},
    "graph.dataset": {"graph": {"format": "dataset", "dataset": "evil:Evil"}},
}


@pytest.mark.parametrize("key", CLASSES)
def test_a_class_of_a_run_is_imported_only_with_trust(
    key: str, foreign: Run, marker: Path, tmp_path: Path
) -> None:
    here = tmp_path / "theirs"
    write_module(here / "evil.py", marker)
    change(foreign, **CLASSES[key])
    calls: list[Callable[..., Any]] = [
        lambda: raygnn.predict(foreign, out=tmp_path / "rows.parquet", display=False),
        lambda: raygnn.embed(foreign, out=tmp_path / "rows.parquet", display=False),
        lambda: raygnn.evaluate(foreign, display=False),
        lambda: raygnn.evaluate(
            foreign, new_data=True, overrides=["graph.path=other"], display=False
        ),
    ]
    for call in calls:
        with pytest.raises(InputError) as caught:
            call()
        assert (
            f"({key.partition(',')[0]}) from {here / 'evil.py'}, and was not" in caught.value.what
        )
        assert str(caught.value.where) == str(foreign.path)
        assert "--trust" in str(caught.value.remedy)
    assert not marker.exists()


def test_classes_of_the_users_own_runs(
    foreign: Run, trained: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run is recognised at any path by the config that its training recorded, unless the config
    was changed or the user is another."""
    change(foreign, train={"callbacks": {"tests.support.own_models:DglSage": {}}})
    with pytest.raises(InputError, match=r"DglSage \(train.callbacks\)"):
        asking.config_of(foreign, [])
    assert asking.config_of(foreign, [], trust=True)
    trust.record(foreign.config)
    assert asking.config_of(foreign, [])
    moved = Run(shutil.move(foreign.path, tmp_path / "elsewhere"))
    assert asking.config_of(moved, [])
    change(moved, train={"callbacks": {"tests.support.own_models:Slow": {}}})
    with pytest.raises(InputError, match="Slow"):
        asking.config_of(moved, [])
    change(moved, train={"callbacks": {"tests.support.own_models:DglSage": {}}})
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "of another user"))
    with pytest.raises(InputError, match="DglSage"):
        asking.config_of(moved, [])


def test_a_class_of_the_same_name_in_another_file(
    foreign: Run, marker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A config that the user has trained with vouches for its class only."""
    change(foreign, train={"callbacks": {"evil:Evil": {}}})
    write_module(tmp_path / "evil.py", marker)
    monkeypatch.chdir(tmp_path)
    trust.record(foreign.config)
    assert asking.config_of(foreign, [])
    write_module(tmp_path / "theirs" / "evil.py", marker)
    monkeypatch.chdir(tmp_path / "theirs")
    with pytest.raises(InputError, match=r"theirs/evil\.py"):
        asking.config_of(foreign, [])


def test_arguments_with_colons_are_no_classes() -> None:
    args = {"args": {"ratio": "one:two"}}
    config = dict.fromkeys(("graph", "model", "task"), args)
    assert not [*trust.classes({**config, "tasks": {"a": args}, "comm": {"env": {"A": "b:c"}}})]
    callbacks = {"callbacks": {"own.module:Stop": {"at": "one:two"}}}
    assert [spec for _, spec in trust.classes({"train": callbacks})] == ["own.module:Stop"]


def test_predicting_records_nothing(foreign: Run, tmp_path: Path) -> None:
    """Otherwise a run without a class of its own would vouch for one with such a class."""
    asking.config_of(foreign, [], trust=True)
    assert not (tmp_path / "state").exists()
    assert not trust.is_own(foreign.config)


def test_without_a_home_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/nothing/can/be/made/here")
    trust.record({"name": "a"})
    assert not trust.is_own({"name": "a"})


SHADOWED = ("torch", "pandas", "pyarrow", "ray", "yaml", "evil", "sitecustomize", "raygnn_plugin")
VERBS = (
    ["predict", "test", "--out", "../rows.parquet"],
    ["export", "test", "--out", "../exported"],
    ["report", "test"],
)


def test_modules_beside_a_run(foreign: Run, marker: Path, tmp_path: Path) -> None:
    """Commands in a downloaded directory import none of its modules, even if these have names of
    libraries."""
    for name in SHADOWED:
        write_module(tmp_path / "theirs" / f"{name}.py", marker)
    change(foreign, model={"kind": "evil:Evil", "layers": 2})
    script = tmp_path / "bin" / "raygnn"  # installed: its directory is on the path
    script.parent.mkdir()
    script.write_text("import sys\nfrom raygnn.cli import main\nsys.exit(main(sys.argv[1:]))\n")
    for verb in VERBS:
        done = subprocess.run(
            [sys.executable, str(script), *verb, "--storage", "."],
            cwd=tmp_path / "theirs",
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert "Traceback" not in done.stderr + done.stdout
        assert "internal error" not in done.stderr
        assert done.returncode == (0 if verb[0] == "report" else 2), (verb, done.stderr)
        assert not marker.exists(), verb


# --- weights -------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*pickle protocol")
def test_weights_that_run_things_whose_digest_is_right(
    foreign: Run, trained: Run, marker: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Through each reader of them: what loads them, `raygnn export`, and the ranks of `predict`,
    `embed` and `evaluate`."""
    config = load_config(job(trained.path.parent, train={"epochs": 1}))
    model = torch.nn.Linear(2, 2)
    through_all = ("system", "eval, bare", "reconstruct", "script")
    for name, state in states(marker).items():
        swear(foreign, state)
        found = weights.find(foreign.path / "checkpoints")
        with pytest.raises(DataError) as error:
            weights.load(found, model)
        assert "selected.pt" in str(error.value.where), name
        assert main(["export", str(foreign.path), "--out", str(tmp_path / "out")]) == 2, name
        for asked in ({"rows": True}, {"rows": False}, {"rows": True, "embeddings": True}):
            if name in through_all:
                with pytest.raises(RuntimeError, match=r"selected\.pt"):
                    ask(foreign, config, 1, **asked)
        assert not marker.exists(), name
    assert not (tmp_path / "out").exists()
    capsys.readouterr()


@pytest.mark.parametrize(
    "about",
    [
        {"rows": {"dim": 1, "steps": 1, "files": [{"name": "../../outside"}]}},
        {"rows": {"dim": 1, "steps": 1, "files": [{"name": "/etc/passwd"}]}},
        {"goals": {"": "x"}},
        {"goals": {"../..": {"ntype": "a", "etype": "b", "relation": 7}}},
        {"sizes": {"a": "b"}},
        {"words": ["x"]},
        {"transforms": 7},
        {"data": ["x"]},
    ],
)
def test_hostile_descriptions_of_weights_are_refused(
    about: dict[str, Any], foreign: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = foreign.path / "checkpoints" / "selected.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **about}))
    before = tree(tmp_path)
    for verb in (["evaluate", "test"], ["export", "test", "--out", str(tmp_path / "out")]):
        assert main([*verb, "--storage", "."]) == 2
        err = capsys.readouterr().err
        assert "checkpoints/selected" in err
        assert "internal error" not in err
    assert tree(tmp_path) == before


# --- places --------------------------------------------------------------------------------------


def test_a_link_in_place_of_the_directory_beside_runs(foreign: Run, tmp_path: Path) -> None:
    """The link leads to a run of the user's with the same name, which would else be removed."""
    mine = make_run(tmp_path / "mine", "test")
    (foreign.path.parent / ".predicting").symlink_to(tmp_path / "mine")
    before = tree(mine)
    with pytest.raises(InputError, match="symbolic link"):
        raygnn.evaluate(foreign, display=False)
    assert tree(mine) == before


@pytest.mark.parametrize("place", ["../../../etc", "/etc", "/dev/zero", "a\0b", 7, "\x1b[2J"])
def test_places_of_the_partition(
    place: Any, foreign: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The path is refused without a write, or ignored in favour of an equal partition."""
    about = {"directory": place, "parts": [{}, {}]}
    (foreign.path / "partition.json").write_text(json.dumps(about))
    arguments = ["evaluate", "test", "--storage", ".", "--set", "cluster.workers=1"]
    arguments += ["--set", "cluster.address=127.0.0.1:1"]  # where no Ray is
    assert main(arguments) in (2, 3)
    out, err = capsys.readouterr()
    assert "internal error" not in err
    assert "\x1b" not in out + err


@pytest.mark.parametrize("link", ["config.yaml", "checkpoints/selected.json", "summary.json"])
def test_files_that_are_links_to_the_users(
    link: str, foreign: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No line of a file of the user's is shown or copied into a page."""
    secret = tmp_path / "secret"
    secret.write_text("password: hunter2\n")
    (foreign.path / link).unlink()
    (foreign.path / link).symlink_to(secret)
    for verb in (
        ["report", "test"],
        ["diagnose", "test"],
        ["evaluate", "test", "--task", "x"],
        ["runs"],
    ):
        main([*verb, "--storage", "."])
        out, err = capsys.readouterr()
        assert "hunter2" not in out + err, verb
    page = foreign.path / "report.html"
    assert not page.exists() or "hunter2" not in page.read_text()
    assert secret.read_text() == "password: hunter2\n"


# --- names ---------------------------------------------------------------------------------------


def test_names_that_are_markup_or_escapes(
    foreign: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Pages and terminals escape markup and control characters in everything that a run
    provides."""
    odd = ESCAPES
    change(foreign, **{odd: odd, "model": {odd: odd}, "graph": {"path": odd}, "tasks": {odd: odd}})
    summary = {"status": odd, "error": odd, "metric": odd, "steps": 7}
    summary |= {"metrics": {odd: 0.5, f"test/{odd}": 0.5}, "versions": {odd: odd}, "job": odd}
    records = [{"step": n, "epoch": 0, "time": n, "train/loss": 1, odd: 1} for n in (1, 2, 3)]
    lines = "".join(json.dumps(record) + "\n" for record in records)
    events = "".join(json.dumps({"time": 1, "text": odd}) + "\n" for _ in range(3))
    finding = {"check": odd, "severity": odd, "what": odd, "remedy": odd, "node": odd}
    preflight = {"findings": [finding], "nodes": [{"node": odd, "host": odd, odd: odd}]}
    part = {"directory": odd, "parts": [{odd: odd, **dict.fromkeys((*PART_COUNTS, "bytes"), 7)}]}
    for name, content in {
        "summary.json": json.dumps(summary),
        "metrics.jsonl": lines,
        "ranks.jsonl": lines,
        "preflight.json": json.dumps(preflight),
        "partition.json": json.dumps(part),
        "logs/events.jsonl": events,
        "logs/told.jsonl": events,
        "logs/rank-0.log": f"{odd}\nTraceback (most recent call last):\n{odd}\n",
        ".lock": json.dumps({"pid": 1, "host": odd}),
    }.items():
        (foreign.path / name).write_text(content)
    odd_name = foreign.path.with_name(f"a{odd.replace('/', '')}")
    shutil.copytree(foreign.path, odd_name)
    for path in (foreign.path, odd_name):
        for verb in ("report", "diagnose", "evaluate"):
            main([verb, str(path)])
            out, err = capsys.readouterr()
            assert "internal error" not in err, verb
            assert "\x1b" not in out + err, verb
            assert "\u202e" not in out + err, verb
        page = (path / "report.html").read_text()
        assert "<script>owned" not in page
        assert "<img src=x" not in page
    assert main(["runs", "--storage", "."]) == 0
    out, err = capsys.readouterr()
    assert "\x1b" not in out + err


@pytest.mark.parametrize(("number", "value"), [*enumerate((7, [1], {"a": [1]}, None, "x", 1e400))])
def test_values_of_other_types(
    number: int, value: Any, foreign: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    """A value of any type in any section of the config or entry of the summary is no internal
    error."""
    values, summary = foreign.config, foreign.summary
    for key in values:
        text = yaml.safe_dump({**values, key: value})
        (foreign.path / "config.yaml").write_text(MARK + text)
        with suppress(InputError):
            asking.config_of(foreign, [])
        main(["export", "test", "--out", "/dev/null/x", "--storage", "."])
        assert "internal error" not in (err := capsys.readouterr().err), (key, err)
    (foreign.path / "config.yaml").write_text(MARK + yaml.safe_dump(values))
    verbs = ["report", "test"], ["diagnose", "test"], ["runs"]
    for at, key in enumerate(summary):  # each verb reads each entry with some of the values
        (foreign.path / "summary.json").write_text(json.dumps({**summary, key: value}))
        verb = verbs[(at + number) % 3]
        assert main([*verb, "--storage", "."]) == 0, (key, capsys.readouterr().err)
    capsys.readouterr()
