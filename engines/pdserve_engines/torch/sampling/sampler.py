"""Samples tokens from logits, for all sampling rows of a step at once.

The order is fixed by `SamplingParams`: raw logprobs; bias and the `min_tokens` mask; repetition,
frequency and presence penalties; greedy, or temperature, min_p, top_k, top_p and one draw. The draw
inverts the cumulative distribution in token-id order at one uniform number, which `noise` derives
from the request alone. So a token depends only on its own row of the batch. Tokens that tie at the
border of top_k or top_p all stay.

Only requested work is done; a purely greedy step (`is_plain`) does not come here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pdserve_engines.torch.models.download import Download
from pdserve_engines.torch.models.upload import upload
from pdserve_engines.torch.sampling.filters import filter_
from pdserve_engines.torch.sampling.grammar_masks import GrammarMasks
from pdserve_engines.torch.sampling.logprobs import look_up, records
from pdserve_engines.torch.sampling.penalties import Penalties
from pdserve_engines.torch.sampling.row_params import RowParamsCache, is_penalised
from pdserve_engines.torch.sampling.token_bans import TokenBans

if TYPE_CHECKING:
    from collections.abc import Iterable
    from collections.abc import Sequence as Seq

    from pdserve.engine_core.scheduler.sequence import Sequence
    from pdserve.ids import SequenceKey
    from pdserve.messages.request import TokenLogprob
    from pdserve_engines.torch.sampling.logprobs import LogprobWishes
    from pdserve_engines.torch.sampling.row_params import Draws, Floats, Ints, RowParams


class SampledTokens:
    """Tokens that the device has been told to choose."""

    def __init__(self, tokens: torch.Tensor, raw: torch.Tensor | None, batch: RowParams) -> None:
        """`raw`: logprobs of the rows that want some."""
        self.tokens = tokens
        """`[n]` int64 on the device, negative where no logit is a number."""
        self._wishes = None if raw is None else batch.wishes(raw.device)
        found: list[torch.Tensor] = []
        if raw is not None and self._wishes is not None:
            found = look_up(raw, self._wishes.of_rows(tokens).clamp_min(0), self._wishes)
        self._host = Download([tokens, *found])

    def read(self) -> tuple[list[int], list[TokenLogprob | None]]:
        """Wait for the tokens and what is said of them, but for nothing that was launched since;
        returns them as `Sampler.sample` does."""
        host, *found = self._host.wait()
        tokens: list[int] = host.tolist()
        logprobs: list[TokenLogprob | None] = [None] * len(tokens)
        if self._wishes is not None:
            chosen = [max(0, tokens[row]) for row in self._wishes.rows]
            for row, record in zip(
                self._wishes.rows, records(chosen, self._wishes, found), strict=True
            ):
                logprobs[row] = record
        return tokens, logprobs


class Sampler:
    """Samples tokens. Keeps parameters and token counts of sequences, until `forget`."""

    def __init__(self) -> None:
        self.masks = GrammarMasks()
        """Masks of grammars and of the reasoning's end."""
        self.bans = TokenBans()
        """Tokens that requests exclude themselves."""
        self.one_by_one = False
        """Draw each row by itself, so that it does not depend on the others to the last bit: on a
        GPU, torch sums a row in an order that depends on their number."""
        self._params = RowParamsCache()
        self._penalties = Penalties()

    def sample(
        self, logits: torch.Tensor, sequences: list[Sequence]
    ) -> tuple[list[int], list[TokenLogprob | None]]:
        """Sample one token per row of `logits` `[n, vocab]` float32, which may be overwritten.

        Row i continues `sequences[i]`; its logprob is None unless requested. The token is negative
        where no logit is a number; the other rows are not affected.
        """
        return self.launch(logits, sequences).read()

    def launch(self, logits: torch.Tensor, sequences: list[Sequence]) -> SampledTokens:
        """The same without waiting for the device."""
        batch = self._params.of(sequences)
        raw: torch.Tensor | None = None
        if batch.logprobs:
            raw = self._logprobs(logits, batch.wishes(logits.device))
        num_outputs = batch.num_outputs()
        self._adjust(logits, batch, num_outputs)
        choose = self._choose_each if self.one_by_one else _choose
        return SampledTokens(choose(logits, batch, num_outputs), raw, batch)

    def _logprobs(self, logits: torch.Tensor, wishes: LogprobWishes) -> torch.Tensor:
        if self.one_by_one:
            rows = wishes.rows
            return torch.cat([logits[row : row + 1].clone().log_softmax(-1) for row in rows])
        return wishes.of_rows(logits).log_softmax(-1)

    def _choose_each(
        self, logits: torch.Tensor, batch: RowParams, num_outputs: Ints
    ) -> torch.Tensor:
        """`_choose`, as if each drawn row were a batch of its own."""
        if not len(batch.drawing) or len(logits) == 1:
            return _choose(logits, batch, num_outputs)
        # A row's place in memory decides, too, how it is summed.
        return torch.cat(
            [
                _choose(logits[row : row + 1].clone(), each, num_outputs[row : row + 1])
                for row, each in enumerate(self._params.each(batch))
            ]
        )

    def is_plain(self, sequences: list[Sequence]) -> bool:
        """Return whether each next token is the likeliest one and nothing else is requested."""
        batch = self._params.of(sequences)
        return batch.simple and not len(batch.before_min(batch.num_outputs()))

    def forget(self, keys: Iterable[SequenceKey]) -> None:
        """Drop the state of these sequences; unknown ones are ignored."""
        for key in keys:
            self._params.forget(key)
            self._penalties.forget(key)
            self.masks.forget(key)
            self.bans.forget(key)

    def faults(self, sequences: Seq[Sequence]) -> dict[int, str]:
        """Index of a sequence -> why it has no token, for causes other than the model's logits."""
        faults = self.masks.faults
        if not faults:
            return {}
        return {row: faults[each.key] for row, each in enumerate(sequences) if each.key in faults}

    def lasting(self, sequences: Seq[Sequence]) -> set[int]:
        """Indices in `faults` whose request would fail on any worker."""
        lasting = self.masks.lasting
        if not lasting:
            return set()
        return {row for row, each in enumerate(sequences) if each.key in lasting}

    def close(self) -> None:
        """Stop compiling grammars. Idempotent."""
        if self.masks.structured_output is not None:
            self.masks.structured_output.close()

    def _adjust(self, logits: torch.Tensor, batch: RowParams, num_outputs: Ints) -> None:
        """Bias, masks and penalties, in place."""
        if batch.guided:
            self.masks.apply(logits, batch.sequences)
        else:
            self.masks.clear()
        if batch.banned:
            self.bans.apply(logits, batch.sequences, self.masks.forced)
        if batch.biased:
            bias = batch.bias(logits.device)
            logits[bias.rows, bias.ids] += bias.values
        self._mask_ends(logits, batch, num_outputs)
        self._penalties.apply(logits, batch)

    def _mask_ends(self, logits: torch.Tensor, batch: RowParams, num_outputs: Ints) -> None:
        """Mask end tokens before `min_tokens`, but not in rows for which only an end is left."""
        rows = batch.before_min(num_outputs)
        if not len(rows):
            return
        free = [row for row in rows.tolist() if row not in self.masks.forced]
        ends = batch.ends(free, logits.device)
        logits[ends.rows, ends.ids] = -torch.inf


