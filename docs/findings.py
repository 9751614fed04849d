"""Writes the end of ``docs/failures.md``: what each check of preflight sees, why, and what to do.

What it looks at is the check's own docstring; the rest is here. Run ``python docs/findings.py``
when one of them has changed; a test compares them.
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
        "A node that does not answer now would hold up all ranks later.",
        "Look after the node, or take it out of the cluster. If it is only slow to start Python, "
        "raise `cluster.probe_timeout`.",
    ),
    "versions_supported": About(
        "Outside of these ranges raygnn has not been tried. DGL from the Python index does not "
        f"even import on a newer torch by itself ({_issue('dmlc/dgl', 7822)}). With a newer Ray, "
        "torch or Lightning a private name that raygnn uses may be missing: then public names are "
        "used, which costs what the note says and changes no result.",
        "Install the version that the finding names, best with `-c constraints.txt`. Set "
        "`RAYGNN_PLAIN=1` to use public names only, such as when a job fails inside of a newer "
        "version.",
    ),
    "versions_uniform": About(
        "Ranks with other versions may disagree about a collective hours later; Ray refuses a "
        f"node with another Python at once ({_issue('ray-project/ray', 44063)}).",
        "Install the same everywhere, best from one image.",
    ),
    "code_uniform": About(
        "Two checkouts can have one version number.",
        "Install the same raygnn everywhere.",
    ),
    "hardware_uniform": About(
        "The slowest rank sets the pace, and other instructions round differently.",
        "Train on nodes of one kind, or accept it with `cluster.uniform: warn`.",
    ),
    "environment_uniform": About(
        "A variable that was set on one node only makes its rank use other transports, buffers "
        "or threads.",
        "Unset it there, or set it for all in `comm.env`.",
    ),
    "cpus_are_there": About(
        "Ray counts what it was told; the workers share what there is.",
        "Start Ray without `--num-cpus`, or lower `cluster.num_cpus`.",
    ),
    "shared_memory": About(
        "Containers get 64 MB of `/dev/shm` unless told otherwise. NCCL and Ray's object store "
        f"then die of a bus error ({_issue('NVIDIA/nccl', 290)}, "
        f"{_issue('pytorch/torchtitan', 853)}).",
        "`docker run --shm-size=8g`; on Kubernetes an `emptyDir` of medium `Memory`.",
    ),
    "host_name_resolves": About(
        "gloo listens on the address that the node's own name resolves to. Many distributions "
        "let that be 127.0.1.1, where no other node reaches it "
        f"({_issue('aws-samples/aws-do-eks', 69, 'pull')}).",
        "Correct `/etc/hosts`, or accept it with `cluster.allow`: gloo is then told the "
        "interface of Ray's address.",
    ),
    "interfaces_there": About(
        "One name for all nodes is often wrong on some, and what follows is no clear error "
        f"({_issue('NVIDIA/nccl', 1837)}). Ray once set one itself, which broke sites with "
        f"InfiniBand ({_issue('ray-project/ray', 42652)}).",
        "Remove the variable: each node is told its own interface where that is needed.",
    ),
    "debug_level_safe": About(
        "`TORCH_DISTRIBUTED_DEBUG=DETAIL` wraps the process group, which tests of torch's own "
        f"fail of ({_issue('pytorch/pytorch', 75011)}) and DistributedDataParallel of torch "
        "2.13 dies of.",
        "Unset it, and set `comm.debug: true`, which compares collectives without it.",
    ),
    "clocks_agree": About(
        "Logs of several nodes are put in order by time.",
        "Let chrony or ntpd run on the node.",
    ),
    "open_files": About(
        "Ray and the process groups hold a socket for each peer.",
        "`ulimit -n 65536` before `ray start`, or LimitNOFILE of its service.",
    ),
    "resources_fit": About(
        "Ray waits without end for resources that no node has.",
        "Lower `cluster.workers`, `cluster.cpus_per_worker` or `cluster.gpus_per_worker`, or add "
        "nodes, or let the job wait for those that a cluster starts (`cluster.wait`). On one "
        "machine `cluster.num_cpus` lets workers share its CPUs.",
    ),
    "devices_suit": About(
        "Sharding needs a torch that is new enough, GPUs need builds for them, and `dgl.nn` goes "
        "only where DGL's own build goes.",
        "Change the key that the finding names, or install the build that it names.",
    ),
    "bf16_is_there": About(
        "Without bf16 instructions it saves memory and bytes, and little time; on older GPUs it "
        "does not work.",
        "Set `precision` to `fp32`, or to `fp16-mixed` on GPUs.",
    ),
    "gpus_are_there": About(
        "Two ranks on one GPU is what NCCL calls `Duplicate GPU detected` "
        f"({_issue('NVIDIA/nccl', 1241)}), or hangs of.",
        "One Ray node per machine, without `--num-gpus`; or a `CUDA_VISIBLE_DEVICES` for each.",
    ),
    "gpus_are_free": About(
        "Another process takes memory and time.",
        "End it (`nvidia-smi` shows it), or expect less.",
    ),
    "model_runs": About(
        "A wrong argument, a wrong number of rows or an exception in `forward` would end all ranks "
        "at their first batch. A model that needs a GPU, or takes longer than two minutes, "
        "is a warning.",
        "Correct the line that the finding names; the README says how your model is called.",
    ),
    "storage_visible": About(
        "Every rank writes to the run directory. On a disk of each node's own a run would be in "
        "pieces, and no checkpoint whole.",
        "Set `storage` to a directory that all nodes mount under one path, and may write; or to a "
        "URI such as `s3://BUCKET/DIRECTORY`, with credentials for it on every node.",
    ),
    "partition_visible": About(
        "Ranks with other parts train on another graph, or fail in the middle of a read.",
        "Put the partition on shared storage (`partition.path`), or copy it whole; restore the "
        "file that the finding names.",
    ),
    "parts_agree": About(
        'Ranks would exchange features of other dtypes or widths, which torch calls "Collectives '
        f'differ" if it says anything ({_issue("dmlc/dgl", 7851)}).',
        "Make the partition again from one array.",
    ),
    "arrays_usable": About(
        "A name that is not there, or a label that is a fraction, would fail on all ranks.",
        "Correct `task.target`, `task.ntype`, `model.features` or `model.categories`, of edges "
        "`model.edge_features` or `model.edge_categories`: the finding lists what there is.",
    ),
    "embeddings_usable": About(
        "`model.embedding` names a node type that the graph does not have, or no node type would "
        "get learned rows.",
        "Name the types in `model.embedding.ntypes`, or leave `model.embedding` out.",
    ),
    "inputs_exist": About(
        "A name that no node type, or no edge type, has is a typing error.",
        "Correct `model.features` or `model.categories`, of edges `model.edge_features` or "
        "`model.edge_categories`.",
    ),
    "nodes_to_train_on": About(
        "An empty mask trains on nothing, or picks the best epoch by nothing.",
        "Give the graph the mask and make the partition again; without validation set "
        "`train.select: last`.",
    ),
    "fold_is_unseen": About(
        "The best of many epochs is best on the fold partly by chance.",
        "Report the last epoch (`train.select: last`), or test on the fold (`graph.fold_for: "
        "test`) and select by other graphs (`graph.val`).",
    ),
    "splits_agree": About(
        "What one task is trained on, the network that all share has seen: edges that another is "
        "tested with would be no test.",
        "Give tasks on the same edges the same `split`, or the edges masks.",
    ),
    "times_usable": About(
        "Edges without the times of their reverses would tell a seed its future, and what has no "
        "time cannot be predicted at it.",
        "Correct `sampling.time.edges`, `sampling.time.seeds` or `task.split.time`; the finding "
        "lists what there is. Of other data `predict --at` takes one time for all.",
    ),
    "batch_size_fits": About(
        "An epoch is then one step with fewer seeds, and as many epochs as usual train little.",
        "Lower `sampling.batch_size`, which is of one worker, or train for more epochs.",
    ),
    "edge_arrays_read": About(
        "Features, weights and times of edges are stored with the graph, and have an effect where "
        "the model (`model.edge_features`), the sampler (`sampling.edge_weight`, `sampling.time`) "
        "or the split (`task.split: {by: time}`) reads them.",
        "Name them there, or leave them out.",
    ),
    "memory_fits": About(
        "The kernel kills a process for memory without a word to the others. The partition is "
        "mapped: where only its share does not fit, this is a warning, and what is not in memory "
        "is read from the disk again and again.",
        "Add nodes, take larger ones, or lower `sampling.cache`, `model.hidden` or "
        "`model.embedding.dim`, whichever is the largest. [scaling.md](scaling.md) predicts what a "
        "graph needs.",
    ),
    "disk_space": About(
        "A storage that is full costs checkpoints.",
        "Free space, lower `fault.keep`, or change `storage` (`staging.path` where that is a "
        "store).",
    ),
    "cache_usable": About(
        "Each node keeps its parts there as plain arrays, and maps them.",
        "Set `staging.path` to a directory of your own on a local disk.",
    ),
    "cache_space": About(
        "Making the copy would end with a full disk.",
        "Free space, or set `staging.path` to another disk.",
    ),
    "parts_and_workers": About(
        "Where they do not, workers share parts, and more edges lead from one to another.",
        "Make as many parts as there are workers (`partition.parts: auto`), or a multiple.",
    ),
    "network_reach": About(
        "A firewall, or another MTU on the way, lets a connection open and large messages "
        "vanish: training would hang at the first exchange.",
        "Open all ports between the nodes, give all interfaces one MTU, or name the interface of "
        "another network in `comm.env.GLOO_SOCKET_IFNAME`.",
    ),
    "network_latency": About(
        "Each step waits for several messages.",
        "Send less often: `comm.bucket_cap_mb`, `train.accumulate`; or use nodes that are closer.",
    ),
    "network_bandwidth": About(
        "Gradients and features go over it in each step.",
        "Send less: `comm.compression`, `train.accumulate`, `sampling.cache`. `raygnn tune` "
        "measures what helps; [performance.md](performance.md) explains it.",
    ),
    "name_free": About(
        "`raygnn train` would refuse the name.",
        "Choose another `name`, or pass `--overwrite` or `--resume`.",
    ),
}

_LOOKS = {"name_free": "No run of this name is there already; only `raygnn check` says so."}


def markdown() -> str:
    """The text of the page, with a section for each check, in the order of the checks."""
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
