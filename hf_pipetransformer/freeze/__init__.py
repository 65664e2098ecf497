"""Policies: when layers freeze from the bottom, and how many. Pure.

In: gradients' norms and other signals at a decision. Out: the number of frozen layers.
"""
