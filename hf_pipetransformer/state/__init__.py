"""Checkpoints: what is saved of a run, how it is found whole again, and on which other layouts it goes on.

In: a run between two steps, or a folder. Out: files without pickles, or a run that goes on where it was.
"""
