"""Models as users write them that cannot work, or not everywhere."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Fit(nn.Module):
    """One linear layer of the seeds' own features."""

    def __init__(self, in_features: Any, out_features: int):
        super().__init__()
        if isinstance(in_features, dict):
            in_features = in_features["item"]
        self.linear = nn.Linear(in_features, out_features)

    def forward(self, blocks: Any, x: Any) -> Tensor:
        if isinstance(x, dict):
            return self.linear(x["item"][: blocks[-1].num_dst_nodes("item")])
        return self.linear(x[: blocks[-1].num_dst_nodes()])


class Ranked(Fit):
    """Requires to be the only rank."""

    def __init__(self, in_features: int, out_features: int):
        assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
        super().__init__(in_features, out_features)


class SevenClasses(Fit):
    """Has seven classes, whatever the data have."""

    def __init__(self, in_features: int, out_features: int):
        super().__init__(in_features, 7)


class FiveClasses(Fit):
    def __init__(self, in_features: int, out_features: int):
        super().__init__(in_features, 5)


class EveryRow(Fit):
    def forward(self, blocks: Any, x: Tensor) -> Tensor:
        return self.linear(x)


class ThirdBlock(Fit):
    def forward(self, blocks: Any, x: Tensor) -> Tensor:
        return super().forward(blocks[2:3], x)


class BlockData(Fit):
    def forward(self, blocks: Any, x: Tensor) -> Tensor:
        return super().forward(blocks, x) * blocks[0].edata["weight"].mean()


class Indexed(Fit):
    """Has an embedding for each of two numbers that a feature column may contain."""

    def __init__(self, in_features: int, out_features: int):
        super().__init__(in_features, out_features)
        self.rows = nn.Embedding(2, in_features)

    def forward(self, blocks: Any, x: Tensor) -> Tensor:
        return super().forward(blocks, x + self.rows(x[:, 0].long()))


class Fp32Alone(Fit):
    def forward(self, blocks: Any, x: Tensor) -> Tensor:
        return super().forward(blocks, x) + x.new_zeros(1) @ torch.zeros(1)


class _NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ArithmeticError("there is no way back")


class NoWayBack(Fit):
    def forward(self, blocks: Any, x: Tensor) -> Tensor:
        return _NoGradient.apply(super().forward(blocks, x))


class Exits(Fit):
    def forward(self, blocks: Any, x: Tensor) -> Tensor:
        sys.exit("enough")


class NeedsGpu(Fit):
    def forward(self, blocks: Any, x: Tensor) -> Tensor:
        raise RuntimeError("this kernel needs CUDA")


class Dies(Fit):
    def forward(self, blocks: Any, x: Tensor) -> Tensor:
        print("a last word", flush=True)
        os._exit(3)


class Sleeps(Fit):
    def forward(self, blocks: Any, x: Tensor) -> Tensor:
        time.sleep(3600)
        raise AssertionError


class WithArgument(Fit):
    def __init__(self, in_features: int, out_features: int, width: int):
        super().__init__(in_features, out_features)


class NoModule:
    pass


class ExitsInBatch(Fit):
    """Raises exceptions that end other programs, in its second batch or in evaluation."""

    def __init__(self, in_features: int, out_features: int, how: str, evaluates: bool):
        super().__init__(in_features, out_features)
        kinds = {"exit": SystemExit, "interrupt": KeyboardInterrupt, "stop": StopIteration}
        self.kind, self.evaluates, self.calls = kinds[how], evaluates, 0

    def forward(self, blocks: Any, x: Tensor) -> Tensor:
        self.calls += self.training
        if self.evaluates != self.training and self.calls > 1:
            raise self.kind("enough")
        return super().forward(blocks, x)


class Whole(nn.Module):
    """A graph-level model that returns the mean of a graph's nodes."""

    def __init__(self, in_features: int, out_features: int):
        super().__init__()
        self.linear = nn.Linear(in_features, out_features)

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        import dgl

        graph.ndata["h"] = self.linear(x)
        return dgl.mean_nodes(graph, "h")


class WholeNodes(Whole):
    def forward(self, graph: Any, x: Tensor) -> Tensor:
        return self.linear(x)
