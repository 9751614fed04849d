"""Tables of a company as they come: text ids, dates, truth values, words, missing values; and what
becomes of their features, worked out with pandas and numpy alone."""

from __future__ import annotations

import hashlib
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pandas as pd
import yaml

FEATURES: list[Any] = [
    "visits",
    {"column": "visits", "scale": "standard"},
    {"column": "income", "impute": "median", "scale": ["log", "standard"]},
    {"column": "income", "impute": "mean", "indicator": True, "scale": "minmax"},
    {"column": "income", "impute": -0.5, "scale": "rank_gauss"},
    {"column": "income", "impute": "median", "bucket": 5},
    {"column": "visits", "bucket": [2, 5]},
    {"column": "active", "impute": 0.5},
    {"column": "joined", "impute": "median", "parts": "weekday"},
    {"column": "joined", "impute": "median", "parts": ["year", "month"], "scale": "standard"},
    {"column": "joined", "since": "2024-01-01", "impute": "mean", "scale": "standard"},
    {"column": "seen", "since": "joined", "impute": 0, "scale": "minmax"},
    {"column": "plan", "onehot": True, "unknown": "bucket", "min_count": 3},
    {"column": "city", "impute": "nowhere", "hash": 7},
]
CALLS: list[Any] = [
    {"column": "minutes", "impute": "median", "scale": "standard"},
    "kind",
    {"column": "line", "onehot": True, "unknown": "bucket", "min_count": 3},
    {"column": "line", "impute": "none", "hash": 5},
    {"column": "minutes", "impute": "mean", "bucket": 4},
]


def spec(kind: str, **split: Any) -> dict[str, Any]:
    """Return the tables' description; ``split`` is the keys of customers."""
    return {
        "nodes": {
            "customer": {
                "files": f"customers.{kind}",
                "id": "customer",
                "features": {"feat": FEATURES},
                "label": "leaves",
                **(split or {"split": "fold"}),
            }
        },
        "edges": {
            "customer:calls:customer": {
                "files": f"calls.{kind}",
                "source": "a",
                "target": "b",
                "features": {"how": CALLS},
            }
        },
    }


def customers(random: np.random.Generator, num: int, new: bool) -> pd.DataFrame:
    """Return ``num`` customers; ``new`` ones have unseen categories and no class."""

    def some(values: Any, share: float = 0.1) -> Any:
        values = pd.Series(values)
        return values.mask(random.random(num) < share)

    when = pd.Timestamp("2023-05-01") + pd.to_timedelta(random.integers(0, 6 * 10**7, num), "s")
    plans = ["basic", "family", "premium", "pro"] + ["launch"] * new
    income = np.round(random.lognormal(10, 1, num), 2)
    leaves = (income > np.exp(10)) ^ (random.random(num) < 0.1)
    frame = pd.DataFrame(
        {
            "customer": [f"C{new:d}-{n:07d}" for n in random.permutation(num)],
            "visits": random.poisson(3, num),
            "income": some(income),
            "active": some(random.random(num) < 0.5).astype(object),
            "joined": some(when),
            "seen": when + pd.to_timedelta(random.integers(0, 10**7, num), "s"),
            "plan": some(random.choice(plans, num)),
            "city": some(random.choice([f"city {n}" for n in range(20 + 10 * new)], num)),
            "leaves": np.where(leaves, "yes", "no"),
            "fold": random.choice(["train", "val", "test"], num, p=[0.5, 0.2, 0.3]),
        }
    )
    frame.loc[: 1 if num > 40 else -1, "plan"] = "rare"  # in fewer rows than have a feature
    if new:
        frame["leaves"], frame["fold"] = None, None
    return frame


def calls(random: np.random.Generator, names: pd.Series, num: int, new: bool) -> pd.DataFrame:
    """Calls of customers to others; ``new`` ones also by a line that was not there before."""
    minutes = pd.Series(np.round(random.exponential(5, num), 3)).mask(random.random(num) < 0.1)
    ends = random.choice(names.to_numpy(), (2, num))
    kinds = random.integers(0, 3, num)
    lines = pd.Series(random.choice(["fibre", "mobile", "landline"] + ["satellite"] * new, num))
    lines[:2] = "rare"
    return pd.DataFrame(
        {
            "a": ends[0],
            "b": ends[1],
            "minutes": minutes,
            "kind": kinds,
            "line": lines.mask(random.random(num) < 0.1),
            "fold": random.choice(["train", "val", "test"], num, p=[0.5, 0.2, 0.3]),
        }
    )


