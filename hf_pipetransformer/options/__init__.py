"""The arguments of a run: their types, their combinations, and refusals that need nothing but them.

In: what a script, a command line or a launcher's file says. Out: `PipeTransformerArguments`, or one sentence.
"""
