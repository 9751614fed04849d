"""Input made to do harm, through the command line: refused in our words, and nothing is done."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from raygnn.cli import main
from raygnn.graph.partition.layout import PartitionMeta
from tests.support.builders import write_dgl
from tests.support.graphs import partitioned, typed_graph
from tests.support.hostile import Outcome, assert_refused, bombs, outcomes, tree
from tests.support.made_runs import make_run

pytestmark = pytest.mark.long


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    """File that a pickle would create if it were loaded."""
    return tmp_path / "marker"


@pytest.fixture
def foreign(tmp_path: Path) -> PartitionMeta:
    """A partition as other tools write it: without checksums, so that its files are read."""
    meta = partitioned(typed_graph(30, 12), tmp_path / "theirs", 2)
    (meta.directory / "raygnn.json").unlink()
    return meta


def job(file: Path, **sections: Any) -> str:
    """Write a job's file."""
    config = {"name": "bad", "model": {"kind": "gcn"}, "cluster": {"workers": 1}, **sections}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(yaml.safe_dump(config))
    return str(file)


def here(tmp_path: Path) -> Path:
    directory = tmp_path / "here"
    directory.mkdir(exist_ok=True)
    return directory


def assert_harmless(commands: list[list[str]], tmp_path: Path, marker: Path, *said: str) -> None:
    """Check that each command is refused, nothing was executed and no file was written."""
    before = tree(tmp_path)
    found = outcomes(commands, here(tmp_path))
    assert len(found) == len(commands)
    for outcome in found:
        assert_refused(outcome, *said)
    assert not marker.exists()
    assert tree(tmp_path) == {**before, "here": tree(tmp_path)["here"]}
    assert list(here(tmp_path).iterdir()) == []


def test_pickles_in_partitions(tmp_path: Path, marker: Path, foreign: PartitionMeta) -> None:
    """Any file may be replaced, also those that belong to the partition by name only."""
    commands = []
    files = ("graph.dgl", "node_feat.dgl", "edge_feat.dgl", "orig_nids.dgl")
    beside = (foreign.config_file.name, "raygnn.json", "node_map.pkl")
    found = bombs(marker)
    for number, (bomb, file) in enumerate(
        [(bomb, f"part0/{files[at % 3]}") for at, bomb in enumerate(found)]
        + [("system", f"part1/{file}") for file in files]
        + [("partial", file) for file in beside[:2]]
    ):
        place = tmp_path / str(number)
        shutil.copytree(foreign.directory, place)
        (place / file).write_bytes(found[bomb])
        config = job(tmp_path / f"{number}.yaml", partition={"path": str(place)})
        commands.append(["partition", config])
    assert_harmless(commands, tmp_path, marker)


def test_pickles_in_files_of_many_graphs(tmp_path: Path, marker: Path) -> None:
    commands = []
    for name, bomb in bombs(marker).items():
        for file in ("graphs.bin", "graphs/0.dgl", "MUTAG.txt"):
            path = tmp_path / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(bomb)
            graph = {"format": "graphs", "path": str(path.parent if "/" in file else path)}
            task = {"kind": "graph_classification"}
            config = job(path.parent / f"{path.stem}.yaml", graph=graph, task=task)
            commands.append(["partition", config])
    assert_harmless(commands, tmp_path, marker)


# --- YAML ----------------------------------------------------------------------------------------

GOOD = "name: a\ngraph: {format: dgl, path: a.dgl}\nmodel: {kind: gcn}\n"
LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 20)
)


