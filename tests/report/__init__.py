"""Tests of `hf_pipetransformer.report`."""
