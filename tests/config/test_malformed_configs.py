"""Malformed configurations, given to the command line.

Each must end with exit code 2 and one message that says where, what and what to do, must write
nothing, and must not take the time of importing torch.
"""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from raygnn.cli import main

GOOD = """\
name: small
graph:
  format: dgl
  path: graph.dgl
model:
  kind: gcn
"""

BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12)
)


def without(line: str) -> str:
    assert line in GOOD
    return GOOD.replace(line, "")


def graph(section: str) -> str:
    return f"name: small\ngraph: {section}\nmodel: {{kind: gcn}}\n"


def model(section: str) -> str:
    return GOOD.replace("\n  kind: gcn", f" {section}")


# name → (content of job.yaml, what the message must contain)
CASES: dict[str, tuple[str | bytes, tuple[str, ...]]] = {
    # Not a configuration at all.
    "empty file": ("", ("empty", "name, graph and model")),
    "only a comment": ("# later\n", ("empty",)),
    "a list": ("- name\n- graph\n", ("expected sections", "['name', 'graph']")),
    "a word": ("hello\n", ("expected sections", "'hello'")),
    "not UTF-8": (GOOD.encode() + b"# caf\xe9\n", ("UTF-8", "0xe9", "line 7")),
    "binary": (b"\x93NUMPY\x01\x00v\x00{", ("UTF-8", "0x93", "line 1")),
    "control character": ("name: a\x00b\n", ("line 1, column 8",)),
    "too large": (GOOD + "#" * (1 << 21), ("characters",)),
    # YAML that is wrong, or that is an attack.
    "two documents": (GOOD + "---\n" + GOOD, ("line 7", "single document")),
    "deep nesting": (GOOD + "train: " + "[" * 10_000, ("line 7", "50 levels")),
    "deep block nesting": ("".join(" " * n + "a:\n" for n in range(200)), ("line 50", "50 levels")),
    "alias bomb": (BOMB, ("aliases",)),
    "alias of itself": ("name: &a [*a]\n", ("line 1", "aliases")),
    "endless number": (GOOD + f"train: {{epochs: {'9' * 6000}}}\n", ("line 7", "number")),
    # Unknown and missing keys.
    "unknown key": (GOOD + "train:\n  learning: 1\n", ("train.learning (line 8)", "known here")),
    "no name": (
        without("name: small\n"),
        ("job.yaml: name", "'name' is missing", "Name of the run"),
    ),
    "no model": (without("model:\n  kind: gcn\n"), ("job.yaml: model", "'model' is missing")),
    "no graph": (
        "name: a\nmodel: {kind: gcn}\n",
        ("job.yaml: graph", "neither graph nor partition.path"),
    ),
    # Types and ranges.
    "number as a name": (GOOD.replace("small", "123"), ("name (line 1)", "text, got 123")),
    "name that is a path": (GOOD.replace("small", "../small"), ("name", "'../small'", "letters")),
    "reserved name": (GOOD.replace("small", "partitions"), ("name", "'partitions'")),
    "endless variable": (
        GOOD + f"comm: {{env: {{A: {'x' * 200_000}}}}}\n",
        ("comm.env.A", "at most 100000 bytes"),
    ),
    **{
        f"workers {found}": (
            GOOD + f"cluster: {{workers: {found}}}\n",
            ("cluster.workers", "auto, a whole number", "[min, max]", "min ≤ max", f"got {found}"),
        )
        for found in ("[3, 2]", "[0, 2]", "[1]", "[1, 2, 3]", "[]", "[1, 'auto']", "[1.5, 2]", "0")
    },
    # Keys that contradict each other.
    "relations of whole graphs": (
        "name: small\ngraph: {format: graphs, path: graph.dgl}\n"
        "task: {kind: graph_classification}\nmodel: {kind: rgcn, relation: kind}\n",
        ("model.relation", "graph-level tasks", "edge type"),
    ),
}

