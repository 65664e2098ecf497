"""Tests of `hf_pipetransformer.engine`."""
