"""What a rank uses of its machine: processor, memory, GPU, network."""

from __future__ import annotations

import math
import time
from contextlib import suppress

import psutil
import torch

# of a rank since the last look, or at that moment
FACTS = ("cpu", "gpu", "rss", "gpu_memory", "gpu_share", "sent", "received")


class Usage:
    """Looks at this process and its host; never raises, what is not known is NaN.

    Args:
        cpus: that the rank was given.
        device: of the rank.
    """

    def __init__(self, cpus: int, device: torch.device):
        self._cpus = cpus
        self._device = device
        self._process = psutil.Process()
        self._at = self._cpu = 0.0
        self._sent = self._received = 0
        self.look()

    def look(self) -> dict[str, float]:
        """One value for each of `FACTS`, for the time since the last look.

        ``cpu``: busy share of the rank's CPUs (above 1 where it took more); ``gpu``: busy share of
        its GPU at this moment, of all that use it; ``rss``, ``gpu_memory``: bytes held now;
        ``gpu_share``: of the GPU's memory; ``sent``, ``received``: bytes a second of the whole
        host, its loopback left out.
        """
        now, cpu = time.monotonic(), time.process_time()
        seconds = max(now - self._at, 1e-9)
        facts = dict.fromkeys(FACTS, math.nan)
        facts["cpu"] = (cpu - self._cpu) / seconds / self._cpus
        with suppress(psutil.Error, OSError):
            facts["rss"] = float(self._process.memory_info().rss)
        with suppress(psutil.Error, OSError):
            sent, received = _network()
            facts["sent"] = (sent - self._sent) / seconds
            facts["received"] = (received - self._received) / seconds
            self._sent, self._received = sent, received
        if self._device.type == "cuda":
            with suppress(Exception):  # NVML may be missing, or another version than the driver's
                facts["gpu"] = torch.cuda.utilization(self._device) / 100
            with suppress(RuntimeError):
                free, total = torch.cuda.mem_get_info(self._device)
                facts["gpu_memory"], facts["gpu_share"] = float(total - free), 1 - free / total
        self._at, self._cpu = now, cpu
        return facts


def _network() -> tuple[int, int]:
    """Bytes that this host has sent and received, but for those to itself."""
    counters = psutil.net_io_counters(pernic=True)
    real = [counter for name, counter in counters.items() if name != "lo"]
    return sum(c.bytes_sent for c in real), sum(c.bytes_recv for c in real)
