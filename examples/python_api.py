"""A job from Python: configure, check, partition, train, look at the run.

Run it where runs may be written (into ./runs): ``python examples/python_api.py``.
"""

import raygnn

config = raygnn.load_config(
    {
        "name": "from-python",
        "graph": {"format": "planted", "nodes": 5000, "degree": 20, "classes": 8, "train": 0.2},
        "model": {"kind": "sage", "hidden": 32},
        "sampling": {"fanout": [10, 10], "batch_size": 128},
        "cluster": {"workers": 2},
    },
    train={"epochs": 3, "lr": 0.01},  # sections given by name override the mapping
)

report = raygnn.check(config)  # starts no training
assert report.ok, report.findings
raygnn.partition(config)  # does nothing when it has been done
run = raygnn.train(config, overwrite=True)  # blocks; shows progress
print(run.summary["metrics"]["test/accuracy"])

run = raygnn.open_run("from-python")  # any time later, by name or path
print(run.metrics[["step", "train/loss", "val/accuracy"]])  # a pandas DataFrame
