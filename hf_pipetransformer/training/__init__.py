"""One call of `train()`, `evaluate()` or `predict()`: start, steps, evaluations, end.

In: what the door hands on. Out: Trainer's numbers, its log, and a whole model at the end.
"""
