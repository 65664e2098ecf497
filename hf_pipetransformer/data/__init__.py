"""Samples on their way to a batch: orders, shares of replicas, loaders, random numbers.

In: the script's data set, sampler and collator. Out: the batches that one process would read, cut for each rank.
"""
