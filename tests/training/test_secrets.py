"""What a run leaves is read by others: no secret is in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from raygnn.config.load import load_config
from raygnn.errors import ConfigError, TrainingError
from raygnn.training import driver
from raygnn.training.cluster import RayCluster


@pytest.mark.usefixtures("no_ray")
def test_a_run_directory_has_no_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = []

    def fit(config: object, *_: object, **__: object) -> None:
        given.append(config)
        raise TrainingError("far enough")

    monkeypatch.setattr(RayCluster, "start", lambda self: None)
    monkeypatch.setattr(driver, "fit", fit)
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
        driver.train(config, display=False)
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
