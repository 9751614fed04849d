"""What is wrong with a configuration, one key at a time, and how that is said."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticUndefined

from raygnn.config.duration import Duration
from raygnn.config.graphs import FORMATS
from raygnn.config.schema import SECTIONS, Config
from raygnn.config.secret import HIDDEN, is_secret
from raygnn.config.several import OneOfTasks
from raygnn.config.types import MODEL_FAMILIES, NO_LAYERS
from raygnn.config.yaml_text import KeyPath

# Pydantic's error types in our words; the fields are those of its context.
_SECRETIVE = (("comm", "env"), ("logging", "mlflow"), ("logging", "wandb"))

_EXPECTATIONS = {
    "int_type": "expected a whole number",
    "float_type": "expected a number",
    "finite_number": "expected a finite number",
    "bool_type": "expected true or false",
    "string_type": "expected text",
    "string_too_short": "expected text that is not empty",
    "dict_type": "expected a section of keys and values",
    "model_type": "expected a section of keys and values",
    "model_attributes_type": "expected a section of keys and values",
    "tuple_type": "expected a list",
    "list_type": "expected a list",
    "greater_than": "expected a number above {gt:g}",
    "greater_than_equal": "expected a number of at least {ge}",
    "less_than": "expected a number below {lt:g}",
    "less_than_equal": "expected a number of at most {le}",
    "too_short": "expected a list of at least {min_length}",
    "too_long": "expected a list of at most {max_length}",
    "literal_error": "expected {expected}",
}


# What other libraries call what is called otherwise here; difflib finds the nearer ones.
_SYNONYMS = {
    other: ours
    for ours, others in {
        "lr": "learning_rate learningrate",
        "epochs": "num_epochs n_epochs max_epochs",
        "max_steps": "num_steps total_steps max_iterations",
        "hidden": "hidden_dim hidden_size hidden_channels hidden_features num_hidden width",
        "layers": "num_layers n_layers depth",
        "heads": "num_heads n_heads num_attention_heads",
        "dropout": "dropout_rate dropout_p drop_rate",
        "norm": "normalization batch_norm layer_norm",
        "activation": "activation_fn nonlinearity",
        "aggregator": "aggr aggregation",
        "weight_decay": "wd l2",
        "clip": "grad_clip clip_norm max_grad_norm gradient_clip_val",
        "accumulate": "gradient_accumulation_steps accumulate_grad_batches",
        "schedule": "scheduler lr_scheduler lr_schedule",
        "patience": "early_stopping",
        "fanout": "fan_out fanouts num_neighbors num_neighbours neighbors",
        "workers": "num_workers num_trainers world_size",
        "parts": "num_parts num_partitions",
        "gcn": "graphconv graph_conv gcnconv",
        "sage": "graphsage graph_sage sageconv",
        "gat": "gatconv",
        "gatv2": "gatv2conv",
        "gin": "ginconv",
        "rgcn": "relgraphconv rgcnconv",
        "none": "mlp linear",
        "fp32": "float32 float",
        "bf16": "bfloat16",
        "ntype": "node_type target_node_type",
    }.items()
    for other in others.split()
}

_NO_EDGE_FEATURES = {"edge_features", "edge_feats", "edge_attr", "edge_dim"}


@dataclass(frozen=True)
class Problem:
    """``what`` is wrong with the value at ``key``, and the ``remedy``."""

    key: KeyPath
    what: str
    remedy: str


def dotted(key: KeyPath) -> str:
    """``("sampling", "fanout", 0)`` → ``sampling.fanout[0]``; odd characters are escaped."""
    text = ""
    for part in key:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += ("." if text else "") + (part if part.isprintable() else ascii(part))
    return _short(text, 200)


def show(value: Any) -> str:
    """A value as a user would write it, shortened, with nothing unprintable in it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return "a section" if value else "{}"
    if isinstance(value, (list, tuple)):
        if len(value) > 8:
            return f"a list of {len(value)}"
        return _short("[" + ", ".join(show(item) for item in value) + "]")
    if isinstance(value, int) and value.bit_length() > 200:
        return "a huge number"  # Python refuses to print the largest ones
    text = str(value) if isinstance(value, Duration) else repr(value)
    text = re.sub(r"://[^/@\s]+@", "://***@", text)  # a URI's user and password
    return _short(text if text.isprintable() else ascii(value))


