"""Malformed configurations, given to the command line.

Each must end with exit code 2 and one message that says where, what and what to do, must write
nothing, and must not take the time of importing torch.
"""

from __future__ import annotations

import errno
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from raygnn.cli import main

GOOD = """\
name: small
graph:
  format: npz
  path: graph.npz
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
    "unclosed bracket": (GOOD + "sampling: {fanout: [1, 2}\n", ("line 7, column 25", "']'")),
    "tab": (GOOD + "train:\n\tlr: 1\n", ("line 8, column 1", "\\t")),
    "duplicate key": (GOOD + "name: other\n", ("line 7", "'name'", "second time")),
    "two documents": (GOOD + "---\n" + GOOD, ("line 7", "single document")),
    "object tag": (GOOD + "train: !!python/object/apply:os.getcwd []\n", ("line 7", "tag")),
    "own tag": (GOOD + "train: !include other.yaml\n", ("line 7", "!include")),
    "undefined alias": (GOOD + "train: *other\n", ("line 7", "other")),
    "deep nesting": (GOOD + "train: " + "[" * 10_000, ("line 7", "50 levels")),
    "deep block nesting": (
        "".join(" " * n + "a:\n" for n in range(200)),
        ("line 50", "50 levels"),
    ),
    "alias bomb": (BOMB, ("aliases",)),
    "alias of itself": ("name: &a [*a]\n", ("line 1", "aliases")),
    "key that is a number": (GOOD + "1: 2\n", ("line 7", "key")),
    "key that is a list": (GOOD + "? [a]\n: 2\n", ("line 7", "key")),
    "endless number": (GOOD + f"train: {{epochs: {'9' * 6000}}}\n", ("line 7", "number")),
    # Unknown and missing keys.
    "unknown section": (GOOD + "trian: {lr: 1}\n", ("trian (line 7)", "did you mean train?")),
    "unknown key": (GOOD + "train:\n  learning: 1\n", ("train.learning (line 8)", "known here")),
    "misspelt key": (model("{kind: gcn, hiden: 3}"), ("model.hiden", "did you mean model.hidden?")),
    "key of another section": (GOOD + "epochs: 3\n", ("epochs", "did you mean train.epochs?")),
    "key of another format": (
        graph("{format: planted, nodes: 100, path: x}"),
        ("graph.path (line 2)", "npz"),
    ),
    "another library's key": (
        GOOD + "train: {learning_rate: 1}\n",
        ("train.learning_rate (line 7)", "did you mean train.lr?"),
    ),
    "another library's key elsewhere": (
        model("{kind: gcn, learning-rate: 1}"),
        ("model.learning-rate", "did you mean train.lr?"),
    ),
    "neighbours": (GOOD + "sampling: {num_neighbors: [9]}\n", ("mean sampling.fanout?",)),
    "features of edges": (
        model("{kind: gcn, edge_features: [w]}"),
        ("model.edge_features", "no model reads features of edges yet"),
    ),
    "another library's model": (model("{kind: GraphSAGE}"), ("model.kind", "did you mean sage?")),
    "misspelt model": (model("{kind: gatv3}"), ("model.kind", "did you mean gatv2?")),
    "misspelt planetoid graph": (
        graph("{format: planetoid, path: ., name: citeser}"),
        ("graph.name (line 2)", "ind.citeser.x", "did you mean citeseer? there are: none"),
    ),
    "unprintable key": (GOOD + '"a\\e[31m": 1\n', ("\\x1b",)),
    "no name": (
        without("name: small\n"),
        ("job.yaml: name", "'name' is missing", "Name of the run"),
    ),
    "no model": (without("model:\n  kind: gcn\n"), ("job.yaml: model", "'model' is missing")),
    "no model kind": (model("{hidden: 3}"), ("model.kind (line 5)", "'kind' is missing")),
    "no graph": (
        "name: a\nmodel: {kind: gcn}\n",
        ("job.yaml: graph", "neither graph nor partition.path"),
    ),
    "no format": (
        graph("{path: graph.npz}"),
        ("graph.format (line 2)", "'format' is missing", "planetoid"),
    ),
    "no graph path": (
        graph("{format: npz}"),
        ("graph.path (line 2)", "'path' is missing", ".npz file"),
    ),
    # Types and ranges.
    "section that is a list": (
        GOOD + "train: [lr, 1]\n",
        ("train (line 7)", "section", "['lr', 1]"),
    ),
    "graph that is text": (graph("cora"), ("graph (line 2)", "section", "'cora'")),
    "text for a number": (GOOD + "train: {lr: fast}\n", ("train.lr", "number", "'fast'", "0.003")),
    "quoted number": (GOOD + "train: {epochs: '3'}\n", ("train.epochs", "remove the quotes: 3")),
    "fraction for a whole number": (GOOD + "train: {epochs: 1.5}\n", ("whole number", "1.5")),
    "true for a number": (GOOD + "train: {epochs: true}\n", ("whole number", "got true")),
    "yes for true": (GOOD + "sampling: {replace: yes}\n", ("true or false", "write true")),
    "null for a number": (GOOD + "train: {lr: null}\n", ("train.lr", "number", "got null")),
    "not a number": (GOOD + "train: {lr: .nan}\n", ("train.lr", "finite", "nan")),
    "infinite": (GOOD + "train: {lr: 1e999}\n", ("train.lr", "finite", "inf")),
    "zero learning rate": (GOOD + "train: {lr: 0}\n", ("train.lr", "above 0", "got 0")),
    "negative decay": (GOOD + "train: {weight_decay: -1}\n", ("at least 0", "got -1")),
    "no epochs": (GOOD + "train: {epochs: 0}\n", ("train.epochs", "at least 1", "got 0")),
    "dropout of one": (model("{kind: gcn, dropout: 1}"), ("model.dropout", "below 1", "got 1")),
    "huge batch": (GOOD + "sampling: {batch_size: 99999999999}\n", ("at most", "99999999999")),
    "cache above one": (GOOD + "sampling: {cache: 10}\n", ("sampling.cache", "from 0 to 1")),
    "fanout of zero": (GOOD + "sampling: {fanout: [10, 0]}\n", ("sampling.fanout[1]", "got 0")),
    "fanout that is a number": (GOOD + "sampling: {fanout: 10}\n", ("sampling.fanout", "list")),
    "number as a name": (GOOD.replace("small", "123"), ("name (line 1)", 'quotes: "123"')),
    "name that is a path": (GOOD.replace("small", "../small"), ("name", "'../small'", "letters")),
    "reserved name": (GOOD.replace("small", "partitions"), ("name", "'partitions'")),
    "unknown choice": (GOOD + "task: {metric: acuracy}\n", ("'acuracy'", "did you mean accuracy?")),
    "unknown precision": (GOOD + "precision: fp64\n", ("precision (line 7)", "'fp64'", "bf16")),
    "unknown format": (graph("{format: rdf}"), ("graph.format", "'rdf'", "planetoid, npz")),
    "unknown model": (model("{kind: transformer}"), ("model.kind", "'transformer'", "gatv2")),
    "parts": (GOOD + "partition: {parts: all}\n", ("partition.parts", "auto or", "'all'")),
    "duration without unit": (GOOD + "comm: {timeout: '30'}\n", ("comm.timeout", "30m", "'30'")),
    "duration as a clock": (GOOD + "comm: {timeout: 1:30}\n", ("comm.timeout", "'1:30'")),
    "negative duration": (GOOD + "comm: {timeout: -5}\n", ("comm.timeout", "got -5")),
    "fraction in env": (GOOD + "comm: {env: {A: 1.5}}\n", ("comm.env.A", 'quotes: "1.5"')),
    "reserved variable": (
        GOOD + "comm: {env: {RANK: '0'}}\n",
        ("comm.env.RANK (line 7)", "another name: RANK is set", "got 'RANK'"),
    ),
    "variable with a blank": (
        GOOD + "comm: {env: {A B: x}}\n",
        ("comm.env.A B (line 7)", "letters, digits", "got 'A B'"),
    ),
    "NUL in env": (GOOD + 'comm: {env: {A: "x\\0y"}}\n', ("comm.env.A", "NUL", "'x\\x00y'")),
    "half a character in env": (GOOD + 'comm: {env: {A: "\\ud800"}}\n', ("comm.env.A", "UTF-8")),
    "endless variable": (
        GOOD + f"comm: {{env: {{A: {'x' * 200_000}}}}}\n",
        ("comm.env.A", "at most 100000 bytes"),
    ),
    "no threads": (
        GOOD + "comm: {env: {OMP_NUM_THREADS: 0}}\n",
        ("comm.env.OMP_NUM_THREADS (line 7)", "whole number from 1", "'0'"),
    ),
    "threads in words": (GOOD + "comm: {env: {OMP_NUM_THREADS: abc}}\n", ("'abc'",)),
    "empty threads": (GOOD + "comm: {env: {OMP_NUM_THREADS: ''}}\n", ("got ''",)),
    "unknown level": (
        GOOD + "comm: {env: {TORCH_DISTRIBUTED_DEBUG: lots}}\n",
        ("comm.env.TORCH_DISTRIBUTED_DEBUG", "'lots'", "OFF, INFO, DETAIL", "comm.debug"),
    ),
    "hidden value": (
        GOOD + "comm: {env: {MY_TOKEN: '***'}}\n",
        ("comm.env.MY_TOKEN", "does not keep", "--set comm.env.MY_TOKEN="),
    ),
    "no time to breathe": (GOOD + "fault: {heartbeat: 4s}\n", ("fault.heartbeat", "4s", "5s or")),
    "no time to meet": (GOOD + "comm: {timeout: 0.001s}\n", ("comm.timeout", "0.001s", "1s or")),
    "unknown check": (
        GOOD + "cluster:\n  allow: [hardware_unifrom, a, a, a]\n",
        ("cluster.allow (line 8)", "no check 'hardware_unifrom', 'a'", "mean hardware_uniform?"),
    ),
    "no check at all": (GOOD + "cluster: {allow: [a]}\n", ("checks are: batch_size_fits, ",)),
    "check that must hold": (
        GOOD + "cluster: {allow: [resources_fit, name_free]}\n",
        ("cluster.allow", "resources_fit, name_free cannot be allowed"),
    ),
    "text for a list": (GOOD + "cluster: {allow: nonsense}\n", ("a list, got", ": [nonsense]")),
    "workers without end": (GOOD + "cluster: {workers: 2000000000}\n", ("from 1 to 1048576",)),
    "most workers without end": (
        GOOD + "cluster: {workers: [1, 2000000000]}\n",
        ("cluster.workers", "from 1 to 1048576"),
    ),
    **{
        f"workers {found}": (
            GOOD + f"cluster: {{workers: {found}}}\n",
            ("cluster.workers", "auto, a whole number", "[min, max]", "min ≤ max", f"got {found}"),
        )
        for found in ("[3, 2]", "[0, 2]", "[1]", "[1, 2, 3]", "[]", "[1, 'auto']", "[1.5, 2]", "0")
    },
    "storage in a cloud": (GOOD + "storage: s3://bucket/runs\n", ("storage", "s3://bucket/runs")),
    "address of the dashboard": (
        GOOD + "cluster: {address: 'http://head:8265'}\n",
        ("cluster.address", "http://head:8265", "HOST:PORT"),
    ),
    # Files that are not there.
    "missing graph": (
        GOOD.replace("graph.npz", "graf.npz"),
        ("graph.path (line 4)", "graf.npz does not exist", "did you mean", "graph.npz?"),
    ),
    "directory for a file": (GOOD.replace("graph.npz", "."), ("graph.path", "is a directory")),
    "file for a directory": (
        graph("{format: planetoid, path: graph.npz, name: cora}"),
        ("graph.path", "is a file"),
    ),
    "missing partition": (
        "name: a\nmodel: {kind: gcn}\npartition: {path: parts}\n",
        ("partition.path", "parts does not exist"),
    ),
    "partition over the graph": (
        GOOD + "partition: {path: graph.npz}\n",
        ("partition.path", "graph.path"),
    ),
    "storage in a file": (GOOD + "storage: graph.npz/runs\n", ("storage", "not a directory")),
    "missing module": (model("{kind: 'nowhere.models:Net'}"), ("model.kind", "no module nowhere")),
    "missing class": (model("{kind: 'json.decoder:JSONDecodr'}"), ("json.decoder:JSONDecoder?",)),
    "graph of an endless name": (
        GOOD.replace("graph.npz", "a" * 300),
        ("graph.path (line 4)", "cannot be looked at: File name too long"),
    ),
    "storage of an endless name": (GOOD + f"storage: {'a' * 300}\n", ("storage", "too long")),
    "partition of an endless name": (
        GOOD + f"partition: {{path: {'a' * 300}}}\n",
        ("partition.path", "too long"),
    ),
    # Keys that contradict each other.
    "fanouts and layers": (
        GOOD + "sampling: {fanout: [5, 5, 5]}\n",
        ("sampling.fanout", "[5, 5, 5]", "2 model.layers"),
    ),
    "heads and width": (
        model("{kind: gat, hidden: 30, heads: 8}"),
        ("model.hidden", "30", "8 heads"),
    ),
    "heads without attention": (
        model("{kind: gcn, heads: 4}"),
        ("model.heads", "gatv2, han", "(4): model.kind is gcn"),
    ),
    "heads and width of all types": (
        model("{kind: hgt, hidden: 30, heads: 8}"),
        ("model.hidden", "30", "8 heads"),
    ),
    "heads of a last layer that has none of its own": (
        model("{kind: hgt, out_heads: 2}"),
        ("model.out_heads", "han"),
    ),
    "bases without relations": (
        model("{kind: sage, bases: 4}"),
        ("model.bases", "a key of model.kind rgcn"),
    ),
    "bases that nothing is made of": (
        model("{kind: rgcn, regularizer: none, bases: 4}"),
        ("model.bases", "regularizer none"),
    ),
    "no bases": (model("{kind: rgcn, bases: 0}"), ("model.bases", "0")),
    "a relation that nothing reads": (
        model("{kind: gat, relation: kind}"),
        ("model.relation", "only rgcn", "gat"),
    ),
    "relations of whole graphs": (
        "name: small\ngraph: {format: graphs, path: graph.npz}\n"
        "task: {kind: graph_classification}\nmodel: {kind: rgcn, relation: kind}\n",
        ("model.relation", "whole graphs", "edge type"),
    ),
    "reverses of a graph that has both": (
        graph("{format: npz, path: graph.npz, reverse: true}"),
        ("graph.reverse",),
    ),
    "arguments of a family": (
        model("{kind: gcn, args: {a: 1}}"),
        ("model.args", "package.module:Class"),
    ),
    "momentum of adam": (GOOD + "train: {momentum: 0.9}\n", ("train.momentum", "0.9", "sgd")),
    "static and unused": (
        GOOD + "comm: {static_graph: true, find_unused_parameters: true}\n",
        ("comm.static_graph", "find_unused_parameters are both true"),
    ),
    "nccl without GPUs": (
        GOOD + "comm: {backend: nccl}\n",
        ("comm.backend", "gpus_per_worker is 0"),
    ),
    "sharded without DDP's options": (
        GOOD + "comm: {shard: full, bucket_cap_mb: 5, compression: bf16, static_graph: true}\n",
        ("comm.bucket_cap_mb", "bucket_cap_mb 5 would", "comm.compression", "comm.static_graph"),
    ),
    "sharded and unused": (
        GOOD + "comm: {shard: full, find_unused_parameters: true}\n",
        ("comm.find_unused_parameters", "comm.shard is full"),
    ),
    "sharded fp16": (
        GOOD + "comm: {shard: full}\nprecision: fp16-mixed\ncluster: {gpus_per_worker: 1}\n",
        ("precision (line 8)", "fp16-mixed scales", "only its own share"),
    ),
    "sharded GPUs over gloo": (
        GOOD + "comm: {shard: full, backend: gloo}\ncluster: {gpus_per_worker: 1}\n",
        ("comm.backend (line 7)", "gloo does not", "set comm.backend to auto"),
    ),
    "fp16 without GPUs": (GOOD + "precision: fp16-mixed\n", ("precision", "gpus_per_worker is 0")),
    "all neighbours, replaced": (
        GOOD + "sampling: {fanout: [-1, 5], replace: true}\n",
        ("sampling.replace", "[-1, 5]"),
    ),
    "nothing to test on": (
        graph("{format: planted, nodes: 1000, train: 0.8, val: 0.2}"),
        ("graph.val", "train 0.8 + val 0.2"),
    ),
    "more classes than nodes": (
        graph("{format: planted, nodes: 46, degree: 3}"),
        ("graph.classes (line 2)", "47 classes", "46 nodes", "raise graph.nodes"),
    ),
    "more classes than labelled nodes": (
        graph("{format: planted, nodes: 57, degree: 3, typed: true}"),
        ("graph.classes", "47 classes", "46 nodes with labels"),
    ),
    "more neighbours than half the nodes": (
        graph("{format: planted, nodes: 99}"),
        ("graph.degree", "50", "half of 99 nodes", "lower graph.degree"),
    ),
    "more neighbours than half the labelled nodes": (
        graph("{format: planted, nodes: 100, typed: true}"),
        ("graph.degree", "50", "half of 80 nodes with labels"),
    ),
    "nothing to train on": (
        graph("{format: planted, nodes: 100, train: 0.009}"),
        ("graph.train (line 2)", "0.009", "100 nodes", "raise graph.train"),
    ),
    "nothing labelled to train on": (
        graph("{format: planted, nodes: 110, degree: 5, train: 0.01, typed: true}"),
        ("graph.train", "0.01", "88 nodes with labels"),
    ),
    "too few CPUs": (
        GOOD + "cluster: {workers: 4, cpus_per_worker: 2, num_cpus: 4}\n",
        ("cluster.num_cpus", "4 × 2"),
    ),
    "too few CPUs for the fewest": (
        GOOD + "cluster: {workers: [3, 9], cpus_per_worker: 2, num_cpus: 4}\n",
        ("cluster.num_cpus", "3 × 2"),
    ),
    "CPUs of a running cluster": (
        GOOD + "cluster: {address: 'head:6379', num_cpus: 4}\n",
        ("cluster.num_cpus", "head:6379"),
    ),
}

# Overrides on the good job → what the message must contain.
OVERRIDES: dict[str, tuple[str, tuple[str, ...]]] = {
    "unknown key": ("train.lrr=1", ("--set train.lrr", "did you mean train.lr?")),
    "wrong type": ("train.lr=fast", ("--set train.lr", "'fast'")),
    "no value": ("train.lr", ("--set 'train.lr'", "--set train.lr=0.1")),
    "no key": ("=3", ("''", "section.key")),
    "key below a value": ("name.first=a", ("--set name.first", "'small'")),
    "bad YAML": ("sampling.fanout=[1,", ("--set sampling.fanout", "line 1, column")),
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
    ("target", "said"),
    [
        ("link", "link cannot be looked at: Too many levels of symbolic links"),
        ("nothing", "link is a link to nothing, which does not exist"),
    ],
)
def test_links_that_lead_nowhere(
    target: str, said: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "link").symlink_to(target)
    (here / "job.yaml").write_text(GOOD.replace("graph.npz", "link"))
    assert main(["check", "job.yaml"]) == 2
    check_message(capsys.readouterr().err, ("graph.path (line 4)", said))


@pytest.mark.parametrize("key", ["graph.path", "partition.path", "storage"])
def test_places_that_may_not_be_looked_at(
    key: str, here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a directory of somebody else; whoever runs the tests may see all."""
    stat = Path.stat

    def refuse(path: Path, **options: object) -> object:
        if path.name == "x":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", refuse)
    (here / "job.yaml").write_text(GOOD)
    assert main(["check", "job.yaml", "--set", f"{key}=x"]) == 2
    check_message(capsys.readouterr().err, (key, "x cannot be looked at: Permission denied"))


@pytest.mark.parametrize(
    "env",
    [
        *("MY_TOKEN: [hunter2]", "MY_TOKEN: 12.5", "GITHUB_PAT: {hunter2: 1}"),
        *('MY_PASSWORD: "hunter2\\0"', 'DATABASE_URL: "postgres://u:hunter2@h/db\\0"'),
    ],
)
def test_secrets_are_not_told(env: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


@pytest.mark.parametrize("path", ["nowhere.yaml", ".", "graph.npz/job.yaml", "/dev/zero", "a\0b"])
def test_path_that_is_no_config(path: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = snapshot(here)
    assert main(["train", path]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert "→" in said
    assert snapshot(here) == before


def test_all_problems_are_said_at_once(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    ["empty file", "deep nesting", "alias bomb", "too large", "unknown key", "missing module"],
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
    # The limit is 3 s; the processor's time does not depend on what else the machine does.
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
