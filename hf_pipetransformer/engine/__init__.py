"""One rank's forwards and backwards of a step, action by action, and the weights and sums that belong to them.

In: an action list, micro-batches and a stage's part of the model. Out: gradients, losses and outputs.
"""
