"""Tests of `hf_pipetransformer.startup`."""
