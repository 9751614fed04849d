"""Encoders of text: a small transformer of random weights, and some that are wrong."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch
from torch import nn


class Tiny:
    """A transformer of one layer on the bytes of a text, whose weights are random and fixed."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.embed = nn.Embedding(256, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        for weights in [*self.embed.parameters(), *self.layer.parameters()]:
            weights.data.copy_(torch.randn(weights.shape, generator=generator) / 4)
        self.layer.eval()

    @torch.no_grad()
    def __call__(self, texts: list[str]) -> np.ndarray:
        rows = [torch.tensor([0, *text.encode()[:50]]) for text in texts]
        return torch.stack([self.layer(self.embed(row[None]))[0].mean(0) for row in rows]).numpy()


class Counting(Tiny):
    """Notes how many texts it was called with, in the file that `RAYGNN_TEST_CALLS` names."""

    def __call__(self, texts: list[str]) -> np.ndarray:
        with Path(os.environ["RAYGNN_TEST_CALLS"]).open("a") as file:
            file.write(f"{len(texts)}\n")
        return super().__call__(texts)


class Dying(Tiny):
    """Ends its process at the second call."""

    calls = 0

    def __call__(self, texts: list[str]) -> np.ndarray:
        self.calls += 1
        if self.calls > 1:
            os._exit(1)
        return super().__call__(texts)


class Nan:
    def __call__(self, texts: list[str]) -> np.ndarray:
        return np.full((len(texts), 2), np.nan)


class Ragged:
    def __call__(self, texts: list[str]) -> np.ndarray:
        return np.zeros((len(texts), len(texts)))


class Empty:
    def __call__(self, texts: list[str]) -> np.ndarray:
        return np.zeros((len(texts), 0))


class Flat:
    def __call__(self, texts: list[str]) -> np.ndarray:
        return np.zeros(len(texts))