def is_plain(sequence: Sequence) -> bool:
    """Return whether the next token is the likeliest one and nothing else is requested."""
    sampling = sequence.sampling
    return (
        sampling.temperature == 0
        and sampling.logprobs is None
        and not sampling.logit_bias
        and sequence.num_output >= sampling.min_tokens
        and not is_penalised(sampling)
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


def _choose(logits: torch.Tensor, batch: RowParams, num_outputs: Ints) -> torch.Tensor:
    """One token per row of the adjusted logits: `[n]` int64, -1 where none is a number."""
    likeliest = argmax(logits)
    rows = batch.drawing
    if not len(rows):
        return likeliest
    draws = batch.draws(logits)
    noise = draws.uniforms(num_outputs[rows])
    if len(rows) == len(logits):
        drawn = draw(logits, draws, noise)
        return torch.where(likeliest < 0, likeliest, drawn)
    at = upload(rows, logits.device)
    drawn = draw(logits[at], draws, noise)
    return likeliest.scatter(0, at, torch.where(likeliest[at] < 0, likeliest[at], drawn))


def draw(logits: torch.Tensor, draws: Draws, noise: Floats) -> torch.Tensor:
    """Draw one token per row by temperature, filters and the row's own uniform number: `[n]`
    int64. A row without numbers gets any token."""
    # Subtracting the maximum first keeps tiny temperatures from overflowing to infinity.
    scaled = (logits - logits.amax(-1, keepdim=True)) / draws.temperatures
    probabilities = scaled.softmax(-1)
    filter_(probabilities, draws.filters)
    cumulative = probabilities.cumsum(-1, dtype=torch.float64)
    targets = upload(noise[:, None], logits.device) * cumulative[:, -1:]
    # The first token whose cumulative probability lies beyond the target. Noise below 1 - 2**-52
    # keeps the target under the total, so there always is one, and never an impossible one.
    return torch.searchsorted(cumulative, targets, right=True).squeeze(1)
