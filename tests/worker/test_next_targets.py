"""Lists of targets at a time: what will this customer buy next?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml

from raygnn.config.load import load_config
from raygnn.config.schema import Config
from raygnn.errors import ConfigError
from tests.prediction.test_predict import ask
from tests.support.small_jobs import job, train_on_ranks

CUSTOMERS, ITEMS, DAYS, WEEK = 40, 12, 70, 7
FIRST = np.datetime64("2025-01-01")


def tables(place: Path) -> Path:
    """Write purchases of items of one of three kinds, and each week's as lists: a customer keeps to
    the kind of the latest purchase."""
    random = np.random.default_rng(0)
    kind = random.integers(0, 3, CUSTOMERS)
    rows = []
    for day in range(DAYS):
        for customer in np.flatnonzero(random.random(CUSTOMERS) < 0.5):
            rows.append((customer, 3 * random.integers(0, ITEMS // 3) + kind[customer], day))
    bought = pd.DataFrame(rows, columns=["customer", "item", "day"])
    asked = []
    for day in range(WEEK, DAYS - WEEK + 1, WEEK):
        week = bought[(bought.day >= day) & (bought.day < day + WEEK)]
        lists = week.groupby("customer").item.agg(lambda items: sorted(set(items))).reset_index()
        split = "train" if day < 42 else "val" if day < 56 else "test"
        asked.append(lists.assign(day=day, split=split))
    question = pd.concat(asked)
    for table in (bought, question):
        table["day"] = FIRST + pd.to_timedelta(table.day, "D")
    bought.to_csv(place / "bought.csv", index=False)
    question.to_parquet(place / "next.parquet")
    items = pd.DataFrame({"item": range(ITEMS), "kind": [f"k{i % 3}" for i in range(ITEMS)]})
    items.to_csv(place / "items.csv", index=False)
    pd.DataFrame({"customer": range(CUSTOMERS)}).to_csv(place / "customers.csv", index=False)
    described = {
        "nodes": {
            "customer": {"files": "customers.csv", "id": "customer"},
            "item": {
                "files": "items.csv",
                "id": "item",
                "features": {"feat": {"column": "kind", "onehot": True}},
            },
        },
        "edges": {
            "customer:bought:item": {
                "files": "bought.csv",
                "source": "customer",
                "target": "item",
                "time": "day",
                "reverse": "bought_by",
            },
            "customer:next:item": {
                "sql": "select customer, unnest(item) as item, day, split from 'next.parquet'",
                "source": "customer",
                "target": "item",
                "time": "day",
                "split": "split",
            },
        },
    }
    file = place / "graph.yaml"
    file.write_text(yaml.safe_dump(described))
    return file


def config_of(place: Path, **sections: Any) -> Config:
    values = job(
        place,
        task={
            "kind": "link_prediction",
            "etype": "next",
            "metric": "map@3",
            "negatives": {"ends": "target"},
            "ranking": {"candidates": "destinations"},
        },
        model={"layers": 2, "hidden": 16, "embedding": {"dim": 8, "ntypes": ["customer"]}},
        sampling={
            "fanout": 2 * [{"next": 0, "*": 8}],
            "time": {"edges": "time", "strategy": "latest"},
        },
        train={"epochs": 4, "lr": 0.02},
        partition={"method": "random"},
        **sections,
    )
    values["graph"] = {"format": "tables", "path": str(place / "graph.yaml")}
    return load_config(values)


def test_lists_of_a_table_are_learned(tmp_path: Path) -> None:
    """The kind of what a customer buys is known from earlier purchases; the lists of other weeks
    are not seen. Metrics do not depend on the number of ranks."""
    tables(tmp_path)
    run = train_on_ranks(config_of(tmp_path))
    one, two = (
        ask(run, config_of(tmp_path, cluster={"workers": n}), n, split="test", rows=False)
        for n in (1, 2)
    )
    assert one["test/map@3"] == pytest.approx(two["test/map@3"], abs=1e-9)
    assert one["test/map@3"] > 0.5  # 0.15 in any order
    assert run.summary["metrics"]["test/map@3"] == pytest.approx(one["test/map@3"], abs=1e-9)


@pytest.mark.parametrize("ranking", [{"candidates": 5}, {}, {"edges": 20}])
def test_lists_are_of_all_destinations(ranking: dict[str, Any], tmp_path: Path) -> None:
    tables(tmp_path)
    given = {"candidates": "destinations", **ranking} if "edges" in ranking else ranking
    values = config_of(tmp_path).to_dict()
    values["task"]["ranking"] = given
    with pytest.raises(ConfigError, match="metrics per source"):
        load_config(values)
