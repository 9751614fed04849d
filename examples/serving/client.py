"""Ask a service of `raygnn serve` for predictions of nodes, each a line of JSON.

python examples/serving/client.py http://127.0.0.1:8000 --ids ids.txt [--token-file FILE]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import requests

SIZE = 100  # ids of a request
ATTEMPTS = 10
AGAIN = (500, 503)  # the replica that computed the answer has died; there is no room
LIMIT = 60.0  # seconds of a request


def predict(
    session: requests.Session, address: str, ids: Sequence[int | str], **options: Any
) -> Iterator[dict[str, Any]]:
    """Yield a row for each id.

    Args:
        options: ``task``, ``fanout``, ``at``, ``scores`` or ``explain``; see docs/serving.md.

    Raises:
        RuntimeError: the service refused the request, or failed or was full for too long.
        requests.RequestException: it cannot be reached, or did not answer in time.
    """
    body = {"ids": list(ids), **options}
    for _ in range(ATTEMPTS):
        answer = session.post(f"{address}/predict", json=body, timeout=LIMIT)
        if answer.status_code not in AGAIN:
            break
        time.sleep(float(answer.headers.get("Retry-After", 1)))
    if not answer.ok:
        raise RuntimeError(f"{answer.status_code}: {answer.text}")
    yield from answer.json()["rows"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("address", help="such as http://127.0.0.1:8000")
    parser.add_argument("--ids", required=True, help="a file with an id in each line")
    parser.add_argument("--task", help="of a service of several")
    parser.add_argument("--token-file", help="as of raygnn serve")
    args = parser.parse_args()
    session = requests.Session()
    if args.token_file:
        token = Path(args.token_file).read_text().strip()
        session.headers["Authorization"] = f"Bearer {token}"
    schema = session.get(f"{args.address}/schema", timeout=LIMIT)
    schema.raise_for_status()
    served = schema.json()
    (kind,) = (served["tasks"][args.task] if args.task else served)["ids"].values()
    lines = Path(args.ids).read_text().split("\n")
    ids = [int(line) if kind == "integer" else line for line in lines if line]
    for start in range(0, len(ids), SIZE):
        for row in predict(session, args.address, ids[start : start + SIZE], task=args.task):
            print(json.dumps(row))


if __name__ == "__main__":
    main()
