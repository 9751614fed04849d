"""From the config's ``model`` section to a module."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from raygnn.config.model import (
    AttentionConfig,
    FamilyConfig,
    GinConfig,
    HgtConfig,
    ModelConfig,
    NoLayersConfig,
    RgcnConfig,
    SageConfig,
    UserModelConfig,
)
from raygnn.config.task import COMPLEX
from raygnn.errors import ConfigError
from raygnn.models.attention_layers import HANLayer, HGTLayer
from raygnn.models.convolutions import GATConv, GCNConv, GINConv, Rest, SAGEConv
from raygnn.models.decoders import make_decoder
from raygnn.models.graph_network import GraphNetwork, GraphSchema
from raygnn.models.heads import EdgeModel, LinkModel
from raygnn.models.network import Direct, Encoder, Network, Schema
from raygnn.models.rgcn import RGCNLayer
from raygnn.models.typed_layers import ConvFactory, Family, LayerSpec, TypedLayer
from raygnn.models.user import PygGraphModel, PygModel, UserGraphModel, UserModel
from raygnn.sampling.batch import EdgeType


def build_model(config: ModelConfig, schema: Schema) -> Encoder:
    """The network that the config names, for a task whose seeds are nodes.

    Raises:
        ConfigError: a user's class that cannot be imported or constructed.
    """
    if isinstance(config, NoLayersConfig):
        return Direct(schema)
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
    """The network that the config names, and a decoder, for a task whose seeds are edges.

    Args:
        schema: of the network, whose targets are the node types at the edges' ends.
        decoder: its kind; relations: how many there are, at least 1.
        out: classes or numbers; None for links.
        features: width of what the decoder reads of the edges themselves.

    Raises:
        ConfigError: see `build_model`; the ends are not of the same width, or there is nothing
            to train.
    """
    if isinstance(config, NoLayersConfig):
        widths = {schema.widths[t] for t in (etype[0], etype[2])}
        if len(widths) > 1:
            raise ConfigError(
                f"nodes of {etype[0]} and {etype[2]} have rows of {sorted(widths)} numbers, which "
                f"no decoder compares",
                where="model.kind",
                remedy="choose another model.kind, whose outputs are alike, or give both types "
                "rows of one width",
            )
        encoder: Encoder = Direct(schema, head=False)
        (width,) = widths
    else:
        encoder, width = build_model(config, schema), schema.out_features
    if decoder in COMPLEX and width % 2:
        raise ConfigError(
            f"{decoder} reads pairs of numbers, and nodes have {width}",
            where="model.decoder",
            remedy="make that width even, or choose another decoder",
        )
    head = make_decoder(config, decoder, width, relations, out or 1, features)
    model = (LinkModel if out is None else EdgeModel)(encoder, head, etype)
    if not any(True for _ in model.parameters()):
        raise ConfigError(
            f"model.kind {config.kind} with the decoder {decoder} has no weights",
            where="model.decoder",
            remedy="choose another decoder, or another model.kind",
        )
    return model


def build_graph_model(config: ModelConfig, schema: GraphSchema) -> nn.Module:
    """The network that the config names, for a task on whole graphs.

    It maps a `raygnn.sampling.batch.GraphBatch` to ``[B, out_features]``.

    Raises:
        ConfigError: a user's class that cannot be imported or constructed.
    """
    if isinstance(config, UserModelConfig):
        return (UserGraphModel if config.takes_dgl else PygGraphModel)(config, schema)
    assert isinstance(config, FamilyConfig)
    return GraphNetwork(config, FAMILIES[config.kind](config), schema)


def needs_degree(config: ModelConfig) -> bool:
    """Whether batches of nodes must carry the degrees of the whole graph."""
    return config.kind == "gcn"


def needs_relation(config: ModelConfig) -> bool:
    """Whether blocks must carry the relations of edges, where edges have any."""
    return config.kind == "rgcn"


def gcn(config: FamilyConfig) -> Family:
    """Kipf & Welling, "Semi-supervised classification with graph convolutional networks"."""

    def conv(etype: EdgeType, spec: LayerSpec) -> nn.Module:
        same = etype[0] == etype[2]
        return GCNConv(
            spec.in_features[etype[0]],
            spec.out_features,
            same_type=same,
            kernels=config.kernels,
        )

    return Family(partial(TypedLayer, conv=conv), own=False, activation="relu", combine="gcn")


def sage(config: SageConfig) -> Family:
    """Hamilton, Ying & Leskovec, "Inductive representation learning on large graphs"."""

    def conv(etype: EdgeType, spec: LayerSpec) -> nn.Module:
        return SAGEConv(
            spec.in_features[etype[0]],
            spec.out_features,
            edges=spec.edges.get(etype, 0),
            reduce=config.aggregator,
            kernels=config.kernels,
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
            kernels=config.kernels,
            edges=spec.edges.get(etype, 0),
        )

    return conv


def gat(config: AttentionConfig, *, dynamic: bool) -> Family:
    """Veličković et al., "Graph attention networks"; ``dynamic``: Brody, Alon & Yahav, "How
    attentive are graph attention networks?"."""
    layer = partial(TypedLayer, conv=_gat_conv(config, dynamic=dynamic))
    return Family(layer, own=False, activation="elu")


def gin(config: GinConfig) -> Family:
    """Xu, Hu, Leskovec & Jegelka, "How powerful are graph neural networks?"; where edges have
    features Hu et al., "Strategies for pre-training graph neural networks"."""
    on_edges = config.edge_feature_names or config.edge_category_widths or config.time_width

    def conv(etype: EdgeType, spec: LayerSpec) -> nn.Module:
        return GINConv(
            spec.in_features[etype[0]],
            config.hidden,
            same_type=etype[0] == etype[2],
            kernels=config.kernels,
            edges=spec.edges.get(etype, 0),
        )

    layer = partial(
        TypedLayer,
        conv=conv,
        inner=config.hidden,
        rest=lambda width: Rest(config.hidden, width, config.norm),
    )
    return Family(layer, own=False, activation="relu", combine=None if on_edges else "sum")


def rgcn(config: RgcnConfig) -> Family:
    """Schlichtkrull et al., "Modeling relational data with graph convolutional networks"."""
    layer = partial(
        RGCNLayer,
        regularizer=config.regularizer,
        bases=config.bases,
        mean_over=config.mean_over,
        kernels=config.kernels,
    )
    return Family(layer, own=True, activation="relu")


def hgt(config: HgtConfig) -> Family:
    """Hu, Dong, Wang & Sun, "Heterogeneous graph transformer"."""
    layer = partial(HGTLayer, hidden=config.hidden, heads=config.heads, kernels=config.kernels)
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
    "rgcn": rgcn,
    "hgt": hgt,
    "han": han,
}
