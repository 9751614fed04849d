"""cluster/kubernetes/ against the published schemas, strictly: an unknown key is an error.

Those of Kubernetes come with kubernetes-validate. KubeRay's are in no package: the keys that our
manifests use are listed here, and ``KUBERAY_CRDS=DIRECTORY pytest …`` looks at the definitions
themselves (``ray.io_rayclusters.yaml``, … of its releases).
"""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from ray.autoscaler._private.kuberay.autoscaling_config import (
    _derive_autoscaling_config_from_ray_cr,
)
from ray.serve.schema import ServeDeploySchema

from raygnn.serving import app
from tests.clusters.test_cluster_files import brought

kubernetes_validate = pytest.importorskip(
    "kubernetes_validate", reason="pip install kubernetes-validate"
)

CHECKOUT = Path(__file__).resolve().parents[2]
FILES = sorted((CHECKOUT / "cluster" / "kubernetes").glob("*.yaml"))
MANIFESTS = [each for file in FILES for each in yaml.safe_load_all(file.read_text())]
OF_RAY = [each for each in MANIFESTS if each["apiVersion"] == "ray.io/v1"]
VERSION = "1.33"
# Section → the keys of KubeRay's (``ray.io/v1``) that it may have here.
KEYS = {
    "job": "activeDeadlineSeconds backoffLimit entrypoint rayClusterSpec shutdownAfterJobFinishes "
    "submitterPodTemplate ttlSecondsAfterFinished",
    "service": "rayClusterConfig serveConfigV2",
    "cluster": "authOptions autoscalerOptions enableInTreeAutoscaling headGroupSpec rayVersion "
    "workerGroupSpecs",
    "autoscaler": "idleTimeoutSeconds securityContext version volumeMounts",
    "head": "rayStartParams template",
    "workers": "groupName maxReplicas minReplicas rayStartParams replicas template",
}


def validate(manifest: dict[str, Any]) -> None:
    kubernetes_validate.validate(manifest, VERSION, strict=True)


