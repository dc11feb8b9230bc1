"""Engines of a world hand prompts over, on its clock; deaths leave nothing half done."""

from __future__ import annotations

import asyncio
from random import Random
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from pdserve.engine.port import EngineState
from pdserve.errors import EngineDied, TransferCorrupt
from pdserve.messages.engine import TransferSpec
from pdserve.sim.engine import VirtualTimeEngine
from pdserve.testing.fake_rdma import FakeFabric, FakeFaults
from pdserve.testing.scripted import reference_tokens
from pdserve.testing.virtual_time import run
from tests.engine.test_handoff_between_engines import D, P, Prefilling, Remote, Wired, request, spec

if TYPE_CHECKING:
    from pdserve.transfer.verify import Verify

SPEC = spec("fake")


class Simulated(Wired[VirtualTimeEngine]):
    """The same pair, inline."""

    def __init__(self, fabric: FakeFabric, verify: Verify = "all") -> None:
        self.fabric = fabric
        super().__init__(self.engine(verify), self.engine(verify))

    def engine(self, verify: Verify) -> VirtualTimeEngine:
        one = replace(SPEC, transfer=TransferSpec(backends=("fake",), verify=verify))
        return VirtualTimeEngine(one, pace=0.02, load_time=0.5, fabric=self.fabric)

    async def __aenter__(self) -> Simulated:
        await asyncio.gather(self.d.start(), self.p.start())
        return self

    async def __aexit__(self, *exc: object) -> None:
        await asyncio.gather(self.d.stop(), self.p.stop())
        assert self.d.leaked == self.p.leaked == 0
        assert self.fabric.pairs == {}


def test_a_prompt_goes_on_elsewhere(seed: int) -> None:
    async def main() -> float:
        async with Simulated(FakeFabric(Random(seed))) as two:
            remote, _ = await two.hand_over(request())
            assert remote.ledger.tokens[0] == reference_tokens(request())
            assert two.d.stats().received_tokens == len(request().prompt)
            (path,) = two.d.paths()
            assert (path.node, path.backend) == ("p", "fake")
            return asyncio.get_running_loop().time()

    assert run(main()) == run(main())  # the same course each time


@pytest.mark.parametrize("verify", ["all", "sample", "off"])
def test_queue_pairs_carry_no_checksum_so_the_handoff_does(verify: Verify, seed: int) -> None:
    """Over rdma and its fake nothing but the engines' checksums sees that bytes are wrong."""

    async def main() -> None:
        async with Simulated(FakeFabric(Random(seed), FakeFaults(wrong=1.0)), verify) as two:
            remote, prefilling = Remote(request(14)), Prefilling()
            handle = two.d.submit_remote(request(14), remote)
            await asyncio.sleep(0.1)
            two.d.open_attempt(handle, 1, *P)
            await asyncio.sleep(1.0)
            two.p.prefill(request(14), remote.opened[1], *D, prefilling)
            await asyncio.sleep(1.0)
            assert prefilling.handoff is not None
            assert len(prefilling.handoff.checksums) == (0 if verify == "off" else 4)
            two.d.activate(handle, 1, prefilling.handoff)
            await asyncio.sleep(3.0)
            if verify == "off":
                assert remote.ledger.done
                return
            assert isinstance(remote.lost[1], TransferCorrupt)
            assert "the checksum of its block" in remote.lost[1].message
            two.d.prefill_here(handle)
            await asyncio.sleep(3.0)
            assert remote.ledger.tokens[0] == reference_tokens(request(14))

    run(main())


def test_moving_takes_its_time(seed: int) -> None:
    async def took(pace: float) -> float:
        fabric = FakeFabric(Random(seed), pace=lambda size: pace * size)
        async with Simulated(fabric) as two:
            begin = asyncio.get_running_loop().time()
            await two.hand_over(request())
            return asyncio.get_running_loop().time() - begin

    size = 11 * 4 * 16  # blocks, tokens, bytes of an entry: an upper bound is enough here
    slow = 5.0 / size
    assert run(took(slow)) > run(took(0.0)) + 1.0


def test_deaths_on_either_side_end_what_was_under_way(seed: int) -> None:
    async def main() -> None:
        async with Simulated(FakeFabric(Random(seed))) as two:
            remote, prefilling = Remote(request()), Prefilling()
            handle = two.d.submit_remote(request(), remote)
            await asyncio.sleep(0.1)
            two.d.open_attempt(handle, 1, *P)
            await asyncio.sleep(1.0)
            two.p.prefill(request(), remote.opened[1], *D, prefilling)
            assert two.p.die(1.0)
            assert isinstance(prefilling.error, EngineDied)
            await asyncio.sleep(2.0)
            assert two.p.state is EngineState.READY
            two.d.give_up(handle, 1)
            two.d.peer_gone(*P)
            two.d.prefill_here(handle)
            await asyncio.sleep(2.0)
            assert remote.ledger.tokens[0] == reference_tokens(request())
            assert two.d.stats().blocks_quarantined == 0

            second = Remote(request(30))
            handle = two.d.submit_remote(request(30), second)
            await asyncio.sleep(0.1)
            two.d.open_attempt(handle, 1, *P)
            await asyncio.sleep(1.0)
            assert two.d.die(1.0)
            assert isinstance(second.ledger.error, EngineDied)
            await asyncio.sleep(2.0)
            two.p.peer_gone(*D)
            await asyncio.sleep(1.0)
            remote, _ = await two.hand_over(request(30))
            assert remote.ledger.tokens[0] == reference_tokens(request(30))

    run(main())
