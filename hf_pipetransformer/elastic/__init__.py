"""Decisions between two steps (freeze, number of stages, what is stored) and the moves of weights that follow.

In: a policy's answer and measured times. Out: another layout, with weights and optimizer states in their places.
"""
