"""The door: the mixin, and each override of a method of Trainer with its reason.

In: calls of Trainer and of scripts. Out: calls of the room `training`, which does the work.
"""
