import hashlib

import pytest

from pdserve.errors import ConfigError, Forbidden, Unauthorized
from pdserve.frontend.access.api_keys import (
    ApiKey,
    KeyLimits,
    check_priority,
    parse_keys,
    shared_cache_salt,
)
from pdserve.messages.lora import LoraSummary
from tests.frontend.support import card

GOOD = f"""
# who may do what
[[key]]
key = "sk-research-1"
tenant = "research"
weight = 2
models = ["tiny", "big"]

[key.limits]
max_concurrent_requests = 8
requests_per_minute = 600
tokens_per_minute = 100000

[[key]]
key_sha256 = "{hashlib.sha256(b"sk-other").hexdigest()}"
tenant = "other"
cache_isolation = false
trace_content = true
"""


def wrong(text):
    with pytest.raises(ConfigError) as caught:
        parse_keys(text.encode(), "keys.toml")
    return caught.value.message


def entry(*lines):
    return "\n".join(["[[key]]", 'key = "sk-12345678"', 'tenant = "t"', *lines])


def test_a_key_is_found_by_its_bearer_token():
    ring = parse_keys(GOOD.encode(), "keys.toml")
    key = ring.authenticate("Bearer sk-research-1")
    assert (key.tenant, key.weight, key.cache_isolation) == ("research", 2.0, True)
    assert key.limits == KeyLimits(
        max_concurrent_requests=8, requests_per_minute=600, tokens_per_minute=100000
    )
    assert not key.trace_content
    assert ring.authenticate("bearer  sk-other ").trace_content
    assert ring.authenticate("bearer  sk-other ").tenant == "other"
    assert ring.authenticate(None, "sk-other").tenant == "other"
    assert ring.authenticate("Bearer sk-other", "sk-nobody").tenant == "other"
    with pytest.raises(Unauthorized):
        ring.authenticate(None, "sk-nobody")
    assert len(ring) == 2


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer ", "Basic sk-other", "Bearer wrong", "Bearer \udcff"]
)
def test_anything_else_is_unauthorized(header):
    with pytest.raises(Unauthorized):
        parse_keys(GOOD.encode(), "keys.toml").authenticate(header)


def test_no_key_is_kept_in_the_clear():
    assert "sk-research-1" not in repr(vars(parse_keys(GOOD.encode(), "keys.toml")))


def test_a_key_may_be_bound_to_models():
    key = parse_keys(GOOD.encode(), "keys.toml").authenticate("Bearer sk-research-1")
    assert key.may_use(card(), "tiny")
    assert not key.may_use(card(name="secret"), "secret")
    assert key.may_use(card(name="large", aliases=("tiny",)), "large")


def test_a_key_for_a_model_is_none_for_its_adapters():
    poet = card(loras=(LoraSummary(name="poet", revision="1"),))
    model, adapter = (
        ApiKey(digest=b"d" * 32, tenant="t", models=frozenset({name})) for name in ("tiny", "poet")
    )
    assert [model.may_use(poet, name) for name in ("tiny", "poet")] == [True, False]
    assert [adapter.may_use(poet, name) for name in ("tiny", "poet")] == [False, True]


def test_isolation_keeps_tenants_apart_whatever_they_ask_for():
    ring = parse_keys(GOOD.encode(), "keys.toml")
    isolated = ring.authenticate("Bearer sk-research-1")
    shared = ring.authenticate("Bearer sk-other")
    assert shared.cache_salt(None) == ""
    salts = {isolated.cache_salt(asked) for asked in (None, "x", "tenant:other")}
    assert len(salts) == 3
    assert all(salt.startswith("tenant:research\0") for salt in salts)


