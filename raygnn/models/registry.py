"""Models built from the config's ``model`` section, and restored from their descriptions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, cast

from pydantic import TypeAdapter
from torch import nn

from raygnn.config.model import (
    FamilyConfig,
    LightGcnConfig,
    ModelConfig,
    NoLayersConfig,
    UserModelConfig,
)
from raygnn.config.schema import SamplingConfig
from raygnn.config.task import COMPLEX
from raygnn.errors import ConfigError
from raygnn.models.attention_layers import HANLayer, HGTLayer
from raygnn.models.convolutions import GATConv, GCNConv, GINConv, Rest, SAGEConv
from raygnn.models.decoders import make_decoder
from raygnn.models.heads import EdgeHead, EdgeModel, Head, LinkModel, MultitaskModel, NodeHead
from raygnn.models.network import Direct, Encoder, GraphNetwork, GraphSchema, Network, Schema, Typed
from raygnn.models.rgcn import RGCNLayer
from raygnn.models.typed_layers import Family, LayerSpec, LightGCNLayer, TypedLayer, key
from raygnn.models.user import PygGraphModel, PygModel, UserGraphModel, UserModel
from raygnn.sampling.batch import EdgeType, etype_str

# fields of a schema by edge type
_OF_EDGES = ("relations", "edge_features", "edge_categories", "edge_times")


def build_model(config: ModelConfig, schema: Schema, *, head: bool = True) -> Encoder:
    """Build the network of a task whose seeds are nodes. ``head``: see `Direct`.

    Raises:
        ConfigError: a user's class cannot be imported or constructed, or rows that lightgcn adds
            have different widths.
    """
    if isinstance(config, NoLayersConfig):
        return Direct(schema, head=head)
    if isinstance(config, LightGcnConfig):
        _check_widths(schema.widths, "lightgcn adds up")
        keys = {name: getattr(config, name) for name in ("kind", "layers", "hidden")}
        plain = FamilyConfig(dropout=0.0, **keys)
        return Network(plain, _family(plain), schema)
    if isinstance(config, UserModelConfig):
        return (UserModel if config.takes_dgl else PygModel)(config, schema)
    return Network(config, _family(config), schema)


def build_edge_model(
    config: ModelConfig,
    schema: Schema,
    etype: EdgeType,
    decoder: str,
    relations: int,
    out: int | None,
    features: int = 0,
) -> EdgeModel:
    """Build the network and decoder of a task whose seeds are edges.

    Args:
        schema: of the network; its targets are the node types at the edges' ends.
        decoder: its kind; relations: their number, at least 1.
        out: number of classes or of targets; None for link prediction.
        features: width of the edge features that the decoder reads.

    Raises:
        ConfigError: see `build_model`; the ends have different widths, or there is nothing to
            train.
    """
    encoder, width = build_model(config, schema, head=False), schema.out_features
    if isinstance(config, NoLayersConfig):
        width = _check_widths({t: schema.widths[t] for t in (etype[0], etype[2])}, "decoders need")
    if decoder in COMPLEX and width % 2:
        what = f"{decoder} needs rows of even width, and nodes have {width} numbers"
        remedy = "make that width even, or choose another decoder"
        raise ConfigError(what, where="model.decoder", remedy=remedy)
    head = make_decoder(config, decoder, width, relations, out or 1, features)
    if config.embedding is None and not [*encoder.parameters(), *head.parameters()]:
        what = f"model.kind {config.kind} with the decoder {decoder} has no weights"
        remedy = "set model.embedding, or choose another decoder or model.kind"
        raise ConfigError(what, where="model.decoder", remedy=remedy)
    return (LinkModel if out is None else EdgeModel)(encoder, head, etype)


def _check_widths(widths: Mapping[str, int], reader: str) -> int:
    """Return the only width of rows. Raises ConfigError if there are several."""
    several = sorted(set(widths.values()))
    if len(several) > 1:
        what = f"nodes of {' and '.join(widths)} have rows of {several} numbers, and {reader} rows "
        remedy = "choose another model.kind, or give the types rows of one width "
        remedy += "(model.embedding, model.features)"
        raise ConfigError(f"{what}of equal widths", where="model.kind", remedy=remedy)
    return several[0]


def build_graph_model(config: ModelConfig, schema: GraphSchema) -> nn.Module:
    """Build the network of a graph-level task, which maps a `GraphBatch` to ``[B, out_features]``.
    Raises ConfigError if a user's class cannot be imported or constructed."""
    if isinstance(config, UserModelConfig):
        return (UserGraphModel if config.takes_dgl else PygGraphModel)(config, schema)
    return GraphNetwork(cast("FamilyConfig", config), _family(config), schema)


def describe(model: nn.Module) -> dict[str, Any]:
    """Describe a built-in network as JSON, so that `restore` builds it without data; else empty."""
    encoder, heads = model, dict[str, Any]()
    if isinstance(model, EdgeModel):
        encoder, heads = model.encoder, {"": model}
    elif isinstance(model, MultitaskModel):
        encoder, heads = model.encoder, {name: model.heads[key(name)] for name in model.names}
    if not isinstance(encoder, Network | Direct | GraphNetwork):
        return {}
    return {
        "schema": _schema(encoder.schema),
        "heads": {name: _head(head) for name, head in heads.items()},
    }


