"""Whether all ranks run the same script with the same arguments and data."""

from __future__ import annotations

from typing import Any

from hf_pipetransformer.autodp.topology import Topology


def check_agreement(topology: Topology, what: str, values: dict[str, Any]) -> None:
    """Compare `values` over all ranks before anything depends on them.

    Raises:
        ValueError: on every rank, names the rank that differs from rank 0, and both values.
    """
    answers = topology.gather(values)
    for rank, answer in enumerate(answers):
        for key in sorted({*answer, *answers[0]}):
            found, expected = answer.get(key), answers[0].get(key)
            if found != expected:
                raise ValueError(
                    f"The {what} differ between ranks: {key} is {found} on rank {rank} and {expected} on rank 0. "
                    "Every process must run the same script with the same arguments and data."
                )