def test_nobody_else_can_ask_for_an_isolated_tenants_salt():
    ring = parse_keys(GOOD.encode(), "keys.toml")
    isolated = ring.authenticate("Bearer sk-research-1")
    shared = ring.authenticate("Bearer sk-other")
    theirs = isolated.cache_salt(None)
    asked = [theirs, theirs + "x", f"salt:{theirs}", "x"]
    salts = [shared.cache_salt(salt) for salt in asked]
    assert len(set(salts)) == len(asked)
    assert not any(salt.startswith(theirs) for salt in salts)
    assert [shared_cache_salt(salt) for salt in asked] == salts


def test_nobody_overtakes_others_who_was_not_allowed_to():
    text = GOOD.replace("weight = 2\n", "weight = 2\nmax_priority = 7\n")
    ring = parse_keys(text.encode(), "keys.toml")
    seven, usual = (ring.authenticate(f"Bearer {key}") for key in ("sk-research-1", "sk-other"))
    check_priority(7, seven, None)
    check_priority(0, usual, None)
    check_priority(-(2**31), usual, None)
    check_priority(2**31 - 1, None, None)
    check_priority(3, usual, 3)
    for priority, key, most in [(8, seven, 9), (1, usual, None), (4, usual, 3), (4, None, 3)]:
        with pytest.raises(Forbidden) as caught:
            check_priority(priority, key, most)
        assert caught.value.param == "priority"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no [[key]] entry"),
        ("[[key]]\nkey = ", "not valid TOML"),
        ("[[keys]]\n", "line 1: 'keys': unknown field; did you mean 'key'?"),
        ('key = "x"\n', "write each key under its own [[key]] header"),
        (entry("tennant = 1"), "line 4 (key 1): 'tennant': unknown field; did you mean 'tenant'?"),
        (entry("weight = 0"), "line 4 (key 1): 'weight': must be a number from 0.001 to 1000"),
        (entry("weight = true"), "'weight'"),
        (entry("weight = nan"), "'weight'"),
        (entry("weight = 1e-300"), "'weight'"),
        (entry("weight = inf"), "'weight'"),
        (entry("cache_isolation = 1"), "'cache_isolation': must be true or false"),
        (entry('trace_content = "yes"'), "'trace_content': must be true or false"),
        (entry("models = []"), "'models': must be a non-empty list"),
        (entry("models = [1]"), "'models'"),
        (entry("max_priority = 1.5"), "line 4 (key 1): 'max_priority': must be a whole number"),
        (entry("max_priority = 4294967296"), "'max_priority'"),
        (entry("limits = 3"), "'limits': must be a table"),
        (
            entry("[key.limits]", "request_per_minute = 1"),
            "line 5 (key 1): 'request_per_minute': unknown field; "
            "did you mean 'requests_per_minute'?",
        ),
        (entry("[key.limits]", "tokens_per_minute = 0"), "line 5 (key 1): 'tokens_per_minute'"),
        (entry("[key.limits]", "tokens_per_minute = 1.5"), "'tokens_per_minute'"),
        (entry("key_sha256 = '00'"), "exactly one of 'key' and 'key_sha256'"),
        ('[[key]]\ntenant = "t"\n', "exactly one of 'key' and 'key_sha256'"),
        ('[[key]]\nkey_sha256 = "xy"\ntenant = "t"\n', "line 2 (key 1): 'key_sha256': must be 64"),
        ('[[key]]\nkey = "short"\ntenant = "t"\n', "8 to 512 printable"),
        ('[[key]]\nkey = "with blank"\ntenant = "t"\n', "8 to 512 printable"),
        ('[[key]]\nkey = "sk-12345678"\n', "'tenant': must be a name"),
        ('[[key]]\nkey = "sk-12345678"\ntenant = ""\n', "'tenant': must be a name"),
        (entry() + "\n\n" + entry(), "line 6 (key 2): 'key': the same key appears twice"),
        (entry() + "\n" + entry("zzz = 1"), "line 7 (key 2): 'zzz': unknown field; known: key,"),
    ],
)
def test_a_bad_file_is_refused_with_line_and_remedy(text, words):
    message = wrong(text)
    assert words in message
    assert message.startswith("keys.toml")
