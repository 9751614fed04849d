"""Generated tables of purchases and their stars, for which the lowest possible error is known.

    python examples/purchases.py shop [CUSTOMERS]

writes ``shop/``: customers.csv, products.csv, purchases.csv and tables.yaml. How well a product
suits a customer is the inner product of two lists of four numbers, ``taste`` and ``trait``, which
are in the tables. The strictness of a customer and the quality of a product are not. Stars are the
sum of these three and of a random number with a standard deviation of 0.5: no prediction has a
lower expected RMSE.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv

NOISE, EACH = 0.5, 40  # purchases of a customer
TABLES = """\
nodes:
  customer: {files: customers.csv, id: customer, features: {feat: [taste0, taste1, taste2, taste3]}}
  product:
    files: products.csv
    id: product
    features: {feat: [trait0, trait1, trait2, trait3], in_stock: in_stock}
edges:
  customer:buys:product:
    files: purchases.csv
    source: customer
    target: product
    features: {stars: stars}
    reverse: bought_by
"""


def write(directory: Path, customers: int = 2_000) -> None:
    """Write the tables and their description."""
    directory.mkdir(parents=True, exist_ok=True)
    random, products = np.random.default_rng(0), 400
    taste, trait = (random.normal(0, 0.7, (number, 4)) for number in (customers, products))
    strict, good = (random.normal(3.5, 0.5, number) for number in (customers, products))
    suits = taste @ trait.T
    wish = suits + random.gumbel(size=suits.shape)  # the highest are a draw by exp(suits)
    product = np.argsort(-wish, axis=1)[:, :EACH].ravel()
    customer = np.repeat(np.arange(customers), EACH)
    stars = suits[customer, product] + good[product] - strict[customer] + 3.5
    stars += random.normal(0, NOISE, len(stars))
    names = [f"c{number}" for number in range(customers)], [f"p{n}" for n in range(products)]
    numbers = {"in_stock": random.integers(0, 2, products)}
    _csv(directory / "customers.csv", customer=names[0], **_columns("taste", taste))
    _csv(directory / "products.csv", product=names[1], **_columns("trait", trait), **numbers)
    ends = np.array(names[0])[customer], np.array(names[1])[product]
    bought = {"customer": ends[0], "product": ends[1], "stars": stars.round(2)}
    _csv(directory / "purchases.csv", **bought)
    (directory / "tables.yaml").write_text(TABLES)


def _columns(name: str, values: np.ndarray) -> dict[str, np.ndarray]:
    return {f"{name}{number}": column for number, column in enumerate(values.T.round(4))}


def _csv(file: Path, **columns: object) -> None:
    pyarrow.csv.write_csv(pa.table(columns), file)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    write(Path(sys.argv[1]), *map(int, sys.argv[2:]))
