"""Models of the user's own that cannot work are found before anything starts."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pandas as pd
import pytest
import torch

import raygnn
from raygnn.config.load import load_config
from raygnn.config.schema import Config
from raygnn.driver import dry_run
from raygnn.driver.inputs import packed, read_input
from raygnn.driver.job_plan import ClusterNodes, goals_of, make
from raygnn.driver.ray_cluster import RayCluster, how_it_ended
from raygnn.errors import ConfigError
from raygnn.graph.dgl import dgl
from raygnn.preflight.findings import warn
from raygnn.runs.display import NullDisplay
from raygnn.worker.dry_run_process import DryRunRank, describe, small_graph
from raygnn.worker.job import DryRunRequest
from tests.support.graphs import ensure_collection
from tests.support.small_jobs import JobFactory, job
from tests.worker.test_edge_tasks import LIKES, config_of, shop
from tests.worker.test_graph_tasks import dataset
from tests.worker.test_graph_tasks import make as graphs_of
from tests.worker.test_multitask import KIND, several
from tests.worker.test_training_tables import files, of, write

UNFIT = "tests.support.unfit"
OWN = "tests.support.own_losses"
LINKS = {"kind": "link_prediction", "negatives": {"number": 50}}


def request_of(config: Config) -> DryRunRequest:
    if config.task.of_graphs:
        ensure_collection(config)  # or it would be packed into a directory that goes again
    cluster = RayCluster(config)
    with packed(read_input(config, 2, NullDisplay(), cluster, only_check=True)) as given:
        facts = given.facts(config)
        goals = goals_of(config, facts)
        lists = {n: given.lists(config.of(n), n, goal.edges) for n, goal in goals.items()}
        request = dry_run.request_of(config, given, facts, goals, lists)
    assert request is not None
    return request


def outcome(config: Config, directory: Path) -> dict[str, Any] | None:
    """Try a model in this process and return the described error; None if it works."""
    trial = DryRunRank(request_of(config), directory / "trial")
    (directory / "trial").mkdir()
    try:
        trial.run()
    except BaseException as error:
        return describe(error, config, sure=trial.stepping)
    return None


# class → words of the message, and the user's function that it names
UNABLE = {
    "EveryRow": (["returned [32, 4], expected [8, 4]"], None),
    "ThirdBlock": (["IndexError: list index out of range"], "forward"),
    "BlockData": (["KeyError: 'weight'"], "forward"),
    "NoWayBack": (["ArithmeticError: there is no way back"], "backward"),
    "Exits": (["SystemExit: enough"], "forward"),
    "WithArgument": (["missing 1 required positional argument: 'width'"], None),
    "SevenClasses": (["returned [8, 7], expected [8, 4]"], None),
}


@pytest.mark.dgl
@pytest.mark.parametrize("name", UNABLE)
def test_model_errors_are_explained(name: str, make_job: JobFactory, tmp_path: Path) -> None:
    words, function = UNABLE[name]
    said = outcome(make_job(model={"kind": f"{UNFIT}:{name}"}), tmp_path)
    assert said is not None
    assert said["sure"]
    assert not said["key"]
    assert all(word in said["what"] for word in words), said
    assert said["remedy"]
    if function is not None:
        assert "tests/support/unfit.py:" in said["where"]
        assert said["where"].endswith(f"in {function}")


@pytest.mark.parametrize(
    ("key", "name", "words"),
    [
        ("loss", "mean", "own_losses:mean returned [], expected [8]: a loss of each seed"),
        ("loss", "detached", "has no gradient"),
        ("loss", "raising", "ArithmeticError: no loss today"),
        ("metric", "words", "returned str, expected one number"),
        ("metric", "raising", "ArithmeticError: no loss today"),
    ],
)
def test_errors_of_user_functions_are_explained(
    key: str, name: str, words: str, make_job: JobFactory, tmp_path: Path
) -> None:
    said = outcome(make_job(task={key: f"{OWN}:{name}"}), tmp_path)
    assert said is not None
    assert said["sure"]
    assert words in said["what"]
    assert said["remedy"]
    if name == "raising":
        assert "tests/support/own_losses.py:" in said["where"]
        assert "the function there" in said["remedy"]


def test_own_functions_that_work(make_job: JobFactory, tmp_path: Path) -> None:
    own = {"loss": f"{OWN}:plain", "metric": f"{OWN}:profit"}
    assert outcome(make_job(task=own), tmp_path) is None
    (tmp_path / "every").mkdir()  # also where not every class has a seed in the batch
    every = {"task": {"metric": f"{OWN}:of_every_class"}, "sampling": {"batch_size": 2}}
    assert outcome(make_job(name="every", **every), tmp_path / "every") is None
    (tmp_path / "tasks").mkdir()
    tasks = {"kind": {"kind": "node_classification", **own}, "links": LINKS}
    assert outcome(make_job(tasks=tasks), tmp_path / "tasks") is None


@pytest.mark.dgl
def test_own_functions_that_work_on_whole_graphs(tmp_path: Path) -> None:
    task = {"kind": "graph_classification", "loss": f"{OWN}:plain", "metric": f"{OWN}:profit"}
    assert outcome(graphs_of(tmp_path, graph=dataset(), task=task), tmp_path) is None


def test_models_of_training_tables(tmp_path: Path) -> None:
    """Rows are those of the table, at a time after the edges."""
    write(tmp_path)
    own = {"loss": f"{OWN}:plain", "metric": f"{OWN}:profit"}
    for name, task, words in (
        ("fine", own, None),
        ("numbers", {"kind": "node_regression", "table": {"target": "amount"}}, None),
        ("raises", {"loss": f"{OWN}:raising"}, "ArithmeticError: no loss today"),
    ):
        (tmp_path / name).mkdir()
        if name == "numbers":
            for file in files(tmp_path).values():
                pd.read_csv(file).assign(amount=0.5).to_csv(file, index=False)
            task = {**task, "loss": f"{OWN}:plain"}
        said = outcome(of(tmp_path, name, task=task), tmp_path / name)
        assert (said and said["what"]) == words


THREE = {"class_weights": [1, 2, 3]}


def test_too_few_class_weights(tmp_path: Path) -> None:
    """The number of weights is checked for classes and labels, of nodes and edges, before a
    partition exists and after."""
    things = (data := shop()).nodes["thing"].data
    things["group"] = (things["price"] / 2).astype(np.int64)
    things["holds"] = np.stack([things["price"] > 2, things["price"] > 4], 1).astype(np.float32)
    nodes = {"kind": "node_classification", "target": "group"}
    tasks = {
        "classes": nodes,
        "labels": {**nodes, "target": "holds", "labels": "multi"},
        "edges": KIND,
    }
    for name, task in tasks.items():
        check_weights(config_of(tmp_path, name, data=data, task={**task, **THREE}))
    with pytest.raises(ConfigError, match="3 weights"):
        raygnn.check(job(tmp_path / "job", task=THREE), display=False)


@pytest.mark.dgl
def test_too_few_class_weights_of_graphs(tmp_path: Path) -> None:
    graphs = [dgl().rand_graph(5, 9) for _ in range(8)]
    labels = {"label": torch.arange(8) % 2, "holds": torch.zeros(8, 2).long()}
    dgl().save_graphs(str(tmp_path / "graphs.bin"), graphs, labels)
    graph = {"format": "graphs", "path": str(tmp_path / "graphs.bin")}
    for task in ({"target": "label"}, {"target": "holds", "labels": "multi"}):
        check_weights(graphs_of(tmp_path, graph=graph, task={**task, **THREE}))


def check_weights(config: Config) -> None:
    """Check that three weights are refused, and one for each class is not."""
    cluster = RayCluster(config)
    with packed(read_input(config, 2, NullDisplay(), cluster, only_check=True)) as given:
        goals = goals_of(config, given.facts(config))
        with pytest.raises(ConfigError, match=r"there are 3 weights, and [24] (cl|lab)") as caught:
            dry_run.check_weights(config, given, goals)
        assert caught.value.where == "task.class_weights"
        if given.meta is None:  # it is reported before a partition is built or a node is awaited
            with pytest.raises(ConfigError, match="there are 3 weights"):
                make(config, Mock(spec=ClusterNodes, survey=AssertionError), given, NullDisplay())
        num = int(caught.value.what.split()[-2])
        update = {"class_weights": (1.0,) * num}
        task = config.task.model_copy(update=update)
        dry_run.check_weights(config.model_copy(update={"task": task}), given, goals)


def test_labels_of_a_small_graph_are_some(tmp_path: Path) -> None:
    """Labels of the small graph are 0 and 1, also where their dtype is a float to allow NaN."""
    data = shop()
    things = data.nodes["thing"].data
    things["holds"] = np.stack([things["price"] > 2, things["price"] > 4], 1).astype(np.float32)
    task = {"kind": "node_classification", "target": "holds", "labels": "multi"}
    own = {"loss": f"{OWN}:plain", "metric": f"{OWN}:of_every_class"}
    config = config_of(tmp_path, "labels", data=data, task={**task, **own})
    assert outcome(config, tmp_path) is None


@pytest.mark.dgl
@pytest.mark.parametrize(
    ("model", "sections"),
    [
        ("tests.support.own_models:DglSage", {}),
        ("tests.support.own_models:DglSage", {"task": LINKS}),
        ("tests.support.own_models:DglSage", {"precision": "bf16"}),
        ("tests.support.own_models:DglSage", {"precision": "bf16-mixed"}),
        ("tests.support.own_models:DglSage", {"sampling": {"fanout": [-1, -1], "batch_size": 3}}),
        (
            "tests.support.own_models:DglSage",
            {"tasks": {"kind": {"kind": "node_classification"}, "links": LINKS}},
        ),
        (f"{UNFIT}:Fit", {"graph": {"typed": True}}),
        (f"{UNFIT}:Indexed", {}),
    ],
)
def test_a_model_that_works(
    model: str, sections: dict[str, Any], make_job: JobFactory, tmp_path: Path
) -> None:
    assert outcome(make_job(model={"kind": model}, **sections), tmp_path) is None


@pytest.mark.dgl
def test_dtypes_are_those_of_the_precision(make_job: JobFactory, tmp_path: Path) -> None:
    model = {"kind": f"{UNFIT}:Fp32Alone"}
    assert outcome(make_job(model=model), tmp_path) is None
    (tmp_path / "bf16").mkdir()
    said = outcome(make_job(model=model, precision="bf16"), tmp_path / "bf16")
    assert said is not None
    assert said["where"].endswith("in forward")


@pytest.mark.dgl
def test_learned_rows_are_part_of_the_features(make_job: JobFactory, tmp_path: Path) -> None:
    model = {"kind": "tests.support.own_models:DglSage", "embedding": {"dim": 5, "ntypes": ["_N"]}}
    assert outcome(make_job(model=model), tmp_path) is None


@pytest.mark.dgl
def test_classes_of_a_partition_that_is_there(make_job: JobFactory, tmp_path: Path) -> None:
    """The small graph takes its number of classes from the partition's labels."""
    graph = {"classes": 7, "train": 0.5}
    raygnn.partition(make_job(graph=graph), display=False)
    config = make_job(graph=graph, model={"kind": f"{UNFIT}:SevenClasses"})
    assert outcome(config, tmp_path) is None
    (tmp_path / "five").mkdir()
    other = make_job(graph=graph, model={"kind": f"{UNFIT}:FiveClasses"})
    said = outcome(other, tmp_path / "five")
    assert said is not None
    assert "returned [8, 5], expected [8, 7]" in said["what"]


