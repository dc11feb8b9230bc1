"""Items on their way from decode workers by way of routers to prefill workers."""

from __future__ import annotations

from tests.net.world import virtually
from tests.worker.prefill_queue.queues import item, world


@virtually
async def test_an_item_goes_from_one_worker_to_another() -> None:
    async with world() as w:
        await w.router("r")
        d, p = await w.decoder("d"), await w.prefiller("p")
        await w.settled()
        p.offer(1)
        await w.until(lambda: d.queue.state("m") is not None)
        heard = d.enqueue(item(1))
        await w.until(lambda: p.requests == [1])
        (claim,) = p.taken
        assert heard.queued == [("r", w.routers["r"].node.epoch)]
        assert (claim.decode, claim.decode_epoch) == ("d", d.node.epoch)
        assert d.open(claim, "p")
        claim.opened()
        claim.end("done")
        await w.until(lambda: w.routers["r"].queues.counters["ended_done"] == 1)
        assert (len(d.queue), len(p.claims)) == (0, 0)
