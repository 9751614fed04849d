"""The obvious way to serve a graph model: FastAPI, DGL's sampler and layers, one process.

PYTHONPATH=benchmarks python -m peers.plain_serve --partition DIR --port 8001
"""

# FastAPI reads the annotations of a function: they are no text here

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel

from peers.dgl_loader import load
from peers.model import SAGE
from raygnn.graph.dgl import dgl


class Body(BaseModel):
    ids: list[int]
    fanout: list[int]


def application(partition: Path) -> FastAPI:
    torch.set_num_threads(1)
    graph, feat, _, _ = load(partition)
    model = SAGE(feat.shape[1]).eval()
    http = FastAPI()

    @http.post("/predict")
    def predict(body: Body) -> dict[str, Any]:
        sampler = dgl().dataloading.NeighborSampler([*reversed(body.fanout)])
        with torch.no_grad():
            inputs, _, blocks = sampler.sample(graph, torch.tensor(body.ids))
            shares = model(blocks, feat[inputs]).softmax(1)
        best = shares.max(1)
        rows = zip(body.ids, best.indices.tolist(), best.values.tolist())
        return {"rows": [{"node": n, "prediction": c, "probability": p} for n, c, p in rows]}

    @http.get("/healthz")
    def healthz() -> str:
        return "ok"

    return http


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--partition", type=Path, required=True)
    parser.add_argument("--port", type=int, required=True)
    given = parser.parse_args()
    sys.exit(uvicorn.run(application(given.partition), port=given.port, log_level="warning"))