@pytest.mark.dgl
def test_whole_graphs(tmp_path: Path) -> None:
    own = "tests.worker.test_graph_tasks:OwnGin"
    works = graphs_of(tmp_path, graph=dataset(), model={"kind": own})
    assert outcome(works, tmp_path) is None
    (tmp_path / "other").mkdir()
    fails = graphs_of(tmp_path, graph=dataset(), model={"kind": f"{UNFIT}:WholeNodes"})
    said = outcome(fails, tmp_path / "other")
    assert said is not None
    assert "expected [3, 2]: a row for each seed" in said["what"]


def test_the_small_graph_is_like_the_real_one(tmp_path: Path) -> None:
    """Types, arrays, dtypes, widths, masks and classes agree; every node has in-edges."""
    config = several(tmp_path, model={"kind": f"{UNFIT}:Fit", "hidden": 64})
    request = request_of(config)
    graph = small_graph(request)
    assert graph.nodes.keys() == request.facts.nodes.keys()
    for ntype, columns in request.facts.columns.items():
        for name, (column, *_) in columns.items():
            array = graph.nodes[ntype].data[name]
            assert (str(array.dtype), array.shape[1:]) == (column.dtype, column.shape)
    assert graph.edges.keys() == request.facts.edges.keys()
    for frame in graph.edges.values():
        assert set(frame.dst) == set(range(32))
    target = config.of("kind").task.target
    assert graph.edges[LIKES].data[target].max() + 1 == request.classes["kind"] > 1


