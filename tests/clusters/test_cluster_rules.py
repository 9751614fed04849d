"""Each rule on a cluster that it has something to say of, and on the same one put right.

A case is a good file, a change, and what is said of the changed one. So every rule has a cluster
that triggers it; that the good file does not is asserted once for all rules.
"""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest

from raygnn.clusters.check import check
from raygnn.config.yaml_text import write_yaml
from raygnn.preflight.findings import Finding

START = "ulimit -n 65536; RAY_AUTH_MODE=token {} ray start {}"
HEAD = START.format("RAY_enable_autoscaler_v2=0", "--head --dashboard-host=127.0.0.1")
WORKER = START.format("", "--address=$RAY_HEAD_IP:6379")
LOCAL = {
    "cluster_name": "here",
    "provider": {"type": "local", "head_ip": "10.0.0.1", "worker_ips": ["10.0.0.2", "node3"]},
    "auth": {"ssh_user": "me", "ssh_private_key": "key"},
    "file_mounts": {"~/.ray/auth_token": "auth_token", "~/code": "code"},
    "setup_commands": ["pip install ray==2.60.0 torch==2.13.0"],
    "head_start_ray_commands": ["ray stop", HEAD],
    "worker_start_ray_commands": ["ray stop", WORKER],
}
KIND = {"resources": {"CPU": 4}, "node_config": {"InstanceType": "m5.large"}}
MOUNT = "sudo mount -t nfs4 -o hard fs.example.com:/ /mnt/raygnn"
AWS = {
    **{k: v for k, v in LOCAL.items() if k != "provider"},
    "max_workers": 2,
    "provider": {
        "type": "aws",
        "region": "us-east-1",
        "security_group": {
            "IpPermissions": [
                {
                    "FromPort": 22,
                    "ToPort": 22,
                    "IpProtocol": "tcp",
                    "IpRanges": [{"CidrIp": "0.0.0.0/0"}],
                }
            ]
        },
    },
    "available_node_types": {"head": KIND, "worker": {**KIND, "min_workers": 1, "max_workers": 2}},
    "head_node_type": "head",
    "setup_commands": [*LOCAL["setup_commands"], MOUNT],
    "docker": {
        "image": "rayproject/ray:2.60.0-py311",
        "container_name": "ray",
        "run_options": ["--shm-size=8g"],
    },
}


def _pod() -> dict[str, Any]:
    container = {
        "name": "ray",
        "image": "rayproject/ray:2.60.0-py311",
        "volumeMounts": [
            {"name": "runs", "mountPath": "/mnt/raygnn"},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }
    volumes = [
        {"name": "runs", "persistentVolumeClaim": {"claimName": "raygnn"}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "4Gi"}},
    ]
    return {"spec": {"containers": [container], "volumes": volumes}}


KUBE = {
    "apiVersion": "ray.io/v1",
    "kind": "RayCluster",
    "metadata": {"name": "here"},
    "spec": {
        "rayVersion": "2.60.0",
        "authOptions": {"mode": "token"},
        "headGroupSpec": {"rayStartParams": {"dashboard-host": "127.0.0.1"}, "template": _pod()},
        "workerGroupSpecs": [
            {
                "groupName": "w",
                "replicas": 1,
                "minReplicas": 1,
                "maxReplicas": 2,
                "rayStartParams": {},
                "template": _pod(),
            }
        ],
    },
}
POLICY = {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "spec": {}}
GOOD = {"local": [LOCAL], "aws": [AWS], "kube": [KUBE, POLICY]}

