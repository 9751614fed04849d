"""Tables of a company to train on: 100,000 customers, their purchases and their contacts; and the
tables of a later month to predict for.

    python customers.py DIRECTORY [CUSTOMERS]

writes ``training/`` and ``october/``, each with its tables and ``tables.yaml``, and ``job.yaml``:

    cd DIRECTORY
    raygnn train job.yaml
    raygnn predict interests --new-data --set graph.path=october/tables.yaml --out october.parquet

Regions of customers may be missing or rare; October has fewer regions, and new ones. A customer's
interest can be predicted from purchases, and a little from the region.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

INTERESTS = ("books", "garden", "kitchen", "music", "sports")
REGIONS = tuple(f"{side} {n}" for side in ("north", "south", "east", "west") for n in (1, 2, 3))
NEW_REGIONS = ("harbour", "airport")
TABLES = """\
nodes:
  customer:
    files: customers.parquet
    id: customer
    features: {feat: [age, income]}
    categories:
      region: {column: region, unknown: bucket, min_count: 20}
      plan: plan
    label: interest
    splits: {train: 0.5, val: 0.1}
  product:
    files: products.csv
    id: sku
    features: {feat: price}
    categories: {kind: {column: kind, unknown: bucket, min_count: 2}}
edges:
  customer:bought:product:
    {files: purchases.csv, source: customer, target: sku, reverse: bought_by}
  customer:knows:customer: {files: contacts.csv, source: one, target: other, undirected: true}
"""
JOB = """\
name: interests
graph: {format: tables, path: training/tables.yaml}
task: {ntype: customer}
model: {kind: sage, hidden: 32, dropout: 0.1, categories: {region: 8, plan: 4, kind: 8}}
sampling: {fanout: [10, 5], batch_size: 256}
train: {epochs: 1, lr: 0.01}
cluster: {workers: 2}
"""


def write(directory: Path, customers: int = 100_000) -> pa.Table:
    """Write all of it.

    Returns:
        The customers of October: ``customer``, ``region`` and, as no table says, ``interest``.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "job.yaml").write_text(JOB)
    _month(directory / "training", customers, 0, REGIONS, ())
    return _month(directory / "october", customers // 5, 1, REGIONS[:8], NEW_REGIONS)


def _month(
    directory: Path,
    customers: int,
    seed: int,
    regions: tuple[str, ...],
    new: tuple[str, ...],
) -> pa.Table:
    random = np.random.default_rng(seed)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tables.yaml").write_text(TABLES)
    products = customers // 20
    names = np.array([f"C{seed}-{n:07d}" for n in random.permutation(customers)])
    skus = np.array([f"sku/{n:05d}" for n in random.permutation(products)])
    interest = random.integers(0, len(INTERESTS), customers)
    # half of the customers live where others of their interest do
    near = interest * 2 + random.integers(0, 2, customers)
    far = random.integers(0, len(regions), customers)
    stays = (random.random(customers) < 0.5) & (near < len(regions))
    region = np.array(regions, object)[np.where(stays, near, far)]
    region[random.random(customers) < 0.01] = None
    rare = random.random(customers) < (0.02 if new else 0.001)
    words = new or tuple(f"village {n}" for n in range(customers // 100 + 1))
    region[rare] = random.choice(words, rare.sum())
    columns = {
        "customer": names,
        "age": random.integers(18, 90, customers) / 50,
        "income": random.lognormal(0, 0.5, customers),
        "region": region,
        "plan": random.choice(["basic", "family", "premium"], customers),
    }
    table = pa.table({**columns, "interest": np.array(INTERESTS, object)[interest]})
    if new:  # it is not known yet
        columns["interest"] = pa.nulls(customers, pa.string())
    else:
        columns["interest"] = table["interest"]
    pq.write_table(pa.table(columns), directory / "customers.parquet")
    kind = random.integers(0, len(INTERESTS), products)
    kinds = np.array(INTERESTS, object)[kind]
    kinds[random.random(products) < 0.02] = "toys" if new else None
    price = random.lognormal(0, 1, products)
    _csv(directory / "products.csv", sku=skus, kind=kinds, price=price)
    buyer, known = (np.repeat(np.arange(customers), n) for n in (8, 2))
    bought = random.integers(0, products, len(buyer))
    liked = random.random(len(buyer)) < 0.4
    for number in range(len(INTERESTS)):
        rows = np.flatnonzero(liked & (interest[buyer] == number))
        bought[rows] = random.choice(np.flatnonzero(kind == number), len(rows))
    _csv(directory / "purchases.csv", customer=names[buyer], sku=skus[bought])
    other = random.integers(0, customers, len(known))
    _csv(directory / "contacts.csv", one=names[known], other=names[other])
    return table.select(["customer", "region", "interest"])


def _csv(file: Path, **columns: np.ndarray) -> None:
    pyarrow.csv.write_csv(pa.table(columns), file)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    write(Path(sys.argv[1]), *map(int, sys.argv[2:]))
