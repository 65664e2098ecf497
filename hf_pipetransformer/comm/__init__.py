"""Communication between ranks: process groups, topology, transfers of tensors and values, and their failures.

In: tensors, or values made of plain types. Out: the same on other ranks, or an error that names rank and wait.
"""
