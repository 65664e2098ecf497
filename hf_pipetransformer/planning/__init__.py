"""Costs of a run that is not run: memory, times of schedules, cuts, layouts, storing. Pure.

In: sizes and seconds of blocks, of links and of disks. Out: layouts with their predicted steps and bytes.
"""
