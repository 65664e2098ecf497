"""Tests of `hf_pipetransformer.comm`."""
