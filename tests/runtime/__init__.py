"""Tests of `hf_pipetransformer.runtime`."""