_HEAD, _WORKER = "head_start_ray_commands", "worker_start_ray_commands"
_POD = "spec.workerGroupSpecs.0.template.spec"
_CONTAINER = f"{_POD}.containers.0"
_TYPES = "available_node_types"
_RULE = "provider.security_group.IpPermissions.0"
OPEN = [{"FromPort": 6000, "ToPort": 9000, "IpRanges": [{"CidrIp": "0.0.0.0/0"}]}]
MODE = "RAY_AUTH_MODE=token"
GONE = "gone"  # a text: processes that share the tests compare their names
# check, severity, the good file, key to change → value, a part of what is said
CASES: list[tuple[str, str, str, dict[str, Any], str]] = [
    ("unknown_key", "error", "local", {"setup_comands": []}, "setup_commands?"),
    ("unknown_key", "error", "local", {"provider.worker_ip": []}, "worker_ips?"),
    ("unknown_key", "error", "aws", {"provider.regoin": "x"}, "region?"),
    ("unknown_key", "error", "kube", {"spec.headGroupSpecs": {}}, "headGroupSpec?"),
    ("unknown_key", "error", "kube", {"spec.workerGroupSpecs.0.replica": 1}, "replicas?"),
    ("unknown_key", "error", "kube", {"spec.authOptions.modes": 1}, "mode?"),
    ("schema", "error", "local", {"file_mounts_sync_continuously": "yes"}, "'yes' is not"),
    ("schema", "error", "local", {"auth.ssh_key": "k"}, "ssh_key"),
    ("schema", "error", "local", {"provider.head_ip": GONE}, "head_ip"),
    ("schema", "error", "aws", {f"{_TYPES}.head.node_config": GONE}, "node_config"),
    ("schema", "error", "aws", {"docker.image": GONE}, "container & image"),
    ("schema", "error", "aws", {"max_workers": 0}, "smaller than the sum"),
    ("ssh_user", "error", "local", {"auth": GONE}, "ssh_user is missing"),
    ("ssh_user", "error", "local", {"auth.ssh_user": ""}, "ssh_user is missing"),
    ("address", "error", "local", {"provider.worker_ips.1": "10.0.0.2"}, "listed twice"),
    ("address", "error", "local", {"provider.worker_ips.1": "10.0.0.1"}, "is the head"),
    ("address", "error", "local", {"provider.worker_ips.1": "10.0.0.256"}, "neither"),
    ("address", "error", "local", {"provider.worker_ips.1": "me@host"}, "neither"),
    ("address", "error", "local", {"provider.head_ip": "127.0.0.1"}, "own loopback"),
    ("head_node_type", "error", "aws", {"head_node_type": "haed"}, "one of them: head"),
    ("workers", "error", "aws", {f"{_TYPES}.worker.min_workers": 3}, "more than max_workers"),
    ("workers", "error", "kube", {"spec.workerGroupSpecs.0.minReplicas": 3}, "maxReplicas"),
    ("workers", "error", "kube", {"spec.workerGroupSpecs.0.replicas": 3}, "maxReplicas"),
    ("autoscaler", "error", "local", {f"{_HEAD}.1": HEAD.replace("_v2=0", "_v2=1")}, "_v2=0"),
    ("versions", "error", "local", {"worker_setup_commands": ["pip install ray==2.59.0"]}, "2.59"),
    ("versions", "error", "local", {"worker_setup_commands": ["pip install torch==2.4"]}, "torch"),
    ("versions", "error", "kube", {f"{_CONTAINER}.image": "rayproject/ray:2.59.0"}, "ray 2.59.0"),
    ("versions", "error", "kube", {f"{_CONTAINER}.image": "a/ray:2.60.0-py312"}, "python 3.12"),
    ("versions", "error", "kube", {"spec.rayVersion": "2.59.0"}, "rayVersion is 2.59.0"),
    ("image", "warn", "aws", {"docker.image": "rayproject/ray:latest-py311"}, "not always"),
    ("image", "warn", "kube", {f"{_CONTAINER}.image": "example.com:5000/raygnn"}, "not always"),
    ("image", "info", "aws", {"docker.worker_image": "mine/ray:2.60.0"}, "mine/ray"),
    ("auth", "error", "local", {f"{_WORKER}.1": "ulimit -n 9; ray start"}, "Ray of worker"),
    ("auth", "error", "local", {_HEAD: GONE}, "Ray of head"),
    ("auth", "error", "local", {f"{_WORKER}.1": f"{MODE} ulimit -n 9; ray start"}, "Ray of worker"),
    ("auth", "error", "local", {f"{_WORKER}.1": f"{MODE}; ulimit -n 9; ray start"}, "of worker"),
    ("auth", "error", "kube", {"spec.authOptions": GONE}, "authOptions.mode"),
    ("token", "error", "local", {f"{_WORKER}.1": f"export RAY_AUTH_TOKEN=abc; {WORKER}"}, "plain"),
    ("token", "error", "local", {"setup_commands": ["echo abc > ~/.ray/auth_token"]}, "plain"),
    (
        "token",
        "error",
        "kube",
        {f"{_CONTAINER}.env": [{"name": "RAY_AUTH_TOKEN", "value": "abc"}]},
        "plain text",
    ),
    ("dashboard", "warn", "local", {f"{_HEAD}.1": HEAD.replace("127.0.0.1", "0.0.0.0")}, "travel"),
    ("dashboard", "warn", "local", {f"{_HEAD}.1": HEAD.replace("127.0.0.1", "10.0.0.1")}, "travel"),
    (
        "dashboard",
        "error",
        "local",
        {f"{_HEAD}.1": "ulimit -n 9; ray start --head --dashboard-host 0.0.0.0"},
        "from everybody",
    ),
    (
        "dashboard",
        "error",
        "kube",
        {"spec.authOptions": GONE, "spec.headGroupSpec.rayStartParams": {}},
        "from everybody",
    ),
    ("firewall", "error", "aws", {"provider.security_group.IpPermissions": OPEN}, "port 8265"),
    ("firewall", "error", "aws", {f"{_RULE}.IpProtocol": "-1"}, "every port"),
    ("service", "error", "kube", {"spec.headGroupSpec.serviceType": "NodePort"}, "NodePort"),
    ("service", "warn", "kube", {f"{_POD}.hostNetwork": True}, "w opens Ray's ports"),
    ("service", "error", "kube", {"spec.headGroupSpec.enableIngress": True}, "ingress"),
    (
        "service",
        "error",
        "kube",
        {"spec.headGroupSpec.headService": {"spec": {"type": "LoadBalancer"}}},
        "LoadBalancer",
    ),
    ("shm", "warn", "aws", {"docker.run_options": ["--shm-size", "512m"]}, "512 MiB"),
    ("shm", "info", "aws", {"docker.run_options": []}, "left to"),
    (
        "shm",
        "error",
        "aws",
        {"docker.run_options": [], "docker.disable_shm_size_detection": True},
        "64 MiB",
    ),
    ("shm", "warn", "kube", {f"{_POD}.volumes.1.emptyDir.sizeLimit": "64Mi"}, "64 MiB"),
    ("shm", "info", "kube", {f"{_POD}.volumes.1.emptyDir": {}}, "left to"),
    ("ulimit", "warn", "local", {f"{_WORKER}.1": WORKER.split("; ")[1]}, "Ray of worker"),
    (
        "ulimit",
        "warn",
        "aws",
        {f"{_WORKER}.1": f"sudo prlimit --pid $$ --nofile=9999; {MODE} ray start"},
        "Ray of worker",
    ),
    ("ray_stop", "warn", "local", {_WORKER: [WORKER]}, "Ray of worker"),
    ("storage", "info", "aws", {"setup_commands": []}, "no storage"),
    (
        "storage",
        "error",
        "aws",
        {"setup_commands": [], "head_setup_commands": [MOUNT]},
        "/mnt/raygnn is mounted on head and not on worker",
    ),
    (
        "storage",
        "error",
        "kube",
        {f"{_POD}.volumes.0.persistentVolumeClaim.claimName": "other"},
        "/mnt/raygnn is raygnn on head, and other on w",
    ),
    ("file_mounts", "error", "local", {"file_mounts": {"~/x": "absent"}}, "no absent"),
    ("file_mounts", "warn", "local", {"file_mounts": {"~/x": "large"}}, "more than 100 MiB"),
    ("file_mounts", "warn", "local", {"file_mounts": {"~/x": "repository"}}, "its .git"),
    ("token", "warn", "local", {"file_mounts": {"~/.ray/auth_token": "open_token"}}, "mode 644"),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where `ray up` would be run: what the cases carry is there."""
    path = tmp_path_factory.mktemp("place")
    for folder in ("code/__pycache__", "repository/.git", "large"):
        (path / folder).mkdir(parents=True)
    for name, mode in (("auth_token", 0o600), ("open_token", 0o644)):
        (path / name).write_text("")
        (path / name).chmod(mode)
    with open(path / "large" / "file", "wb") as file:
        file.truncate((100 << 20) + 1)  # of holes: it takes no room
    return path


def found(documents: list[dict[str, Any]], place: Path) -> tuple[Finding, ...]:
    file = place / "cluster.yaml"
    file.write_text("---\n".join(map(write_yaml, documents)))
    return check(str(file), place).findings


def changed(documents: list[dict[str, Any]], changes: dict[str, Any]) -> list[dict[str, Any]]:
    copies = copy.deepcopy(documents)
    for key, value in changes.items():
        *path, last = (int(part) if part.isdecimal() else part for part in key.split("."))
        at: Any = copies[0]
        for part in path:
            at = at[part]
        if value is GONE:
            del at[last]
        else:
            at[last] = value
    return copies


@pytest.mark.parametrize("name", GOOD)
def test_nothing_is_said_of_a_good_one(name: str, place: Path) -> None:
    assert found(GOOD[name], place) == ()


@pytest.mark.parametrize(
    ("rule", "severity", "good", "changes", "said"), CASES, ids=lambda value: str(value)[:40]
)
def test_what_is_said_of_a_bad_one(
    rule: str, severity: str, good: str, changes: dict[str, Any], said: str, place: Path
) -> None:
    findings = found(changed(GOOD[good], changes), place)
    told = [(f.check, f.severity, f"{f.what} {f.remedy}") for f in findings]
    assert any((r, s) == (rule, severity) and said in what for r, s, what in told), told
    assert all(f.remedy for f in findings)


def test_a_policy_is_missed(place: Path) -> None:
    (finding,) = found([KUBE], place)
    assert (finding.check, finding.severity) == ("network_policy", "warn")


def test_a_secret_in_the_file(place: Path) -> None:
    secret = {"apiVersion": "v1", "kind": "Secret", "stringData": {"auth_token": "abc"}}
    (finding,) = found([KUBE, POLICY, secret], place)
    assert (finding.check, finding.values["key"]) == ("token", "stringData.auth_token")


def test_services_of_their_own(place: Path) -> None:
    ports = [{"port": 80, "targetPort": 8265}]
    service = {"apiVersion": "v1", "kind": "Service", "spec": {"type": "NodePort", "ports": ports}}
    (finding,) = found([KUBE, POLICY, service], place)
    assert (finding.check, finding.values["key"]) == ("service", "spec.type")
    service["spec"]["ports"] = [{"port": 5432}]
    assert found([KUBE, POLICY, service], place) == ()


def test_what_is_no_trouble(place: Path) -> None:
    """Rules that have nothing to say of what looks like their trouble."""
    # each machine's own disks and devices are no storage of the job
    pod = copy.deepcopy(_pod())
    pod["spec"]["volumes"].append({"name": "scratch", "hostPath": {"path": "/mnt/nvme"}})
    pod["spec"]["containers"][0]["volumeMounts"].append({"name": "scratch", "mountPath": "/local"})
    workers = changed([KUBE, POLICY], {"spec.workerGroupSpecs.0.template": pod})
    assert found(workers, place) == ()
    # KubeRay makes a policy by itself where it is asked to
    assert found(changed([KUBE], {"spec.networkPolicy": {"mode": "DenyAll"}}), place) == ()
    # all nodes have both, and use the last
    both = ["python3.10 -m pip --version", "python3.12 -m venv env", *LOCAL["setup_commands"]]
    assert found(changed([LOCAL], {"setup_commands": both}), place) == ()
    exported = f"export {MODE}; ulimit -n 65536; ray start --address=$RAY_HEAD_IP:6379"
    assert found(changed([LOCAL], {f"{_WORKER}.1": exported}), place) == ()


def test_values_of_the_wrong_type(place: Path) -> None:
    """Those that the rules look up in sets, where a list has no place."""
    rule = {"FromPort": 22, "ToPort": 22, "IpRanges": [{"CidrIp": ["0.0.0.0/0"]}]}
    assert found(changed([AWS], {_RULE: rule}), place) == ()
    ports = [{"port": [8265], "targetPort": {}}]
    service = {"apiVersion": "v1", "kind": "Service", "spec": {"type": "NodePort", "ports": ports}}
    assert found([KUBE, POLICY, service], place) == ()


def test_a_shell_that_sets_the_mode_for_all(place: Path) -> None:
    bare = [text.replace("RAY_AUTH_MODE=token ", "") for text in (HEAD, WORKER)]
    starts = {f"{_HEAD}.1": bare[0], f"{_WORKER}.1": bare[1]}
    for quote in "'\"":
        line = f"echo {quote}export RAY_AUTH_MODE=token{quote} >> ~/.bashrc"
        assert found(changed([LOCAL], {**starts, "setup_commands": [line]}), place) == ()
    errors = found(changed([LOCAL], starts), place)
    assert [finding.check for finding in errors] == ["auth", "auth"]


def test_what_is_excluded_is_not_carried(place: Path) -> None:
    mounts = {"file_mounts": {"~/x": "repository"}, "rsync_exclude": [".git"]}
    assert found(changed([LOCAL], mounts), place) == ()


def test_each_rule_has_a_case() -> None:
    checks = {"network_policy", *(case[0] for case in CASES)}
    source = Path(check.__code__.co_filename).parent / "rules"
    text = "".join(file.read_text() for file in source.glob("*.py"))
    assert checks == set(re.findall(r"Remark\(\s*\"(\w+)\"", text))
    page = Path(__file__).resolve().parents[2] / "docs" / "on-prem.md"
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", page.read_text(), re.MULTILINE)
    assert checks == set(re.findall(r"\w+", " ".join(rows)))
