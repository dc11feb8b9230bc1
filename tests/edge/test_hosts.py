"""A laptop's server answers its user's programs and pages, and no page of another site."""

import pytest

from pdserve.edge.hosts import HostRule, OriginRule

EVIL = "http://evil.example"


@pytest.mark.parametrize(
    "host",
    [
        *(
            "127.0.0.1:8000",
            "127.0.0.1",
            "[::1]:8000",
            "[::1]",
            "::1",
            "10.0.0.7:80",
            "0.0.0.0:8000",
        ),
        *("localhost:8000", "LOCALHOST", "localhost.", "app.localhost:8000"),
        *("box", "BOX:8000", "llm.example", "llm.example.:443", "a.b.example.org", ""),
    ],
)
def test_addresses_and_known_names_are_answered(host):
    rule = HostRule(("box", "llm.example", "*.example.org"))
    assert rule.refusal(host) is None


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example:8000", "evil.example", "127.0.0.1.evil.example", "localhost.evil.example"),
        *(
            "xlocalhost",
            "example.org",
            "notexample.org",
            "[evil]:80",
            "1.2.3.4.5",
            "user@127.0.0.1",
        ),
    ],
)
def test_other_names_are_refused_with_the_remedy(host):
    refusal = HostRule(("box", "*.example.org")).refusal(host)
    assert refusal is not None
    assert "--allowed-hosts=" in refusal


def test_a_star_answers_to_all():
    assert HostRule(("*",)).refusal("evil.example") is None
    assert HostRule(()).refusal(None) is None
    assert HostRule(("",)).refusal("evil.example") is not None


def test_programs_and_own_pages_are_answered():
    rule = OriginRule(("https://ui.example",))
    assert rule.refusal({}) is None
    assert rule.refusal({"Host": "127.0.0.1:8000", "Origin": "http://127.0.0.1:8000"}) is None
    assert rule.refusal({"Host": "llm.example", "Origin": "https://LLM.example"}) is None
    cross = {"Sec-Fetch-Site": "cross-site"}
    assert rule.refusal({"Host": "x", "Origin": "https://ui.example", **cross}) is None
    for site in ("none", "same-origin", "same-site"):
        assert rule.refusal({"Sec-Fetch-Site": site}) is None


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "127.0.0.1:8000", "Origin": EVIL},
        {"Host": "127.0.0.1:8000", "Origin": "http://127.0.0.1:3000"},
        {"Host": "127.0.0.1:8000", "Origin": "null"},
        {"Origin": EVIL},
        {"Host": "127.0.0.1:8000", "Sec-Fetch-Site": "cross-site"},
    ],
)
def test_foreign_pages_are_refused_with_the_remedy(headers):
    refusal = OriginRule(("https://ui.example",)).refusal(headers)
    assert refusal is not None
    assert "--cors-origins=" in refusal
    assert OriginRule(("*",)).refusal(headers) is None


def test_what_a_stranger_says_is_not_repeated_at_length():
    refusal = OriginRule(()).refusal({"Origin": "http://" + "x" * 5000})
    assert refusal is not None
    assert len(refusal) < 400
