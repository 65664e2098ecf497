"""Tests of `hf_pipetransformer.options`."""