def test_a_failure_of_ours_is_not_the_models(make_job: JobFactory) -> None:
    config = make_job(model={"kind": f"{UNFIT}:Fit"})
    assert not describe(OSError("no space left"), config, sure=False)["sure"]


def test_the_end_of_a_process_is_described() -> None:
    """Most real-time signals have no name."""
    found = [how_it_ended(status) for status in (None, 3, -signal.SIGKILL, -40)]
    killed = ["was killed by SIGKILL", "was killed by signal 40"]
    assert found == ["has ended", "ended with exit status 3", *killed]


@pytest.mark.system
@pytest.mark.parametrize(
    ("name", "gpus", "severity", "words"),
    [
        ("Ranked", 0, None, []),
        ("Dies", 0, "error", ["with exit status 3", "it printed last: a last word"]),
        ("NeedsGpu", 0, "error", ["this kernel needs CUDA", "unfit.py:"]),
        ("NeedsGpu", 1, "warn", ["could not be tried without a GPU", "this kernel needs CUDA"]),
    ],
)
def test_in_a_process(
    name: str, gpus: int, severity: str | None, words: list[str], tmp_path: Path
) -> None:
    cluster = {"workers": 2, "num_cpus": 4, "gpus_per_worker": gpus}
    config = load_config(job(tmp_path, model={"kind": f"{UNFIT}:{name}"}, cluster=cluster))
    with dry_run.started(request_of(config)) as wait:
        found = wait()
    assert (found and found.severity) == severity
    said = re.sub(r"\[Gloo\].*\n\s*", "", found.what if found else "")  # by torch 2.8
    assert all(word in said for word in words), found


