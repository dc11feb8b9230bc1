"""Turns the sampling parameters of a step's sequences into columns, one entry per row.

A sequence's parameters never change, so its row of numbers is made once. Columns are made when
other sequences are sampled than in the step before, and used as long as the batch stays the same.
It knows neither logits nor the tokens that were sampled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
import torch

from pdserve.engine_core.structured_output import uses_structured_output
from pdserve_engines.torch.models.upload import upload
from pdserve_engines.torch.sampling.logprobs import LogprobWishes
from pdserve_engines.torch.sampling.noise import uniforms

if TYPE_CHECKING:
    from collections.abc import Iterable
    from collections.abc import Sequence as Seq

    from pdserve.engine_core.scheduler.sequence import Sequence
    from pdserve.ids import SequenceKey
    from pdserve.messages.request import SamplingParams

__all__ = ["FlatIds", "RowFilter", "RowParams", "RowParamsCache", "is_penalised"]

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_TEMPERATURE: Final = 0
_MIN_P: Final = 1
_TOP_K: Final = 2
_TOP_P: Final = 3
_REPETITION: Final = 4
_FREQUENCY: Final = 5
_PRESENCE: Final = 6
_MIN_TOKENS: Final = 7
_PROMPT_LEN: Final = 8
_PROMPT_INDEX: Final = 9
_CHOICE: Final = 10
_COLUMNS: Final = 11

_COLDEST: Final = torch.finfo(torch.float32).tiny
"""Below the smallest normal number a quotient by the temperature would be 0 / 0; there it has
reached its limit."""


@dataclass(frozen=True, slots=True)
class _Row:
    """One sequence's parameters as numbers."""

    numbers: tuple[float, ...]
    seed: int
    simple: bool
    """True if the token is the likeliest one, unless an end is masked before `min_tokens`."""
    ends: tuple[int, ...]
    """Tokens that are masked before `min_tokens`."""


@dataclass(frozen=True, slots=True)
class FlatIds:
    """Tokens of some rows, one entry each."""

    rows: torch.Tensor
    """`[k]` int64."""
    ids: torch.Tensor
    """`[k]` int64."""
    values: torch.Tensor
    """`[k]` float32; empty if there is nothing to say of them."""


@dataclass(frozen=True, slots=True)
class RowFilter:
    """A filter's parameter in the rows that have one."""

    rows: torch.Tensor | None
    """`[m]` int64; None: all rows."""
    column: torch.Tensor
    """`[m, 1]`."""
    most: int
    """The largest value, if they are integers."""


class RowParams:
    """The parameters of one batch, which hold as long as the batch is the same. Tensors are made
    when they are first asked for, for logits of one device and width."""

    def __init__(self, sequences: Seq[Sequence], rows: Seq[_Row]) -> None:
        self.sequences = list(sequences)
        self.params = [sequence.request.sampling for sequence in sequences]
        self._ends = [row.ends for row in rows]
        self._numbers = np.array([row.numbers for row in rows], np.float64).reshape(-1, _COLUMNS)
        self._seeds = np.array([row.seed for row in rows], np.uint64)
        self._prompt_lens = self._column(_PROMPT_LEN)
        self._min_tokens = self._column(_MIN_TOKENS)
        self._last_min = int(self._min_tokens.max(initial=0))
        self.simple = all(row.simple for row in rows)
        """True if every row is `simple`."""
        self.logprobs = [row for row, each in enumerate(self.params) if each.logprobs is not None]
        """Rows that want logprobs."""
        self.drawing = np.flatnonzero(self._numbers[:, _TEMPERATURE] > 0)
        """Rows whose token is drawn."""
        self.penalised = np.flatnonzero(
            (self._numbers[:, _REPETITION] != 1)
            | (self._numbers[:, _FREQUENCY] != 0)
            | (self._numbers[:, _PRESENCE] != 0)
        )
        self.banned = any(each.allowed_token_ids or each.bad_words for each in self.params)
        """True if a request has `allowed_token_ids` or `bad_words`."""
        self.guided = any(map(uses_structured_output, self.params))
        """True if a row has a grammar or a reasoning budget."""
        self.biased = any(each.logit_bias for each in self.params)
        """True if a row has `logit_bias`."""
        self._bias: FlatIds | None = None
        self._draws: Draws | None = None
        self._wishes: LogprobWishes | None = None

    def _column(self, index: int) -> Ints:
        return self._numbers[:, index].astype(np.int64)

    def num_outputs(self) -> Ints:
        """`[n]` output tokens of each row now."""
        lengths = [len(sequence.tokens) for sequence in self.sequences]
        found: Ints = np.array(lengths, np.int64) - self._prompt_lens
        return found

    def before_min(self, num_outputs: Ints) -> Ints:
        """Rows that have not reached their `min_tokens`."""
        if not self._last_min:
            return np.zeros(0, np.int64)
        return np.flatnonzero(num_outputs < self._min_tokens)

    def ends(self, rows: Iterable[int], device: torch.device) -> FlatIds:
        """The ends of these rows."""
        return _flat([(row, self._ends[row], ()) for row in rows], device)

    def penalties(self, device: torch.device) -> torch.Tensor:
        """`[3, m, 1]` factors of repetition, frequency and presence of the penalised rows."""
        found = self._numbers[self.penalised, _REPETITION : _PRESENCE + 1]
        return upload(found.T.astype(np.float32)[..., None].copy(), device)

    def bias(self, device: torch.device) -> FlatIds:
        """What is added to the logits of single tokens."""
        if self._bias is None:
            entries = [
                (row, tuple(param.logit_bias), tuple(param.logit_bias.values()))
                for row, param in enumerate(self.params)
            ]
            self._bias = _flat(entries, device)
        return self._bias

    def draws(self, logits: torch.Tensor) -> Draws:
        """What the drawn rows need."""
        if self._draws is None:
            numbers, seeds = self._numbers[self.drawing], self._seeds[self.drawing]
            self._draws = Draws(numbers, seeds, logits.device, logits.shape[-1])
        return self._draws

    def wishes(self, device: torch.device) -> LogprobWishes:
        """What the rows in `logprobs` want to know."""
        if self._wishes is None:
            wanted = [self.params[row] for row in self.logprobs]
            self._wishes = LogprobWishes(
                [each.logprobs or 0 for each in wanted],
                [each.logprob_token_ids for each in wanted],
                device,
                None if len(wanted) == len(self.params) else self.logprobs,
            )
        return self._wishes


