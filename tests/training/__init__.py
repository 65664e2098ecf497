"""Tests of `hf_pipetransformer.training`."""
