import pytest
from multidict import CIMultiDict, CIMultiDictProxy

from pdserve.errors import InvalidRequest
from pdserve.frontend.access.api_keys import ApiKey
from pdserve.frontend.routing_hints import NO_HINTS, RoutingHints, parse_hints
from pdserve.ids import NodeId


def read(*headers: tuple[str, str]) -> RoutingHints:
    return parse_hints(CIMultiDictProxy(CIMultiDict(headers)), None, None)


def test_nothing_said_is_nothing_wished() -> None:
    assert read() == NO_HINTS
    assert read(("x-pdserve-worker", "")) == NO_HINTS


def test_workers_are_allowed_or_denied() -> None:
    found = read(("X-Pdserve-Worker", "a, b,!c"), ("x-pdserve-worker", "!d"))
    assert (found.allowed, found.denied) == (("a", "b"), ("c", "d"))
    assert [found.takes(NodeId(name)) for name in "abcde"] == [True, True, False, False, False]
    only = read(("x-pdserve-worker", "!c"))
    assert [only.takes(NodeId(name)) for name in "ac"] == [True, False]


@pytest.mark.parametrize(
    "value", ["a,,b", ",", "!", "a b", "é", "a,!", "x" * 129, "a," * 300 + "a", "!!a"]
)
def test_what_is_no_list_of_workers_is_refused(value: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(("x-pdserve-worker", value))
    assert caught.value.param == "x-pdserve-worker"


def test_a_time_to_the_first_token_is_in_milliseconds() -> None:
    assert read(("x-pdserve-slo-ttft-ms", "250")).slo_ttft == 0.25
    assert read(("x-pdserve-slo-ttft-ms", "0.5")).slo_ttft == 0.0005
    assert read(("x-pdserve-slo-ttft-ms", " 1e3 ")).slo_ttft == 1.0


@pytest.mark.parametrize(
    "value",
    ["", "0", "-1", "nan", "inf", "1e30", "fast", "100ms", "1,2", "1_0", "\u0663", "0x10", "."],
)
def test_what_is_no_time_is_refused(value: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(("x-pdserve-slo-ttft-ms", value))
    assert caught.value.param == "x-pdserve-slo-ttft-ms"


def test_a_long_number_is_looked_through_once() -> None:
    """Quadratic work would not end before the test's time is over."""
    for value in ("1" * 200_000 + "x", "." + "1" * 200_000 + "x", "1e" + "1" * 200_000 + "x"):
        with pytest.raises(InvalidRequest):
            read(("x-pdserve-slo-ttft-ms", value))


def test_two_times_are_one_too_many() -> None:
    with pytest.raises(InvalidRequest):
        read(("x-pdserve-slo-ttft-ms", "1"), ("x-pdserve-slo-ttft-ms", "2"))


def test_a_key_says_who_asks_and_with_which_share() -> None:
    key = ApiKey(digest=b"", tenant="research", weight=2.5)
    found = parse_hints(CIMultiDictProxy(CIMultiDict()), "talk-1", key)
    assert (found.tenant, found.weight, found.session_id) == ("research", 2.5, "talk-1")
