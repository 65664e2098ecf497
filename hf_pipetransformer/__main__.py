"""`python -m hf_pipetransformer`: the command line."""

from hf_pipetransformer.cli import main


main()