def _short(text: str, limit: int = 60) -> str:
    return text if len(text) <= limit else text[:limit] + "…"


def nearest(word: Any, known: Iterable[str]) -> str | None:
    """The known word that ``word`` is another name of, or most resembles, if any."""
    by_letters = {other.casefold(): other for other in known}
    if (ours := _ours(word)) in by_letters:
        return by_letters[ours]
    close = difflib.get_close_matches(str(word)[:100].casefold(), by_letters, n=1, cutoff=0.6)
    return by_letters[close[0]] if close else None


def _ours(word: Any) -> str:
    """What we call what other libraries call so."""
    text = str(word)[:100].casefold().replace("-", "_")
    return _SYNONYMS.get(text, text)


def schema_problems(error: ValidationError) -> list[Problem]:
    """What pydantic found, in our words; a key that was only misspelt is not also missing."""
    details = error.errors(include_url=False)
    problems = [_problem(detail) for detail in details]
    hints = {problem.remedy.split("?")[0] for problem in problems}
    return [
        problem
        for problem, detail in zip(problems, details, strict=True)
        if detail["type"] != "missing" or f"did you mean {dotted(problem.key)}" not in hints
    ]


def _problem(detail: ErrorDetails) -> Problem:
    kind, value, key = detail["type"], detail["input"], detail["loc"]
    if kind == "union_tag_not_found":
        return Problem(
            ("graph", "format"), "'format' is missing", f"give one of {', '.join(FORMATS)}"
        )
    if kind == "union_tag_invalid":
        form = detail["ctx"]["tag"]
        return Problem(("graph", "format"), f"unknown format {show(form)}", _one_of(form, FORMATS))

    if key[-1] == "[key]":  # pydantic's name for a mapping's key that is wrong
        key = key[:-1]
    section, depth = _section(key)
    fields = section.model_fields
    field = fields.get(str(key[depth])) if len(key) > depth else None
    if key[0] == "graph" and len(key) > 1:  # ("graph", format, key, …)
        key = ("graph", *key[2:])
    if kind == "extra_forbidden":
        return Problem(key, f"unknown key {show(key[-1])}", _for_unknown(str(key[-1]), key, fields))
    if kind == "missing":
        return missing_key(key, field)
    if kind == "invalid_key":
        return Problem(key, "expected text as the key", "put the key in quotes")
    if key[:2] in _SECRETIVE and detail["loc"][-1] != "[key]" and _hidden(key, value):
        what = f"{_wanted(detail)}, got {HIDDEN}"
        return Problem(key, what, f"correct it: {field and field.description}")
    return wrong_value(key, detail, field)


def unknown_key(key: KeyPath, known: Iterable[str]) -> Problem:
    """A key that its section does not have."""
    names = list(known)
    if close := nearest(key[-1], names):
        remedy = f"did you mean {dotted((*key[:-1], close))}? known here: {', '.join(names)}"
    else:
        remedy = f"remove it; known here: {', '.join(names)}"
    return Problem(key, f"unknown key {show(key[-1])}", remedy)


def missing_key(key: KeyPath, field: FieldInfo | None) -> Problem:
    """A key that its section needs."""
    meaning = field.description if field else ""
    return Problem(key, f"{show(key[-1])} is missing", f"add {key[-1]}: {meaning}")


def wrong_value(key: KeyPath, detail: ErrorDetails, field: FieldInfo | None) -> Problem:
    """A value that is not what its key takes."""
    what = f"{_wanted(detail)}, got {show(detail['input'])}"
    return Problem(key, what, _for_value(key, detail, field))


