"""Samples tokens from logits, for all sampling rows of a step at once.

The order is fixed by `SamplingParams`: raw logprobs; bias and the `min_tokens` mask; repetition,
frequency and presence penalties; greedy, or temperature, min_p, top_k, top_p and one draw. The draw
inverts the cumulative distribution in token-id order at one uniform number, which `noise` derives
from the request alone. So a token depends only on its own row of the batch. Tokens that tie at the
border of top_k or top_p all stay.

Only requested work is done; a purely greedy step (`is_plain`) does not come here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from pdserve.messages.request import SamplingParams, TokenLogprob
from pdserve_engines.torch.sampling.grammar_masks import GrammarMasks
from pdserve_engines.torch.sampling.noise import uniforms
from pdserve_engines.torch.sampling.token_bans import TokenBans

if TYPE_CHECKING:
    from collections.abc import Container, Iterable
    from collections.abc import Sequence as Seq

    from pdserve.engine_core.scheduler.sequence import Sequence
    from pdserve.ids import SequenceKey

_NUCLEUS_GUESS = 128
"""How many of the likeliest tokens top_p looks at before it sorts a whole row."""


@dataclass(slots=True)
class _History:
    """Token counts of one penalised sequence; follows its tokens, which only grow."""

    prompt: np.ndarray
    """Distinct prompt tokens."""
    output: dict[int, int] = field(default_factory=dict)
    seen: int = 0
    """Output tokens counted so far."""

    def follow(self, sequence: Sequence) -> None:
        for token in sequence.tokens[sequence.prompt_len + self.seen :]:
            self.output[token] = self.output.get(token, 0) + 1
        self.seen = sequence.num_output


class Sampler:
    """Samples tokens. Keeps only token counts of penalised sequences, until `forget`."""

    def __init__(self) -> None:
        self._histories: dict[SequenceKey, _History] = {}
        self.masks = GrammarMasks()
        """Masks of grammars and of the reasoning's end."""
        self.bans = TokenBans()
        """Tokens that requests exclude themselves."""

    def sample(
        self, logits: torch.Tensor, sequences: Seq[Sequence]
    ) -> tuple[list[int], list[TokenLogprob | None]]:
        """Sample one token per row of `logits` `[n, vocab]` float32, which may be overwritten.

        Row i continues `sequences[i]`; its logprob is None unless requested. The token is negative
        where no logit is a number; the other rows are not affected.
        """
        params = [sequence.sampling for sequence in sequences]
        wanted = [row for row, param in enumerate(params) if param.logprobs is not None]
        raw = logits[wanted].log_softmax(-1) if wanted else None
        self._adjust(logits, sequences)
        tokens = argmax(logits)
        faulty = tokens < 0
        if broken := bool(faulty.any()):
            logits[faulty] = 0
        drawing = [row for row, param in enumerate(params) if param.temperature > 0]
        if drawing:
            chosen = [sequences[row] for row in drawing]
            tokens[drawing] = draw(
                logits if len(drawing) == len(params) else logits[drawing], chosen
            )
        if broken:
            tokens[faulty] = -1
        found: list[int] = tokens.tolist()
        logprobs: list[TokenLogprob | None] = [None] * len(found)
        if raw is not None:
            counts = [params[row].logprobs or 0 for row in wanted]
            others = [params[row].logprob_token_ids for row in wanted]
            records = describe(raw, [max(0, found[row]) for row in wanted], counts, others)
            for row, record in zip(wanted, records, strict=True):
                logprobs[row] = record
        return found, logprobs

    def forget(self, keys: Iterable[SequenceKey]) -> None:
        """Drop the state of these sequences; unknown ones are ignored."""
        for key in keys:
            self._histories.pop(key, None)
            self.masks.forget(key)
            self.bans.forget(key)

    def faults(self, sequences: Seq[Sequence]) -> dict[int, str]:
        """Index of a sequence -> why it has no token, for causes other than the model's logits."""
        faults = self.masks.faults
        return {row: faults[each.key] for row, each in enumerate(sequences) if each.key in faults}

    def lasting(self, sequences: Seq[Sequence]) -> set[int]:
        """Indices in `faults` whose request would fail on any worker."""
        lasting = self.masks.lasting
        return {row for row, each in enumerate(sequences) if each.key in lasting}

    def close(self) -> None:
        """Stop compiling grammars. Idempotent."""
        if self.masks.structured_output is not None:
            self.masks.structured_output.close()

    def _adjust(self, logits: torch.Tensor, sequences: Seq[Sequence]) -> None:
        """Bias, masks and penalties, in place."""
        self.masks.apply(logits, sequences)
        self.bans.apply(logits, sequences, self.masks.forced)
        _add_bias(logits, [sequence.sampling for sequence in sequences])
        _mask_ends(logits, sequences, self.masks.forced)
        penalised = [row for row, seq in enumerate(sequences) if _is_penalised(seq.sampling)]
        if penalised:
            self._penalise(logits, sequences, penalised)

    def _penalise(
        self, logits: torch.Tensor, sequences: Seq[Sequence], penalised: Seq[int]
    ) -> None:
        for row in penalised:
            history, sampling = self._history(sequences[row]), sequences[row].sampling
            used = np.fromiter(history.output, np.int64, len(history.output))
            if sampling.repetition_penalty != 1.0:
                every = torch.from_numpy(np.union1d(history.prompt, used)).to(logits.device)
                values = logits[row, every]
                factor = sampling.repetition_penalty
                scaled = torch.where(values > 0, values / factor, values * factor)
                # A tiny factor makes infinities, from which no token can be drawn. A factor that
                # rounds to zero makes NaN of a masked token.
                most = torch.finfo(scaled.dtype).max
                logits[row, every] = scaled.nan_to_num_(
                    nan=-torch.inf, posinf=most, neginf=-torch.inf
                )
            counts = np.fromiter(history.output.values(), np.float32, len(used))
            penalty = counts * sampling.frequency_penalty + sampling.presence_penalty
            ids = torch.from_numpy(used).to(logits.device)
            logits[row, ids] -= torch.from_numpy(penalty.astype(np.float32)).to(logits.device)

    def _history(self, sequence: Sequence) -> _History:
        history = self._histories.get(sequence.key)
        if history is None:
            prompt = np.unique(np.array(sequence.tokens[: sequence.prompt_len], np.int64))
            history = self._histories[sequence.key] = _History(prompt)
        history.follow(sequence)
        return history


