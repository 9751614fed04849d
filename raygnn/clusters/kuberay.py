"""What Kubernetes manifests say, as facts, and the keys that KubeRay knows.

The keys are those of KubeRay 1.7 (``ray.io/v1``): names alone, in a form of our own. What stands in
the template of a pod, and in any other kind, is for Kubernetes' own schema.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from raygnn.clusters.facts import Cluster, Group, Text, listed, section, strings, texts
from raygnn.clusters.quantity import quantity
from raygnn.config.yaml_text import KeyPath

_WORDS = {
    "cluster": "authOptions autoscalerOptions enableInTreeAutoscaling gcsFaultToleranceOptions "
    "historyServerOptions networkPolicy tlsOptions "
    "headGroupSpec headServiceAnnotations managedBy rayVersion suspend upgradeStrategy "
    "workerGroupSpecs",
    "head": "enableIngress headService ingressOptions labels rayStartParams resources serviceType "
    "template",
    "workers": "groupName idleTimeoutSeconds labels maxReplicas minReplicas numOfHosts priority "
    "rayStartParams replicas resources scaleStrategy suspend template",
    "auth": "enableK8sTokenAuth mode secretName",
    "job": "activeDeadlineSeconds backoffLimit clusterSelector deletionStrategy entrypoint "
    "entrypointNumCpus entrypointNumGpus entrypointResources jobId managedBy metadata "
    "preRunningDeadlineSeconds rayClusterSpec runtimeEnvYAML shutdownAfterJobFinishes "
    "submissionMode submitterConfig submitterPodTemplate suspend ttlSecondsAfterFinished",
}
KEYS = {name: frozenset(words.split()) for name, words in _WORDS.items()}
"""Section → the keys that it may have."""

# Volumes that a pod shares with no pod of another node.
_OWN = {"secret", "configMap", "projected", "downwardAPI", "hostPath", "ephemeral"}

SPEC: Mapping[str, KeyPath] = {"RayCluster": ("spec",), "RayJob": ("spec", "rayClusterSpec")}
"""Kind → where it describes its cluster."""


def cluster(manifest: Mapping[str, Any], beside: frozenset[str]) -> Cluster:
    """The facts of one manifest; of a kind that is not KubeRay's, its values alone.

    Args:
        beside: the kinds of the manifests in the same file.
    """
    kind = str(manifest.get("kind"))
    base = SPEC.get(kind, ())
    found = Cluster(kind=kind, value=manifest, base=base, beside=beside)
    if not base or not found.spec:  # another kind, or a RayJob on a cluster that is there already
        return found
    head = _group(section(found.spec.get("headGroupSpec")), "head", (*base, "headGroupSpec"))
    workers = [
        _group(section(each), "worker", (*base, "workerGroupSpecs", i))
        for i, each in enumerate(listed(found.spec.get("workerGroupSpecs")))
    ]
    return replace(found, groups=(head, *workers))


def sections(found: Cluster) -> list[tuple[str, KeyPath, Mapping[str, Any]]]:
    """The sections whose keys are known: their name in :data:`KEYS`, place and value."""
    spec, base = found.spec, found.base
    listing = [("cluster", base, spec)]
    listing.append(("auth", (*base, "authOptions"), section(spec.get("authOptions"))))
    if found.kind == "RayJob":
        listing.insert(0, ("job", ("spec",), section(found.value.get("spec"))))
    listing.append(("head", (*base, "headGroupSpec"), section(spec.get("headGroupSpec"))))
    for i, each in enumerate(listed(spec.get("workerGroupSpecs"))):
        listing.append(("workers", (*base, "workerGroupSpecs", i), section(each)))
    return listing


def _group(spec: Mapping[str, Any], role: Any, key: KeyPath) -> Group:
    template = section(section(spec.get("template")).get("spec"))
    here: KeyPath = (*key, "template", "spec")
    container = section(next(iter(listed(template.get("containers"))), None))
    at: KeyPath = (*here, "containers", 0)
    image = container.get("image")
    commands = texts(container.get("command"), (*at, "command"))
    commands += texts(container.get("args"), (*at, "args"))
    volumes = {
        str(section(each).get("name")): section(each) for each in listed(template.get("volumes"))
    }
    mounts, shm = _mounts(container, volumes)
    return Group(
        name=str(spec.get("groupName", "head")),
        role=role,
        key=key,
        setup=commands,
        env={
            str(section(each).get("name")): _value(section(each))
            for each in listed(container.get("env"))
        },
        image=Text((*at, "image"), image) if isinstance(image, str) else None,
        shm=shm,
        container=True,
        mounts=mounts,
        params={k: str(v) for k, v in section(spec.get("rayStartParams")).items()},
    )


def _value(variable: Mapping[str, Any]) -> str | None:
    return str(variable["value"]) if "value" in variable else None


def _mounts(
    container: Mapping[str, Any], volumes: Mapping[str, Mapping[str, Any]]
) -> tuple[dict[str, str], int | None]:
    """path → volume that outlives the pod, and the bytes of what is mounted on /dev/shm."""
    mounts: dict[str, str] = {}
    shm = None
    for mount in map(section, listed(container.get("volumeMounts"))):
        path = str(mount.get("mountPath")).rstrip("/")
        volume = volumes.get(str(mount.get("name")), {})
        empty = section(volume.get("emptyDir")) if "emptyDir" in volume else None
        if path == "/dev/shm":
            if empty is not None and empty.get("medium") == "Memory":
                shm = quantity(empty.get("sizeLimit"), decimal=True) or 1 << 62
        elif empty is None and not _OWN & set(volume):
            mounts[path] = " ".join(text.text for text in strings(volume) if text.key != ("name",))
    return mounts, shm
