"""Before the first step: the model is tried on a few samples, its blocks are timed, the first layout is planned.

In: a model, the loss and a few samples. Out: a `StartUp` with structure, costs and plans, or why there is none.
"""