# Lines added to the good job → what the message must contain.
ADDED: dict[str, tuple[str, ...]] = {
    "sampling: {fanout: [1, 2}": ("line 7, column 25", "']'"),
    "train:\n\tlr: 1": ("line 8, column 1", "\\t"),
    "name: other": ("line 7", "'name'", "second time"),
    "train: !!python/object/apply:os.getcwd []": ("line 7", "tag"),
    "train: !include other.yaml": ("line 7", "!include"),
    "train: *other": ("line 7", "other"),
    "1: 2": ("line 7", "key"),
    "? [a]\n: 2": ("line 7", "key"),
    "trian: {lr: 1}": ("trian (line 7)", "did you mean train?"),
    "epochs: 3": ("epochs", "did you mean train.epochs?"),
    '"a\\e[31m": 1': ("\\x1b",),
    "train: [lr, 1]": ("train (line 7)", "section", "['lr', 1]"),
    "train: {lr: fast}": ("train.lr", "number", "'fast'", "0.003"),
    "train: {epochs: '3'}": ("train.epochs", "whole number", "'3'"),
    "train: {epochs: 1.5}": ("whole number", "1.5"),
    "train: {epochs: true}": ("whole number", "got true"),
    "sampling: {replace: yes}": ("true or false", "'yes'"),
    "train: {lr: null}": ("train.lr", "number", "got null"),
    "train: {lr: .nan}": ("train.lr", "finite", "nan"),
    "train: {lr: 1e999}": ("train.lr", "finite", "inf"),
    "train: {lr: 0}": ("train.lr", "above 0", "got 0"),
    "train: {weight_decay: -1}": ("at least 0", "got -1"),
    "train: {epochs: 0}": ("train.epochs", "at least 1", "got 0"),
    "sampling: {batch_size: 99999999999}": ("at most", "99999999999"),
    "sampling: {cache: 10}": ("sampling.cache", "from 0 to 1"),
    "sampling: {fanout: [10, 0]}": ("sampling.fanout[1]", "got 0"),
    "sampling: {fanout: 10}": ("sampling.fanout", "list"),
    "task: {metric: acuracy}": ("'acuracy'", "did you mean accuracy?"),
    "precision: fp64": ("precision (line 7)", "'fp64'", "bf16"),
    "partition: {parts: all}": ("partition.parts", "auto or", "'all'"),
    "comm: {timeout: '30'}": ("comm.timeout", "30m", "'30'"),
    "comm: {timeout: 1:30}": ("comm.timeout", "'1:30'"),
    "comm: {timeout: -5}": ("comm.timeout", "got -5"),
    "comm: {env: {A: 1.5}}": ("comm.env.A", "text, got 1.5"),
    "comm: {env: {RANK: '0'}}": (
        "comm.env.RANK (line 7)",
        "another name: RANK is set",
        "got 'RANK'",
    ),
    "comm: {env: {A B: x}}": ("comm.env.A B (line 7)", "letters, digits", "got 'A B'"),
    'comm: {env: {A: "x\\0y"}}': ("comm.env.A", "NUL", "'x\\x00y'"),
    'comm: {env: {A: "\\ud800"}}': ("comm.env.A", "UTF-8"),
    "comm: {env: {MY_TOKEN: '***'}}": (
        "comm.env.MY_TOKEN",
        "does not keep",
        "--set comm.env.MY_TOKEN=",
    ),
    "fault: {heartbeat: 4s}": ("fault.heartbeat", "4s", "5s or"),
    "comm: {timeout: 0.001s}": ("comm.timeout", "0.001s", "1s or"),
    "cluster:\n  allow: [hardware_unifrom, a, a, a]": (
        "cluster.allow (line 8)",
        "no check 'hardware_unifrom', 'a'",
        "mean hardware_uniform?",
    ),
    "cluster: {allow: [a]}": ("checks are: ", "hardware_uniform"),
    "cluster: {allow: [resources_fit, name_free]}": (
        "cluster.allow",
        "resources_fit, name_free cannot be allowed",
    ),
    "cluster: {wait: 15m}": ("cluster.wait", "cluster.workers is auto", "to a number"),
    "cluster: {wait: 15m, workers: 2, address: local}": ("cluster.wait", "does not grow"),
    "cluster: {wait: soon, workers: 2}": ("cluster.wait", "0, or a duration", "'soon'"),
    "cluster: {allow: nonsense}": ("a list, got",),
    "cluster: {workers: 2000000000}": ("from 1 to 1048576",),
    "cluster: {workers: [1, 2000000000]}": ("cluster.workers", "from 1 to 1048576"),
    "cluster: {address: 'http://head:8265'}": ("cluster.address", "http://head:8265", "HOST:PORT"),
    "partition: {path: graph.dgl}": ("partition.path", "graph.path"),
    "sampling: {fanout: [5, 5, 5]}": ("sampling.fanout", "[5, 5, 5]", "2 model.layers"),
    "train: {momentum: 0.9}": ("train.momentum", "0.9", "sgd"),
    "comm: {backend: nccl}": ("comm.backend", "gpus_per_worker is 0"),
    "precision: fp16-mixed": ("precision", "gpus_per_worker is 0"),
    "sampling: {fanout: [-1, 5], replace: true}": ("sampling.replace", "[-1, 5]"),
    "cluster: {workers: 4, cpus_per_worker: 2, num_cpus: 4}": ("cluster.num_cpus", "4 × 2"),
    "cluster: {workers: [3, 9], cpus_per_worker: 2, num_cpus: 4}": ("cluster.num_cpus", "3 × 2"),
    "cluster: {address: 'head:6379', num_cpus: 4}": ("cluster.num_cpus", "head:6379"),
}

