"""The fake keeps the promises of a real backend, or tests over it would prove nothing."""

import asyncio
from typing import Any

import pytest

from pdserve.errors import EngineDied, NotReady, Overloaded
from pdserve.messages.request import GenerateRequest, SamplingParams, TokenDelta
from pdserve.token_ids import token_ids
from tests.support.fake_backend import FakeBackend, Script


class Sink:
    def __init__(self):
        self.deltas: list[TokenDelta] = []
        self.errors: list[Exception] = []

    def on_delta(self, delta):
        self.deltas.append(delta)

    def on_error(self, error):
        self.errors.append(error)

    def tokens(self, choice=0):
        return [token for d in self.deltas if d.choice == choice for token in d.tokens]

    def finish(self, choice=0):
        (finish,) = [d.finish for d in self.deltas if d.choice == choice and d.finish]
        return finish


def request(n=1, prompt=(7, 8), **sampling: Any):
    params = SamplingParams(**{"max_tokens": 5} | sampling)
    return GenerateRequest(
        request_id="r", model="m", prompt=token_ids(prompt), sampling=params, n=n
    )


async def run(script, asked=None, turns=30):
    backend, sink = FakeBackend({}, script), Sink()
    stream = await backend.open(asked or request(), sink)
    for _ in range(turns):
        await asyncio.sleep(0)
    return backend, sink, stream


@pytest.mark.parametrize("burst", [1, 2, 5, 99])
async def test_every_choice_gets_its_tokens_and_one_end(burst):
    _, sink, _ = await run(Script(tokens=[1, 2, 3], burst=burst), request(n=2))
    for choice in (0, 1):
        assert sink.tokens(choice) == [1, 2, 3, 1, 2]
        assert (sink.finish(choice).reason, sink.finish(choice).completion_tokens) == ("length", 5)


async def test_it_ends_by_stop_and_end_tokens_once_min_tokens_allow():
    _, sink, _ = await run(Script(tokens=[1, 2, 3]), request(stop_token_ids=(2,)))
    assert (sink.tokens(), sink.finish().stop_reason) == ([1, 2], 2)
    _, sink, _ = await run(Script(tokens=[1, 2, 3]), request(eos_token_ids=(2,), min_tokens=3))
    assert sink.tokens() == [1, 2, 3, 1, 2]
    _, sink, _ = await run(Script(tokens=[1, 2]), request(eos_token_ids=(2,), ignore_eos=True))
    assert sink.finish().reason == "length"


async def test_without_repetition_it_ends_with_its_tokens():
    _, sink, _ = await run(Script(tokens=[1, 2], repeat=False))
    assert (sink.tokens(), sink.finish().reason) == ([1, 2], "stop")


async def test_logprobs_come_with_tokens_and_for_the_prompt_once():
    asked = request(n=1, prompt=(7, 8, 9), logprobs=2, prompt_logprobs=1)
    _, sink, _ = await run(Script(tokens=[1, 2]), asked)
    assert [len(d.logprobs or ()) for d in sink.deltas] == [1] * 5
    assert [len(d.prompt_logprobs or ()) for d in sink.deltas] == [2, 0, 0, 0, 0]


async def test_after_a_cancel_nothing_is_said():
    backend, sink = FakeBackend({}, Script(tokens=[1])), Sink()
    stream = await backend.open(request(), sink)
    await asyncio.sleep(0)
    told = len(sink.deltas)
    stream.cancel()
    stream.cancel()
    for _ in range(10):
        await asyncio.sleep(0)
    assert len(sink.deltas) == told
    assert backend.streams[0].cancelled
    assert backend.idle


async def test_a_stream_that_has_ended_was_not_cancelled():
    backend, _, stream = await run(Script(tokens=[1]))
    stream.cancel()
    assert not backend.streams[0].cancelled


async def test_faults_come_where_the_script_says():
    _, sink, _ = await run(Script(tokens=[1, 2], fail=EngineDied("x"), fail_after=2))
    assert (sink.tokens(), len(sink.errors)) == ([1, 2], 1)
    backend, sink, _ = await run(Script(tokens=[1, 2], silent_after=1))
    assert sink.tokens() == [1]
    assert not backend.idle
    _, sink, _ = await run(Script(tokens=[1, 2], end="error", fail_after=1))
    assert sink.finish().reason == "error"
    with pytest.raises(Overloaded):
        await run(Script(refuse=Overloaded("x")))


async def test_what_is_not_ready_opens_nothing():
    backend = FakeBackend({}, unready="loading")
    with pytest.raises(NotReady, match="loading"):
        await backend.open(request(), Sink())
    assert backend.unready_reason() == "loading"
    assert backend.streams == []