def test_a_model_that_takes_long(make_job: JobFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow model or machine yields no result, and leaves no process."""
    monkeypatch.setattr(dry_run, "LIMIT", 0.2)
    request = request_of(make_job(model={"kind": f"{UNFIT}:Sleeps"}))
    with dry_run.started(request) as wait:
        found = wait()
    assert found == warn(found.what, found.remedy)
    assert "longer than 0.2 s" in found.what


@pytest.mark.system
def test_the_command_refuses(make_job: JobFactory) -> None:
    config = make_job(model={"kind": f"{UNFIT}:BlockData"})
    report = raygnn.check(config, display=False)
    (error,) = [finding for finding in report.findings if finding.severity == "error"]
    assert error.check == "model_runs"
    assert "KeyError: 'weight', at " in error.what
    allowed = config.cluster.model_copy(update={"allow": ["model_runs"]})
    assert raygnn.check(config.model_copy(update={"cluster": allowed}), display=False).ok


@pytest.mark.system
def test_the_command_refuses_a_loss(make_job: JobFactory) -> None:
    config = make_job(task={"loss": f"{OWN}:mean"})
    report = raygnn.check(config, display=False)
    (error,) = [finding for finding in report.findings if finding.severity == "error"]
    assert error.what.startswith(
        f"{OWN}:mean fails on a batch: {OWN}:mean returned [], expected [8]"
    )
    assert "single seeds" in error.remedy
    with pytest.raises(ConfigError, match=r"task\.metric: tests\.support\.own_losses:Any is a "):
        raygnn.check(make_job(task={"metric": f"{OWN}:Any"}), display=False)


@pytest.mark.system
@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"model": {"kind": f"{UNFIT}:NoModule"}}, "model.kind: .* is not a torch.nn.Module"),
        (
            {"train": {"callbacks": [f"{UNFIT}:NoModule"]}},
            "train.callbacks: .* is not a lightning.pytorch.Callback",
        ),
        ({"task": {"kind": f"{UNFIT}:NoModule"}}, "task.kind: .* is not a raygnn.Task"),
    ],
    ids=["model", "callback", "task"],
)
def test_invalid_model_classes(sections: dict[str, Any], words: str, make_job: JobFactory) -> None:
    with pytest.raises(ConfigError, match=words):
        raygnn.check(make_job(**sections), display=False)


def test_built_in_models_need_no_process(
    make_job: JobFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(request: DryRunRequest) -> None:
        raise AssertionError

    monkeypatch.setattr(dry_run, "started", never)
    raygnn.check(make_job(), display=False)