# Its model → what the message must contain.
MODELS: dict[str, tuple[str, ...]] = {
    "{kind: gcn, hiden: 3}": ("model.hiden", "did you mean model.hidden?"),
    "{kind: gcn, edge_features: [w]}": ("model.edge_features", "a key of model.kind sage, gat"),
    "{kind: GraphSAGE}": ("model.kind", "did you mean sage?"),
    "{kind: gatv3}": ("model.kind", "did you mean gatv2?"),
    "{hidden: 3}": ("model.kind (line 5)", "'kind' is missing"),
    "{kind: gcn, dropout: 1}": ("model.dropout", "below 1", "got 1"),
    "{kind: transformer}": ("model.kind", "'transformer'", "gatv2"),
    "{kind: gat, hidden: 30, heads: 8}": ("model.hidden", "30", "8 heads"),
    "{kind: gcn, heads: 4}": ("model.heads", "gatv2, han", "(4): model.kind is gcn"),
    "{kind: hgt, hidden: 30, heads: 8}": ("model.hidden", "30", "8 heads"),
    "{kind: hgt, out_heads: 2}": ("model.out_heads", "han"),
    "{kind: sage, bases: 4}": ("model.bases", "a key of model.kind rgcn"),
    "{kind: rgcn, regularizer: none, bases: 4}": ("model.bases", "regularizer is none"),
    "{kind: rgcn, bases: 0}": ("model.bases", "0"),
    "{kind: gat, relation: kind}": ("model.relation", "only rgcn", "gat"),
    "{kind: gcn, args: {a: 1}}": ("model.args", "package.module:Class"),
}

# Its graph → what the message must contain.
GRAPHS: dict[str, tuple[str, ...]] = {
    "{format: planted, nodes: 100, path: x}": ("graph.path (line 2)", "dgl"),
    "{format: dataset, dataset: Planetoid}": ("graph.dataset", "package.module:Class"),
    "{format: dataset, dataset: 'json:JSONDecoder', folds: 3}": ("graph.folds", "task.kind is"),
    "{path: graph.dgl}": ("graph.format (line 2)", "'format' is missing", "dataset"),
    "{format: dgl}": ("graph.path (line 2)", "'path' is missing", "dgl.save_graphs"),
    "cora": ("graph (line 2)", "section", "'cora'"),
    "{format: rdf}": ("graph.format", "'rdf'", "dataset, dgl"),
    "{format: ogb, path: graph.dgl, name: a, reverse: true}": ("graph.reverse",),
    "{format: planted, nodes: 1000, train: 0.8, val: 0.2}": ("graph.val", "train 0.8 + val 0.2"),
    "{format: planted, nodes: 46, degree: 3}": (
        "graph.classes (line 2)",
        "47 classes",
        "46 nodes",
        "raise graph.nodes",
    ),
    "{format: planted, nodes: 57, degree: 3, typed: true}": (
        "graph.classes",
        "47 classes",
        "46 nodes with labels",
    ),
    "{format: planted, nodes: 99}": (
        "graph.degree",
        "50",
        "half of 99 nodes",
        "lower graph.degree",
    ),
    "{format: planted, nodes: 100, typed: true}": (
        "graph.degree",
        "50",
        "half of 80 nodes with labels",
    ),
    "{format: planted, nodes: 100, train: 0.009}": (
        "graph.train (line 2)",
        "0.009",
        "100 nodes",
        "raise graph.train",
    ),
    "{format: planted, nodes: 110, degree: 5, train: 0.01, typed: true}": (
        "graph.train",
        "0.01",
        "88 nodes with labels",
    ),
}

CASES |= {text: (f"{GOOD}{text}\n", fragments) for text, fragments in ADDED.items()}
CASES |= {text: (model(text), fragments) for text, fragments in MODELS.items()}
CASES |= {text: (graph(text), fragments) for text, fragments in GRAPHS.items()}

