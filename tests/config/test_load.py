"""Valid configurations: defaults, paths, overrides, reading back."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

import raygnn
from raygnn.config.graph import DglGraph, PlantedGraph
from raygnn.config.load import load_config
from raygnn.config.model import FamilyConfig
from raygnn.config.schema import Config
from raygnn.config.values import Duration
from raygnn.config.yaml_text import write_yaml
from raygnn.errors import ConfigError

PLANTED: dict[str, Any] = {
    "name": "planted-gcn",
    "graph": {"format": "planted", "nodes": 1000},
    "model": {"kind": "gcn"},
}
DGL = "name: small\ngraph: {format: dgl, path: graph.dgl}\nmodel: {kind: gcn}\n"


# ── defaults and forms ───────────────────────────────────────────────────────────────────────


def test_defaults() -> None:
    config = load_config(PLANTED)
    assert config.train.epochs == 20
    assert config.sampling.fanout == (10, 10)
    assert config.comm.timeout == Duration(1800)
    assert config.fault.checkpoint_every == Duration(600)
    assert config.partition.parts == "auto"
    assert config.file is None


def test_public_name_is_the_same_function() -> None:
    assert raygnn.load_config is load_config


def test_empty_sections_stand_for_their_defaults(here: Path) -> None:
    (here / "job.yaml").write_text(DGL + "train:\n  # lr: 0.1\nsampling:\nstorage:\n")
    (here / "plain.yaml").write_text(DGL)
    assert load_config("job.yaml").to_dict() == load_config("plain.yaml").to_dict()


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-3", 1e-3), ("1E-3", 1e-3), (".5", 0.5), ("1", 1.0), ("1_000", 1000.0), ("+.1e+1", 1.0)],
)
def test_numbers_as_people_write_them(text: str, value: float, here: Path) -> None:
    (here / "job.yaml").write_text(DGL + f"train: {{lr: {text}}}\n")
    assert load_config("job.yaml").train.lr == value


def test_words_that_yaml_1_1_reads_as_something_else(here: Path) -> None:
    (here / "job.yaml").write_text(DGL.replace("small", "no") + "task: {target: 2024-01-01}\n")
    config = load_config("job.yaml")
    assert config.name == "no"
    assert config.task.target == "2024-01-01"


def test_numpy_numbers_are_numbers() -> None:
    np = pytest.importorskip("numpy")
    train = {"lr": np.float32(0.5), "seed": np.int64(3)}
    sampling = {"fanout": np.array([5, -1])}
    config = load_config({**PLANTED, "train": train, "sampling": sampling})
    assert config.train.lr == 0.5
    assert config.train.seed == 3
    assert config.sampling.fanout == (5, -1)


def test_steps_and_time_between_checkpoints() -> None:
    assert load_config(PLANTED, fault={"checkpoint_every": 50}).fault.checkpoint_every == 50
    every = load_config(PLANTED, fault={"checkpoint_every": "90s"}).fault.checkpoint_every
    assert every == Duration(90)


def test_configs_are_frozen() -> None:
    config = load_config(PLANTED)
    with pytest.raises(ValidationError, match="frozen"):
        config.train.lr = 1.0  # type: ignore[misc]


def test_configs_can_be_pickled(here: Path) -> None:
    (here / "job.yaml").write_text(DGL)
    config = load_config("job.yaml")
    copy = pickle.loads(pickle.dumps(config))
    assert copy == config
    assert copy.file == here / "job.yaml"


# ── paths ────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def elsewhere(here: Path) -> Path:
    """Directory ``jobs`` with a job and its input, below the current directory."""
    directory = here / "jobs"
    directory.mkdir()
    (directory / "graph.dgl").write_bytes(b"")
    (directory / "job.yaml").write_text(DGL + "partition: {path: parts}\nstorage: runs\n")
    return directory


def graph_path(config: Config) -> Path:
    assert isinstance(config.graph, DglGraph)
    return config.graph.path


def test_paths_in_a_file_are_relative_to_it(elsewhere: Path) -> None:
    config = load_config("jobs/job.yaml")
    assert graph_path(config) == elsewhere / "graph.dgl"
    assert config.partition.path == elsewhere / "parts"
    assert config.file == elsewhere / "job.yaml"


def test_storage_is_relative_to_where_the_command_runs(here: Path, elsewhere: Path) -> None:
    config = load_config("jobs/job.yaml")
    assert config.storage == here / "runs"
    assert config.run_dir == here / "runs" / "small"


def test_paths_in_overrides_are_relative_to_where_the_command_runs(
    here: Path, elsewhere: Path
) -> None:
    config = load_config("jobs/job.yaml", ["graph.path=graph.dgl"])
    assert graph_path(config) == here / "graph.dgl"
    assert config.partition.path == elsewhere / "parts"
    config = load_config("jobs/job.yaml", graph={"format": "dgl", "path": "graph.dgl"})
    assert graph_path(config) == here / "graph.dgl"


def test_paths_in_a_mapping_are_relative_to_where_the_command_runs(here: Path) -> None:
    config = load_config({**PLANTED, "graph": {"format": "dgl", "path": Path("graph.dgl")}})
    assert graph_path(config) == here / "graph.dgl"


@pytest.mark.parametrize("storage", ["file:///a%20b/runs", "file://localhost/a%20b/runs"])
def test_storage_may_be_a_file_uri(storage: str) -> None:
    assert load_config(PLANTED, storage=storage).storage == Path("/a b/runs")


@pytest.mark.parametrize("path", ["/d\udcff", "s3://bucket/d\udcff"])
def test_paths_that_are_not_utf8_are_refused(path: str) -> None:
    """No file of a run and no message of Ray could contain them."""
    with pytest.raises(ConfigError, match=r"storage: expected a path") as caught:
        load_config(PLANTED, {"storage": path})
    str(caught.value).encode()


def test_home_is_expanded(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(here))
    (here / "job.yaml").write_text(DGL.replace("graph.dgl", "~/graph.dgl"))
    assert graph_path(load_config("job.yaml")) == here / "graph.dgl"


def test_an_existing_partition_needs_no_graph(here: Path) -> None:
    (here / "parts").mkdir()
    config = load_config({"name": "a", "model": {"kind": "gcn"}, "partition": {"path": "parts"}})
    assert config.graph is None
    assert config.partition.path == here / "parts"


# ── overrides ────────────────────────────────────────────────────────────────────────────────


def test_forms_of_overrides_agree() -> None:
    expected = {**PLANTED, "train": {"lr": 0.1, "epochs": 3}, "sampling": {"fanout": [5, 5]}}
    for config in (
        load_config(PLANTED, ["train.lr=0.1", "train.epochs=3", "sampling.fanout=[5, 5]"]),
        load_config(PLANTED, {"train.lr": 0.1, "train": {"epochs": 3}, "sampling.fanout": [5, 5]}),
        load_config(PLANTED, overrides=["train={lr: 0.1, epochs: 3}", "sampling.fanout=[5, 5]"]),
        load_config(PLANTED, train={"lr": 0.1, "epochs": 3}, sampling={"fanout": (5, 5)}),
        load_config(PLANTED, "train={lr: 0.1, epochs: 3}", **{"sampling.fanout": [5, 5]}),
    ):
        assert config == load_config(expected)


def test_later_overrides_win() -> None:
    assert load_config(PLANTED, ["train.lr=1", "train.lr=2"], train={"lr": 3}).train.lr == 3
    assert load_config(PLANTED, ["train.lr=1", "train={lr: 2}"]).train.lr == 2


def test_a_section_is_merged_and_a_graph_with_a_format_replaced(here: Path) -> None:
    (here / "job.yaml").write_text(DGL + "train: {lr: 0.5}\n")
    config = load_config("job.yaml", ["train={epochs: 3}", "graph={format: planted, nodes: 100}"])
    assert (config.train.lr, config.train.epochs) == (0.5, 3)
    assert isinstance(config.graph, PlantedGraph)
    graph = load_config("job.yaml", graph={"index": 4}).graph
    assert isinstance(graph, DglGraph)
    assert graph.index == 4


def test_a_mapping_is_not_changed() -> None:
    source = {**PLANTED, "train": {"lr": 0.1}}
    load_config(source, ["train.lr=1", "model.hidden=8"])
    assert source == {**PLANTED, "train": {"lr": 0.1}}
    assert PLANTED["model"] == {"kind": "gcn"}


def test_an_override_can_mend_a_file(here: Path) -> None:
    (here / "job.yaml").write_text(DGL + "train: {lr: fast}\n")
    assert load_config("job.yaml", ["train.lr=0.1"]).train.lr == 0.1


def test_errors_name_the_source_of_the_value(here: Path) -> None:
    (here / "job.yaml").write_text(DGL + "train:\n  lr: fast\n")
    for overrides, where in (
        ([], "job.yaml: train.lr (line 5)"),
        (["train.lr=slow"], "--set train.lr"),
        ({"train.lr": "slow"}, "override train.lr"),
    ):
        with pytest.raises(ConfigError) as caught:
            load_config("job.yaml", overrides)
        assert caught.value.where == where
        assert caught.value.remedy
    with pytest.raises(ConfigError) as caught:
        load_config({**PLANTED, "train": {"lr": "fast"}})
    assert caught.value.where == "config: train.lr"


# ── reading back ─────────────────────────────────────────────────────────────────────────────

SECTIONS = st.fixed_dictionaries(
    {
        "name": st.from_regex(r"[a-z0-9][a-z0-9._-]{0,4}", fullmatch=True).filter(
            lambda name: name != "partitions"
        ),
        "graph": st.fixed_dictionaries(
            {"format": st.just("planted"), "nodes": st.integers(1000, 2**31 - 1)},
            optional={
                "normalize": st.sampled_from(["none", "row", "standard", None]),
                "noise": st.floats(0, 1e6),
                "typed": st.booleans(),
            },
        ),
        "model": st.fixed_dictionaries(
            {"kind": st.sampled_from(["gcn", "sage"])},
            optional={"hidden": st.integers(1, 4096), "dropout": st.floats(0, 0.99)},
        ),
    },
    optional={
        "precision": st.sampled_from(["fp32", "bf16", "bf16-mixed"]),
        "sampling": st.fixed_dictionaries(
            {"fanout": st.lists(st.integers(1, 50) | st.just(-1), min_size=2, max_size=2)},
            optional={"cache": st.floats(0, 1), "prefetch": st.integers(0, 9)},
        ),
        "train": st.fixed_dictionaries(
            {},
            optional={
                "lr": st.floats(1e-300, 1e3) | st.integers(1, 10),
                "clip": st.none() | st.floats(1e-6, 10),
                "seed": st.integers(0, 2**32 - 1),
            },
        ),
        "comm": st.fixed_dictionaries(
            {},
            optional={
                "timeout": st.integers(1, 10**6) | st.floats(1, 1e6),
                "env": st.dictionaries(
                    st.from_regex(r"[A-Z][A-Z_]{8}", fullmatch=True).filter(
                        lambda name: "RANK" not in name
                    ),
                    st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=8),
                    max_size=3,
                ),
            },
        ),
        "fault": st.fixed_dictionaries(
            {"checkpoint_every": st.integers(1, 10**6) | st.sampled_from(["10m", "1.5h", "2d"])}
        ),
    },
)


@given(SECTIONS)
def test_a_config_is_read_back_from_its_dict(source: dict[str, Any]) -> None:
    config = load_config(source)
    assert load_config(config.to_dict()) == config


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(source=SECTIONS)
def test_a_config_is_read_back_from_its_yaml(source: dict[str, Any], tmp_path: Path) -> None:
    config = load_config(source)
    path = tmp_path / "job.yaml"
    path.write_text(write_yaml(config.to_dict()), encoding="utf-8")
    assert load_config(path).to_dict() == config.to_dict()


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=8,
)
KEYS = st.sampled_from([*Config.model_fields, "format", "kind", "path", "lr", "fanout", "zzz"])


@given(st.dictionaries(KEYS, ANYTHING | st.dictionaries(KEYS, ANYTHING)))
def test_anything_else_is_a_config_error(source: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        load_config({"name": "", **source, "model": {"kind": source.get("kind", "x")}})


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    content=st.binary(max_size=60)
    | st.text(max_size=60).map(lambda text: text.encode("utf-8", "surrogatepass"))
)
def test_any_other_file_is_a_config_error(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"job\.yaml"):
        load_config(path)


@pytest.mark.parametrize(
    ("graph", "model", "dropout"),
    [
        ({"format": "tables", "path": "tables.yaml"}, {"kind": "sage"}, 0.1),
        ({"format": "tables", "path": "tables.yaml"}, {"kind": "sage", "dropout": 0.5}, 0.5),
        ({"format": "planted", "nodes": 100}, {"kind": "sage"}, 0.5),
    ],
)
def test_tables_drop_less(
    graph: dict[str, Any],
    model: dict[str, Any],
    dropout: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tables have a lower default dropout, and the config that a run records reads back as the
    same."""
    monkeypatch.chdir(tmp_path)
    Path("tables.yaml").touch()
    config = load_config({"name": "a", "graph": graph, "model": model})
    assert isinstance(config.model, FamilyConfig)
    assert config.model.dropout == dropout
    assert load_config(config.recorded()) == config
