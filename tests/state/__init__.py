"""Tests of `hf_pipetransformer.state`."""
