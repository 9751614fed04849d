"""Upload of a job's working directory: which files are included, and which are not."""

from __future__ import annotations

import os
import random
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest
from ray._private.runtime_env.packaging import create_package

from raygnn.errors import ConfigError, InputError
from raygnn.jobs.submit import Package, prepare
from raygnn.jobs.upload import _NEVER, contents_of, pack

JOB = """
name: small
storage: /mnt/raygnn/runs
graph: {format: dgl, path: data/graph.dgl}
model: {kind: sage}
"""


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with typical files."""
    work = tmp_path / "work"
    files = ["models/mine.py", "models/log.txt", "notes/a.txt", "notes/keep.txt", "data/graph.dgl"]
    write(work, dict.fromkeys(files, "text"))
    never = [".git/objects/pack", ".venv/bin/python", "models/__pycache__/m.pyc", "runs/r/x"]
    write(work, dict.fromkeys(never, "never"))
    write(work, {"job.yaml": JOB, ".gitignore": "/data/\nnotes/*\n!notes/keep.txt\n"})
    write(work, {"models/.rayignore": "*.txt\n"})
    monkeypatch.chdir(work)
    return work


def write(place: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text)


def names(work: Path, **options: Any) -> set[str]:
    return set(contents_of(work, **options).files)


def packed(package: Package, target: Path) -> Path:
    target.mkdir()
    pack(package.contents, package.document(), package.file, target)
    return target


def of_ray(directory: Path, excludes: list[str] | None = None) -> set[str]:
    """Return the files that Ray uploads of a directory."""
    file = directory.parent / "package.zip"
    create_package(str(directory), file, include_gitignore=True, excludes=excludes)
    with zipfile.ZipFile(file) as package:
        return {name for name in package.namelist() if not name.endswith("/")}


def test_files_that_are_uploaded(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    always = {"job.yaml", "models/mine.py", "notes/keep.txt"}
    assert names(work, without=work / "runs") == always
    assert names(work) == always | {"runs/r/x"}
    data = work / "data" / "graph.dgl"
    assert names(work, data=[data], without=work / "runs") == always | {"data/graph.dgl"}
    monkeypatch.setenv("RAY_RUNTIME_ENV_IGNORE_GITIGNORE", "1")
    assert names(work, without=work / "runs") == always | {"data/graph.dgl", "notes/a.txt"}


def test_ray_leaves_out_nothing_of_it(work: Path, tmp_path: Path) -> None:
    """Ray also applies ignore files that it packs; they exclude the data and perhaps the job."""
    write(work, {".gitignore": "/data/\n*.yaml\n", "data/.rayignore": "*\n"})
    target = packed(prepare("job.yaml"), tmp_path / "target")
    assert {"small.yaml", "data/graph.dgl", "models/mine.py"} <= of_ray(target)


PATTERNS = ["*", "*.log", "a", "b/", "/a", "/a/b", "a/*", "a/**", "**/b", "a/**/c.py", "*/", "*.py"]
PATTERNS += ["c.py", "/b/a/", "# a", "", "[ab]/c.*", "b/a/c.py", "\\!a", "?.log", "c.* "]


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("reader", ["ray", "git"])
def test_ignore_files_mean_what_others_say(tmp_path: Path, reader: str, seed: int) -> None:
    """Ray decides for ignore files in several directories, and git for one with exceptions."""
    chance = random.Random(seed)
    work = tmp_path / "work"
    folders = ["", "a/", "b/", "a/b/", "b/a/", "a/b/a/", "b/a/b/"]
    for folder in folders:
        write(work, {f"{folder}{name}": "" for name in ("c.py", "a.log", "b.log", "c.txt", "!a")})
    for folder in chance.sample(folders, 3 if reader == "ray" else 1):
        lines = chance.choices(PATTERNS, k=chance.randint(1, 4))
        if reader == "git":
            lines = [f"!{line}" if line and chance.random() < 0.4 else line for line in lines]
        write(work, {f"{folder}.gitignore": "\n".join(lines)})
    if reader == "ray":
        others = of_ray(work, _NEVER)
    else:
        git = ["git", "-C", work]
        subprocess.run([*git, "init", "-q"], check=True, timeout=60)
        listing = [*git, "ls-files", "--others", "--exclude-standard"]
        others = set(subprocess.check_output(listing, text=True, timeout=60).splitlines())
    assert names(work) == {name for name in others if not name.endswith(".gitignore")}


def test_a_line_that_is_no_pattern(work: Path) -> None:
    write(work, {".gitignore": "!\n/data/\n"})
    assert "job.yaml" in names(work)


def test_links_and_odd_names_are_left_out(work: Path, tmp_path: Path) -> None:
    write(tmp_path, {"secret": "outside"})
    links = {"out": tmp_path / "secret", "outer": tmp_path, "inside": work / "job.yaml"}
    for name, goal in {**links, "round": "round", "nothing": "nowhere"}.items():
        (work / name).symlink_to(goal)
    os.mkfifo(work / "pipe")
    Path(os.fsdecode(os.fsencode(work) + b"/odd\xff.txt")).write_text("")
    package = prepare("job.yaml")
    left_out = {"out", "outer", "pipe", "round", "nothing", "odd\\udcff.txt"}
    assert set(package.contents.left_out) == left_out
    target = packed(package, tmp_path / "target")
    assert (target / "inside").read_text() == JOB
    assert not (target / "inside").is_symlink()
    texts = {path.read_text() for path in target.rglob("*") if path.is_file()}
    assert not any("outside" in text for text in texts)
    assert not {path.name for path in target.iterdir()} & left_out


def test_a_file_that_cannot_be_read(work: Path, tmp_path: Path) -> None:
    package = prepare("job.yaml")
    (work / "models" / "mine.py").unlink()
    with pytest.raises(InputError, match="cannot be read") as error:
        packed(package, tmp_path / "target")
    assert error.value.where == str(work / "models" / "mine.py")


def test_ten_gigabytes_stay(work: Path) -> None:
    with open(work / "notes" / "keep.txt", "wb") as file:
        file.truncate(10 * 2**30)  # a sparse file that must not be read
    with pytest.raises(InputError) as error:
        prepare("job.yaml")
    assert "10.0 GiB" in error.value.what
    assert "notes/ 10.0 GiB" in error.value.what
    assert error.value.where == str(work)
    assert "every node sees" in str(error.value.remedy)


def test_many_files_stay(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raygnn.jobs.upload.MOST_FILES", 3)
    with pytest.raises(InputError, match="too large"):
        prepare("job.yaml")
    monkeypatch.setattr("raygnn.jobs.upload._COUNTED", 4)
    with pytest.raises(InputError, match="at least"):
        prepare("job.yaml")


def test_data_travels_by_relative_names_only(work: Path) -> None:
    package = prepare("job.yaml")
    assert "data/graph.dgl" in package.contents.files
    assert package.document()["graph"]["path"] == "data/graph.dgl"
    absolute = prepare("job.yaml", ["graph.path=/data/of/the/cluster.dgl"])
    assert not absolute.data
    assert absolute.document()["graph"]["path"] == "/data/of/the/cluster.dgl"
    assert "data/graph.dgl" not in absolute.contents.files


def test_files_of_tasks_travel(work: Path, tmp_path: Path) -> None:
    """Training tables, also as patterns, and lists of negatives; ignore files notwithstanding."""
    write(work, dict.fromkeys(["data/rows/a.csv", "data/rows/b.csv", "data/test.csv"], "x"))
    write(work, dict.fromkeys(["data/hard.npz", "data/rows/c.txt"], "x"))
    table = "{files: %s, entity: who, target: left}"
    left = "{kind: node_classification, ntype: person, table: " + table + "}"
    knows = "{kind: link_prediction, negatives: {file: data/hard.npz}}"
    files = "{train: data/rows/*.csv, test: data/test.csv}"
    tasks = f"tasks={{left: {left % files}, knows: {knows}}}"
    package = prepare("job.yaml", [tasks])
    wanted = {"data/rows/a.csv", "data/rows/b.csv", "data/test.csv", "data/hard.npz"}
    assert wanted <= package.contents.files.keys()
    assert "data/rows/c.txt" not in package.contents.files
    made = package.document()["tasks"]
    assert made["left"]["table"]["files"] == {"train": "data/rows/*.csv", "test": "data/test.csv"}
    assert made["knows"]["negatives"]["file"] == "data/hard.npz"
    assert wanted <= of_ray(packed(package, tmp_path / "target"))
    with pytest.raises(ConfigError, match=r"tasks\.left\.table\.files\.train: there is no .*none"):
        prepare("job.yaml", [f"tasks={{left: {left % '{train: data/none*.csv}'}, knows: {knows}}}"])
    with pytest.raises(
        ConfigError, match=r"task\.table\.files\.train leads out of the working directory"
    ):
        prepare("job.yaml", ["task=" + left % "{train: ../rows.csv}"])


def test_the_root_of_a_dataset_travels(work: Path) -> None:
    write(work, {"data/Cora/raw/ind.cora.x": "x"})
    graph = "{format: dataset, dataset: 'torch_geometric.datasets:Planetoid', args: {root: %s}}"
    package = prepare("job.yaml", ["graph=" + graph % "data"])
    assert "data/Cora/raw/ind.cora.x" in package.contents.files
    assert package.document()["graph"]["args"] == {"root": "data"}
    absolute = prepare("job.yaml", ["graph=" + graph % "/mnt/data"])
    assert absolute.document()["graph"]["args"] == {"root": "/mnt/data"}
    with pytest.raises(ConfigError, match=r"graph\.args\.root: there is no"):
        prepare("job.yaml", ["graph=" + graph % "none"])


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["storage=runs"], "storage is a relative path"),
        (["partition.path=parts"], "partition.path is a relative path"),
        (["graph.path=../elsewhere.dgl"], "leads out of the working directory"),
        (["graph.path=data/none.dgl"], "there is no"),
        (["graph.path=linked/graph.dgl"], "a link to a directory"),
        (["comm.env.DB_PASSWORD=hunter2"], "comm.env.DB_PASSWORD is a secret"),
        (["train.lr=much"], "much"),
    ],
)
def test_jobs_that_cannot_be_uploaded(work: Path, overrides: list[str], told: str) -> None:
    (work / "linked").symlink_to("data")
    with pytest.raises(ConfigError) as error:
        prepare("job.yaml", overrides)
    assert told in error.value.what
    assert "hunter2" not in str(error.value)


def test_the_default_storage_is_relative(work: Path) -> None:
    write(work, {"job.yaml": JOB.replace("storage: /mnt/raygnn/runs\n", "")})
    with pytest.raises(ConfigError, match="storage is a relative path"):
        prepare("job.yaml")


def test_a_job_from_elsewhere(work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(work / "models")
    assert "models/mine.py" in prepare("../job.yaml", working_dir="..").contents.files
    (elsewhere := tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(elsewhere)
    assert prepare(work / "job.yaml").contents.directory == work
    with pytest.raises(InputError, match="not in the working directory"):
        prepare(work / "job.yaml", working_dir=".")


def test_a_mapping(work: Path) -> None:
    package = prepare(
        {
            "name": "made",
            "storage": "/mnt/raygnn/runs",
            "graph": {"format": "planted", "nodes": 100},
            "model": {"kind": "gcn"},
            "cluster": {"address": "head:6379"},
        }
    )
    assert package.file == "made.yaml"
    assert package.document()["cluster"]["address"] == "auto"


KEY = "-----BEGIN OPENSSH PRIVATE KEY-----\nhunter2\n"
SECRETS = {
    **dict.fromkeys([".env", "prod.env", ".env.production", "deep/Secrets.yaml", ".netrc"], ""),
    **dict.fromkeys(["deep/.git-credentials", ".pypirc", ".npmrc", "deep/id_rsa", "ID_RSA"], ""),
    **dict.fromkeys(["server.pem", "tls/server.key", "kubeconfig", "credentials.json"], ""),
    **dict.fromkeys(["deep/my-service-account.json", ".ray/auth_token"], ""),
    "deploy": KEY,
    "robot.json": '{"private_key": "-----BEGIN PRIVATE KEY-----"}',
}


def test_secrets_stay(work: Path) -> None:
    harmless = {".env.example": "", "id_rsa.pub": "", "keys.py": f"_HEAD = {KEY!r}", "tokens": ""}
    write(work, {**SECRETS, **harmless, ".aws/config": "", "deep/.ssh/known_hosts": ""})
    write(work, {"data/server.pem": ""})  # in a directory that travels by graph.path
    contents = contents_of(work, data=[work / "data"])
    assert set(contents.secrets) == {*SECRETS, ".aws/", "deep/.ssh/", "data/server.pem"}
    assert harmless.keys() <= contents.files.keys()
    assert not contents.files.keys() & SECRETS.keys()
    assert prepare("job.yaml").contents.secrets, "submit names them"

    write(work, {".gitignore": "!.env\n"})  # the line may have other reasons than the upload
    assert ".env" in contents_of(work).secrets
    write(work, {".rayignore": "!.env\n!.aws/\n!deploy\n!deep/id_rsa\n"})
    assert {".env", ".aws/config", "deploy", "deep/id_rsa"} <= names(work)
