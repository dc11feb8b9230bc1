"""NIXL over UCX: WRITE of prepared descriptors, one per block of the pool, and a notification.

Descriptors of the whole pools are prepared once. A transfer selects those of its blocks; that time
counts, and so does the notification, because the other end must learn of the arrival. UCX chooses
its transport by itself (shared memory or CMA on one host), or takes the one in UCX_TLS.
"""

from __future__ import annotations

import importlib
import time
from typing import TYPE_CHECKING, Any

from bench.transfer_arms.base import BLOCK, BLOCKS, POOL, Arm, Pool, Talk, run

if TYPE_CHECKING:
    from collections.abc import Sequence

DEADLINE = 60.0
"""Seconds of one transfer, after which the run fails."""


class Nixl(Arm):
    name = "NIXL"
    about = "NIXL over UCX, WRITE of prepared descriptors and a notification"

    def _agent(self, name: str, value: int) -> Any:
        api = importlib.import_module("nixl._api")
        self.pool = Pool(value)
        agent = api.nixl_agent(name, api.nixl_agent_config(backends=["UCX"]))
        agent.register_memory([(self.pool.address, POOL, 0, "")], "DRAM")
        return agent

    def _table(self, owner: str, address: int) -> Any:
        blocks = [(address + n * BLOCK, BLOCK, 0) for n in range(BLOCKS)]
        return self.agent.prep_xfer_dlist(owner, blocks, "DRAM")

    def connect(self, partner: Talk | None) -> None:
        assert partner is not None
        self.agent = self._agent("source", 1)
        theirs = partner.ask({"what": "join"})
        remote = self.agent.add_remote_agent(bytes.fromhex(theirs["metadata"]))
        if isinstance(remote, bytes):
            remote = remote.decode()
        self.ours = self._table("", self.pool.address)
        self.theirs = self._table(remote, theirs["address"])

    def move(self, mode: str, here: Sequence[int], there: Sequence[int]) -> float:
        agent = self.agent
        started = time.perf_counter()
        handle = agent.make_prepped_xfer(
            "WRITE", self.ours, list(here), self.theirs, list(there), b"arrived"
        )
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
            if time.perf_counter() - started > DEADLINE:
                raise RuntimeError("the transfer does not end")
        elapsed = time.perf_counter() - started
        if state != "DONE":
            raise RuntimeError(f"the transfer ended as {state}")
        agent.release_xfer_handle(handle)
        return elapsed

    def mark(self, here: int, value: bytes) -> None:
        self.pool.head(here)[:] = value

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        if request["what"] == "join":
            self.agent = self._agent("destination", 2)
            metadata = self.agent.get_agent_metadata().hex()
            return {"metadata": metadata, "address": self.pool.address}
        self.agent.get_new_notifs()
        return {"bytes": bytes(self.pool.head(request["block"])).hex()}


if __name__ == "__main__":
    run(Nixl())
