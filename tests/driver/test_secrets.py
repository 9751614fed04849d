"""Secrets: none is in the files of a run, which other people may read."""

from __future__ import annotations

from pathlib import Path

import pytest

from raygnn.cli import main
from raygnn.config.load import load_config
from raygnn.driver import train
from raygnn.driver.ray_cluster import RayCluster
from raygnn.driver.session import Session
from raygnn.errors import ConfigError, TrainingError


@pytest.mark.usefixtures("no_ray")
def test_a_run_directory_has_no_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = []

    def launch(session: Session, *_: object, **__: object) -> None:
        given.append(session.config)
        raise TrainingError("far enough")

    monkeypatch.setattr(RayCluster, "start", lambda self: None)
    monkeypatch.setattr(Session, "_launch", launch)
    env = {"DB_PASSWORD": "hunter2", "DATABASE_URL": "postgres://u:hunter2@h/db", "A": "told"}
    config = load_config(
        {
            "name": "a",
            "storage": str(tmp_path),
            "graph": {"format": "planted", "nodes": 1000},
            "model": {"kind": "gcn"},
            "cluster": {"workers": 1, "address": "local"},
            "comm": {"env": env},
        }
    )
    with pytest.raises(TrainingError, match="far enough"):
        train.train(config, display=False)
    assert [each.comm.env for each in given] == [env], "the ranks get them"
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert {"config.yaml", "preflight.json", "summary.json"} <= {file.name for file in files}
    assert not [file for file in files if b"hunter2" in file.read_bytes()]
    assert "A: told" in (tmp_path / "a" / "config.yaml").read_text()
    with pytest.raises(ConfigError, match="does not keep"):
        load_config(tmp_path / "a" / "config.yaml")
    kept = {f"comm.env.{name}": value for name, value in env.items()}
    again = load_config(tmp_path / "a" / "config.yaml", kept)
    assert again.to_dict() == config.to_dict()


GOOD = "name: a\ngraph: {format: dgl, path: graph.dgl}\nmodel: {kind: gcn}\n"
USER = "u:hunter2@host"

# mistakes in values with secrets: the error must not repeat the secret
WRONG = {
    "storage": f"storage: ftp://{USER}/runs",
    "storage on another host": f"storage: file://{USER}/runs",
    "address": f"cluster: {{address: 'http://{USER}:8265'}}",
    "partition": f"partition: {{path: 'ftp://{USER}/x'}}",
    "removed key": f"fault: {{mirror: 's3://{USER}/x'}}",
    "staging": f"staging: {{path: 's3://{USER}/x'}}",
    "model": f"task: {{target: 3}}\nprecision: https://{USER}",
    "list for variables": "comm: {env: [hunter2]}",
    "text for variables": "comm: {env: hunter2}",
    "list for a variable": "comm: {env: {TOKEN: [hunter2]}}",
    "misspelt section": "comm: {evn: {TOKEN: hunter2}}",
    "no such section": "env: {TOKEN: hunter2}",
    "broken": "comm: {env: {TOKEN: hunter2",
    "no value": "comm:\n  env:\n    TOKEN: @hunter2",
    "key of wandb": "logging: {loggers: {wandb: {settings: {api_key: hunter2}}}}",
    "list for wandb": "logging: {loggers: {wandb: [hunter2]}}",
    "user of mlflow": f"logging: {{loggers: {{mlflow: {{tracking_uri: 'https://{USER}'}}}}}}",
    "text for mlflow": "logging: {loggers: {mlflow: hunter2}}",
}


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("json", [False, True])
def test_errors_have_no_secrets(
    case: str,
    json: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "graph.dgl").touch()
    (tmp_path / "job.yaml").write_text(f"{GOOD}{WRONG[case]}\n")
    assert main(["check", "job.yaml", *["--json"][:json]]) == 2
    out, err = capsys.readouterr()
    assert "job.yaml" in err
    assert "hunter2" not in out + err


@pytest.mark.parametrize(
    "arguments",
    [
        ["check", "job.yaml", "--set", f"storage=s3://{USER}/x"],
        ["check", "job.yaml", "--set", "comm.env.TOKEN=[hunter2"],
        ["check", "job.yaml", "--set", f"graph.path=s3://{USER}/x.dgl"],
        ["check", "job.yaml", "--set", "TOKEN=hunter2"],
        ["check", "--address", f"http://{USER}"],
        ["runs", "--storage", f"s3://{USER}/runs"],
        ["report", f"https://{USER}/runs/a"],
        ["report", "a", "--storage", f"s3://{USER}/runs"],
        ["tables", f"postgresql://{USER}/shop"],
    ],
)
def test_arguments_with_secrets(
    arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")  # where it looks for seconds
    (tmp_path / "graph.dgl").touch()
    (tmp_path / "job.yaml").write_text(GOOD)
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert "error: " in err
    assert "hunter2" not in out + err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["graph.dgl", "job.yaml"]
