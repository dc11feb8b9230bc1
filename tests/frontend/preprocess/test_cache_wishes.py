"""What a request wants of the tiers below the device, from its fields to the engine."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from pdserve.errors import InvalidRequest
from pdserve.frontend.preprocess.cache_wishes import CacheWish, cache_wish
from pdserve.protocols.completion_requests import ChatRequest, CompletionRequest

HELLO = [{"role": "user", "content": "hello"}]


def wish(**fields: Any) -> CacheWish:
    return cache_wish(msgspec.convert({"messages": HELLO} | fields, ChatRequest))


@pytest.mark.parametrize(
    ("fields", "ttl", "scope"),
    [
        ({}, 0.0, ""),
        ({"cache_ttl": 90.5}, 90.5, ""),
        ({"cache_ttl": 0}, 0.0, ""),
        ({"cache_scope": "shared", "cache_ttl": 86400}, 86400.0, "shared"),
        ({"cache_scope": "never"}, 0.0, "never"),
        ({"cache_scope": "never", "cache_ttl": 0}, 0.0, "never"),
        ({"prompt_cache_retention": "24h"}, 86400.0, ""),
        ({"prompt_cache_retention": "24h", "cache_ttl": 5}, 5.0, ""),
        ({"prompt_cache_retention": "24h", "cache_scope": "never"}, 0.0, "never"),
        ({"prompt_cache_retention": "in_memory"}, 0.0, ""),
        ({"prompt_cache_retention": "7d"}, 0.0, ""),
    ],
)
def test_fields_become_one_wish(fields: dict[str, Any], ttl: float, scope: str) -> None:
    assert wish(**fields) == CacheWish(ttl, scope)  # type: ignore[arg-type]


def test_fields_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="leave one of the two out") as caught:
        wish(cache_scope="never", cache_ttl=60)
    assert caught.value.param == "cache_ttl"


@pytest.mark.parametrize(
    "fields",
    [{"cache_ttl": -1}, {"cache_ttl": 86401}, {"cache_ttl": "1h"}, {"cache_scope": "mine"}],
)
def test_times_are_bounded_and_scopes_known(fields: dict[str, Any]) -> None:
    for record, body in ((ChatRequest, {"messages": HELLO}), (CompletionRequest, {"prompt": "a"})):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(body | fields, record)


def test_no_number_is_no_time() -> None:
    with pytest.raises(msgspec.DecodeError):
        msgspec.json.decode(b'{"messages": [], "cache_ttl": NaN}', type=ChatRequest)
    assert not math.isnan(wish(cache_ttl=1e-9).ttl)