def restore(values: Mapping[str, Any], config: ModelConfig) -> nn.Module:
    """Build the network that `describe` was given, with initial weights. Raises ValueError if the
    values are invalid."""
    try:
        schema = _read_schema(values["schema"])
        heads = {n: _read_head(config, one) for n, one in values["heads"].items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"invalid description of a network's data: {error}") from error
    if isinstance(schema, GraphSchema):
        return build_graph_model(config, schema)
    encoder = build_model(config, schema, head=not heads)
    if not heads:
        return encoder
    if isinstance(head := heads.get(""), EdgeHead):
        return EdgeModel(encoder, head.decoder, head.etype)
    return MultitaskModel(encoder, heads)


def _schema(schema: Typed) -> dict[str, Any]:
    ends = {"target": schema.target, "others": schema.others} if isinstance(schema, Schema) else {}
    plain = {name: getattr(schema, name) for name in ("in_features", "out_features", "categories")}
    of_edges = {n: {etype_str(e): v for e, v in getattr(schema, n).items()} for n in _OF_EDGES}
    return {"etypes": [list(etype) for etype in schema.etypes], **ends, **plain, **of_edges}


def _read_schema(values: Mapping[str, Any]) -> Schema | GraphSchema:
    by_name = {etype_str((a, b, c)): (a, b, c) for a, b, c in values["etypes"]}
    of_edges = {n: {by_name[e]: v for e, v in values[n].items()} for n in _OF_EDGES}
    kind: Any = Schema if "target" in values else GraphSchema
    return TypeAdapter(kind).validate_python({**values, **of_edges})


def _head(head: Any) -> dict[str, Any]:
    """Describe a task's head, or the model of a single task on edges."""
    if isinstance(head, NodeHead):
        out = head.linear.out_features
        return {"ntype": head.ntype, "width": head.width, "out_features": out}
    return {"etype": list(head.etype), "decoder": head.decoder.arguments}


def _read_head(config: ModelConfig, values: Mapping[str, Any]) -> Head:
    if "ntype" in values:
        return NodeHead(**values, dropout=config.dropout)
    source, relation, target = values["etype"]
    decoder = make_decoder(config, **values["decoder"])
    return EdgeHead((source, relation, target), decoder, links=False)


def needs_degree(config: ModelConfig) -> bool:
    """Return True if the model reads degrees of the complete graph, even unsampled."""
    return config.kind in ("gcn", "lightgcn")


def needs_degree_sampled(
    config: ModelConfig, sampling: SamplingConfig, requested: Sequence[int] = ()
) -> bool:
    """Return True if sampled batches must carry degrees of the complete graph: also for sums over
    sampled neighbours, except with times, where the full neighbourhood differs for each seed.
    ``requested``: fanouts of a prediction."""
    sums = config.kind == "gin" or getattr(config, "aggregator", None) == "sum"
    hops = [
        hop.values() if isinstance(hop, dict) else (hop,) for hop in (*sampling.fanout, *requested)
    ]
    drawn = sampling.time is None and any(fanout >= 0 for hop in hops for fanout in hop)
    return needs_degree(config) or (sums and drawn)


def needs_relation(config: ModelConfig) -> bool:
    """Return True if blocks must carry the relations of edges."""
    return config.kind == "rgcn"


def _family(config: Any) -> Family:
    """Return the properties of a built-in model family."""
    kind, typed = config.kind, partial(TypedLayer, conv=partial(_conv, config))
    if kind == "gcn":
        return Family(typed, own=False, activation="relu", combine="gcn")
    if kind == "sage":
        return Family(typed, own=True, activation="relu", combine=config.aggregator)
    if kind in ("gat", "gatv2"):
        return Family(typed, own=False, activation="elu")
    if kind == "han":
        han = partial(HANLayer, conv=partial(_conv, config), attention=config.hidden)
        return Family(han, own=False, activation="elu")
    if kind == "gin":
        on_edges = config.edge_feature_names or config.edge_category_widths or config.time_width
        typed = partial(typed, inner=config.hidden, rest=partial(Rest, config.hidden, config.norm))
        return Family(typed, own=False, activation="relu", combine=None if on_edges else "sum")
    if kind == "lightgcn":
        light = partial(LightGCNLayer, layers=config.layers)
        return Family(light, own=False, activation="none")
    if kind == "hgt":
        hgt = partial(HGTLayer, hidden=config.hidden, heads=config.heads)
        return Family(hgt, own=True, activation="relu")
    options = {name: getattr(config, name) for name in ("regularizer", "bases", "mean_over")}
    return Family(partial(RGCNLayer, **options), own=True, activation="relu")


def _conv(config: Any, etype: EdgeType, spec: LayerSpec) -> nn.Module:
    """Build the convolution of an edge type."""
    width, out, edges = spec.in_features[etype[0]], spec.out_features, spec.edges.get(etype, 0)
    same_type = etype[0] == etype[2]
    if config.kind == "gcn":
        return GCNConv(width, out, same_type=same_type)
    if config.kind == "sage":
        return SAGEConv(width, out, edges=edges, reduce=config.aggregator)
    if config.kind == "gin":
        return GINConv(width, config.hidden, same_type=same_type, edges=edges)
    heads = config.out_heads if spec.last else config.heads
    return GATConv(
        width,
        spec.in_features.get(etype[2], 0),
        out if spec.last else config.hidden // heads,
        heads=heads,
        mean_heads=spec.last,
        attn_dropout=config.dropout if config.attn_dropout is None else config.attn_dropout,
        dynamic=config.kind == "gatv2",
        same_type=same_type,
        edges=edges,
    )
