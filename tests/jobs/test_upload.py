"""What travels with a job, and what does not."""

from __future__ import annotations

import os
import random
import subprocess
import zipfile
from pathlib import Path

import pytest
from ray._private.runtime_env.packaging import create_package

from raygnn.errors import ConfigError, InputError
from raygnn.jobs.submit import prepare
from raygnn.jobs.upload import check_unpacked, look, pack

JOB = """
name: small
storage: /mnt/raygnn/runs
graph: {format: dgl, path: data/graph.dgl}
model: {kind: sage}
"""


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory as people have them."""
    work = tmp_path / "work"
    for name in ("job.yaml", "models/mine.py", "notes/a.txt", "notes/keep.txt", "data/graph.dgl"):
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        (work / name).write_text(name)
    (work / "job.yaml").write_text(JOB)
    for name in (".git/objects/pack", ".venv/bin/python", "models/__pycache__/m.pyc", "runs/r/x"):
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        (work / name).write_text("never")
    (work / ".gitignore").write_text("/data/\nnotes/*\n!notes/keep.txt\n")
    (work / "models" / ".rayignore").write_text("*.txt\n")
    (work / "models" / "log.txt").write_text("")
    monkeypatch.chdir(work)
    return work


def names(work: Path, **options: list[Path]) -> set[str]:
    return set(look(work, **options).files)


def test_what_travels(work: Path) -> None:
    always = {"job.yaml", "models/mine.py", "notes/keep.txt"}
    assert names(work, without=[work / "runs"]) == always
    assert names(work) == always | {"runs/r/x"}
    wanted = names(work, wanted=[work / "data" / "graph.dgl"], without=[work / "runs"])
    assert wanted == always | {"data/graph.dgl"}


def test_ray_leaves_out_nothing_of_it(work: Path, tmp_path: Path) -> None:
    """Ray reads ignore files of what it packs, too: they name the data, and perhaps the job."""
    (work / ".gitignore").write_text("/data/\n*.yaml\n")
    (work / "data" / ".rayignore").write_text("*\n")
    package = prepare("job.yaml")
    target = tmp_path / "target"
    target.mkdir()
    pack(package.found, package.document(), package.file, target)
    create_package(str(target), tmp_path / "package.zip", include_gitignore=True)
    with zipfile.ZipFile(tmp_path / "package.zip") as packed:
        assert {"small.yaml", "data/graph.dgl", "models/mine.py"} <= set(packed.namelist())


def test_odd_names_are_left_out(work: Path) -> None:
    (work / "round").symlink_to("round")
    (work / "nothing").symlink_to("nowhere")
    (Path(os.fsdecode(os.fsencode(work) + b"/odd\xff.txt"))).write_text("")
    found = look(work)
    assert {"round", "nothing", "odd\\udcff.txt"} <= set(found.left_out)
    assert not [name for name in found.files if "odd" in name]


def test_a_file_that_cannot_be_read(work: Path, tmp_path: Path) -> None:
    found = look(work)
    (work / "models" / "mine.py").unlink()
    target = tmp_path / "target"
    target.mkdir()
    with pytest.raises(InputError, match="cannot be read") as error:
        pack(found, {}, "small.yaml", target)
    assert error.value.where == str(work / "models" / "mine.py")


def test_a_directory_above(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(work / "models")
    assert "models/mine.py" in prepare("../job.yaml", working_dir="..").found.files


def test_links_lead_nowhere(work: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("outside")
    (work / "out").symlink_to(tmp_path / "secret")
    (work / "outer").symlink_to(tmp_path)
    (work / "inside").symlink_to(work / "job.yaml")
    os.mkfifo(work / "pipe")
    found = look(work)
    assert {"out", "outer", "pipe"} <= set(found.left_out)
    assert "inside" in found.files
    target = tmp_path / "target"
    target.mkdir()
    pack(found, {"name": "small"}, "small.yaml", target)
    assert (target / "inside").read_text() == JOB
    assert not (target / "inside").is_symlink()
    assert not [
        path for path in target.rglob("*") if path.is_file() and "outside" in path.read_text()
    ]


def test_ten_gigabytes_stay(work: Path) -> None:
    with open(work / "notes" / "keep.txt", "wb") as file:
        file.truncate(10 * 2**30)  # a sparse file: nobody may read it
    with pytest.raises(InputError) as error:
        prepare("job.yaml")
    assert "10.0 GiB" in error.value.what
    assert "notes/" in error.value.what
    assert error.value.where == str(work)
    assert "shared" in error.value.remedy or "every node sees" in error.value.remedy


def test_many_files_stay(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raygnn.jobs.upload.MOST_FILES", 3)
    with pytest.raises(InputError, match="too large"):
        prepare("job.yaml")
    monkeypatch.setattr("raygnn.jobs.upload._LOOKED_AT", 2)
    with pytest.raises(InputError, match="more than"):
        prepare("job.yaml")


def test_a_repository_that_came_is_refused(work: Path) -> None:
    """By the entry script, where Ray's own command packed."""
    with pytest.raises(InputError, match=r"a \.git of 5 B") as error:
        check_unpacked(work)
    assert "rayignore" in str(error.value.remedy)


