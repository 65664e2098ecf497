"""Tests of `hf_pipetransformer.splitters`."""
