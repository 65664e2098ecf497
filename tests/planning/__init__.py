"""Tests of `hf_pipetransformer.planning`."""
