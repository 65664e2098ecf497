"""Tests of `hf_pipetransformer.pipe`."""
