"""README, docs and examples say what is so: their commands, configurations and code are run."""

from __future__ import annotations

import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from raygnn.cli import parser
from raygnn.config.graph import GraphConfig, TablesGraph
from raygnn.config.load import load_config
from raygnn.config.values import classes_of
from raygnn.graph.sources import load_graph
from raygnn.graph.tables.description import read_description
from tests.support.pages import CHECKOUT, PAGES, blocks, commands_of

README = (CHECKOUT / "README.md").read_text()
SOURCES = [
    path
    for folder in ("docs", "examples")
    for path in sorted((CHECKOUT / folder).iterdir())
    if path.is_file()
]
RAYGNN = Path(sys.executable).with_name("raygnn")

# Commands of the pages that are not run here: they install, train for minutes, or
# need a cluster. What can be checked without running them, is.
NOT_RUN = {"make", "pip", "ray", "cd", "python3", "tensorboard", "."}
ON_THE_PAGE = ("first.yaml", "theirs.yaml")
ELSEWHERE = {
    "job.yaml": "jobs/cora-gcn.yaml",
    "company/job.yaml": "jobs/planted.yaml",
    "own_model.yaml": "examples/own_model.yaml",
}


def commands() -> list[str]:
    """Return every command in the ``sh`` blocks of all pages."""
    return [command for page in PAGES for command in commands_of(page, "sh", "sh install")]


@pytest.mark.parametrize("command", commands())
def test_commands(command: str) -> None:
    """Commands exist and take these arguments; those of raygnn name jobs that load."""
    for words in (shlex.split(part.strip()) for part in re.split(r"&&| -- ", command)):
        if words[0] == "raygnn":
            _check_raygnn([word for word in words[1:] if word != ">" and ".schema." not in word])
            continue
        assert words[0] in NOT_RUN
        if words[0] == "make":
            assert re.search(rf"^{words[1]}:", (CHECKOUT / "Makefile").read_text(), re.MULTILINE)
        elif words[0] == "cd":
            assert (CHECKOUT / words[1]).is_dir()


def _check_raygnn(arguments: list[str]) -> None:
    if arguments in (["--version"], ["config-schema"]):
        assert subprocess.run([RAYGNN, *arguments], capture_output=True, check=True).stdout
        return
    args = parser().parse_args(arguments)
    if getattr(args, "config", None):
        file = ELSEWHERE.get(args.config, args.config)
        if file in ON_THE_PAGE:  # which test_docs_run.py runs
            return
        job = yaml.safe_load((CHECKOUT / file).read_text())
        job["graph"], job["model"] = _tiny_graph(), {"kind": "sage"}
        job["sampling"] = {}
        job.pop("task", None)
        load_config(job, args.set)


def _tiny_graph() -> dict[str, Any]:
    return {"format": "planted", "nodes": 500, "degree": 5, "classes": 4, "features": 8}


def test_job_examples_load(tmp_path: Path) -> None:
    """Job files of the pages load unchanged, except for the location of the data."""
    (whole,) = (yaml.safe_load(block) for block in blocks("yaml"))
    classes, theirs, large, *_, shop = _jobs_of("data")
    models = {job.get("name"): job for job in _jobs_of("models")}
    links, many = models["cora-links"], models["molecules"]
    (guard,) = _jobs_of("failures")
    (train,) = _jobs_of("performance")
    theirs["partition"]["path"] = shop["partition"]["path"] = str(tmp_path)
    assert load_config(whole).name == "cora-gat"
    assert load_config({**whole, **classes}).graph == load_config(whole).graph
    assert load_config(theirs).graph is None
    assert load_config({**links, **large}).partition.engine == "ray"
    assert load_config(links).task.of_links
    assert load_config(many).task.of_graphs
    assert load_config({**whole, **guard}).guard == load_config({**whole, "guard": {}}).guard
    assert load_config({"name": "a", "graph": _tiny_graph(), **train}).train.ema == 0.99
    assert load_config(shop).model.categories == {"brand": 16}


def _jobs_of(page: str) -> list[Any]:
    return [yaml.safe_load(block) for block in blocks("yaml", CHECKOUT / "docs" / f"{page}.md")]