def write(
    directory: Path, kind: str, num: int, seed: int, new: bool = False, **split: Any
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Write a month's tables and their description; returns customers and calls."""
    directory.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(seed)
    people = customers(random, num, new)
    called = calls(random, people["customer"], 3 * num, new)
    for name, frame in (("customers", people), ("calls", called)):
        if kind == "csv":
            frame.to_csv(directory / f"{name}.csv", index=False)
        else:
            frame.to_parquet(directory / f"{name}.{kind}", index=False)
    (directory / "tables.yaml").write_text(yaml.safe_dump(spec(kind, **split), sort_keys=False))
    return people, called


def by_hand(train: pd.DataFrame, frame: pd.DataFrame) -> np.ndarray:
    """Compute what `FEATURES` yield for a frame, float64 ``[N, F]``.

    Args:
        train: the rows for training.
    """

    def standard(of: pd.Series, values: pd.Series) -> pd.Series:
        return (values - of.mean()) / of.std(ddof=0)

    def minmax(of: pd.Series, values: pd.Series) -> pd.Series:
        return (values - of.min()) / (of.max() - of.min())

    columns: list[Any] = [frame["visits"], standard(train["visits"], frame["visits"])]
    median = train["income"].median()
    logs = [np.log1p(one["income"].fillna(median)) for one in (train, frame)]
    columns.append(standard(*logs))
    mean = train["income"].mean()
    columns.append(minmax(train["income"].fillna(mean), frame["income"].fillna(mean)))
    columns.append(frame["income"].isna())
    columns.append(_rank_gauss(train["income"].fillna(-0.5), frame["income"].fillna(-0.5)))
    bounds = np.quantile(train["income"].fillna(median), [0.2, 0.4, 0.6, 0.8])
    columns += _indicators(np.digitize(frame["income"].fillna(median), bounds), 5)
    columns += _indicators(np.digitize(frame["visits"], [2, 5]), 3)
    columns.append(frame["active"].astype(float).fillna(0.5))
    days = train["joined"].dt.day_of_week
    columns.append(frame["joined"].dt.day_of_week.fillna(days.median()))
    for part in ("year", "month"):
        of_train, values = (getattr(one["joined"].dt, part) for one in (train, frame))
        median = of_train.median()
        columns.append(standard(of_train.fillna(median), values.fillna(median)))
    day = pd.Timedelta("1D")
    of_train, values = (
        (one["joined"] - pd.Timestamp("2024-01-01")) / day for one in (train, frame)
    )
    columns.append(standard(of_train.fillna(of_train.mean()), values.fillna(of_train.mean())))
    since = [((one["seen"] - one["joined"]) / day).fillna(0) for one in (train, frame)]
    columns.append(minmax(*since))
    columns += _onehot(train["plan"], frame["plan"])
    columns += _hashed(frame["city"].fillna("nowhere"), 7)
    return np.stack([np.asarray(column, np.float64) for column in columns], axis=1)


def calls_by_hand(train: pd.DataFrame, frame: pd.DataFrame) -> np.ndarray:
    """Compute the same of `CALLS`."""
    median = train["minutes"].median()
    of_train, values = (one["minutes"].fillna(median) for one in (train, frame))
    scaled = (values - of_train.mean()) / of_train.std(ddof=0)
    columns = [scaled, frame["kind"], *_onehot(train["line"], frame["line"])]
    columns += _hashed(frame["line"].fillna("none"), 5)
    mean = train["minutes"].mean()
    bounds = np.quantile(train["minutes"].fillna(mean), [0.25, 0.5, 0.75])
    columns += _indicators(np.digitize(frame["minutes"].fillna(mean), bounds), 4)
    return np.stack(columns, axis=1)


def _indicators(codes: np.ndarray, width: int) -> list[np.ndarray]:
    return [(codes == n).astype(float) for n in range(width)]


def _onehot(of: pd.Series, values: pd.Series) -> list[np.ndarray]:
    """One-hot encode values that at least three rows have; column 0 stands for all others."""
    counts = of.value_counts()
    words = sorted(counts.index[counts >= 3])
    known = values.map({word: n + 1 for n, word in enumerate(words)}).fillna(0)
    return _indicators(known.to_numpy(), len(words) + 1)


def _hashed(words: pd.Series, width: int) -> list[np.ndarray]:
    slots = [
        int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "little") % width
        for word in words
    ]
    return _indicators(np.array(slots), width)


def _rank_gauss(of: pd.Series, values: pd.Series) -> list[float]:
    """The normal deviate of the share of quantiles below each value."""
    shares = np.linspace(0, 1, num := min(len(of), 1001))
    quantiles = np.quantile(of, shares)
    normal, found = NormalDist(), []
    for value in values:
        low, high = (
            np.searchsorted(quantiles, value, "left"),
            np.searchsorted(quantiles, value, "right"),
        )
        if low < high:  # one or several of them
            share = (shares[low] + shares[high - 1]) / 2
        elif low in (0, num):
            share = float(low > 0)
        else:
            step = (value - quantiles[low - 1]) / (quantiles[low] - quantiles[low - 1])
            share = shares[low - 1] + step * (shares[low] - shares[low - 1])
        found.append(normal.inv_cdf(min(max(share, 0.5 / num), 1 - 0.5 / num)))
    return found
