"""A model as a chain of units: the embeddings (unit 0), two sublayers for every encoder layer, the head. Pure."""

from __future__ import annotations


EMBEDDINGS = 0


def num_units(num_layers: int) -> int:
    """Embeddings, two sublayers a layer, head."""
    return 2 * num_layers + 2


def attention_of(layer: int) -> int:
    """The attention sublayer of a layer: the unit that follows the first `layer` layers."""
    return 2 * layer + 1


def mlp_of(layer: int) -> int:
    """The MLP sublayer of a layer."""
    return 2 * layer + 2


def head_of(num_layers: int) -> int:
    """The last unit: it follows all layers."""
    return attention_of(num_layers)


def first_above(num_layers: int) -> int:
    """The first unit above the embeddings and `num_layers` layers; the embeddings themselves above no layer."""
    return attention_of(num_layers) if num_layers else EMBEDDINGS


def block_of(unit: int) -> int:
    """0 for the embeddings, `layer + 1` for both sublayers of a layer, `num_layers + 1` for the head."""
    return (unit + 1) // 2