def _flat(
    entries: Iterable[tuple[int, tuple[int, ...], tuple[float, ...]]], device: torch.device
) -> FlatIds:
    rows: list[int] = []
    ids: list[int] = []
    values: list[float] = []
    for row, tokens, numbers in entries:
        rows += [row] * len(tokens)
        ids += tokens
        values += numbers
    places = upload(np.array((rows, ids), np.int64), device)
    return FlatIds(places[0], places[1], upload(np.array(values, np.float32), device))


class Draws:
    """The parameters of the rows whose token is drawn, in their order."""

    def __init__(
        self, numbers: Floats, seeds: npt.NDArray[np.uint64], device: torch.device, vocab: int
    ) -> None:
        self._seeds = seeds
        self._choices = numbers[:, _CHOICE].astype(np.uint64)
        self._prompt_indices = numbers[:, _PROMPT_INDEX].astype(np.uint64)
        temperatures = np.maximum(numbers[:, _TEMPERATURE], _COLDEST).astype(np.float32)
        self.temperatures = upload(temperatures[:, None], device)
        """`[d, 1]`."""
        self.filters = RowFilters(
            numbers[:, _MIN_P], numbers[:, _TOP_K], numbers[:, _TOP_P], device, vocab
        )

    def uniforms(self, positions: Ints) -> Floats:
        """One number in [0, 1) for each row, which draws its output token `positions[i]`."""
        return uniforms(self._seeds, self._prompt_indices, self._choices, positions)


class RowFilters:
    """min_p, top_k and top_p of the rows that have them; None: no row does."""

    def __init__(
        self, min_p: Floats, top_k: Floats, top_p: Floats, device: torch.device, vocab: int
    ) -> None:
        self.min_p = _filter(min_p, min_p > 0, np.float32, device)
        self.top_k = _filter(top_k, (top_k > 0) & (top_k < vocab), np.int64, device)
        self.top_p = _filter(top_p, top_p < 1, np.float32, device)

    @classmethod
    def of(cls, params: Seq[SamplingParams], device: torch.device, vocab: int) -> RowFilters:
        """The filters of these parameters, one row each."""
        columns = np.array([(each.min_p, each.top_k, each.top_p) for each in params]).T
        return cls(columns[0], columns[1], columns[2], device, vocab)


def _filter(
    values: Floats, has: npt.NDArray[np.bool_], dtype: type, device: torch.device
) -> RowFilter | None:
    if not has.any():
        return None
    chosen: npt.NDArray[Any] = values[has].astype(dtype)[:, None]
    rows = None if has.all() else upload(np.flatnonzero(has), device)
    return RowFilter(rows, upload(chosen, device), int(chosen.max()))


class RowParamsCache:
    """Keeps the rows of sequences until `forget`, and the columns of the last batch."""

    def __init__(self) -> None:
        self._rows: dict[SequenceKey, _Row] = {}
        self._last: RowParams | None = None
        self._parts: tuple[RowParams, list[RowParams]] | None = None
        """A batch, and its rows as batches."""

    def of(self, sequences: list[Sequence]) -> RowParams:
        """The columns of this batch."""
        last = self._last
        if last is None or last.sequences != sequences:
            rows = [self._row(sequence) for sequence in sequences]
            last = self._last = RowParams(sequences, rows)
        return last

    def each(self, batch: RowParams) -> list[RowParams]:
        """The columns of every row as a batch of its own."""
        if self._parts is None or self._parts[0] is not batch:
            parts = [RowParams([one], [self._row(one)]) for one in batch.sequences]
            self._parts = (batch, parts)
        return self._parts[1]

    def forget(self, key: SequenceKey) -> None:
        """Drop the row of a sequence; an unknown one is ignored."""
        if self._rows.pop(key, None) is not None:
            self._last = self._parts = None

    def _row(self, sequence: Sequence) -> _Row:
        row = self._rows.get(sequence.key)
        if row is None:
            row = self._rows[sequence.key] = _row(sequence)
        return row


def _row(sequence: Sequence) -> _Row:
    param = sequence.request.sampling
    ends = param.stop_token_ids if param.ignore_eos else param.stop_token_ids + param.eos_token_ids
    numbers = (
        param.temperature,
        param.min_p,
        param.top_k,
        param.top_p,
        param.repetition_penalty,
        param.frequency_penalty,
        param.presence_penalty,
        param.min_tokens,
        sequence.prompt_len,
        sequence.request.prompt_index,
        sequence.choice,
    )
    simple = (
        param.temperature == 0
        and param.logprobs is None
        and not param.logit_bias
        and not is_penalised(param)
        and not param.steered
    )
    return _Row(numbers, param.seed & 0xFFFFFFFFFFFFFFFF, simple, ends)


def is_penalised(param: SamplingParams) -> bool:
    """Return whether tokens lose or gain by having been used."""
    return (
        param.repetition_penalty != 1.0
        or param.frequency_penalty != 0.0
        or param.presence_penalty != 0.0
    )
