"""Tests of `hf_pipetransformer.freeze`."""
