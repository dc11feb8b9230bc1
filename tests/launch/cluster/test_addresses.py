from __future__ import annotations

from pathlib import Path

import pytest

from pdserve.errors import ConfigError
from pdserve.launch.cluster.addresses import ClusterConfig, advertise, listen_address, route_from

ROUTES = {
    "seed": "10.1.0.5",
    "other": "10.2.0.5",
    "here": "127.0.1.1",
    "six": "fd00::5",
    "192.0.2.1": "192.168.0.5",
}


def advertised(listen: str = "0.0.0.0:7700", *join: str, told: str = "") -> str:
    return advertise(ClusterConfig(join=join, advertise=told), listen, ROUTES.get)


def test_what_was_said_is_done() -> None:
    config = ClusterConfig(listen="10.0.0.1:1", advertise="pub:2")
    assert listen_address(config, "router") == "10.0.0.1:1"
    assert advertise(config, "0.0.0.0:1", ROUTES.get) == "pub:2"


def test_a_router_has_a_port_that_others_can_guess() -> None:
    assert listen_address(ClusterConfig(), "router") == "127.0.0.1:7700"
    assert listen_address(ClusterConfig(), "worker") == "127.0.0.1:0"


@pytest.mark.parametrize("seed", ["127.0.0.1:1", "localhost:1", "[::1]:1"])
def test_with_seeds_on_this_machine_nobody_else_can_come_in(seed: str) -> None:
    assert listen_address(ClusterConfig(join=(seed,)), "worker") == "127.0.0.1:0"


def test_with_a_seed_elsewhere_all_addresses_are_listened_on() -> None:
    config = ClusterConfig(join=("127.0.0.1:1", "seed:1"))
    assert listen_address(config, "worker") == "0.0.0.0:0"


def test_a_single_address_needs_no_choice() -> None:
    assert advertised("10.0.0.1:7700", "seed:1") == ""


def test_of_many_addresses_the_one_that_leads_to_a_seed_is_told() -> None:
    assert advertised("0.0.0.0:1", "seed:1", "other:1") == "10.1.0.5"
    assert advertised("0.0.0.0:1", "lost:1", "other:1") == "10.2.0.5"
    assert advertised("[::]:1", "six:1") == "[fd00::5]"


def test_without_seeds_the_way_to_other_machines_is_told() -> None:
    assert advertised("0.0.0.0:1") == "192.168.0.5"


def test_a_seed_on_this_machine_says_nothing_of_the_way_to_others() -> None:
    """As where a host's own name is among the seeds of all."""
    assert advertised("0.0.0.0:1", "here:1") == "192.168.0.5"
    assert advertised("0.0.0.0:1", "here:1", "other:1") == "10.2.0.5"


def test_where_no_address_leads_anywhere_one_must_be_said() -> None:
    for join in ((), ("lost:1",), ("here:1",)):
        with pytest.raises(ConfigError, match="--advertise"):
            advertise(ClusterConfig(join=join), "0.0.0.0:1", {"here": "127.0.1.1", "x": ""}.get)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"listen": "nowhere"}, "listen"),
        ({"listen": "h:99999"}, "listen"),
        ({"join": ("h",)}, "join"),
        ({"join": ("h:0",)}, "no port"),
        ({"advertise": "::1"}, "advertise"),
        ({"advertise": "0.0.0.0:7700"}, "cannot be dialled"),
        ({"advertise": "[::]"}, "cannot be dialled"),
        ({"node_name": "a b"}, "node-name"),
        ({"node_name": "a:1"}, "node-name"),
        ({"node_name": "ä"}, "node-name"),
        ({"node_name": "x" * 101}, "node-name"),
        ({"cluster": "a b"}, "cluster"),
        ({"change": "-x"}, "change: '-x'"),
        ({"change": "a/b"}, "change"),
    ],
)
def test_what_cannot_be_is_named(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ClusterConfig(**changes).validate()  # type: ignore[arg-type]


def test_a_seed_without_a_way_may_be_a_typing_error() -> None:
    with pytest.raises(ConfigError, match="is the name right"):
        advertise(ClusterConfig(join=("typo:7700",)), "0.0.0.0:0", lambda host: None)


@pytest.mark.parametrize("told", ["host", "host:0", "host:7", "10.0.0.1", "[::1]", "[::1]:7"])
def test_what_is_advertised_may_leave_the_port_open(told: str) -> None:
    ClusterConfig(advertise=told, node_name="gpu-7.rack_1").validate()


def test_certificates_come_whole() -> None:
    some = Path("some.pem")
    for config in (
        ClusterConfig(tls_cert=some),
        ClusterConfig(tls_key=some),
        ClusterConfig(tls_ca=some),
    ):
        config.validate()
        with pytest.raises(ConfigError, match="tls"):
            config.check_tls()
    ClusterConfig(tls_cert=some, tls_key=some, tls_ca=some).check_tls()


def test_who_said_nothing_of_others_is_alone() -> None:
    assert ClusterConfig(node_name="x", cluster="y").alone
    for config in (
        ClusterConfig(listen="h:1"),
        ClusterConfig(join=("h:1",)),
        ClusterConfig(advertise="h"),
    ):
        assert not config.alone


def test_the_way_to_oneself_is_oneself() -> None:
    assert route_from("127.0.0.1") == "127.0.0.1"
    for name in ("no such host.invalid", "a..b", "x" * 64):  # the last two IDNA refuses
        assert route_from(name) is None
