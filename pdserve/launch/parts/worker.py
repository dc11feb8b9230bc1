"""The worker role as a part of a process; its engine is another process."""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from typing import TYPE_CHECKING

from msgspec.structs import replace

from pdserve.engine.api import EngineState
from pdserve.engine.carrier import ProcessCarrier
from pdserve.engine.client import ClientOptions, CoreClient
from pdserve.launch.announce import loaded_line
from pdserve.launch.cpus import read_limits
from pdserve.launch.parts.base import card, report
from pdserve.launch.samples import sample_node
from pdserve.runtime.status import StatusService
from pdserve.runtime.topics.service import Topics
from pdserve.worker.member import WorkerMember
from pdserve.worker.service import WorkerService

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.engine.carrier import Carrier
    from pdserve.ids import Seconds
    from pdserve.launch.parts.base import Context
    from pdserve.messages.engine import EngineSpec
    from pdserve.messages.status import Report
    from pdserve.runtime.node import Node
    from pdserve.worker.config import WorkerConfig

__all__ = ["WorkerPart"]

_log = logging.getLogger(__name__)


class WorkerPart:
    """The worker role: a node, and an engine in a process of its own."""

    def __init__(
        self,
        context: Context,
        node: Node,
        on_state: Callable[[EngineState, str], None],
        *,
        config: WorkerConfig | None = None,
        carrier: Callable[[], Carrier] | None = None,
    ) -> None:
        """`config` and `carrier`: of one of several workers in this process."""
        config = config or context.config.worker
        threads = config.threads or read_limits().threads
        transfer = context.membership.transfer(node, config)
        self._config = config = dataclasses.replace(config, threads=threads, transfer=transfer)
        self._carrier = carrier or functools.partial(_process, context)
        self.node = node
        self.topics = Topics(node, node.timers)
        self.service = WorkerService(config, self._make_engine, context.metrics)
        self.secrets = context.membership.secrets(node, context.degradations)
        self.secrets.listen(self.service.rekey)
        self.member = WorkerMember(
            self.service, node, self.topics, card(context, "worker"), context.degradations
        )
        self._context = context
        self._on_state = on_state
        context.metrics.attach_node(lambda: sample_node(node, self.topics))
        StatusService(node, self._report, time.time)

    def _report(self) -> Report:
        return replace(
            report(self._context, self),
            worker=self.member.load(),
            handoffs=self.member.handoffs(),
            paths=tuple(self.service.paths()),
        )

    def _make_engine(self, spec: EngineSpec) -> CoreClient:
        config = self._config
        options = ClientOptions(
            load_timeout=config.start_timeout,
            stall_timeout=config.stall_timeout,
            canary_interval=config.canary_interval,
        )
        cancelled = self._context.metrics.cancel_seconds
        return CoreClient(
            spec,
            options,
            on_state=self._note_state,
            on_cancelled=lambda phase, seconds: cancelled.labels(phase).observe(seconds),
            make_carrier=self._carrier,
        )

    def _note_state(self, state: EngineState, reason: str) -> None:
        self.node.call_soon(self.member.tell)  # the engine has the state when this turn ends
        mode = self._config.mode
        name = "engine_down" if mode == "aggregated" else f"{mode}_engine_down"
        if state in (EngineState.RESTARTING, EngineState.FAILED):
            self._context.degradations.add(name, f"the engine is {state.value}: {reason}")
        else:
            self._context.degradations.clear(name)
        self._on_state(state, reason)

    async def begin(self) -> None:
        """The engine comes after joining, so that others see it load."""

    async def join(self, seeds: tuple[str, ...] = ()) -> None:
        await self.node.start(beside=seeds)

    async def load(self) -> None:
        """Find the model and start the engine. Errors: see `WorkerService.start`."""
        self.service.rekey(self.secrets.need())
        await self.service.start(self._context.screen.progress)
        self._context.screen.finish()
        capabilities = self.service.capabilities
        if capabilities is not None and self._context.config.process.role == "worker":
            for model in self.service.cards().values():
                mode = self._config.mode
                does = "" if mode == "aggregated" else f"; a {mode} worker"
                _log.info("%s%s", loaded_line(model, capabilities), does)

    async def drain(self, timeout: Seconds) -> None:
        left = self.member.requests
        if not await self.member.drain(timeout):
            _log.warning(
                "not all of %d requests were gone within %g s: their frontends send the others on",
                *(left, timeout),
            )

    @property
    def left(self) -> int:
        return self.member.left

    async def close(self) -> None:
        self.member.close()
        await self.node.leave()
        self.topics.close()
        await self.service.stop()
        await self.node.close()

    def unready_reason(self) -> str | None:
        return self.service.unready_reason()


def _process(context: Context) -> ProcessCarrier:
    process = context.config.process
    return ProcessCarrier(
        log_format=process.log_format,
        log_level=process.log_level,
        on_line=context.screen.write_line,
    )
