"""A job on a database: it trains, predicts for the rows of a later day, and keeps no password."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote

import pandas as pd
import pytest
import yaml

from tests.support.commands import Command
from tests.support.postgres import PASSWORD, Server, postgres
from tests.support.small_jobs import job

pytest.importorskip("pyarrow", minversion="19")  # as the extra has it
pytest.importorskip("adbc_driver_postgresql")
pytestmark = pytest.mark.system

TABLES = """
create table items as select 'item ' || i as name, (i % 2) * 2.0 - 1 as x,
    case when i % 2 = 0 then 'no' else 'yes' end as kind,
    case i % 5 when 0 then 'val' when 1 then 'test' else 'train' end as fold
    from generate_series(1, 300) i;
create table users as select i as id, i / 100.0 as x from generate_series(1, 100) i;
create table bought as select 1 + (i * 7) % 100 as user_id, 'item ' || (1 + (i * 13) % 300) as item,
    i % 7 / 7.0 as price from generate_series(1, 2000) i;
"""
SPEC = """
nodes:
  item: {url: 'env:SHOP', sql: select * from items, id: name, features: {feat: x},
         label: kind, split: fold}
  user: {url: 'env:SHOP', sql: select * from users, id: id, features: {feat: x}}
edges:
  user:bought:item: {url: 'env:SHOP', sql: select * from bought, source: user_id, target: item}
"""


@pytest.mark.parametrize("engine", ["local", pytest.param("ray", marks=pytest.mark.slow)])
@pytest.mark.timeout(600)
def test_a_job_on_a_database(engine: str, tmp_path: Path) -> None:
    with postgres() as server:
        _check(server, engine, tmp_path)


def _check(server: Server, engine: str, place: Path) -> None:
    output = []

    def run(*command: str, code: int = 0) -> str:
        process = Command([*command], place, SHOP=server.uri)
        status, out, err = process.finish(240)
        assert status == code, out + err
        output.append(out + err)
        return out + err

    server.run(TABLES)
    (place / "shop.yaml").write_text(SPEC)
    config = job(place / "runs", graph={"format": "tables", "path": "shop.yaml"})
    config["graph"] = {"format": "tables", "path": "shop.yaml"}
    config["partition"] = {"engine": engine, "method": "random"}
    config["train"] = {"epochs": 8, "lr": 0.05}
    config["cluster"] |= {"workers": 1}
    config["task"] = {"kind": "node_classification", "ntype": "item"}
    (place / "job.yaml").write_text(yaml.safe_dump(config))
    run("train", "job.yaml")
    if engine == "local":
        new = [("new 1", "-1", "no"), ("new 2", "1", "yes")]
        for name, x, _ in new:
            server.run(f"insert into items values ('{name}', {x}, null, null)")
        (made,) = (place / "runs" / "partitions").iterdir()
        kept = ["--set", "graph=null", "--set", f"partition.path={made}", "--set", "train.epochs=9"]
        asked = ["--new-data", "--set", "graph.path=shop.yaml", "--out", "new.parquet"]
        run("predict", "runs/test", *asked)
        frame = pd.read_parquet(place / "new.parquet").set_index("node")
        assert len(frame) == 302
        assert [frame["prediction"][name] for name, *_ in new] == [kind for *_, kind in new]
        run("train", "job.yaml", "--resume", *kept)
        run("tables", "env:SHOP", "--out", "proposed.yaml")
        config["graph"]["path"] = "proposed.yaml"
        config |= {"name": "other", "task": {"kind": "link_prediction", "etype": "item"}}
        (place / "other.yaml").write_text(yaml.safe_dump(config))
        run("check", "other.yaml")
    server.run("alter table items drop column kind")
    assert "no column 'kind'" in run("train", "job.yaml", "--set", "name=third", code=2)
    files = [file for file in place.rglob("*") if file.is_file()]
    assert {"config.yaml", "raygnn.json", "summary.json"} <= {file.name for file in files}
    for secret in (PASSWORD, quote(PASSWORD, safe="")):
        assert not [file for file in files if secret.encode() in file.read_bytes()]
        assert not [text for text in output if secret in text]
