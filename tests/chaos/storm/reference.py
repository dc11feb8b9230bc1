"""What the sim engine must answer, without any engine: an undisturbed run is checked, too.

The sim engine derives each token from the bytes of all blocks before it; `reference_tokens` does
the same from the tokens alone. Other engines have no such function.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pdserve
from pdserve.messages.engine import EngineSpec
from pdserve.messages.request import GenerateRequest, SamplingParams
from pdserve.token_ids import token_ids
from pdserve_engines.sim.settings import SimOptions, read_model
from pdserve_engines.sim.tokens import reference_tokens

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.chaos.storm.storm_requests import Expected, StormRequest

BUNDLED = Path(pdserve.__file__).parent / "bundled"


def misled(question: StormRequest, expected: Expected) -> str:
    """Where an answer is not what it must be; empty: nowhere. A stop string may have cut it."""
    for choice, tokens in enumerate(expected.tokens):
        right = right_tokens(question, expected.prompt, choice)
        if list(tokens) != right[: len(tokens)]:
            return f"question {question.number}, choice {choice}: {list(tokens)}, not {right}"
        if len(tokens) < len(right) and "stop" not in question.fields:
            return f"question {question.number}, choice {choice} ends early"
    return ""


def right_tokens(question: StormRequest, prompt: Sequence[int], choice: int = 0) -> list[int]:
    """The whole answer, without stop strings."""
    spec = EngineSpec(engine="sim", model=str(BUNDLED), hash_secret=bytes(32))
    vocabulary = read_model(spec, SimOptions())
    fields = question.fields
    sampling = SamplingParams(
        max_tokens=fields["max_tokens"],
        temperature=fields["temperature"],
        seed=fields["seed"],
        ignore_eos=True,
    )
    request = GenerateRequest(
        request_id="reference",
        model="bundled",
        prompt=token_ids(prompt),
        sampling=sampling,
        n=question.choices,
    )
    return list(reference_tokens(request, vocabulary, choice, content=True))
