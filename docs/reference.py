"""Writes ``docs/config.md``, the reference of a job's configuration, from its JSON Schema, and of
what is checked before it starts, from the checks' docstrings.

Run ``python docs/reference.py`` when one of them has changed; a test compares them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from raygnn.config.execution import BINDING
from raygnn.config.load import json_schema
from raygnn.preflight.report import described

FILE = Path(__file__).with_name("config.md")

HEAD = """\
# Configuration

<!-- Written by docs/reference.py from the schema and the checks. -->

A job is a YAML file, or a Python mapping of the same shape. `name`, `model`, and `graph` or
`partition.path` are needed; everything else has a default. `raygnn config-schema` prints the same
as JSON Schema.

- Relative paths in a file are relative to that file; `storage`, and paths in `--set`, are
  relative to where the command runs.
- A duration is written with a unit, `90s`, `30m`, `1.5h`, `2d`; a bare number means seconds,
  unless the key says otherwise (`fault.checkpoint_every`: steps).
- Types are strict: `"3"` is not a number. An unknown key is an error that names the nearest one.
- `config.yaml` in a run directory has every key. Secrets in `comm.env` are `***` there, which is
  refused when it is read again: give them anew, with `--resume`, too.
"""

CHECKS = """\
## Checks

What `raygnn check` looks at, and `raygnn train` before it starts. Every finding names its check:
`error [storage_visible]: …`. An error refuses the job, with exit code 3; a warning (`warn`) or a
note (`info`) does not. `cluster.allow: [CHECK, …]` turns a check's errors into notes, except for
checks marked "no" below: the job would fail later anyway. `cluster.uniform` is the severity of
findings of the checks `*_uniform`, which compare the nodes that may run a worker. `raygnn check`
also warns when the run's name is taken (`name_free`).
"""


def markdown() -> str:
    """The text of the reference."""
    schema = json_schema()
    definitions, top = schema["$defs"], schema["properties"]
    sections = {key: found for key, field in top.items() if (found := _sections(field))}
    named = {key: found for key, field in top.items() if (found := _named(field))}
    plain = {key: field for key, field in top.items() if key not in {**sections, **named}}
    blocks = [HEAD, "## Top level", _table(plain, schema.get("required", []), {})]
    for key, names in sections.items():
        meaning = top[key].get("description") or definitions[names[0]]["description"]
        blocks += [f"## {key}", meaning]
        if key != "graph":
            kinds, required = _kinds([definitions[name] for name in names])
            blocks.append(
                _table(_flat(kinds, definitions), required, top[key].get("default") or {})
            )
            continue
        kinds = [definitions[name]["properties"] for name in names]
        common = {
            k: kinds[0][k] for k in kinds[0] if all(k in one for one in kinds) and k != "path"
        }
        formats = [one["format"]["const"] for one in kinds]
        common["format"] = {**common["format"], "enum": formats}
        del common["format"]["const"]
        blocks.append(_table(common, ["format"], {}))
        for name, own in zip(names, kinds):
            definition = definitions[name]
            blocks.append(f"### {key}: {own['format']['const']}")
            blocks.append(definition["description"])
            properties = _flat({k: v for k, v in own.items() if k not in common}, definitions)
            blocks.append(_table(properties, definition.get("required", []), {}))
    for key, names in named.items():
        alone = {k for name in sections["task"] for k in definitions[name]["properties"]}
        merged, _ = _kinds([definitions[name] for name in names])
        own = {k: v for k, v in merged.items() if k.split("\0")[0] not in alone}
        blocks += [f"## {key}", top[key]["description"], _table(own, [], {})]
    blocks += [CHECKS, _checks()]
    return "\n\n".join(block.rstrip() for block in blocks) + "\n"


def _kinds(definitions: list[dict[str, Any]]) -> tuple[dict[str, Any], list[str]]:
    """The keys of a section in one table, and those that are needed in every kind of it. A key
    that is not alike in all kinds is there once for each form, with the kinds that have it."""
    if len(definitions) == 1:
        return definitions[0]["properties"], definitions[0].get("required", [])
    names = list(dict.fromkeys(key for d in definitions for key in d["properties"]))
    merged: dict[str, Any] = {}
    for key in names:
        forms: dict[str, list[dict[str, Any]]] = {}
        for definition in definitions:
            if key in definition["properties"]:
                forms.setdefault(json.dumps(definition["properties"][key]), []).append(definition)
        if key in _KINDS:
            fields = [json.loads(form) for form in forms]
            merged[key] = {**fields[0], "enum": [kind for f in fields for kind in _constants(f)]}
            if any(len(f.get("anyOf", ())) > 1 for f in fields):
                merged[key]["enum"].append("package.module:Class")
            merged[key].pop("const", None)
            continue
        for number, (form, having) in enumerate(forms.items()):
            field = json.loads(form)
            if len(having) < len(definitions):
                kinds = [kind for d in having for kind in _constants(_kind_field(d))]
                others = [d for d in definitions if key not in d["properties"]]
                without = [kind for d in others for kind in _constants(_kind_field(d))]
                only = (
                    f"not {', '.join(without)}" if len(without) < len(kinds) else ", ".join(kinds)
                )
                if len(forms) > 1:
                    only = ", ".join(kinds)
                field["description"] = f"({only}) {field.get('description', '')}"
            merged[key + "\0" * number] = field
    every = [key for key in names if all(key in d.get("required", []) for d in definitions)]
    return merged, every


_KINDS = ("kind", "like")


def _kind_field(definition: dict[str, Any]) -> dict[str, Any]:
    field: dict[str, Any] = next(
        field for key, field in definition["properties"].items() if key in _KINDS
    )
    return field


def _constants(field: dict[str, Any]) -> list[str]:
    options = field.get("anyOf", [field])  # a kind, or a class like it
    named = [option["const"] for option in options if "const" in option]
    return named or field.get("enum") or ["package.module:Class"]


def _flat(properties: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """The keys; in place of a section among them its own, as ``schedule.kind``, and after one that
    need not be there."""
    flat: dict[str, Any] = {}
    for key, field in properties.items():
        if "$ref" not in field:
            flat[key] = field
        for name in _sections(field):
            inner = definitions[name]["properties"]
            flat |= {f"{key}.{name}": value for name, value in inner.items()}
    return flat


def _checks() -> str:
    rows = ["| check | what it looks at | in `cluster.allow` |", "| --- | --- | --- |"]
    for name, sentence in described().items():
        rows.append(f"| `{name}` | {sentence} | {'no' if name in BINDING else 'yes'} |")
    return "\n".join(rows)


def _sections(field: dict[str, Any]) -> list[str]:
    """The definitions that a field stands for; none for a plain value."""
    options = [field, *field.get("anyOf", ()), *field.get("oneOf", ())]
    options += [inner for option in field.get("anyOf", ()) for inner in option.get("oneOf", ())]
    return [option["$ref"].rpartition("/")[2] for option in options if "$ref" in option]


def _named(field: dict[str, Any]) -> list[str]:
    """The definitions of the sections that a field has under names of the user's own."""
    options = (field, *field.get("anyOf", ()))
    inner = [option.get("additionalProperties") for option in options]
    return [name for one in inner if isinstance(one, dict) for name in _sections(one)]


