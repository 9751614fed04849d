"""Models built from the config's ``model`` section, and restored from their descriptions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from torch import nn

from raygnn.config.model import (
    AttentionConfig,
    FamilyConfig,
    GinConfig,
    HgtConfig,
    LightGcnConfig,
    ModelConfig,
    NoLayersConfig,
    RgcnConfig,
    SageConfig,
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
from raygnn.models.typed_layers import (
    ConvFactory,
    Family,
    LayerSpec,
    LightGCNLayer,
    TypedLayer,
    key,
)
from raygnn.models.user import PygGraphModel, PygModel, UserGraphModel, UserModel
from raygnn.sampling.batch import EdgeType, etype_str

T = TypeVar("T")


def build_model(config: ModelConfig, schema: Schema) -> Encoder:
    """Build the network of a task whose seeds are nodes.

    Raises:
        ConfigError: a user's class cannot be imported or constructed, or rows that lightgcn adds
            have different widths.
    """
    if isinstance(config, NoLayersConfig):
        return Direct(schema)
    if isinstance(config, LightGcnConfig):
        _check_widths(schema.widths, "lightgcn adds up")
        plain = FamilyConfig(
            kind=config.kind, layers=config.layers, hidden=config.hidden, dropout=0.0
        )
        return Network(plain, lightgcn(plain), schema)
    if isinstance(config, UserModelConfig):
        return (UserModel if config.takes_dgl else PygModel)(config, schema)
    return Network(config, FAMILIES[config.kind](config), schema)


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
    if isinstance(config, NoLayersConfig):
        width = _check_widths({t: schema.widths[t] for t in (etype[0], etype[2])}, "decoders need")
        encoder: Encoder = Direct(schema, head=False)
    else:
        encoder, width = build_model(config, schema), schema.out_features
    if decoder in COMPLEX and width % 2:
        raise ConfigError(
            f"{decoder} needs rows of even width, and nodes have {width} numbers",
            where="model.decoder",
            remedy="make that width even, or choose another decoder",
        )
    head = make_decoder(config, decoder, width, relations, out or 1, features)
    if config.embedding is None and not any(
        True for module in (encoder, head) for _ in module.parameters()
    ):
        raise ConfigError(
            f"model.kind {config.kind} with the decoder {decoder} has no weights",
            where="model.decoder",
            remedy="set model.embedding, or choose another decoder or model.kind",
        )
    return (LinkModel if out is None else EdgeModel)(encoder, head, etype)


def _check_widths(widths: Mapping[str, int], reader: str) -> int:
    """Return the only width of rows.

    Raises:
        ConfigError: there are several.
    """
    if len(set(widths.values())) > 1:
        raise ConfigError(
            f"nodes of {' and '.join(widths)} have rows of {sorted(set(widths.values()))} numbers, "
            f"and {reader} rows of equal widths",
            where="model.kind",
            remedy="choose another model.kind, or give the types rows of one width "
            "(model.embedding, model.features)",
        )
    return next(iter(widths.values()))


def build_graph_model(config: ModelConfig, schema: GraphSchema) -> nn.Module:
    """Build the network of a graph-level task, which maps a `GraphBatch` to ``[B, out_features]``.

    Raises:
        ConfigError: a user's class cannot be imported or constructed.
    """
    if isinstance(config, UserModelConfig):
        return (UserGraphModel if config.takes_dgl else PygGraphModel)(config, schema)
    assert isinstance(config, FamilyConfig)
    return GraphNetwork(config, FAMILIES[config.kind](config), schema)


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
    """Build the network that `describe` was given, with initial weights.

    Raises:
        ValueError: the values are invalid.
    """
    try:
        schema = _read_schema(values["schema"])
        heads = {n: _read_head(config, one) for n, one in values["heads"].items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"invalid description of a network's data: {error}") from error
    if isinstance(schema, GraphSchema):
        return build_graph_model(config, schema)
    if not heads:
        return build_model(config, schema)
    if isinstance(config, NoLayersConfig):
        encoder: Encoder = Direct(schema, head=False)
    else:
        encoder = build_model(config, schema)
    if isinstance(head := heads.get(""), EdgeHead):
        return EdgeModel(encoder, head.decoder, head.etype)
    return MultitaskModel(encoder, heads)


def _schema(schema: Typed) -> dict[str, Any]:
    ends = {"target": schema.target, "others": schema.others} if isinstance(schema, Schema) else {}
    return {
        "in_features": schema.in_features,
        "etypes": [list(etype) for etype in schema.etypes],
        **ends,
        "out_features": schema.out_features,
        "categories": schema.categories,
        "relations": _named(schema.relations),
        "edge_features": _named(schema.edge_features),
        "edge_categories": _named(schema.edge_categories),
        "edge_times": _named(schema.edge_times),
    }


def _read_schema(values: Mapping[str, Any]) -> Schema | GraphSchema:
    etypes = [(str(a), str(b), str(c)) for a, b, c in values["etypes"]]
    by_name: dict[str, EdgeType] = {etype_str(e): e for e in etypes}
    known: dict[str, Any] = {
        "in_features": {str(t): int(width) for t, width in values["in_features"].items()},
        "etypes": etypes,
        "out_features": int(values["out_features"]),
        "categories": {str(t): _categories(named) for t, named in values["categories"].items()},
        "relations": {by_name[e]: int(num) for e, num in values["relations"].items()},
        "edge_features": {by_name[e]: int(width) for e, width in values["edge_features"].items()},
        "edge_categories": {
            by_name[e]: _categories(named) for e, named in values["edge_categories"].items()
        },
        "edge_times": {by_name[e]: int(width) for e, width in values["edge_times"].items()},
    }
    if "target" not in values:
        return GraphSchema(**known)
    return Schema(**known, target=str(values["target"]), others=tuple(values.get("others", ())))


def _head(head: Any) -> dict[str, Any]:
    """Describe a task's head, or the model of a single task on edges."""
    if isinstance(head, NodeHead):
        out = head.linear.out_features
        return {"ntype": head.ntype, "width": head.width, "out_features": out}
    return {"etype": list(head.etype), "decoder": head.decoder.arguments}


