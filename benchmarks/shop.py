"""A shop of any size as tables with ids of text: users, items, what they bought, what is alike."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq

CLASSES = ("books", "garden", "kitchen", "music", "office", "sports", "tools", "toys")
FEATURES = 100
TRAIN, VAL = 0.1, 0.02  # shares of the users; the others are for test
_ALIKE = 0.8  # share of the edges that stay within a class
_CHUNK = 1 << 18  # rows that are made at a time

SPEC = """
nodes:
  user:
    files: users.parquet
    id: name
    features: {feat: profile}
    label: likes
    splits: {train: 0.1, val: 0.02}
  item: {files: "items-*.parquet", id: sku, features: {feat: profile}}
edges:
  user:bought:item:
    {files: bought.csv, source: user, target: sku, weight: amount, time: at, reverse: bought_by}
  item:alike:item: {files: alike.csv, source: one, target: other}
"""


def write(directory: Path, edges: int, seed: int = 0) -> dict[str, str]:
    """Write ``shop.yaml`` and its tables, with so many edges in all, reversed ones included.

    There are a tenth as many users as edges, and 0.04 as many items. What a user likes shows in
    what he or she bought, and hardly in his or her profile.

    Returns:
        A user's name → what he or she likes, of every user.
    """
    random = np.random.default_rng(seed)
    users, items, bought = edges // 10, edges // 25, edges * 2 // 5
    likes, kinds = (random.integers(0, len(CLASSES), num) for num in (users, items))
    names = _names("user", random.permutation(users * 3)[:users])
    skus = _names("sku", random.permutation(items * 7)[:items])
    words = pa.array(CLASSES).take(pa.array(likes))
    profiles = _profiles(random, likes, noise=6.0)
    pq.write_table(
        pa.table({"name": names, "profile": profiles, "likes": words}), directory / "users.parquet"
    )
    profiles = _profiles(random, kinds, noise=2.0)
    table = pa.table({"sku": skus, "profile": profiles})
    for part in (0, 1):
        half = table.slice(part * (items // 2), items - items // 2 if part else items // 2)
        pq.write_table(half, directory / f"items-{part}.parquet")
    by_kind = [np.flatnonzero(kinds == kind) for kind in range(len(CLASSES))]
    buyers = random.integers(0, users, bought)
    found = _within(random, likes[buyers], by_kind, items)
    columns = {
        "user": (names, buyers),
        "sku": (skus, found),
        "amount": (None, random.integers(1, 9, bought)),
        "at": (None, random.integers(1_600_000_000, 1_700_000_000, bought)),
    }
    _write_csv(directory / "bought.csv", columns)
    one = random.integers(0, items, edges - 2 * bought)
    columns = {"one": (skus, one), "other": (skus, _within(random, kinds[one], by_kind, items))}
    _write_csv(directory / "alike.csv", columns)
    (directory / "shop.yaml").write_text(SPEC)
    return dict(zip(names.to_pylist(), words.to_pylist(), strict=True))


def _names(start: str, numbers: np.ndarray) -> pa.Array:
    return pc.binary_join_element_wise(start, pa.array(numbers).cast(pa.string()), "-")


def _profiles(random: np.random.Generator, kinds: np.ndarray, noise: float) -> pa.Array:
    means = np.eye(len(CLASSES), FEATURES, dtype=np.float32) * 3
    rows = means[kinds] + random.standard_normal((len(kinds), FEATURES), np.float32) * noise
    return pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), FEATURES)


def _within(
    random: np.random.Generator, wanted: np.ndarray, by_kind: list[np.ndarray], num: int
) -> np.ndarray:
    """Items of the kinds that are wanted, mostly."""
    found = random.integers(0, num, len(wanted))
    alike = random.random(len(wanted)) < _ALIKE
    for kind, members in enumerate(by_kind):
        rows = np.flatnonzero(alike & (wanted == kind))
        if len(members):
            found[rows] = members[random.integers(0, len(members), len(rows))]
    return found


def _write_csv(file: Path, columns: dict[str, tuple[pa.Array | None, np.ndarray]]) -> None:
    num = len(next(iter(columns.values()))[1])
    schema = pa.schema(
        [
            (name, pa.int64() if words is None else pa.string())
            for name, (words, _) in columns.items()
        ]
    )
    with pa.csv.CSVWriter(file, schema) as writer:
        for start in range(0, num, _CHUNK):
            arrays = []
            for words, rows in columns.values():
                piece = pa.array(rows[start : start + _CHUNK])
                arrays.append(piece if words is None else words.take(piece))
            writer.write_table(pa.table(arrays, schema=schema))