def test_jobs_in_files_load(
    data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(CHECKOUT / "examples")
    write = runpy.run_path("college.py")["write"]
    tables = write(data_dir / "temporal" / "CollegeMsg.txt", tmp_path)
    for file in [*CHECKOUT.glob("jobs/*.yaml"), *CHECKOUT.glob("examples/*.yaml")]:
        if file.stem == "runtime-env":
            continue
        job = yaml.safe_load(file.read_text())
        if "path" in job["graph"]:
            made = tables if job["graph"]["format"] == "tables" else tmp_path
            job["graph"]["path"] = str(made)  # packed there
        assert load_config(job).name == file.stem.replace("_", "-")


def test_formats_and_exit_codes_are_listed() -> None:
    data = (CHECKOUT / "docs" / "data.md").read_text()
    table = data.partition("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == set(classes_of(GraphConfig))
    assert re.findall(r"^\| (\d+) \|", README, re.MULTILINE) == ["0", "2", "3", "4", "130"]


def test_reference_is_up_to_date() -> None:
    reference = runpy.run_path(str(CHECKOUT / "docs" / "reference.py"))
    assert reference["markdown"]() == (CHECKOUT / "docs" / "config.md").read_text(), (
        "run python docs/reference.py"
    )


def test_tables_of_the_page(tmp_path: Path) -> None:
    """The worked example runs as printed."""
    page = CHECKOUT / "docs" / "data.md"
    named = re.findall(
        r"^```\w+ (\S+\.\w+)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE
    )
    for name, content in named:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    (job,) = blocks("yaml job", page)
    (tmp_path / "job.yaml").write_text(job)
    config = load_config(tmp_path / "job.yaml")
    assert config.graph is not None
    data = load_graph(config.graph)
    assert data.ids["user"].to_pylist() == ["anna", "ben", "carl", "dora"]
    assert data.ids["item"].to_pylist() == [1001, 1002]
    assert data.names["user/label"] == ["no", "yes"]
    assert data.nodes["user"].data["label"].tolist() == [0, 1, 1, -1]
    assert data.nodes["item"].data["feat"].tolist() == [[9.5], [0.0]]
    assert data.edges["item", "bought_by", "user"].dst.tolist() == [0, 1, 2, 3]
    (columns,) = read_description(tmp_path / "company.yaml").nodes["customer"].features.values()
    assert [column.is_plain for column in columns] == [True, *[False] * 9]
    assert [column.column for column in columns][:4] == ["visits", "income", "debt", "joined"]
    assert read_description(tmp_path / "books.yaml").nodes["book"].text["description"].dim == 256
    races = TablesGraph(format="tables", path=tmp_path / "races.yaml")
    assert len(load_graph(races, needs_masks=False).edges) == 6
    payments = TablesGraph(format="tables", path=tmp_path / "payments.yaml")
    data = load_graph(payments, needs_masks=False)
    assert data.ids["customer"].to_pylist() == ["anna", "ben"]
    assert data.edges["customer", "visits", "shop"].data["weight"].tolist() == [1, 1, 1]


def test_links_to_files_exist() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
            if not target.startswith("https://"):
                assert (page.parent / target.split("#")[0]).exists(), target


def test_picture_shows_a_run() -> None:
    svg = (CHECKOUT / "docs" / "train.svg").read_text()
    text = re.sub(r"<[^>]+>", " ", svg).replace("&#160;", " ")
    for shown in ("raygnn train jobs/", "epoch 5/5", "test/accuracy", "run directory"):
        assert shown in text
    assert "http" not in svg.replace("http://www.w3.org/2000/svg", "")  # nothing is fetched


def test_a_terminal_is_read_as_it_looks() -> None:
    screen = runpy.run_path(str(CHECKOUT / "docs" / "record.py"))["Screen"](10)
    for piece in ("\x1b[1mone", "\x1b[0m two\r\nwait", "ing\r\x1b", "[2K\x1b[1A\x1b[2K", "done\n"):
        screen.feed(piece)
    screen.feed("\r0123456789abc")
    assert screen.lines() == ["done", "0123456789", "abc"]
    screen.feed("\r\n\x1b[1mbold\x1b[0m not")
    assert screen.lines()[-1] == "\x1b[1mbold\x1b[0m not"


@pytest.mark.parametrize("path", [*PAGES, *SOURCES], ids=lambda path: path.name)
def test_nothing_of_this_machine(path: Path) -> None:
    """The pages contain neither paths of the machine that they were written on nor secrets."""
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"/(root|work|home|Users|tmp)/", text)
    assert not re.search(r"[0-9a-f]{32}", text)
    assert str(CHECKOUT) not in text


def test_python_example_is_the_file() -> None:
    (block,) = blocks("python")
    assert block in (CHECKOUT / "examples" / "python_api.py").read_text()


@pytest.mark.system
@pytest.mark.slow
@pytest.mark.timeout(560)
def test_examples_run(tmp_path: Path) -> None:
    """All examples run as a user would run them, on one Ray, whose start takes most of the time."""
    for file in CHECKOUT.glob("examples/*.*"):
        shutil.copy(file, tmp_path)
    (tmp_path / "all.py").write_text(_ALL)
    done = subprocess.run(
        [sys.executable, "all.py"],
        cwd=tmp_path,
        env={**os.environ, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=540,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"partition \S+/runs/partitions/\w+\n", done.stdout)
    assert "val/accuracy" in done.stdout
    for name in ("from-python", "own-model", "pyg-model", "own-step", "own-loss", "own-metric"):
        run = tmp_path / "runs" / name
        assert yaml.safe_load((run / "summary.json").read_text())["status"] == "done"


_ALL = """
import runpy
import sys

import raygnn
from raygnn.cli import main
from raygnn.driver.ray_cluster import RayCluster

with RayCluster(raygnn.load_config("own_model.yaml", cluster={"num_cpus": 4})) as cluster:
    cluster.wait()
    runpy.run_path("python_api.py")
    for name in ("own_model", "pyg_model", "own_step", "own_loss", "own_metric"):
        if code := main(["train", f"{name}.yaml", "--set", "train.max_steps=4"]):
            sys.exit(code)
"""
