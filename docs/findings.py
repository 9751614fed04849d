"""Write the end of ``docs/failures.md``: what each preflight check tests, why, and what to do.

The check's docstring describes the test; its reason and its remedy are here. Run
``python docs/findings.py`` after a change of either; a test compares them with the page.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from raygnn.config.execution import BINDING
from raygnn.preflight.report import described

FILE = Path(__file__).with_name("failures.md")
MARK = "<!-- From here on written by docs/findings.py. -->\n"


class About(NamedTuple):
    """Why a check is there and what to do about its findings, in sentences."""

    why: str
    do: str


def _issue(repository: str, number: int, kind: str = "issues") -> str:
    return f"[{repository}#{number}](https://github.com/{repository}/{kind}/{number})"


ABOUT = {
    "nodes_answer": About(
        "A node that does not answer now would block all ranks later.",
        "Repair the node, or remove it from the cluster. If it is only slow to start Python, "
        "raise `cluster.probe_timeout`.",
    ),
    "versions_supported": About(
        "raygnn has not been tested outside of these ranges. DGL from the Python index does not "
        f"even import on a newer torch by itself ({_issue('dmlc/dgl', 7822)}). With a newer Ray, "
        "torch or Lightning a private name that raygnn uses may be missing: then public names are "
        "used, which costs what the note says and changes no result.",
        "Install the version that the finding names, best with `-c constraints.txt`. Set "
        "`RAYGNN_PLAIN=1` to use public names only, such as when a job fails inside of a newer "
        "version.",
    ),
    "versions_uniform": About(
        "Ranks with different versions may diverge hours later; Ray refuses a "
        f"node with another Python at once ({_issue('ray-project/ray', 44063)}).",
        "Install the same versions everywhere, best from one image.",
    ),
    "code_uniform": About(
        "Two checkouts can have the same version number.",
        "Install the same raygnn everywhere.",
    ),
    "hardware_uniform": About(
        "The slowest rank determines the speed, and other instruction sets round differently.",
        "Train on nodes of one kind, or accept the difference with `cluster.uniform: warn`.",
    ),
    "environment_uniform": About(
        "A variable that was set on one node only makes its rank use other transports, buffers "
        "or threads.",
        "Unset it there, or set it for all in `comm.env`.",
    ),
    "shared_memory": About(
        "Containers have 64 MB of `/dev/shm` by default. NCCL and Ray's object store "
        f"then die of a bus error ({_issue('NVIDIA/nccl', 290)}, "
        f"{_issue('pytorch/torchtitan', 853)}).",
        "`docker run --shm-size=8g`; on Kubernetes an `emptyDir` of medium `Memory`.",
    ),
    "interfaces_there": About(
        "The same name is often wrong on some nodes, and the error that follows is unclear "
        f"({_issue('NVIDIA/nccl', 1837)}). Ray once set the variable itself, which broke "
        f"clusters with InfiniBand ({_issue('ray-project/ray', 42652)}).",
        "Remove the variable: raygnn sets each node's interface where that is needed.",
    ),
    "debug_level_safe": About(
        "`TORCH_DISTRIBUTED_DEBUG=DETAIL` wraps the process group. Tests of torch itself fail with "
        f"it ({_issue('pytorch/pytorch', 75011)}), and DistributedDataParallel of torch 2.13 "
        "crashes.",
        "Unset it, and set `comm.debug: true`, which compares collectives without it.",
    ),
    "resources_fit": About(
        "Ray waits forever for resources that no node has.",
        "Lower `cluster.workers`, `cluster.cpus_per_worker` or `cluster.gpus_per_worker`, or add "
        "nodes, or let the job wait for new nodes (`cluster.wait`). On one "
        "machine `cluster.num_cpus` lets workers share its CPUs.",
    ),
    "devices_suit": About(
        "GPUs need builds with CUDA, and `dgl.nn` runs only on the devices of DGL's build.",
        "Change the key, or install the build, that the finding names.",
    ),
    "bf16_is_there": About(
        "GPUs of a compute capability below 8.0 cannot compute in it.",
        "Set `precision` to `fp16-mixed` or `fp32`.",
    ),
    "gpus_are_there": About(
        "Two ranks on one GPU is what NCCL calls `Duplicate GPU detected` "
        f"({_issue('NVIDIA/nccl', 1241)}), or hangs of.",
        "One Ray node per machine, without `--num-gpus`; or a `CUDA_VISIBLE_DEVICES` for each.",
    ),
    "gpus_are_free": About(
        "Another process uses memory and time.",
        "End it (`nvidia-smi` shows it), or expect less.",
    ),
    "model_runs": About(
        "A wrong argument, a wrong shape or an exception in `forward` would end all ranks at "
        "their first batch. A model that needs a GPU, or takes longer than two minutes, "
        "is a warning.",
        "Correct the line that the finding names; docs/models.md describes how your model is "
        "called.",
    ),
    "storage_visible": About(
        "Every rank writes to the run directory. On local disks the run would be scattered, and"
        " no checkpoint complete.",
        "Set `storage` to a directory that all nodes mount under one path, and may write; or to a "
        "URI such as `s3://BUCKET/DIRECTORY`, with credentials for it on every node.",
    ),
    "partition_visible": About(
        "Otherwise ranks would train on different graphs, or fail in the middle of a read.",
        "Put the partition on shared storage (`partition.path`), or copy all of it; restore the"
        " file that the finding names.",
    ),
    "parts_agree": About(
        'Ranks would exchange features of other dtypes or widths, which torch calls "Collectives '
        f'differ" if it says anything ({_issue("dmlc/dgl", 7851)}).',
        "Create the partition again from one array.",
    ),
    "arrays_usable": About(
        "A missing array, or a fractional class label, would fail on all ranks.",
        "Correct `task.target`, `task.ntype`, `model.features` or `model.categories`, of edges "
        "`model.edge_features` or `model.edge_categories`: the finding lists the available arrays.",
    ),
    "embeddings_usable": About(
        "`model.embedding` names a node type that the graph does not have, or no node type "
        "would get an embedding table.",
        "Name the types in `model.embedding.ntypes`, or leave `model.embedding` out.",
    ),
    "inputs_exist": About(
        "A name that no node type and no edge type has is a typing error.",
        "Correct `model.features` or `model.categories`, of edges `model.edge_features` or "
        "`model.edge_categories`.",
    ),
    "nodes_to_train_on": About(
        "With an empty mask there is nothing to train on, or no way to select the best epoch.",
        "Add the mask to the graph and create the partition again; without validation set "
        "`train.select: last`.",
    ),
    "splits_agree": About(
        "All tasks share one network. If one task trains on edges that another is tested on, "
        "the test is not valid.",
        "Give tasks on the same edges the same `split`, or the edges masks.",
    ),
    "times_usable": About(
        "Edges that lack the times of their reverses would leak the future to a seed, and seeds"
        " without a time cannot be predicted at their time.",
        "Correct `sampling.time.edges`, `sampling.time.seeds` or `task.split.time`; the finding "
        "lists what there is. For other data `predict --at` sets one time for all.",
    ),
    "edge_arrays_read": About(
        "Features, weights and times of edges are stored with the graph, and have an effect where "
        "the model (`model.edge_features`), the sampler (`sampling.edge_weight`, `sampling.time`) "
        "or the split (`task.split: {by: time}`) reads them.",
        "Name the array there, or omit it from the graph.",
    ),
    "memory_fits": About(
        "The kernel kills a process that is out of memory without a message. The partition is "
        "memory-mapped. If only the parts do not fit, this is a warning, and they are read from"
        " the disk repeatedly.",
        "Add nodes, use larger ones, or lower `sampling.cache`, `model.hidden` or "
        "`model.embedding.dim`, whichever is the largest. [scaling.md](scaling.md) predicts what a "
        "graph needs.",
    ),
    "disk_space": About(
        "If storage is full, checkpoints are skipped.",
        "Free space, lower `fault.keep`, or change `storage` (`staging.path` where that is a "
        "store).",
    ),
    "cache_usable": About(
        "Each node keeps its parts there as plain arrays and memory-maps them.",
        "Set `staging.path` to a directory of your own on a local disk.",
    ),
    "cache_space": About(
        "Copying would fill the disk.",
        "Free space, or set `staging.path` to another disk.",
    ),
    "network_reach": About(
        "A firewall, or another MTU on the way, lets a connection open and large messages "
        "vanish: training would hang at the first exchange.",
        "Open all ports between the nodes, give all interfaces one MTU, or name the interface of "
        "another network in `comm.env.GLOO_SOCKET_IFNAME`.",
    ),
    "name_free": About(
        "`raygnn train` would refuse the name.",
        "Choose another `name`, or pass `--overwrite` or `--resume`.",
    ),
}

_LOOKS = {"name_free": "No run of this name exists yet; only `raygnn check` reports it."}


def markdown() -> str:
    """Return the text of the page, with a section for each check, in the order of the checks."""
    blocks = [FILE.read_text(encoding="utf-8").partition(MARK)[0] + MARK.rstrip()]
    for name, looks in {**described(), **_LOOKS}.items():
        about = ABOUT[name]
        blocks.append(f"### `{name}`")
        blocks.append(looks)
        blocks.append(f"- **Why.** {about.why}\n- **What to do.** {about.do}")
        if name in BINDING:
            blocks.append("Its errors cannot be accepted with `cluster.allow`.")
    return "\n\n".join(blocks) + "\n"


if __name__ == "__main__":
    FILE.write_text(markdown(), encoding="utf-8")