def cluster_of(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return the RayCluster's part of a manifest."""
    spec: dict[str, Any] = manifest["spec"]
    return spec.get("rayClusterSpec") or spec.get("rayClusterConfig") or spec


def pods(manifest: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Return every pod template in a manifest of KubeRay as a separate object."""
    spec, cluster = manifest["spec"], cluster_of(manifest)
    templates = [
        each["template"] for each in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    ]
    if submitter := spec.get("submitterPodTemplate"):
        templates.append(submitter)
    for template in templates:
        yield {"apiVersion": "v1", "kind": "PodTemplate", "template": template}


def ids(manifest: dict[str, Any]) -> str:
    return f"{manifest['kind']}-{manifest['metadata']['name']}"


@pytest.mark.parametrize("manifest", [m for m in MANIFESTS if m not in OF_RAY], ids=ids)
def test_kinds_of_kubernetes(manifest: dict[str, Any]) -> None:
    validate(manifest)
    broken = copy.deepcopy(manifest)
    broken["spec"]["acessModes"] = []
    with pytest.raises(kubernetes_validate.ValidationError):
        validate(broken)


@pytest.mark.parametrize("manifest", OF_RAY, ids=ids)
def test_pods(manifest: dict[str, Any]) -> None:
    found = list(pods(manifest))
    assert len(found) == (3 if manifest["kind"] == "RayJob" else 2)
    for pod in found:
        validate(pod)
        pod["template"]["spec"]["containers"][0]["volumeMount"] = []
        with pytest.raises(kubernetes_validate.ValidationError):
            validate(pod)
        del pod["template"]["spec"]["containers"][0]["volumeMount"]


def test_labels_are_those_of_the_policies() -> None:
    """A policy with another label would silently admit everyone."""
    for file in FILES:
        manifests = {each["kind"]: each for each in yaml.safe_load_all(file.read_text())}
        if policy := manifests.pop("NetworkPolicy", None):
            (cluster,) = manifests.values()
            wanted = policy["spec"]["podSelector"]["matchLabels"]
            assert policy["spec"]["ingress"][0]["from"] == [
                {"podSelector": policy["spec"]["podSelector"]}
            ]
            for pod in pods(cluster):
                assert wanted.items() <= pod["template"]["metadata"]["labels"].items()


def test_no_pod_can_become_root_or_ask_kubernetes() -> None:
    """Jobs run their users' code, in an image that has sudo."""
    for pod in (each for manifest in OF_RAY for each in pods(manifest)):
        spec = pod["template"]["spec"]
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        for container in spec["containers"]:
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            mounts = {mount["name"] for mount in container.get("volumeMounts", [])}
            assert mounts <= {"storage", "shm", "token"}


@pytest.mark.parametrize("manifest", OF_RAY, ids=ids)
def test_the_autoscaler_starts_the_workers_of_a_job_on_kubernetes(manifest: dict[str, Any]) -> None:
    """Only Ray's autoscaler has credentials for Kubernetes, so the manifest is read as it reads
    it."""
    spec = cluster_of(manifest)
    assert spec["enableInTreeAutoscaling"] is True
    assert [group["replicas"] for group in spec["workerGroupSpecs"]] == [0]
    read = _derive_autoscaling_config_from_ray_cr(
        {"metadata": {"namespace": "default", "name": "raygnn"}, "spec": spec}
    )
    types, head = read["available_node_types"], read["head_node_type"]
    assert types["worker"]["min_workers"] == 0
    assert types["worker"]["resources"] == types[head]["resources"]
    assert brought(types, head, read["max_workers"], {"CPU": 4.0}) == 2
    options = spec["autoscalerOptions"]
    assert options["securityContext"]["allowPrivilegeEscalation"] is False
    (mount,) = options["volumeMounts"]
    assert mount["mountPath"] == "/var/run/secrets/kubernetes.io/serviceaccount"  # Ray reads it
    (volume,) = (
        each
        for each in spec["headGroupSpec"]["template"]["spec"]["volumes"]
        if each["name"] == mount["name"]
    )
    files = [source.popitem()[1] for source in copy.deepcopy(volume["projected"]["sources"])]
    assert [file.get("path") or file["items"][0]["path"] for file in files] == ["token", "ca.crt"]


def test_all_pods_run_one_image_and_mount_the_claim() -> None:
    (claim,) = (each for each in MANIFESTS if each["kind"] == "PersistentVolumeClaim")
    images = set()
    for manifest in OF_RAY:
        for pod in pods(manifest):
            (container,) = pod["template"]["spec"]["containers"]
            images.add(container["image"])
            if container["name"].startswith("ray-"):
                volumes = pod["template"]["spec"]["volumes"]
                assert {"claimName": claim["metadata"]["name"]} in [
                    each.get("persistentVolumeClaim") for each in volumes
                ]
    assert len(images) == 1


@pytest.fixture(params=["RayCluster", "RayJob", "RayService"])
def definition(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    """Return KubeRay's own definition of a kind."""
    given = os.environ.get("KUBERAY_CRDS")
    if not given:
        pytest.skip("KubeRay's definitions are in no package; set KUBERAY_CRDS to their directory")
    file = Path(given) / f"ray.io_{request.param.lower()}s.yaml"
    versions = yaml.safe_load(file.read_text())["spec"]["versions"]
    (schema,) = (each["schema"]["openAPIV3Schema"] for each in versions if each["name"] == "v1")
    return request.param, schema


def test_against_kuberays_own_definitions(definition: tuple[str, dict[str, Any]]) -> None:
    kind, schema = definition
    for manifest in OF_RAY:
        if manifest["kind"] == kind:
            jsonschema.validate(manifest, _strict(schema))
            broken = copy.deepcopy(manifest)
            broken["spec"]["entrypiont"] = ""
            with pytest.raises(jsonschema.ValidationError, match="entrypiont"):
                jsonschema.validate(broken, _strict(schema))


@pytest.mark.parametrize("manifest", OF_RAY, ids=ids)
def test_keys_are_those_of_kuberay(manifest: dict[str, Any]) -> None:
    spec, cluster = manifest["spec"], cluster_of(manifest)
    sections = [("cluster", cluster), ("head", cluster["headGroupSpec"])]
    sections.append(("autoscaler", cluster["autoscalerOptions"]))
    sections += [("workers", group) for group in cluster["workerGroupSpecs"]]
    if kind := {"RayJob": "job", "RayService": "service"}.get(manifest["kind"]):
        sections.append((kind, spec))
    for name, section in sections:
        assert set(section) <= set(KEYS[name].split()), name
    assert cluster["authOptions"] == {"mode": "token"}


def test_the_service_is_one_that_ray_serve_deploys() -> None:
    (manifest,) = (each for each in OF_RAY if each["kind"] == "RayService")
    given = yaml.safe_load(manifest["spec"]["serveConfigV2"])
    (application,) = ServeDeploySchema(**given).applications
    assert application.import_path == "raygnn.serving:build"
    token = inspect.signature(app).bind(**application.args).arguments["token_file"]
    for pod in pods(manifest):
        (container,) = pod["template"]["spec"]["containers"]
        assert str(Path(token).parent) in [each["mountPath"] for each in container["volumeMounts"]]


def _strict(schema: Any) -> Any:
    """Return the schema with unknown keys as errors, as `kubectl apply` treats them."""
    if isinstance(schema, list):
        return [_strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: _strict(value) for key, value in schema.items()}
    if made.get("type") == "object" and "properties" in made:
        made.setdefault("additionalProperties", False)
    if made.get("x-kubernetes-int-or-string"):
        made.pop("type", None)
    return made