# Overrides on the good job → what the message must contain.
OVERRIDES: dict[str, tuple[str, tuple[str, ...]]] = {
    "unknown key": ("train.lrr=1", ("--set train.lrr", "did you mean train.lr?")),
    "wrong type": ("train.lr=fast", ("--set train.lr", "'fast'")),
    "no value": ("train.lr", ("--set 'train.lr'", "--set train.lr=0.1")),
    "no key": ("=3", ("''", "section.key")),
    "key below a value": ("name.first=a", ("--set name.first", "'small'")),
    "bad YAML": ("sampling.fanout=[1,", ("--set sampling.fanout", "line 1, column")),
    "window": ("sampling.time={edges: at, window: 90days}", ("'90days'", "30d, or a whole number")),
    "another format": ("graph.format=planted", ("graph.path", "graph.nodes", "2 problems")),
}


def snapshot(directory: Path) -> set[tuple[Path, int]]:
    return {(path, path.stat().st_mtime_ns) for path in directory.rglob("*")}


def check_message(text: str, fragments: tuple[str, ...]) -> None:
    assert text.startswith("error: ")
    assert text.count("error: ") == 1
    assert "job.yaml" in text or "--set" in text
    assert "→" in text
    assert "Traceback" not in text
    assert not [c for c in text if not c.isprintable() and c != "\n"]
    for fragment in fragments:
        assert fragment in text


@pytest.mark.parametrize("case", CASES)
def test_malformed_config(case: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content, fragments = CASES[case]
    (here / "job.yaml").write_bytes(content.encode() if isinstance(content, str) else content)
    before = snapshot(here)
    assert main(["train", "job.yaml"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    check_message(said.err, fragments)
    assert snapshot(here) == before


@pytest.mark.parametrize(
    "env",
    [
        *("MY_TOKEN: [hunter2]", "MY_TOKEN: 12.5", "GITHUB_PAT: {hunter2: 1}"),
        *('MY_PASSWORD: "hunter2\\0"', 'DATABASE_URL: "postgres://u:hunter2@h/db\\0"'),
    ],
)
def test_secrets_are_not_printed(env: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "job.yaml").write_text(GOOD + f"comm: {{env: {{{env}}}}}\n")
    assert main(["check", "job.yaml"]) == 2
    said = capsys.readouterr().err
    assert "comm.env" in said
    assert "***" in said
    assert "hunter2" not in said
    assert "12.5" not in said


@pytest.mark.parametrize("case", OVERRIDES)
def test_malformed_override(case: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    override, fragments = OVERRIDES[case]
    (here / "job.yaml").write_text(GOOD)
    before = snapshot(here)
    assert main(["train", "job.yaml", "--set", override]) == 2
    check_message(capsys.readouterr().err, fragments)
    assert snapshot(here) == before


@pytest.mark.parametrize("path", ["nowhere.yaml", ".", "graph.dgl/job.yaml", "/dev/zero", "a\0b"])
def test_path_that_is_no_config(path: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = snapshot(here)
    assert main(["train", path]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert "→" in said
    assert snapshot(here) == before


def test_all_problems_are_reported_together(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = "train:\n  epochs: 0\n  lr: fast\nsampling: {fanuot: [1]}\n"
    (here / "job.yaml").write_text(GOOD + more)
    assert main(["train", "job.yaml"]) == 2
    said = capsys.readouterr().err
    assert "3 problems" in said
    order = ["train.epochs (line 8)", "train.lr (line 9)", "sampling.fanuot (line 10)"]
    places = [said.index(fragment) for fragment in order]
    assert places == sorted(places)
    assert said.count("→") == 3


# As a command of its own: those that could take long, and one of each other kind.
@pytest.mark.parametrize(
    "case",
    ["empty file", "deep nesting", "alias bomb", "too large", "unknown key"],
)
def test_command_is_quick_and_loads_nothing_heavy(case: str, here: Path) -> None:
    content, fragments = CASES[case]
    (here / "job.yaml").write_bytes(content.encode() if isinstance(content, str) else content)
    before = snapshot(here)
    code = (
        "import sys\n"
        "from raygnn.cli import main\n"
        "code = main(['train', 'job.yaml'])\n"
        "print(*({'torch', 'dgl', 'ray', 'numpy', 'lightning'} & {*sys.modules}))\n"
        "sys.exit(code)"
    )
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 2
    assert done.stdout.strip() == ""
    check_message(done.stderr, fragments)
    assert snapshot(here) == before
    # The limit is 3 s of processor time, which does not depend on the machine's load.
    assert after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime < 3


def test_module_runs_as_a_command(here: Path) -> None:
    (here / "job.yaml").write_text(GOOD + "train: {lr: fast}\n")
    done = subprocess.run(
        [sys.executable, "-m", "raygnn", "train", "job.yaml"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    check_message(done.stderr, ("train.lr (line 7)", "'fast'"))
