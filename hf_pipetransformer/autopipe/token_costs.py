"""Seconds of a slice of tokens, as a formula in its length, its context and its sequences. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass
from typing import Any

import numpy as np

from hf_pipetransformer.autopipe.slice_lengths import Times


@dataclass(frozen=True)
class SliceTime:
    """One measurement.

    Args:
        sequences: of the batch slice.
        context: tokens of each sequence before the slice.
        tokens: of each sequence in the slice.
        seconds: of forward and backward.
    """

    sequences: int
    context: int
    tokens: int
    seconds: float


@dataclass(frozen=True)
class TokenCosts:
    """`launch + sequences (sequence + context L + token x + attention (2 L x + x^2))` seconds, all stages together.

    TeraPipe (Li et al., ICML 2021), section 3.3, takes `a0 + a1 x + a2 L + a3 x L` for what L tokens of context add;
    this form knows that a slice attends to itself too.

    Args:
        launch: of any slice.
        sequence: of each sequence.
        context: of a token of context.
        token: of a token of the slice.
        attention: of a pair of tokens.
        length: tokens of the sequences that were measured.
        error: largest relative difference to what was measured.
    """

    launch: float
    sequence: float
    context: float
    token: float
    attention: float
    length: int
    error: float = 0.0

    def seconds(self, sequences: float, context: float, tokens: float) -> float:
        """Of forward and backward of a slice."""
        pairs = 2 * context * tokens + tokens**2
        each = self.sequence + self.context * context + self.token * tokens + self.attention * pairs
        return self.launch + sequences * each

    def shares(self, sequences: float, lengths: Sequence[int]) -> list[float]:
        """What each slice of whole sequences takes of their time."""
        whole = self.seconds(sequences, 0, sum(lengths))
        starts = [sum(lengths[:number]) for number in range(len(lengths))]
        return [self.seconds(sequences, start, own) / whole for start, own in zip(starts, lengths, strict=True)]

    def times(self, sequences: float, length: int, granules: int, share: float, hop: float = 0.0) -> Times:
        """As `plan_slices` takes them, `(1, granules, granules)`, for batch slices of so many sequences.

        Args:
            sequences: of a batch slice.
            length: tokens of a sequence.
            granules: parts that slices are made of.
            share: of the model's time that a stage takes.
            hop: seconds that a slice costs a stage beside its computation.
        """
        sizes = length / granules
        tokens, context = np.meshgrid(np.arange(1, granules + 1) * sizes, np.arange(granules) * sizes, indexing="ij")
        pairs = 2 * context * tokens + tokens**2
        each = self.sequence + self.context * context + self.token * tokens + self.attention * pairs
        times: Times = (hop + share * (self.launch + sequences * each))[None]
        return times

    def as_event(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


def fit_token_costs(times: Sequence[SliceTime]) -> TokenCosts:
    """The costs that come nearest to what was measured, none below zero; relative errors count.

    Raises:
        ValueError: nothing was measured.
    """
    if not times:
        raise ValueError("Costs of slices need measurements, found none.")
    sequences, contexts, tokens, seconds = np.array([astuple(each) for each in times], np.float64).T
    columns = np.stack(
        [
            np.ones_like(seconds),
            sequences,
            sequences * contexts,
            sequences * tokens,
            sequences * (2 * contexts * tokens + tokens**2),
        ],
        axis=1,
    )
    rates = _non_negative(columns / seconds[:, None])
    found = columns @ rates
    launch, sequence, context, token, attention = rates.tolist()
    error = float(np.max(np.abs(found / seconds - 1)))
    length = int(np.max(contexts + tokens))
    return TokenCosts(launch, sequence, context, token, attention, length, error)


def _non_negative(columns: np.ndarray) -> np.ndarray:
    """Least squares for ones, without negative coefficients: the best over all sets of columns; there are few."""
    num_columns, best, found = columns.shape[1], np.inf, np.zeros(columns.shape[1])
    for chosen in range(1, 2**num_columns):
        used = [column for column in range(num_columns) if chosen >> column & 1]
        rates, *_ = np.linalg.lstsq(columns[:, used], np.ones(len(columns)), rcond=None)
        rest = float(np.sum((columns[:, used] @ rates - 1) ** 2))
        if (rates >= 0).all() and rest < best - 1e-12:
            best, found = rest, np.zeros(num_columns)
            found[used] = rates
    return found
