"""Everything that transformers' Trainer and TRL's trainers do not promise.

In: a trainer, a model or their options. Out: what depends on names and behavior that their next release may change.
"""
