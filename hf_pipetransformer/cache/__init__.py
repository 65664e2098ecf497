"""Stored activations of a frozen prefix of layers: files, records, hashes, and whether storing pays.

In: frozen weights, samples by their index, and their activations. Out: batches whose lower layers need not run.
"""