def is_plain(sequence: Sequence) -> bool:
    """Return whether the next token is the likeliest one and nothing else is requested."""
    sampling = sequence.sampling
    return (
        sampling.temperature == 0
        and sampling.logprobs is None
        and not sampling.logit_bias
        and sequence.num_output >= sampling.min_tokens
        and not _is_penalised(sampling)
        and not sampling.steered
    )


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """Index of the first largest value of each row, `[n]` int64; -1 where none is a number. A NaN
    counts as the largest."""
    if logits.device.type == "cpu":
        # numpy's is vectorised: 10 times faster here, which counts when a step takes milliseconds.
        found = torch.from_numpy(logits.numpy().argmax(-1))
    else:
        found = logits.argmax(-1)
    most = logits.gather(-1, found.unsqueeze(-1)).squeeze(-1)
    return found.masked_fill_(~(most > -torch.inf), -1)


def draw(logits: torch.Tensor, sequences: Seq[Sequence]) -> torch.Tensor:
    """Draw one token per row by temperature, filters and the row's own uniform number: `[n]`
    int64."""
    params = [sequence.sampling for sequence in sequences]
    # Below the smallest normal number the quotient would be 0 / 0; there it has reached its limit.
    coldest = torch.finfo(logits.dtype).tiny
    temperatures = _column([max(param.temperature, coldest) for param in params], logits)
    # Subtracting the maximum first keeps tiny temperatures from overflowing to infinity.
    scaled = (logits - logits.amax(-1, keepdim=True)) / temperatures
    probabilities = scaled.softmax(-1)
    filter_(probabilities, params)
    noise = uniforms(
        [param.seed for param in params],
        [sequence.request.prompt_index for sequence in sequences],
        [sequence.choice for sequence in sequences],
        [sequence.num_output for sequence in sequences],
    )
    cumulative = probabilities.cumsum(-1, dtype=torch.float64)
    targets = torch.from_numpy(noise).to(logits.device).unsqueeze(1) * cumulative[:, -1:]
    # The first token whose cumulative probability lies beyond the target. Noise below 1 - 2**-52
    # keeps the target under the total, so there always is one, and never an impossible one.
    return torch.searchsorted(cumulative, targets, right=True).squeeze(1)


