"""The outcomes of runs, as in tests/distributed."""

from tests.distributed.conftest import ours, plain  # noqa: F401