def _read_head(config: ModelConfig, values: Mapping[str, Any]) -> Head:
    if "ntype" in values:
        given = str(values["ntype"]), int(values["width"]), int(values["out_features"])
        return NodeHead(*given, config.dropout)
    source, relation, target = map(str, values["etype"])
    decoder = make_decoder(config, **values["decoder"])
    return EdgeHead((source, relation, target), decoder, links=False)


def _categories(named: Any) -> dict[str, tuple[int, int]]:
    return {str(name): (int(num), int(width)) for name, (num, width) in named.items()}


def _named(by_etype: dict[EdgeType, T]) -> dict[str, T]:
    return {etype_str(etype): value for etype, value in by_etype.items()}


def needs_degree(config: ModelConfig) -> bool:
    """Return True if the model reads degrees of the complete graph, even unsampled."""
    return config.kind in ("gcn", "lightgcn")


def needs_degree_sampled(
    config: ModelConfig, sampling: SamplingConfig, requested: Sequence[int] = ()
) -> bool:
    """Return True if sampled batches must carry degrees of the complete graph: also for sums over
    sampled neighbours, except with times, where the full neighbourhood differs for each seed.

    Args:
        requested: fanouts of a prediction.
    """
    sums = config.kind == "gin" or getattr(config, "aggregator", None) == "sum"
    hops = [
        hop.values() if isinstance(hop, dict) else (hop,) for hop in (*sampling.fanout, *requested)
    ]
    drawn = sampling.time is None and any(fanout >= 0 for hop in hops for fanout in hop)
    return needs_degree(config) or (sums and drawn)


def needs_relation(config: ModelConfig) -> bool:
    """Return True if blocks must carry the relations of edges."""
    return config.kind == "rgcn"


def gcn(config: FamilyConfig) -> Family:
    """Kipf & Welling, "Semi-supervised classification with graph convolutional networks"."""

    def conv(etype: EdgeType, spec: LayerSpec) -> nn.Module:
        widths, same = (spec.in_features[etype[0]], spec.out_features), etype[0] == etype[2]
        return GCNConv(*widths, same_type=same)

    return Family(partial(TypedLayer, conv=conv), own=False, activation="relu", combine="gcn")


