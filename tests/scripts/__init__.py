"""Tests of what lies in `scripts/`."""