def yamls(marker: Path) -> dict[str, tuple[str, str]]:
    """Return hostile YAML by name, and the expected message."""
    touch = f"touch {marker}"
    return {
        "apply": (f"train: !!python/object/apply:os.system ['{touch}']\n", "tag"),
        "new": (f"train: !!python/object/new:os.system ['{touch}']\n", "tag"),
        "name": ("model: !!python/name:os.system\n", "tag"),
        "module": ("model: !!python/module:os\n", "tag"),
        "written out": (
            f"a: !<tag:yaml.org,2002:python/object/apply:os.system> ['{touch}']",
            "tag",
        ),
        "handle": (
            f"%TAG ! tag:yaml.org,2002:python/\n---\na: !object/apply:os.system ['{touch}']\n",
            "tag",
        ),
        "in a key": (f"? !!python/object/apply:os.system ['{touch}']\n: 1\n", "key"),
        "flow": (GOOD + "train: " + "[" * 10_000 + "]" * 10_000, "50 levels"),
        "flow of mappings": (GOOD + "train: " + "{a: " * 10_000, "50 levels"),
        "block": ("".join(" " * n + "a:\n" for n in range(1_000)), "50 levels"),
        "block of lists": (GOOD + "train:\n  " + "- " * 10_000 + "a\n", "50 levels"),
        "laughs": (LAUGHS, "aliases"),
        "laughs in mappings": (
            "a0: &a0 {k: v}\n"
            + "".join(f"a{n}: &a{n} {{x: *a{n - 1}, y: *a{n - 1}}}\n" for n in range(1, 40)),
            "aliases",
        ),
        "twice": (GOOD + "name: b\n", "second time"),
        "merge": (GOOD + "x: &x {lr: 1}\ntrain: {<<: *x}\n", ""),
        "merge of a bomb": (LAUGHS + "<<: *a19\n", "aliases"),
        "many": (GOOD + "train: [" + "a," * 400_000 + "]", "10000 values"),
    }


def test_configurations(tmp_path: Path, marker: Path) -> None:
    commands, said = [], []
    for name, (text, fragment) in yamls(marker).items():
        (tmp_path / f"{name}.yaml").write_text(text)
        commands.append(["check", str(tmp_path / f"{name}.yaml")])
        said.append(fragment)
    with open(tmp_path / "large.yaml", "wb") as file:
        file.truncate(2**30)
    os.mkfifo(tmp_path / "pipe.yaml")
    commands += [["check", str(tmp_path / f"{name}.yaml")] for name in ("large", "pipe")]
    said += ["characters", "not a regular file"]
    before = tree(tmp_path)
    for found, fragment in zip(outcomes(commands, here(tmp_path)), said, strict=True):
        assert_refused(found, fragment)
    assert not marker.exists()
    assert tree(tmp_path) == {**before, "here": tree(tmp_path)["here"]}


def test_overrides(tmp_path: Path, marker: Path) -> None:
    """The text after ``--set`` is YAML, too."""
    (tmp_path / "job.yaml").write_text(GOOD)
    commands = [
        ["check", str(tmp_path / "job.yaml"), "--set", f"train={text[:100_000]}"]
        for text, _ in yamls(marker).values()
    ]
    for found in outcomes(commands, here(tmp_path)):
        assert_refused(found)
    assert not marker.exists()


def test_configurations_of_runs(tmp_path: Path, marker: Path) -> None:
    """A run directory may come from anyone; its page has everything that can be read of it."""
    from raygnn.runs.run_directory import MARK

    commands = []
    for name, (text, _) in yamls(marker).items():
        run = tmp_path / "runs" / name.replace(" ", "-")
        run.mkdir(parents=True)
        (run / "config.yaml").write_text(MARK + text[:1_000_000])
        (run / "summary.json").write_text(json.dumps({"status": "failed"}))
        commands += [["report", str(run)], ["diagnose", str(run)]]
    commands.append(["runs", "--storage", str(tmp_path / "runs")])
    for code, _, err, _ in outcomes(commands, here(tmp_path)):
        assert code == 0, err
    pages = [*(tmp_path / "runs").glob("*/report.html")]
    assert len(pages) == len(yamls(marker))
    assert max(page.stat().st_size for page in pages) < 10 * 2**20
    assert not marker.exists()


# --- names and places ----------------------------------------------------------------------------

PLACES = ("../../outside", "/outside", "a\0b", "..", "a/../../b", "~nobody-at-all/x")


