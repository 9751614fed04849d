"""Versions that have to be the same on all nodes of a cluster."""

from __future__ import annotations

import re
from collections.abc import Iterator

from raygnn.clusters.facts import Cluster, Group, Remark, Text

PACKAGES = ("ray", "torch", "dgl", "lightning", "raygnn")
_PIN = re.compile(rf"(?<![\w-])({'|'.join(PACKAGES)})(?:\[[\w,-]*\])?\s*==\s*([0-9][\w.]*)")
_PYTHON = re.compile(r"\bpython(3\.[0-9]+)\b|\bpython=(3\.[0-9]+)|-py3([0-9]{1,2})\b")
_RAY_IMAGE = re.compile(r"(?:^|/)ray(?:-ml)?:([0-9]+\.[0-9]+\.[0-9]+)")
# a tag that says another thing every week, or none, which is the same
_MOVING = re.compile(r"(:(latest|nightly)[\w.-]*|^[^:@]+|/[^:@/]+)$")


def pins(cluster: Cluster) -> Iterator[Remark]:
    """A package or a Python that differs between groups of nodes."""
    first: dict[str, tuple[Group, str]] = {}
    for group in cluster.groups:
        last = {name: (value, place) for name, value, place in _versions(group)}
        for name, (value, place) in last.items():
            there, other = first.setdefault(name, (group, value))
            if other != value:
                what = f"{name} {value} on {group.name}, {other} on {there.name}"
                remedy = "nodes of one Ray need the same versions: use one list for all"
                yield Remark("versions", "error", place.key, what, remedy)
    named = cluster.spec.get("rayVersion")
    for group in cluster.groups if named is not None and cluster.base else ():
        found = {n: (v, place) for n, v, place in _versions(group)}.get("ray")
        if found and found[0] != str(named):
            what = f"rayVersion is {named}, but the image of {group.name} has Ray {found[0]}"
            key = (*cluster.base, "rayVersion")
            yield Remark("versions", "error", key, what, "give the version that is in the image")


def images(cluster: Cluster) -> Iterator[Remark]:
    """Images that may be another one on the next node, and groups with different ones."""
    used = [(group, group.image) for group in cluster.groups if group.image is not None]
    for group, image in used:
        if _MOVING.search(image.text):
            what = f"{image.text} of {group.name} is not always the same image"
            yield Remark("image", "warn", image.key, what, "name a tag of one version, or a digest")
    for group, image in used[1:]:
        if image.text != used[0][1].text:
            what = f"{group.name} runs {image.text}, {used[0][0].name} {used[0][1].text}"
            yield Remark("image", "info", image.key, what, "see that both have the same versions")


def _versions(group: Group) -> Iterator[tuple[str, str, Text]]:
    """(package, version, where it is said)."""
    for command in group.setup:
        for name, value in _PIN.findall(command.text):
            yield name, value, command
        for found in _PYTHON.findall(command.text):
            yield "python", found[0] or found[1] or f"3.{found[2]}", command
    if group.image is not None:
        if ray := _RAY_IMAGE.search(group.image.text):
            yield "ray", ray[1], group.image
        for found in _PYTHON.findall(group.image.text):
            yield "python", found[0] or found[1] or f"3.{found[2]}", group.image
