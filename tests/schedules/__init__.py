"""Tests of `hf_pipetransformer.schedules`."""
