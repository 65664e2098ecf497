"""Cuts of a model, and the view of it that has one stage's modules.

In: a transformers model, with adapters or quantized. Out: embeddings, layers and head, in the order of the forward.
"""
