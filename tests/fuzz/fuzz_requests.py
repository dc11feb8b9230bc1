"""Fuzz target: bodies of requests, as anybody may send them.

    python -m tests.fuzz requests -max_total_time=60

Every endpoint's decoder makes a request of them or refuses them in words that name no field longer
than a message may repeat; strictly or not. What decodes encodes to a body that decodes to the same.
"""

from __future__ import annotations

from typing import Final

import msgspec

from pdserve.errors import InvalidRequest
from pdserve.protocols.fields_page import ENDPOINTS
from tests.fuzz.input import look_at_refusal

__all__ = ["fuzz", "seeds"]

_DECODERS: Final = list(ENDPOINTS.values())
_encode: Final = msgspec.json.Encoder().encode


def fuzz(data: bytes) -> None:
    """One input: whose body, how strictly, and the body."""
    if not data:
        return
    decoder = _DECODERS[(data[0] >> 1) % len(_DECODERS)]
    try:
        decoded = decoder.decode(data[1:], strict=bool(data[0] & 1))
    except InvalidRequest as error:
        look_at_refusal(error)
        return
    again = decoder.decode(_encode(decoded.request))
    assert _encode(again.request) == _encode(decoded.request)
    assert not again.unknown


def seeds() -> list[bytes]:
    """A good body of every endpoint with much in it, and some that are wrong in one place."""
    function = {"name": "f", "parameters": {"type": "object", "properties": {"a": {}}}}
    chat = {
        "model": "m",
        "messages": [
            {"role": "system", "content": "a"},
            {"role": "user", "content": [{"type": "text", "text": "b"}]},
        ],
        "tools": [{"type": "function", "function": function}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "stream": True,
        "stream_options": {"include_usage": True},
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": True}},
        "logit_bias": {"5": -1},
        "stop": ["a", "b"],
    }
    bodies: list[object] = [
        chat,
        {"prompt": [[1, 2], [3]], "echo": True, "logprobs": 1, "max_tokens": 0},
        {"model": "m", "input": [{"role": "user", "content": "a"}], "tools": []},
        {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "a"}]},
        {"model": "m", "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]},
        {"model": "m", "input": ["a", "b"], "dimensions": 5},
        {"messages": [{"role": "user", "content": "a"}], "return_token_strs": True},
        {"tokens": [1, 2, 3]},
    ]
    good = [bytes([2 * number]) + _encode(body) for number, body in enumerate(bodies)]
    strict = [bytes([seed[0] | 1]) + seed[1:] for seed in good]
    odd = [b"\0" + body for body in (b"", b"{", b"[]", b'{"a":1,"a":2}', b'{"messages":[NaN]}')]
    return [*good, *strict, *odd]
