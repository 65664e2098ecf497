"""Tests of `hf_pipetransformer.elastic`."""
