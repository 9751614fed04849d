"""`raygnn serve` against FastAPI with DGL's sampler and layers, under load.

The graph of `bench_engine` (1.2 million nodes, 60 million edges), GraphSAGE with 2 layers, hidden
256, fanout [15, 10], one random node in each request. The load is made by wrk, on the same cores.
Ray Serve's own proxy is in Python; HAProxy comes with ``ray[serve]``, see docs/serving.md.

    python benchmarks/bench_serve.py [--scale small|full] [--seconds 15] [--replicas 1 2]

Needs wrk (Debian's package). Exit code 1 if a request failed; answers are not compared.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

CHECKOUT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(CHECKOUT))

from bench_engine import GRAPHS, WORK, job  # noqa: E402
from machine import load, setting, table  # noqa: E402

import raygnn  # noqa: E402
from raygnn.config.load import load_config  # noqa: E402
from tests.support.graphs import ensure_partition  # noqa: E402
from tests.support.postgres import free_port  # noqa: E402

CLIENTS = (1, 8, 64)
START = 300  # seconds
HAPROXY = {"RAY_SERVE_ENABLE_HA_PROXY": "1"}
SCRIPT = """\
math.randomseed(os.time())
wrk.headers["Content-Type"] = "application/json"
request = function()
  return wrk.format("POST", "/predict", nil,
    string.format('{"ids": [%d], "fanout": [15, 10]}', math.random(0, NODES - 1)))
end
done = function(summary, latency, requests)
  local errors = summary.errors
  print(string.format("FOUND %d %d %d %d %d", summary.requests, summary.duration,
    latency:percentile(50), latency:percentile(99),
    errors.connect + errors.read + errors.write + errors.status + errors.timeout))
end
"""


@contextmanager
def service(command: list[str], port: int, **more: str) -> Iterator[psutil.Process]:
    """Start a service with more variables of the environment, and end it after the block."""
    process = subprocess.Popen(
        command,
        cwd=CHECKOUT / "benchmarks",
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(CHECKOUT), **more},
        stdout=sys.stderr,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + START
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=5):
                    break
            except OSError:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"{command[1:4]} did not start") from None
                time.sleep(1)
        yield psutil.Process(process.pid)
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


def wrk(port: int, clients: int, seconds: float, nodes: int) -> tuple[float, float, float, int]:
    """Return requests per second, p50 and p99 in milliseconds, and failed requests."""
    script = WORK / "serve.lua"
    script.write_text(SCRIPT.replace("NODES", str(nodes)))
    url = f"http://127.0.0.1:{port}"
    command = ["wrk", "-t1", f"-c{clients}", f"-d{seconds:g}s", "--timeout", "20s"]
    done = subprocess.run(
        [*command, "-s", str(script), url], capture_output=True, text=True, timeout=seconds + 60
    )
    found = re.search(r"FOUND (\d+) (\d+) (\d+) (\d+) (\d+)", done.stdout)
    if found is None:
        raise RuntimeError(f"wrk ended without figures:\n{done.stdout}{done.stderr}")
    requests, duration, median, late, failed = map(int, found.groups())
    return requests / duration * 1e6, median / 1e3, late / 1e3, failed


def resident(service: psutil.Process) -> float:
    """Return MB of the processes of a service that hold a model, without what they map."""
    named = [service, *service.children(recursive=True)]
    return sum(p.memory_info().rss - p.memory_info().shared for p in named) / 2**20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--scale", choices=GRAPHS, default="full")
    parser.add_argument("--seconds", type=float, default=15)
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2])
    given = parser.parse_args()
    if shutil.which("wrk") is None:
        parser.error("wrk is not there: apt-get install wrk")
    nodes, port = GRAPHS[given.scale], free_port()
    WORK.mkdir(parents=True, exist_ok=True)
    print(setting())
    values = {
        **job(given.scale),
        "name": f"serve-{given.scale}",
        "storage": str(WORK / "runs"),
        "logging": {"loggers": []},
    }
    values["train"] = {**values.get("train", {}), "epochs": 1, "max_steps": 3}
    values["cluster"] = {"workers": 1, "address": "local"}
    values["partition"] = {**values.get("partition", {}), "parts": 2}
    config = load_config(values)
    partition = ensure_partition(config, 2).directory
    run = WORK / "runs" / f"serve-{given.scale}"
    if not (run / "checkpoints" / "selected.pt").exists():
        raygnn.train(values, overwrite=True, display=False)
    ours = [sys.executable, "-m", "raygnn", "serve", str(run), "--port", str(port), "--replicas"]
    peer = [sys.executable, "-m", "peers.plain_serve", "--partition", str(partition)]
    ways = [
        *((f"raygnn serve, {n} replicas", [*ours, str(n)], {}) for n in given.replicas),
        *((f"{n} behind HAProxy", [*ours, str(n)], HAPROXY) for n in given.replicas),
        ("FastAPI and DGL", [*peer, "--port", str(port)], {}),
    ]
    rows, failures = [], 0
    for name, command, more in ways:
        with service(command, port, **more) as process:
            wrk(port, 8, 3, nodes)  # compiles, and maps what is read
            before = resident(process)
            for clients in CLIENTS:
                rate, median, late, failed = wrk(port, clients, given.seconds, nodes)
                failures += failed
                figures = f"{rate:,.0f}", f"{median:.1f}", f"{late:.1f}", f"{failed}", load()[5:]
                rows.append([name, f"{clients}", *figures])
            print(f"{name}: {resident(process) - before:+.0f} MB after the load", flush=True)
    print(table(["", "clients", "requests/s", "p50 ms", "p99 ms", "failed", "load"], rows))
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