def test_data_travels_by_relative_names_only(work: Path) -> None:
    package = prepare("job.yaml")
    assert "data/graph.dgl" in package.found.files
    assert package.document()["graph"]["path"] == "data/graph.dgl"
    there = prepare("job.yaml", ["graph.path=/data/of/the/cluster.dgl"])
    assert there.data is None
    assert there.document()["graph"]["path"] == "/data/of/the/cluster.dgl"
    assert "data/graph.dgl" not in there.found.files


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["storage=runs"], "storage is a relative path"),
        (["partition.path=parts"], "partition.path is a relative path"),
        (["fault.mirror=copies"], "fault.mirror is a relative path"),
        (["graph.path=../elsewhere.dgl"], "leads out of the working directory"),
        (["graph.path=data/none.dgl"], "there is no"),
        (["graph.path=linked/graph.dgl"], "a link to a directory"),
        (["comm.env.DB_PASSWORD=hunter2"], "comm.env.DB_PASSWORD is a secret"),
        (["train.lr=much"], "much"),
    ],
)
def test_what_cannot_travel(work: Path, overrides: list[str], told: str) -> None:
    (work / "linked").symlink_to("data")
    with pytest.raises(ConfigError) as error:
        prepare("job.yaml", overrides)
    assert told in error.value.what
    assert "hunter2" not in str(error.value)


def test_the_default_storage_is_relative(work: Path) -> None:
    (work / "job.yaml").write_text(JOB.replace("storage: /mnt/raygnn/runs\n", ""))
    with pytest.raises(ConfigError, match="storage is a relative path"):
        prepare("job.yaml")


def test_a_job_from_elsewhere(work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (elsewhere := tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(elsewhere)
    assert prepare(work / "job.yaml").found.directory == work
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


def git(place: Path, *args: str) -> str:
    env = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    done = subprocess.run(
        ["git", *args], cwd=place, env=env, capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout


PATTERNS = ["*", "*.log", "a", "b/", "/a", "/a/b", "a/*", "a/**", "**/b", "a/**/c.py", "*/", "*.py"]
PATTERNS += ["c.py", "/b/a/", "# a", "", "[ab]/c.*", "b/a/c.py", "\\!a", "?.log", "c.* "]


@pytest.mark.parametrize("seed", range(40))
def test_ignore_files_mean_what_git_says(tmp_path: Path, seed: int) -> None:
    """Of every directory, those above in the repository too; the last rule that applies wins."""
    chance = random.Random(seed)
    work = tmp_path / "part" / "work"
    folders = ["", "a", "b", "a/b", "b/a", "a/b/a", "b/a/b"]
    for folder in folders:
        (work / folder).mkdir(parents=True, exist_ok=True)
        for name in ("c.py", "a.log", "b.log", "c.txt", "!a"):
            (work / folder / name).write_text("")
    git(tmp_path, "init", "-q")
    places = chance.sample([work / folder for folder in folders], 2)
    for place in (tmp_path, tmp_path / "part", *places):
        lines = chance.choices(PATTERNS, k=chance.randint(1, 4))
        negated = [f"!{line}" if line and chance.random() < 0.4 else line for line in lines]
        if place not in places:  # the working directory itself is not to be ignored
            negated = [line for line in negated if line not in ("*", "*/")]
        (place / ".gitignore").write_text("\n".join(negated) + "\n")
    listed = git(work, "ls-files", "--others", "--exclude-standard").splitlines()
    expected = {name for name in listed if not name.endswith(".gitignore")}
    assert names(work) == expected, [(p / ".gitignore").read_text() for p in places]


def test_ignore_files_above_another_repository_are_not_ours(work: Path) -> None:
    (work.parent / ".gitignore").write_text("*.py\n")
    assert "models/mine.py" in names(work)  # the repository begins at work
    (work / ".git").rename(work.parent / ".git")
    assert "models/mine.py" not in names(work)


KEY = "-----BEGIN OPENSSH PRIVATE KEY-----\nhunter2\n"
SECRETS = {
    ".env": "", "prod.env": "", "deep/Secrets.yaml": "", "ID_RSA": "", ".env.production": "",
    ".netrc": "", "deep/.git-credentials": "", ".pypirc": "",
    ".npmrc": "", "deep/id_rsa": "", "server.pem": "", "tls/server.key": "", "kubeconfig": "",
    "credentials.json": "", "deep/my-service-account.json": "", ".ray/auth_token": "",
    "deploy": KEY, "robot.json": '{"private_key": "-----BEGIN PRIVATE KEY-----"}',
}  # fmt: skip


def test_secrets_stay(work: Path) -> None:
    open_ones = {".env.example": "", "id_rsa.pub": "", "keys.py": f"_HEAD = {KEY!r}", "tokens": ""}
    for name, text in {**SECRETS, **open_ones}.items():
        (work / name).parent.mkdir(exist_ok=True)
        (work / name).write_text(text)
    for name in (".aws/config", ".ssh/known_hosts"):
        (work / name).parent.mkdir()
        (work / name).write_text("")
    (work / "data" / "server.pem").write_text("")  # in a directory that travels by graph.path
    found = look(work, wanted=[work / "data"])
    assert set(found.secrets) == {*SECRETS, ".aws/", ".ssh/", "data/server.pem"}
    assert open_ones.keys() <= found.files.keys()
    assert not found.files.keys() & SECRETS.keys()

    (work / ".gitignore").write_text("!.env\n")  # which may mean many other things
    assert ".env" in look(work).secrets
    (work / ".rayignore").write_text("!.env\n!.aws/\n!deploy\n")
    (work / "deep" / ".rayignore").write_text("!id_rsa\n")
    assert {".env", ".aws/config", "deploy", "deep/id_rsa"} <= names(work)


def test_submit_names_the_secrets(work: Path) -> None:
    (work / ".env").write_text("KEY=hunter2")
    assert prepare("job.yaml").found.secrets == (".env",)
