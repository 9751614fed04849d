"""Tables of a shop until the end of October 2025, to train on, and until the end of November.

    python shop.py DIRECTORY [CUSTOMERS]

writes ``october/`` and ``november/``, each with customers.csv, products.csv and orders.csv. A
customer who was sold bad products stops ordering, and no column says which products are bad: only
the stars of other orders do. docs/database-to-predictions.md trains on them.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv

FIRST, MONTHS = np.datetime64("2024-01"), 23  # until November 2025
REGIONS = np.array(["north", "south", "east", "west"])
KINDS = np.array(["books", "garden", "kitchen", "music", "sports"])


def write(directory: Path, customers: int = 3_000) -> None:
    """Write the tables of both months."""
    random = np.random.default_rng(0)
    products = max(customers // 10, 20)
    quality = random.beta(1.5, 1, products)
    joined = random.integers(0, MONTHS, customers)
    active = np.zeros(customers, bool)
    months = []
    for month in range(MONTHS):
        active |= joined == month
        buyer = np.repeat(np.arange(customers), active * random.poisson(3, customers))
        product = random.integers(0, products, len(buyer))
        days = random.integers(0, 28, len(buyer))
        months.append((buyer, product, (FIRST + month).astype("datetime64[D]") + days))
        bad = np.bincount(buyer, 1 - quality[product], customers)  # of all products of the month
        active &= random.random(customers) > np.clip(0.35 * bad - 0.15, 0.02, 0.9)
    buyer, product, date = (np.concatenate(one) for one in zip(*months, strict=True))
    order = np.argsort(date, kind="stable")
    buyer, product, date = buyer[order], product[order], date[order]
    stars = np.clip(np.round(1 + 4 * quality[product] + random.normal(0, 0.7, len(date))), 1, 5)
    price = random.lognormal(3, 0.8, products).round(2)
    names = np.array([f"c{number}" for number in range(customers)])
    first_day = (FIRST + joined).astype("datetime64[D]")
    born = random.integers(1950, 2005, customers)
    region = random.choice(REGIONS, customers)
    kind = random.choice(KINDS, products)
    for place, end in (("october", "2025-11-01"), ("november", "2025-12-01")):
        there, ordered = first_day < np.datetime64(end), date < np.datetime64(end)
        _csv(
            directory / place / "customers.csv",
            customer=names[there],
            born=born[there],
            region=region[there],
            joined=first_day[there],
        )
        _csv(
            directory / place / "products.csv", product=np.arange(products), kind=kind, price=price
        )
        _csv(
            directory / place / "orders.csv",
            customer=names[buyer[ordered]],
            product=product[ordered],
            date=date[ordered],
            amount=price[product[ordered]],
            stars=stars[ordered].astype(int),
        )


def _csv(file: Path, **columns: np.ndarray) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.csv.write_csv(pa.table(columns), file)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    write(Path(sys.argv[1]), *map(int, sys.argv[2:]))
