"""Tests of `hf_pipetransformer.trainer`."""
