"""Two adapters find a common way, or say why there is none."""

from __future__ import annotations

import ipaddress

import msgspec
import pytest

from pdserve.messages.transfer import RegionCard
from pdserve.testing.kv_oracle import layouts
from pdserve.transfer.copy_plan import PlanError
from pdserve.transfer.rdma.negotiate import (
    DeviceName,
    Gid,
    RailOffer,
    RdmaDetails,
    choose_gid,
    common_mtu,
    pair_rails,
)
from pdserve.transfer.rdma.transport import remote_regions

OFFER = RailOffer(
    device=0, link="roce", number=7, sequence=1, gid=bytes(16), lid=0, mtu=5, reads=16
)  # fmt: skip


def gid(index: int, text: str, kind: int = 2) -> Gid:
    return Gid(index, kind, ipaddress.IPv6Address(text).packed)


TABLE = [
    gid(0, "fe80::1", 1),
    gid(1, "fe80::1"),
    gid(2, "2001:db8::1"),
    gid(3, "::ffff:10.0.0.1", 1),
    gid(4, "::ffff:10.0.0.1"),
    gid(5, "::"),
    gid(6, "::ffff:10.0.0.2"),
]


@pytest.mark.parametrize(
    ("table", "chosen"),
    [(TABLE, 4), (TABLE[:4], 2), (TABLE[:2], 1), (TABLE[5:], 6), (TABLE[::-1], 4)],
)
def test_roce_prefers_v2_over_ipv4(table: list[Gid], chosen: int) -> None:
    assert choose_gid(table, "roce").index == chosen


def test_a_gid_that_is_named_is_taken() -> None:
    assert choose_gid(TABLE, "roce", 0).index == 0
    with pytest.raises(PlanError, match="no GID 9"):
        choose_gid(TABLE, "roce", 9)


def test_without_an_address_there_is_no_roce() -> None:
    with pytest.raises(PlanError, match="no RoCE v2 GID"):
        choose_gid([TABLE[0], TABLE[3], TABLE[5]], "roce")
    assert choose_gid([gid(0, "fe80::5", 0)], "infiniband").index == 0


def test_the_smaller_mtu_holds() -> None:
    smaller = msgspec.structs.replace(OFFER, mtu=3)
    assert common_mtu(OFFER, smaller) == common_mtu(smaller, OFFER) == 3
    with pytest.raises(PlanError, match="this adapter is on roce, the peer's on infiniband"):
        common_mtu(OFFER, msgspec.structs.replace(OFFER, link="infiniband"))


def test_rails_find_adapters_on_their_network() -> None:
    band = msgspec.structs.replace(OFFER, link="infiniband")
    assert pair_rails([OFFER] * 4, ["roce", "roce"]) == [0, 1, 0, 1]
    assert pair_rails([OFFER, band], ["infiniband", "roce"]) == [1, 0]
    assert pair_rails([OFFER], ["roce", "roce"]) == [0]
    with pytest.raises(PlanError, match="no adapter on infiniband"):
        pair_rails([band], ["roce"])


def test_devices_have_names_ports_and_indices() -> None:
    assert DeviceName.parse("mlx5_0") == DeviceName("mlx5_0", 1, None)
    assert DeviceName.parse("mlx5_0:2") == DeviceName("mlx5_0", 2, None)
    assert DeviceName.parse("mlx5_0:1:3") == DeviceName("mlx5_0", 1, 3)
    assert str(DeviceName.parse("mlx5_0:1:3")) == "mlx5_0:1:3"
    for wrong in ("", ":1", "a:b", "a:1:2:3", "a:-1"):
        with pytest.raises(PlanError):
            DeviceName.parse(wrong)


@pytest.mark.parametrize(
    "change",
    [{"mtu": 6}, {"mtu": 0}, {"number": 1 << 24}, {"gid": b"short"}, {"device": 64}, {"link": "x"}],
)
def test_what_no_adapter_offers_is_not_read(change: dict[str, object]) -> None:
    good = RdmaDetails(1, (OFFER,))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(good), type=RdmaDetails) == good
    wrong = RdmaDetails(1, (msgspec.structs.replace(OFFER, **change),))
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(wrong), type=RdmaDetails)


def test_each_rail_takes_the_keys_of_its_adapter() -> None:
    (layout,) = layouts(2, 1)
    card = RegionCard(layout=layout, blocks=4, address=64, keys=(1, 2, 3, 4), slice=100)
    second = msgspec.structs.replace(OFFER, device=1)
    assert [list(region) for region in remote_regions([card], OFFER, 2)] == [[64, 100, 1, 2]]
    assert [list(region) for region in remote_regions([card], second, 2)] == [[64, 100, 3, 4]]
    for keys, size, offer in (((), 100, OFFER), ((1, 2, 3), 100, OFFER), ((1, 2), 0, OFFER)):
        wrong = msgspec.structs.replace(card, keys=keys, slice=size)
        with pytest.raises(PlanError, match="keys for 2 adapters"):
            remote_regions([wrong], offer, 2)
    with pytest.raises(PlanError, match="keys for 2 adapters"):
        remote_regions([card], msgspec.structs.replace(OFFER, device=5), 2)