def filter_(probabilities: torch.Tensor, params: Seq[SamplingParams]) -> None:
    """Zero what min_p, then top_k, then top_p exclude, in place; no renormalisation."""
    rows = [row for row, param in enumerate(params) if param.min_p > 0]
    if rows:
        chosen = probabilities[rows]
        least = _column([params[row].min_p for row in rows], chosen)
        least = least * chosen.amax(-1, keepdim=True)
        probabilities[rows] = chosen.masked_fill_(chosen < least, 0)
    vocab = probabilities.shape[-1]
    rows = [row for row, param in enumerate(params) if 0 < param.top_k < vocab]
    if rows:
        limits = [params[row].top_k for row in rows]
        chosen = probabilities[rows]
        largest = chosen.topk(max(limits)).values
        index = torch.tensor(limits, device=chosen.device).unsqueeze(1) - 1
        probabilities[rows] = chosen.masked_fill_(chosen < largest.gather(1, index), 0)
    rows = [row for row, param in enumerate(params) if param.top_p < 1]
    if rows:
        chosen = probabilities[rows]
        shares = _column([params[row].top_p for row in rows], chosen)
        probabilities[rows] = chosen.masked_fill_(chosen < _nucleus_border(chosen, shares), 0)


def _nucleus_border(probabilities: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """The smallest probability in each row's nucleus: `[n, 1]`."""
    targets = probabilities.sum(-1, keepdim=True, dtype=torch.float64) * shares
    vocab = probabilities.shape[-1]
    width = min(_NUCLEUS_GUESS, vocab)
    largest = probabilities.topk(width).values
    covered = largest.cumsum(-1, dtype=torch.float64)
    if width < vocab and bool((covered[:, -1:] < targets).any()):
        largest = probabilities.sort(-1, descending=True).values
        covered = largest.cumsum(-1, dtype=torch.float64)
    # Tokens stay while those before them cover less than the share; rounding may leave the last
    # sum below the target, hence the clamp.
    last = torch.searchsorted(covered, targets).clamp_(max=largest.shape[-1] - 1)
    return largest.gather(1, last)


def describe(
    raw: torch.Tensor, tokens: Seq[int], counts: Seq[int], others: Seq[Seq[int]] = ()
) -> list[TokenLogprob]:
    """Logprob, rank and the `counts[i]` likeliest tokens of row i of `raw` `[n, vocab]`; after
    these, those of `others[i]` that are not among them."""
    index = torch.tensor(tokens, device=raw.device).unsqueeze(1)
    values = raw.gather(1, index)
    ranks = (raw > values).sum(-1).add_(1).tolist()
    tops = _likeliest(raw, counts)
    for row, ids in enumerate(others):
        if ids:
            known = {token for token, _ in tops[row]}
            wanted = [token for token in ids if token not in known]
            tops[row] += zip(wanted, raw[row, wanted].tolist(), strict=True)
    return [
        TokenLogprob(token=token, logprob=value, rank=rank, top=top)
        for token, value, rank, top in zip(
            tokens, values.squeeze(1).tolist(), ranks, tops, strict=True
        )
    ]


def _likeliest(raw: torch.Tensor, counts: Seq[int]) -> list[list[tuple[int, float]]]:
    """The `counts[i]` best of each row. Rows with the same count are done together, so that ties do
    not depend on the other rows."""
    tops: list[list[tuple[int, float]]] = [[] for _ in counts]
    for count in set(counts) - {0}:
        rows = [row for row, wanted in enumerate(counts) if wanted == count]
        best = raw[rows].topk(min(count, raw.shape[-1]))
        for row, ids, found in zip(rows, best.indices.tolist(), best.values.tolist(), strict=True):
            tops[row] = list(zip(ids, found, strict=True))
    return tops


def _is_penalised(param: SamplingParams) -> bool:
    return (
        param.repetition_penalty != 1.0
        or param.frequency_penalty != 0.0
        or param.presence_penalty != 0.0
    )


def _add_bias(logits: torch.Tensor, params: Seq[SamplingParams]) -> None:
    rows = [row for row, param in enumerate(params) for _ in param.logit_bias]
    if rows:
        ids = [token for param in params for token in param.logit_bias]
        values = [value for param in params for value in param.logit_bias.values()]
        logits[rows, ids] += torch.tensor(values, dtype=logits.dtype, device=logits.device)


def _mask_ends(logits: torch.Tensor, sequences: Seq[Sequence], forced: Container[int] = ()) -> None:
    """Mask end tokens before `min_tokens`. `forced`: rows for which only an end is left."""
    rows: list[int] = []
    ids: list[int] = []
    for row, sequence in enumerate(sequences):
        param = sequence.sampling
        if sequence.num_output >= param.min_tokens or row in forced:
            continue
        ends = (
            param.stop_token_ids if param.ignore_eos else param.stop_token_ids + param.eos_token_ids
        )
        rows += [row] * len(ends)
        ids += ends
    if rows:
        logits[rows, ids] = -torch.inf


def _column(values: Seq[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device).unsqueeze(1)
