"""Commands of README and docs: all are run in one directory, on one Ray, with tiny settings."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

from raygnn.config.load import Override, read_mapping
from tests.support.pages import CHECKOUT, PAGES, blocks, commands_of

# raygnn's commands that are parsed only (test_readme.py), and why
PARSED = {
    "raygnn recommend": "of link prediction; tests/prediction/test_recommend.py runs it",
    "raygnn explain": "of the ids in a file; tests/serving/test_explanations.py runs it",
    "raygnn serve": "runs until Ctrl-C; tests/serving/test_application.py runs it",
    "raygnn tune": "trains for minutes; tests/search/test_search.py runs it",
    "raygnn train own_model.yaml": "test_readme.py runs it, where it lies",
    "raygnn train pyg_model.yaml": "the same",
    "raygnn train jobs/cora-gcn.yaml --set 'logging": "needs packages that are not installed",
    "raygnn predict RUN --out nodes.parquet --s": "one `predict` is run; test_predict.py does more",
    "raygnn predict RUN --out test.parquet": "the same",
    "raygnn predict RUN --out few.parquet": "tests/prediction/test_predict_some.py",
    "raygnn embed RUN": "the same",
    "raygnn predict RUN --out new.parquet": "tests/prediction/test_new_data.py",
    "raygnn evaluate RUN --new-data": "the same",
    "raygnn predict RUN --out edges.parquet": "tests/worker/test_edge_tasks.py does it",
    "raygnn predict RUN --out then.parquet": "tests/prediction/test_predict_at.py",
    "raygnn predict RUN --out today.parquet": "the same",
    "raygnn predict RUN --out late.parquet": "tests/prediction/test_new_edges.py",
    "raygnn predict RUN --task": "tests/worker/test_multitask.py does it",
    "raygnn evaluate RUN": "tests/prediction/test_predict.py runs it",
    "raygnn train jobs/planted.yaml --resume": "tests/driver/test_command.py runs it",
    "raygnn train company/job.yaml": "tests/prediction/test_transformed_tables.py has such tables",
    "raygnn train first.yaml --set": "another --set is run",
    "raygnn train jobs/cora-gcn.yaml --seeds": "tests/runs/test_comparison.py has several seeds",
    "raygnn runs --compare": "needs several runs; tests/runs/test_comparison.py makes them",
    "raygnn --version": "test_readme.py runs it",
    "raygnn config-schema": "test_readme.py runs it",
}
RUN = "planted"  # the run of the README's command
STANDS_FOR = {"RUN": RUN, "cora-gcn": RUN, "runs/cora-gcn": f"runs/{RUN}"}
LIMIT = 420  # seconds for all of them

GRAPH = {"format": "planted", "nodes": 600, "degree": 5, "classes": 4, "features": 8, "train": 0.3}
TINY = {
    "train.epochs": 1,
    "sampling.batch_size": 64,
    "logging.loggers": [],
    "cluster.workers": 1,  # which starts in half the time of two
}

_CHILD = """
import json, sys, os
import raygnn
from raygnn.cli import main
from raygnn.driver.ray_cluster import RayCluster

config = {"name": "all", "graph": {"format": "planted", "nodes": 1000}, "model": {"kind": "gcn"}}
with RayCluster(raygnn.load_config({**config, "cluster": {"num_cpus": 4}})) as cluster:
    cluster.wait()
    page = {}
    for step in json.load(sys.stdin):
        print("$", step, flush=True)
        if isinstance(step, str):
            exec(compile(step, "page", "exec"), page)
        elif (code := main(step)) != 0:
            sys.exit(f"{step} exits with {code}")