def _wanted(detail: ErrorDetails) -> str:
    template = _EXPECTATIONS.get(detail["type"])
    return template.format(**detail.get("ctx", {})) if template else detail["msg"]


def _hidden(key: KeyPath, value: Any) -> bool:
    """Whether what was given for one of these, or for a key in it, may hold a secret."""
    text = value if isinstance(value, str) else ""
    return len(key) == 2 or is_secret(str(key[2]), text)


def _section(key: KeyPath) -> tuple[type[BaseModel], int]:
    """The innermost model that the key belongs to, and the place of its own key in the path."""
    if key[0] == "graph" and len(key) > 1:
        return FORMATS[str(key[1])], 2
    if len(key) == 1 or (key[0] not in SECTIONS and (key[0] != "tasks" or len(key) == 2)):
        return Config, 0
    section: type[BaseModel] = SECTIONS.get(str(key[0]), OneOfTasks)
    depth = 1 if section is not OneOfTasks else 2  # ("tasks", name, key, …)
    field = section.model_fields.get(str(key[depth]))
    options = (field.annotation, *get_args(field.annotation)) if field else ()
    for inner in options if len(key) > depth + 1 else ():
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            return inner, depth + 1
    return section, depth


def _one_of(word: Any, known: Iterable[str]) -> str:
    close = nearest(word, known)
    return f"did you mean {close}? " * bool(close) + f"known: {', '.join(known)}"


def _for_unknown(word: str, key: KeyPath, known: Iterable[str]) -> str:
    """Where the key belongs: a near name in its section, else the same name in another."""
    if word.casefold() in _NO_EDGE_FEATURES:
        return (
            "remove it: no model reads features of edges yet; sampling.edge_weight draws "
            "neighbours by an array of edges"
        )
    here = unknown_key(key, known).remedy
    if nearest(word, known):
        return here
    others = [form for form, section in FORMATS.items() if word in section.model_fields]
    if key[0] == "graph" and others:
        return f"remove it: only the formats {', '.join(others)} have it, unlike this one"
    places = [("", Config.model_fields), *((n + ".", s.model_fields) for n, s in SECTIONS.items())]
    for prefix, names in places:
        if (ours := _ours(word)) in names:
            return f"did you mean {prefix}{ours}? known here: {', '.join(known)}"
    return here


def _for_value(key: KeyPath, detail: ErrorDetails, field: FieldInfo | None) -> str:
    """The likely slip if there is one, else the key's meaning and default."""
    kind, value = detail["type"], detail["input"]
    if kind == "string_type" and isinstance(value, (bool, int, float)):
        return f'put it in quotes: "{show(value)}"'
    if kind in ("list_type", "tuple_type") and isinstance(value, str) and value.isidentifier():
        return f"put it in brackets: [{value}]"
    if kind in ("int_type", "float_type") and isinstance(value, str) and _is_number(value):
        return f"remove the quotes: {show(value.strip())[1:-1]}"
    if kind == "bool_type" and value in ("yes", "Yes", "on", "On", 1):
        return "write true"
    if kind == "bool_type" and value in ("no", "No", "off", "Off", 0):
        return "write false"
    if field is None:
        return "correct the value"
    kinds = (*MODEL_FAMILIES, NO_LAYERS) if key == ("model", "kind") else ()
    if close := nearest(value, kinds or _choices(field.annotation) * (kind == "literal_error")):
        return f"did you mean {close}?"
    if field.default is PydanticUndefined or isinstance(field.default, BaseModel):
        return f"correct it: {field.description}"
    return f"correct it or leave it out (default {show(field.default)}): {field.description}"


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _choices(annotation: Any) -> list[str]:
    """The words that a Literal allows, wherever it stands in the annotation."""
    if isinstance(annotation, str):
        return [annotation]
    return [choice for argument in get_args(annotation) for choice in _choices(argument)]
