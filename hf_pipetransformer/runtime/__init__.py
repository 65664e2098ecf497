"""A training's pipeline on this rank: its stage of the model, the execution of batches, and outputs.

In: a layout, the model and the batches of a step. Out: losses and outputs on the ranks where Trainer wants them.
"""