"""


def shown(command: str) -> bool:
    return command.startswith("raygnn ") and not command.startswith(tuple(PARSED))


def tiny(job: dict[str, Any], **changes: Any) -> str:
    """Return the job with tiny settings, as YAML."""
    document = read_mapping(job)
    for key, value in {**TINY, **changes}.items():
        document.apply(Override((*key.split("."),), value, "test"))
    return yaml.safe_dump(document.data)


def run(steps: list[list[str] | str], here: Path) -> str:
    """Run the steps, commands of raygnn and pieces of Python, in a separate process."""
    done = subprocess.run(
        [sys.executable, "-c", _CHILD],
        input=json.dumps(steps),
        cwd=here,
        env={**os.environ, "PYTHONPATH": str(CHECKOUT), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.system
@pytest.mark.timeout(LIMIT + 30)
def test_commands_of_readme_and_docs(tmp_path: Path) -> None:
    quick, coming = (CHECKOUT / "docs" / f"{name}.md" for name in ("quick-start", "coming-from"))
    (tmp_path / "jobs").mkdir()
    job = yaml.safe_load((CHECKOUT / "jobs" / "planted.yaml").read_text())
    (tmp_path / "jobs" / "planted.yaml").write_text(tiny({**job, "graph": GRAPH}))
    (first,) = map(yaml.safe_load, blocks("yaml", quick))
    (theirs,) = map(yaml.safe_load, blocks("yaml", coming))
    changes = {"graph.nodes": 600, "graph.features": 8}
    (tmp_path / "first.yaml").write_text(tiny(first, **changes))
    (tmp_path / "theirs.yaml").write_text(tiny(theirs, **{"cluster.workers": 2}))

    steps: list[list[str] | str] = []
    taken: set[str] = set()
    for page in (quick, PAGES[0], *(page for page in PAGES[1:] if page not in (quick, coming))):
        for command in filter(shown, commands_of(page)):
            if command in taken:
                continue
            taken.add(command)
            words = shlex.split(command)[1:]
            steps.append([STANDS_FOR.get(word, word) for word in words])
    assert len(steps) > 10, steps
    # the user's graph as a file, its partition by DGL, and a dataset of PyG's
    steps += [*blocks("py own", quick), _PARTITIONED]
    steps += [shlex.split(command)[1:] for command in commands_of(coming)]
    steps += [_DATA + block for block in blocks("py pyg", coming)]
    section = {"format": "dgl", "path": str(tmp_path / "graph.dgl")}
    own = {"name": "own", "graph": section, "model": {"kind": "gcn"}}
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(own))
    steps.append(["check", "own.yaml"])
    out = run(steps, tmp_path)
    assert out.count("test/accuracy") >= 3
    assert "2 parts" in out or "planted" in out
    runs = {path.name for path in (tmp_path / "runs").iterdir()}
    assert runs >= {"first", RUN, "theirs", "from-pyg"}
    assert (tmp_path / "runs" / "first" / "report.html").is_file()


@pytest.mark.system
@pytest.mark.timeout(LIMIT + 30)
def test_from_a_database_to_predictions(tmp_path: Path) -> None:
    """The page's commands, in order, on fewer customers."""
    page = CHECKOUT / "docs" / "database-to-predictions.md"
    (questions,) = blocks("python questions.py", page)
    (job,) = blocks("yaml churn.yaml", page)
    (tmp_path / "churn.yaml").write_text(tiny(yaml.safe_load(job), **{"train.epochs": 3}))
    example = repr(str(CHECKOUT / "examples" / "shop.py"))
    steps: list[list[str] | str] = []
    for command in commands_of(page, "sh churn"):
        program, *words = shlex.split(command)
        steps.append(
            words
            if program == "raygnn"
            else {
                "python examples/shop.py shop": f"import pathlib, runpy; "
                f"runpy.run_path({example})['write'](pathlib.Path('shop'), 600)",
                "python questions.py": questions,
            }.get(command, f"import shutil; shutil.copy(*{words})")
        )
    out = run(steps, tmp_path)
    assert "test/roc_auc" in out
    scores = pd.read_parquet(tmp_path / "scores.parquet")
    asked = pd.read_csv(tmp_path / "shop" / "december.csv")
    assert scores["customer"].tolist() == asked["customer"].tolist()
    assert {"customer", "day", "prediction", "probability"} <= {*scores.columns}


_PARTITIONED = """
from pathlib import Path
dgl.distributed.partition_graph(dgl.load_graphs("graph.dgl")[0][0], "g", 2, "parts")
"""

_DATA = """
import torch
from torch_geometric.data import Data
edge_index = torch.randint(0, 50, (2, 200))
masks = torch.arange(50) % 3
data = Data(
    x=torch.randn(50, 4), y=torch.arange(50) % 4, edge_index=edge_index,
    train_mask=masks == 0, val_mask=masks == 1, test_mask=masks == 2,
)
"""


def test_exempt_commands_exist() -> None:
    """Every exempt command still occurs in a page."""
    found = [command for page in PAGES for command in commands_of(page, "sh", "sh install")]
    text = "\n".join(page.read_text() for page in PAGES)
    for start in PARSED:
        assert any(command.startswith(start) for command in found) or start in text, start


def test_commands_for_a_cloud_are_marked() -> None:
    """Commands that need a cluster are in blocks of their own kind, which are not run."""
    kinds = {kind for page in PAGES for kind in re.findall(r"^```(\S.*)$", page.read_text(), re.M)}
    kinds = {
        kind for kind in kinds if not kind.startswith(("csv ", "yaml "))
    }  # files of an example
    python = {"python", "python questions.py", "py", "py own", "py pyg", "py bridge", "py step"}
    assert kinds <= {"sh", "sh churn", "sh cloud", "sh install", "text", "yaml", *python}
    for page in PAGES:
        for command in commands_of(page):
            assert not re.match(r"(ray|ssh|kubectl|aws|gcloud) ", command), (
                f"{page.name}: {command}"
            )
