"""Tests of `hf_pipetransformer.data`."""