def _table(properties: dict[str, Any], required: list[str], defaults: dict[str, Any]) -> str:
    """A row per key; ``defaults`` of the whole section go before those of single keys."""
    rows = ["| key | value | default | meaning |", "| --- | --- | --- | --- |"]
    for key, field in properties.items():
        default = defaults.get(key, field.get("default"))
        needed = key in required or ("." in key and "default" not in field)
        shown = "needed" if needed else f"`{json.dumps(default)}`"
        meaning = field.get("description", "").replace("|", "\\|").replace("<", "&lt;")
        rows.append(f"| `{key.rstrip(chr(0))}` | {_value(field)} | {shown} | {meaning} |")
    return "\n".join(rows)


def _value(field: dict[str, Any]) -> str:
    """What may be written, in a few words."""
    if "const" in field:
        return f"`{field['const']}`"
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    for union in ("anyOf", "oneOf"):
        if union in field:
            return " or ".join(dict.fromkeys(_value(option) for option in field[union]))
    kind = field.get("type")
    if "prefixItems" in field:
        return f"[{', '.join(map(_value, field['prefixItems']))}]"
    if kind == "array":
        return f"list of {_value(field['items'])}" if "items" in field else "list"
    if kind in ("integer", "number"):
        return _range(field, "whole number" if kind == "integer" else "number")
    if "dhms" in field.get("pattern", ""):
        return "duration"
    names = {"string": "text", "boolean": "true or false", "object": "mapping", "null": "null"}
    return "path" if field.get("format") == "path" else names.get(kind or "", "value")


def _range(field: dict[str, Any], name: str) -> str:
    low, above = field.get("minimum"), field.get("exclusiveMinimum")
    high, below = field.get("maximum"), field.get("exclusiveMaximum")
    bounds = [f"> {above:g}"] if above is not None else [f"≥ {low:g}"] if low is not None else []
    if below is not None:
        bounds.append(f"< {below:g}")
    elif high is not None and high < 10**6:  # larger ones only keep nonsense out
        bounds.append(f"≤ {high:,g}")
    return " ".join([name, ", ".join(bounds)]).rstrip()


if __name__ == "__main__":
    FILE.write_text(markdown(), encoding="utf-8")
