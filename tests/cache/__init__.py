"""Tests of `hf_pipetransformer.cache`."""
