import json

from pdserve.protocols.completion_requests import ChatRequest, CompletionRequest
from pdserve.protocols.unsupported_fields import (
    REFUSED_BY_CHAT,
    REFUSED_BY_COMPLETIONS,
    WITHOUT_EFFECT,
    UnsupportedField,
    shorten,
)


def test_no_field_is_both_served_and_refused():
    assert not REFUSED_BY_CHAT.keys() & set(ChatRequest.__struct_fields__)
    assert not REFUSED_BY_COMPLETIONS.keys() & set(CompletionRequest.__struct_fields__)
    assert not WITHOUT_EFFECT & (REFUSED_BY_CHAT.keys() | REFUSED_BY_COMPLETIONS.keys())


def test_every_refusal_says_what_to_do():
    for refusal in (*REFUSED_BY_CHAT.values(), *REFUSED_BY_COMPLETIONS.values()):
        assert len(refusal.remedy) > 10


def test_null_is_always_allowed_and_neutral_values_by_type():
    refusal = UnsupportedField("no", (False,))
    assert refusal.allows(None)
    assert refusal.allows(False)
    assert not refusal.allows(0)


def test_a_clients_word_is_made_short_and_printable():
    assert shorten("a" * 70) == "a" * 63 + "…"
    assert shorten("line\nbreak\ud800") == "line�break�"
    json.dumps(shorten("\x00" * 100)).encode()
