"""A stream adds up to the whole answer, whatever is asked for and however tokens come."""

import asyncio
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.frontend.support import HELLO, frontend
from tests.support.fake_backend import Script
from tests.support.seeds import is_long

IDS = st.lists(st.integers(0, 460), min_size=1, max_size=25)
SCRIPTS = st.builds(
    Script,
    tokens=IDS,
    burst=st.integers(1, 6),
    repeat=st.booleans(),
    cached_tokens=st.integers(0, 3),
)
COMMON = {
    "n": st.integers(1, 3),
    "max_tokens": st.integers(1, 30),
    "min_tokens": st.just(1),
    "stop": st.lists(st.sampled_from(["e", "th", " ", "fox", "好", "<s>", "�"]), max_size=3),
    "stop_token_ids": st.lists(st.integers(0, 387), max_size=2),
    "include_stop_str_in_output": st.booleans(),
    "ignore_eos": st.booleans(),
    "skip_special_tokens": st.booleans(),
    "return_token_ids": st.booleans(),
}
CHATS = st.fixed_dictionaries(
    {}, optional=COMMON | {"logprobs": st.just(True), "add_generation_prompt": st.booleans()}
)
COMPLETIONS = st.fixed_dictionaries(
    {"prompt": st.sampled_from(["a fox", ["x", "naïve 好"], [5, 6, 7], [[70], [0, 71]]])},
    optional=COMMON | {"logprobs": st.integers(0, 2), "echo": st.booleans()},
)
OPTIONS = st.fixed_dictionaries(
    {"include_usage": st.just(True)}, optional={"continuous_usage_stats": st.booleans()}
)


class World:
    """One frontend for all examples, on a loop of its own."""

    def __init__(self):
        self._runner = asyncio.Runner()
        self._context = frontend()
        self.client = self._runner.run(self._context.__aenter__())
        self._runner.run(self.client.get("/live"))  # opens the one connection that all use

    def run(self, *args):
        self._runner.run(compare(self.client, *args))

    def close(self):
        self._runner.run(self._context.__aexit__(None, None, None))
        self._runner.close()


@pytest.fixture(scope="module")
def world():
    world = World()
    yield world
    world.close()


def assembled(chunks, chat):
    """The whole answer that a stream's chunks describe."""
    choices: dict[int, dict] = {}
    for chunk in chunks:
        for part in chunk["choices"]:
            _take(
                choices.setdefault(part["index"], {"text": "", "ids": [], "told": []}), part, chat
            )
    return [choices[index] for index in sorted(choices)]


def _take(choice, part, chat):
    choice["text"] += part["delta"].get("content", "") if chat else part["text"]
    choice["ids"] += part.get("token_ids") or []
    choice["reason"], choice["stop"] = part["finish_reason"], part.get("stop_reason")
    told = part["logprobs"] or {}
    if chat:
        choice["told"] += told.get("content") or []
    elif told:
        columns = [told[name] for name in LOGPROBS]
        choice["told"] += [list(row) for row in zip(*columns, strict=True)]


LOGPROBS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


def whole(answer, chat):
    """The same form, of an answer that came whole."""
    found = []
    for choice in answer["choices"]:
        told = choice["logprobs"]
        if told and chat:
            rows = told["content"]
        else:
            rows = (
                [list(row) for row in zip(*(told[n] for n in LOGPROBS), strict=True)]
                if told
                else []
            )
        found.append(
            {
                "text": choice["message"]["content"] if chat else choice["text"],
                "ids": choice.get("token_ids") or [],
                "told": rows,
                "reason": choice["finish_reason"],
                "stop": choice["stop_reason"],
            }
        )
    return found


async def compare(client, script, path, body, options):
    chat = path.endswith("chat/completions")
    client.backend.script = script
    status, _, answer = await client.post(path, body)
    assert status == 200, answer
    *events, end = await client.events(path, body | {"stream_options": options})
    assert end.done
    chunks = [json.loads(event.data) for event in events]
    expected = whole(answer, chat)
    assert assembled(chunks, chat) == expected
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == answer["usage"]
    if options.get("continuous_usage_stats"):
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks if chunk["usage"]]
        assert counts == sorted(counts)
    if body.get("logprobs") is not None and not body.get("echo"):
        assert sum(len(choice["told"]) for choice in expected) == counted(answer)
    if body.get("return_token_ids"):
        assert sum(len(choice["ids"]) for choice in expected) == counted(answer)
    assert client.backend.idle


def counted(answer):
    return answer["usage"]["completion_tokens"]


SETTINGS = settings(
    max_examples=1000 if is_long() else 40,
)


@SETTINGS
@given(SCRIPTS, CHATS, OPTIONS)
def test_a_streamed_chat_is_the_whole_chat(world, script, fields, options):
    world.run(script, "/v1/chat/completions", HELLO | fields, options)


@SETTINGS
@given(SCRIPTS, COMPLETIONS, OPTIONS)
def test_a_streamed_completion_is_the_whole_completion(world, script, fields, options):
    world.run(script, "/v1/completions", fields, options)
