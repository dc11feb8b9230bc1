"""The rdma back end keeps the promises of the transfer port, over real verbs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.testing.transfer_conformance import TransferConformance
from pdserve.transfer.rdma import Options, RdmaTransport
from tests.rdma.conftest import DEVICES, packets

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.transfer.base import Ask, PeerKey, Region, Transport

PATIENT = Options(depth=64, receives=64, timeout=17)
"""A virtual machine on a busy host stands still for a while: that is no lost peer."""


class TestRdma(TransferConformance):
    def make(self, key: PeerKey, regions: Sequence[Region], ask: Ask) -> Transport:
        device = DEVICES[0] if key.node == "p" else DEVICES[-1]
        return RdmaTransport(
            key.node, key.epoch, regions, ask, devices=[device], options=PATIENT
        )

    async def test_it_is_rdma_that_moves_the_bytes(self) -> None:
        before = packets()
        await self.test_a_part_is_there_when_its_sink_hears_of_it()
        assert packets() - before >= 64
