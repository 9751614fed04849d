"""The parts that the time of a step is split into, and what ``ranks.jsonl`` holds.

A line of ``ranks.jsonl`` is about a window of some steps::

    {"step": 120, "time": 31.2, "batches": 10,
     "seconds": {"wait": [0.001, 0.002], "forward": [...], ...},
     "bytes": {"gradients": [...], "exchange": [...]},
     "use": {"cpu": [...], "gpu": [...]},
     "memory": {"rss": [...], "gpu": [...], "gpu_share": [...]},
     "network": {"sent": [...], "received": [...]}}

with a value of each rank in rank order: seconds and bytes of a batch (mean over the window), busy
share of the rank's CPUs and of its GPU, bytes that its process and its GPU hold and the share of
the GPU's memory, bytes a second of its host. What is not known is null.

On CPUs the parts are measured by the host's clock, on GPUs along the stream that computes.
"""

from __future__ import annotations

# In the thread that trains, in the order of a step; they sum to its time.
STEP = {
    "wait": "wait for the next batch",
    "transfer": "copy it to the device",
    "forward": "forward pass and loss",
    "backward": "backward pass, and the exchange of gradients hidden behind it",
    "communicate": "exchange of gradients that nothing hides",
    "peers": "wait for slower ranks in that exchange",
    "optimizer": "checks and clipping of the gradient, optimizer",
    "rest": "records, comparisons between ranks, other callbacks",
}

# In the thread that prepares batches, hidden as long as there is no wait.
LOADER = {
    "sample": "choose seeds and draw neighbours",
    "features": "gather features",
    "exchange": "structure and features of other ranks",
}

COMPUTE = ("transfer", "forward", "backward", "optimizer", "rest")  # what a rank does on its own