def run_main(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> Outcome:
    return Outcome(main(arguments), *capsys.readouterr())


@pytest.mark.parametrize("place", PLACES)
def test_names_that_lead_elsewhere(
    place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.chdir(here(tmp_path))
    graph = write_dgl(tmp_path)
    for sections in (
        {"name": place},
        {"logging": {"loggers": [place]}},
        {"model": {"kind": place}},
    ):
        text = json.dumps({"graph": graph, **{"name": "a", "model": {"kind": "gcn"}}, **sections})
        (tmp_path / "job.yaml").write_text(text)  # JSON is YAML, and can spell a NUL
        before = tree(tmp_path)
        for verb in ("train", "partition"):
            assert_refused(run_main([verb, str(tmp_path / "job.yaml")], capsys), "job.yaml: ")
        assert tree(tmp_path) == before


@pytest.mark.parametrize("key", ["part_graph", "node_feats", "edge_feats"])
def test_names_in_partitions(
    key: str, tmp_path: Path, foreign: PartitionMeta, capsys: pytest.CaptureFixture[str]
) -> None:
    outside = tmp_path / "outside"
    shutil.copy(foreign.files[0].graph, outside)
    (foreign.directory / "link").symlink_to(outside)
    (foreign.directory / "up").symlink_to("..")
    config = job(tmp_path / "job.yaml", partition={"path": str(foreign.directory)})
    values = json.loads(foreign.config_file.read_text())
    for name in (*PLACES, "../outside", str(outside), "link", "up/outside", "part0"):
        values["part-0"][key] = name
        foreign.config_file.write_text(json.dumps(values))
        assert_refused(run_main(["partition", config], capsys))
    # beside it, files that block a reader or never end
    foreign.config_file.unlink()
    os.mkfifo(foreign.config_file)
    assert_refused(run_main(["partition", config], capsys), "is no file")
    foreign.config_file.unlink()
    with open(foreign.config_file, "wb") as file:
        file.truncate(2**30)
    assert_refused(run_main(["partition", config], capsys), "more than any partition's")


def test_names_in_manifests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    meta = partitioned(typed_graph(30, 12), tmp_path / "ours", 2)
    manifest = meta.directory / "raygnn.json"
    (tmp_path / "outside").write_text("outside")
    config = job(tmp_path / "job.yaml", partition={"path": str(meta.directory)})
    values = json.loads(manifest.read_text())
    for name in (*PLACES, "../outside", str(tmp_path / "outside"), "a" * 5000):
        files = {**values["files"], name: {"bytes": 7, "sha256": "0" * 64}}
        manifest.write_text(json.dumps({**values, "files": files}))
        assert_refused(run_main(["partition", config], capsys), str(meta.directory))
    manifest.unlink()
    os.mkfifo(manifest)
    assert_refused(run_main(["partition", config], capsys), "is no file")


def test_places_for_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A page replaces the entry of its name, never the target of a link."""
    run = make_run(tmp_path / "runs")
    (tmp_path / "thesis.txt").write_text("x")
    for wrong in (
        str(tmp_path),
        "/proc/no/such",
        "a\0b",
        str(tmp_path / "no" / "x.html"),
        "a" * 300,
    ):
        assert_refused(run_main(["report", str(run), "--out", wrong], capsys), "error: ")
    (tmp_path / "link.html").symlink_to(tmp_path / "thesis.txt")
    (run / "report.html").symlink_to(tmp_path / "thesis.txt")
    (run / f".report.html.tmp-{os.getpid()}").symlink_to(tmp_path / "thesis.txt")
    out = str(tmp_path / "link.html")
    assert run_main(["report", str(run), "--out", out], capsys).code == 0
    assert_refused(run_main(["report", str(run)], capsys), "Too many levels of symbolic links")
    assert run_main(["report", str(run)], capsys).code == 0
    assert (tmp_path / "thesis.txt").read_text() == "x"
    assert not (tmp_path / "link.html").is_symlink()
    for wrong in PLACES:
        assert_refused(run_main(["report", wrong, "--storage", str(tmp_path)], capsys))
        assert_refused(run_main(["diagnose", wrong, "--storage", str(tmp_path)], capsys))


def test_fifos_in_a_run_do_not_block(tmp_path: Path) -> None:
    """A FIFO replaces each file in turn."""
    commands = []
    for name in ("metrics.jsonl", "ranks.jsonl", "preflight.json", "logs/events.jsonl", ".lock"):
        run = make_run(tmp_path / "runs", name.replace("/", "-").lstrip("."))
        (run / name).unlink(missing_ok=True)
        os.mkfifo(run / name)
        commands += [["report", str(run)], ["diagnose", str(run)]]
    for code, _, err, _ in outcomes([*commands, ["runs"]], tmp_path):
        assert code == 0, err
