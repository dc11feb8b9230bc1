"""Adapters of two fabrics never try each other; expected rates are the machine's own."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import pytest

from pdserve.messages.engine import TransferSpec
from pdserve.messages.transfer import BackendOffers
from pdserve.transfer import backends
from pdserve.transfer.backends import make_backends
from pdserve.transfer.nic_topology import fabrics, interface_of
from pdserve.transfer.select_backend import incompatible_reason

if TYPE_CHECKING:
    from pathlib import Path

SUBNET = "fe80:0000:0000:0000"


def adapter(at: Path, name: str, link: str, gid: str, state: str = "4: ACTIVE") -> None:
    port = at / name / "ports" / "1"
    (port / "gids").mkdir(parents=True)
    (port / "link_layer").write_text(link + "\n")
    (port / "gids" / "0").write_text(f"{gid}:1234:0000:0000:0001\n")
    (port / "state").write_text(state + "\n")
    (port / "rate").write_text("100 Gb/sec (4X EDR)\n")


def test_fabrics_are_what_active_ports_are_on(tmp_path: Path) -> None:
    assert fabrics(tmp_path / "none") == ()
    adapter(tmp_path, "mlx5_0", "InfiniBand", SUBNET)
    adapter(tmp_path, "mlx5_1", "InfiniBand", SUBNET)
    adapter(tmp_path, "mlx5_2", "InfiniBand", "fec0:0000:0000:0002", "1: DOWN")
    assert fabrics(tmp_path) == (f"InfiniBand subnet {SUBNET}",)
    adapter(tmp_path, "rxe0", "Ethernet", SUBNET)
    adapter(tmp_path, "mlx5_3", "InfiniBand", "fec0:0000:0000:0003")
    assert fabrics(tmp_path) == (
        f"InfiniBand subnet {SUBNET}",
        "InfiniBand subnet fec0:0000:0000:0003",
        "RoCE",
    )


@pytest.mark.parametrize(
    ("here", "there", "meet"),
    [
        (("InfiniBand", SUBNET), ("InfiniBand", SUBNET), True),
        (("InfiniBand", SUBNET), ("InfiniBand", "fec0:0000:0000:0002"), False),
        (("Ethernet", SUBNET), ("InfiniBand", SUBNET), False),
        (("Ethernet", SUBNET), ("Ethernet", "fec0:0000:0000:0002"), True),
    ],
)
def test_who_is_on_another_fabric_is_not_tried(
    tmp_path: Path, monkeypatch, here, there, meet: bool
) -> None:
    offers = []
    for name, end in (("here", here), ("there", there)):
        adapter(tmp_path / name, "a", *end)
        monkeypatch.setattr(backends, "ADAPTERS", tmp_path / name)
        (rdma,) = make_backends(TransferSpec(backends=("rdma",)))
        offers.append(BackendOffers({"rdma": rdma.places()}, {}))
    why_not = incompatible_reason("rdma", *offers)
    assert (why_not == "") is meet
    if not meet:
        assert "no place in common: " in why_not
        assert here[1] in why_not or "RoCE here" in why_not


def test_addresses_belong_to_interfaces() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.77") == ""
    assert interface_of("no.such.name.invalid") == ""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return  # this machine reaches nobody
        assert interface_of(probe.getsockname()[0]) not in ("", "lo")


def test_ipv6_addresses_too(tmp_path: Path, monkeypatch) -> None:
    table = tmp_path / "if_inet6"
    table.write_text(
        "00000000000000000000000000000001 01 80 10 80       lo\n"
        "fd000000000000000000000000000005 02 40 00 80     eth7\n"
    )
    monkeypatch.setattr("pdserve.transfer.nic_topology._IPV6", table)
    assert interface_of("fd00::5") == "eth7"
    assert interface_of("fd00::6") == ""


@pytest.mark.parametrize(("speed", "rate"), [("25000\n", 3.125e9), ("-1\n", 0.0), (None, 0.0)])
def test_tcp_is_expected_to_be_as_fast_as_its_interface(
    tmp_path: Path, monkeypatch, speed: str | None, rate: float
) -> None:
    monkeypatch.setattr(backends, "INTERFACES", tmp_path)
    monkeypatch.setattr(backends, "interface_of", {"10.1.0.5": "eth7"}.get)
    (tmp_path / "eth7").mkdir()
    if speed is not None:
        (tmp_path / "eth7" / "speed").write_text(speed)
    (tcp,) = make_backends(TransferSpec(backends=("tcp",), host="0.0.0.0", advertise="10.1.0.5"))
    assert tcp.expected() == rate
    (elsewhere,) = make_backends(TransferSpec(backends=("tcp",), host="10.1.0.6"))
    assert elsewhere.expected() == 0.0


def test_within_one_host_memory_is_the_limit() -> None:
    (tcp, shm) = make_backends(TransferSpec(backends=("tcp", "shm"), host="127.0.0.1"))
    assert tcp.expected() == shm.expected() / 2 > 1e6


def test_rdma_is_expected_to_be_as_fast_as_its_port(tmp_path: Path, monkeypatch) -> None:
    adapter(tmp_path, "mlx5_0", "InfiniBand", SUBNET)
    monkeypatch.setattr(backends, "ADAPTERS", tmp_path)
    (rdma,) = make_backends(TransferSpec(backends=("rdma",)))
    assert rdma.expected() == 12.5e9