def sage(config: SageConfig) -> Family:
    """Hamilton, Ying & Leskovec, "Inductive representation learning on large graphs"."""

    def conv(etype: EdgeType, spec: LayerSpec) -> nn.Module:
        return SAGEConv(
            spec.in_features[etype[0]],
            spec.out_features,
            edges=spec.edges.get(etype, 0),
            reduce=config.aggregator,
        )

    layer = partial(TypedLayer, conv=conv)
    return Family(layer, own=True, activation="relu", combine=config.aggregator)


def _gat_conv(config: AttentionConfig, *, dynamic: bool) -> ConvFactory:
    def conv(etype: EdgeType, spec: LayerSpec) -> nn.Module:
        heads = config.out_heads if spec.last else config.heads
        return GATConv(
            spec.in_features[etype[0]],
            spec.in_features.get(etype[2], 0),
            spec.out_features if spec.last else config.hidden // heads,
            heads=heads,
            mean_heads=spec.last,
            attn_dropout=config.dropout if config.attn_dropout is None else config.attn_dropout,
            dynamic=dynamic,
            same_type=etype[0] == etype[2],
            edges=spec.edges.get(etype, 0),
        )

    return conv


def gat(config: AttentionConfig, *, dynamic: bool) -> Family:
    """Veličković et al., "Graph attention networks"; ``dynamic``: Brody, Alon & Yahav, "How
    attentive are graph attention networks?"."""
    layer = partial(TypedLayer, conv=_gat_conv(config, dynamic=dynamic))
    return Family(layer, own=False, activation="elu")


def gin(config: GinConfig) -> Family:
    """Xu, Hu, Leskovec & Jegelka, "How powerful are graph neural networks?"; with edge features Hu
    et al., "Strategies for pre-training graph neural networks"."""
    on_edges = config.edge_feature_names or config.edge_category_widths or config.time_width

    def conv(etype: EdgeType, spec: LayerSpec) -> nn.Module:
        return GINConv(
            spec.in_features[etype[0]],
            config.hidden,
            same_type=etype[0] == etype[2],
            edges=spec.edges.get(etype, 0),
        )

    layer = partial(
        TypedLayer,
        conv=conv,
        inner=config.hidden,
        rest=lambda width: Rest(config.hidden, width, config.norm),
    )
    return Family(layer, own=False, activation="relu", combine=None if on_edges else "sum")


def lightgcn(config: FamilyConfig) -> Family:
    """He, Deng, Wang, Li, Zhang & Wang, "LightGCN: simplifying and powering graph convolution
    network for recommendation"."""
    layer = partial(LightGCNLayer, layers=config.layers)
    return Family(layer, own=False, activation="none")


def rgcn(config: RgcnConfig) -> Family:
    """Schlichtkrull et al., "Modeling relational data with graph convolutional networks"."""
    layer = partial(
        RGCNLayer, regularizer=config.regularizer, bases=config.bases, mean_over=config.mean_over
    )
    return Family(layer, own=True, activation="relu")


def hgt(config: HgtConfig) -> Family:
    """Hu, Dong, Wang & Sun, "Heterogeneous graph transformer"."""
    layer = partial(HGTLayer, hidden=config.hidden, heads=config.heads)
    return Family(layer, own=True, activation="relu")


def han(config: AttentionConfig) -> Family:
    """After Wang et al., "Heterogeneous graph attention network"; see `HANLayer`."""
    layer = partial(HANLayer, conv=_gat_conv(config, dynamic=False), attention=config.hidden)
    return Family(layer, own=False, activation="elu")


FAMILIES: dict[str, Callable[[Any], Family]] = {
    "gcn": gcn,
    "sage": sage,
    "gat": partial(gat, dynamic=False),
    "gatv2": partial(gat, dynamic=True),
    "gin": gin,
    "lightgcn": lightgcn,
    "rgcn": rgcn,
    "hgt": hgt,
    "han": han,
}
