"""The suite of engines as vLLM can keep it: continued noise is not repeated, the rest is."""

from __future__ import annotations

from typing import Any

from pdserve.testing.engine_conformance import EngineConformance


class VllmConformance(EngineConformance):
    """Sampled choices of vLLM draw other numbers after a cut, so cuts are tested without noise."""

    async def test_choices_go_on_after_every_cut(self) -> None:
        """As in the suite, with the most likely tokens, and with the penalties that a bias can
        stand in for."""
        shape: dict[str, Any] = {"n": 3, "max_tokens": 9, "logprobs": 1}
        async with self.running() as engine:
            for penalty in ({"repetition_penalty": 1.2}, {"frequency_penalty": 0.7}):
                whole = await self.complete(engine, **shape, **penalty)
                for cut in range(9):
                    lengths = (cut, cut * 3 % 9, cut * 7 % 9)
                    given = [whole.tokens[choice][:made] for choice, made in enumerate(lengths)]
                    ledger = await self.complete(engine, output=given, **shape, **penalty)
                    assert ledger.tokens == whole.tokens
                    for choice, made in enumerate(lengths):
                        assert [entry.token for entry in ledger.logprobs[choice]] == [
                            entry.token for entry in whole.logprobs[choice][made:]
                        ]
            await self.nothing_left(engine)

    async def test_sampled_choices_end_after_every_cut(self) -> None:
        """What was given stays, and the rest has the length that was asked for."""
        shape: dict[str, Any] = {"n": 2, "max_tokens": 6, "temperature": 0.9, "seed": 7}
        async with self.running() as engine:
            whole = await self.complete(engine, **shape)
            for cut in range(1, 6):
                given = [whole.tokens[0][:cut], whole.tokens[1][: 6 - cut]]
                ledger = await self.complete(engine, output=given, **shape)
                again = await self.complete(engine, output=given, **shape)
                assert ledger.tokens == again.tokens
                for choice, tokens in enumerate(ledger.tokens):
                    assert tokens[: len(given[choice])] == given[choice]
                    assert len(tokens) == 6
