"""Command line `hf-pipetransformer`, and the checks of the machines that a run is meant for.

In: options of a command. Out: what it prints or writes. The self-test uses the package by its public names.
"""

from hf_pipetransformer.cli.commands import main


__all__ = ["main"]
