"""Mooncake's transfer engine over TCP: one synchronous WRITE of a batch of blocks, or several."""

from __future__ import annotations

import importlib
import time
from typing import TYPE_CHECKING, Any

from bench.transfer_arms.base import BLOCK, POOL, Arm, Pool, Talk, addresses, run

if TYPE_CHECKING:
    from collections.abc import Sequence

BATCH = 1024
"""Blocks of one call; several thousand overflow the engine's queue, which fails the call."""


class Mooncake(Arm):
    name = "Mooncake"
    about = "Mooncake's transfer engine over TCP, batch_transfer_sync_write"

    def _engine(self, value: int) -> Any:
        self.pool = Pool(value)
        engine = importlib.import_module("mooncake.engine").TransferEngine()
        if engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""):
            raise RuntimeError("the engine does not start")
        if engine.register_memory(self.pool.address, POOL):
            raise RuntimeError("the memory cannot be registered")
        return engine

    def connect(self, partner: Talk | None) -> None:
        assert partner is not None
        self.engine = self._engine(1)
        theirs = partner.ask({"what": "join"})
        self.target, self.remote = theirs["target"], theirs["address"]

    def move(self, mode: str, here: Sequence[int], there: Sequence[int]) -> float:
        started = time.perf_counter()
        for first in range(0, len(here), BATCH):
            ours, theirs = here[first : first + BATCH], there[first : first + BATCH]
            failed = self.engine.batch_transfer_sync_write(
                self.target,
                list(addresses(self.pool.address, ours)),
                list(addresses(self.remote, theirs)),
                [BLOCK] * len(ours),
            )
            if failed:
                raise RuntimeError(f"the transfer ended with {failed}")
        return time.perf_counter() - started

    def mark(self, here: int, value: bytes) -> None:
        self.pool.head(here)[:] = value

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        if request["what"] == "join":
            self.engine = self._engine(2)
            target = f"127.0.0.1:{self.engine.get_rpc_port()}"
            return {"target": target, "address": self.pool.address}
        return {"bytes": bytes(self.pool.head(request["block"])).hex()}


if __name__ == "__main__":
    run(Mooncake())
