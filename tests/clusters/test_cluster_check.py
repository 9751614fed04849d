"""The command: our own files are good, hostile ones are refused, and Ray keeps quiet."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from raygnn.cli import main
from raygnn.clusters.check import check
from raygnn.config.yaml_text import read_documents, write_yaml

CHECKOUT = Path(__file__).resolve().parents[2]
OURS = [
    *("onprem.yaml", "aws.yaml", "gcp.yaml"),
    *("kubernetes/raycluster.yaml", "kubernetes/rayjob.yaml"),
]
LIMIT = 60.0


@pytest.fixture
def token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home with a token, and the checkout as the working directory."""
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").touch(mode=0o600)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(CHECKOUT)


@pytest.mark.parametrize("name", OURS)
def test_ours_are_good(name: str, token: None, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing at all is said of them, and so Ray's own validation takes them."""
    assert main(["cluster", "check", f"cluster/{name}"]) == 0
    out, err = capsys.readouterr()
    assert out.endswith(": nothing to say\n")
    assert out.count("\n") == 1
    assert err == ""


def test_findings_have_lines_and_remedies(
    tmp_path: Path, token: None, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "cluster.yaml"
    text = (CHECKOUT / "cluster" / "onprem.yaml").read_text()
    line = 1 + text[: text.index("worker_ips")].count("\n")
    file.write_text(text.replace("192.0.2.12", "192.0.2.10").replace("cluster_name", "cluster_nam"))
    assert main(["cluster", "check", str(file)]) == 3
    out, _ = capsys.readouterr()
    where = f"line {line}: provider.worker_ips[1]: '192.0.2.10' is the head"
    assert f"error [address] {where}" in out
    assert "did you mean cluster_name?" in out

    assert main(["cluster", "check", str(file), "--json"]) == 3
    facts = json.loads(capsys.readouterr().out)
    assert facts["ok"] is False
    assert facts["kinds"] == ["ray up"]
    (finding,) = (each for each in facts["findings"] if each["check"] == "address")
    assert (finding["line"], finding["key"]) == (line, "provider.worker_ips[1]")
    assert finding["remedy"]


def test_as_a_process_it_says_nothing_else(tmp_path: Path) -> None:
    """Ray's own warnings, of files that are mounted and of old sections, stay away."""
    (tmp_path / "file").touch()
    (tmp_path / "cluster.yaml").write_text(
        "cluster_name: a\nprovider: {type: local, head_ip: h, worker_ips: [w], regoin: x}\n"
        "min_workers: 5\nfile_mounts: {/file: file}\nworker_nodes: {}\n"
    )
    env = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    done = subprocess.run(
        [sys.executable, "-m", "raygnn", "cluster", "check", "cluster.yaml"],
        env={**env, "PYTHONPATH": str(CHECKOUT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 3
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert all(line.startswith(("error [", "warn [", "info [", "  → ")) for line in lines[:-1])
    assert lines[-1].startswith("cluster.yaml: ray up: ")


HOSTILE = {
    "empty": "",
    "no mapping": "- a\n",
    "text": "hello\n",
    "another document": "a: 1\n",
    "a Service alone": "apiVersion: v1\nkind: Service\n",
    "no YAML": "a: [1\n",
    "a tag": "provider: !!python/object/apply:os.system [true]\n",
    "a tag in the second document": "provider: {type: local}\n---\na: !x 1\n",
    "too deep": "provider: " + "[" * 60 + "]" * 60,
    "aliases without end": "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n"
    + "".join(f"{b}: &{b} [{', '.join([f'*{a}'] * 10)}]\n" for a, b in pairwise("abcdefgh"))
    + "provider: {type: local}\n",
    "a key twice": "provider: {}\nprovider: {}\n",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(HOSTILE[name])
    assert main(["cluster", "check", str(file)]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert "→" in err
    assert "internal" not in err


@pytest.mark.parametrize("content", [None, b"\xff\xfe\x00", b"a" * (1 << 21)])
def test_what_cannot_be_read(
    content: bytes | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "cluster.yaml"
    if content is not None:
        file.write_bytes(content)
    assert main(["cluster", "check", str(file)]) == 2
    assert "cluster.yaml" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("file_mounts", "{/a: " + "a" * 5000 + "}"),
        ("file_mounts", '{/a: "\\0"}'),
        ("setup_commands", "['" + ">" * 500_000 + "']"),
        ("setup_commands", "['" + "ulimit -" * 100_000 + "']"),
        ("head_start_ray_commands", "['ray start; " + "ulimit -" * 50_000 + "']"),
        ("docker", "{container_name: c, image: i, run_options: [--shm-size=" + "9" * 5000 + "g]}"),
        ("rsync_exclude", "['" + "*a" * 1000 + "b']"),
    ],
    ids=range(7),
)
def test_long_values_take_no_time(
    key: str, text: str, tmp_path: Path, token: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """No rule takes the square of a length, which would be minutes here."""
    base = (CHECKOUT / "cluster" / "onprem.yaml").read_text()
    values = read_documents(base, "onprem.yaml")[0][0]
    values.pop(key, None)
    file = tmp_path / "cluster.yaml"
    file.write_text(f"{write_yaml(values)}{key}: {text}\n")
    assert main(["cluster", "check", str(file)]) in (0, 3)
    assert capsys.readouterr().err == ""


# Values of any type, anywhere: a rule that trips over one would be an internal error.
ODD: list[Any] = [None, True, 7, 1.5, "text", [], [None, 3, []], {}, {"a": None}]


@pytest.mark.parametrize("base", ["onprem.yaml", "aws.yaml", "kubernetes/rayjob.yaml"])
def test_no_rule_trips_over_odd_values(base: str, tmp_path: Path, token: None) -> None:
    documents = read_documents((CHECKOUT / "cluster" / base).read_text(), base)
    value, lines = documents[0]
    file = tmp_path / "cluster.yaml"
    for number, key in enumerate(list(lines)[::3]):
        at = value
        for part in key[:-1]:
            at = at[part]
        before, at[key[-1]] = at[key[-1]], ODD[number % len(ODD)]
        if key not in (("kind",), ("apiVersion",), ("provider",)):
            file.write_text(write_yaml(value))
            assert check(str(file)).kinds
        at[key[-1]] = before
