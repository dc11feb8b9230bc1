"""Runs the worker role in a process; its engine is a child process."""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from msgspec.structs import replace

from pdserve.engine.client import CoreClient, CoreClientOptions
from pdserve.engine.port import EngineState
from pdserve.engine_core.engine_libraries import check_installed
from pdserve.launch.cpus import read_cpu_limits
from pdserve.launch.early_engine import process_launcher
from pdserve.launch.kept_secret import SecretKeeper
from pdserve.launch.kv_tiers import (
    NewDirectory,
    describe_tiers,
    missing_tiers,
    plan_tiers,
    tier_trouble,
)
from pdserve.launch.metrics_samples import sample_node
from pdserve.launch.ready_message import loaded_line
from pdserve.launch.recent_windows import EngineRecent
from pdserve.launch.role_traces import RoleTraces
from pdserve.launch.roles.base import node_card, node_report
from pdserve.runtime.status import StatusService
from pdserve.worker.card import shows_tools
from pdserve.worker.node import WorkerNode
from pdserve.worker.tiers.fetch_counts import GrowthCounter

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.engine.launcher import CoreLauncher
    from pdserve.ids import Seconds
    from pdserve.launch.roles.base import RoleContext
    from pdserve.messages.engine import EngineSpec
    from pdserve.messages.status import NodeReport
    from pdserve.messages.tiers import TierSpec
    from pdserve.runtime.hash_secret import HashSecrets
    from pdserve.runtime.node import Node
    from pdserve.tracing.steps import StepTrace
    from pdserve.worker.config import WorkerConfig

__all__ = ["WorkerRole"]

_log = logging.getLogger(__name__)


class WorkerRole:
    """The worker role: a node, and an engine in its own process."""

    def __init__(
        self,
        context: RoleContext,
        node: Node,
        on_given_up: Callable[[], None],
        *,
        config: WorkerConfig | None = None,
        launcher: Callable[[], CoreLauncher] | None = None,
    ) -> None:
        """`on_given_up` is called when a loaded engine will not be restarted; failures before that
        are raised by `load`. `config` and `launcher`: those of one of several workers in this
        process.

        Errors: `ConfigError` if the engine's libraries are not installed, or the machine has no
        room for the KV tiers.
        """
        self._context = context
        self._on_given_up = on_given_up
        config = config or context.config.worker
        check_installed(config.engine)
        threads = config.threads or read_cpu_limits().threads
        transfer = context.membership.transfer(node, config)
        self._directory = NewDirectory(config.disk_kv)
        tiers = plan_tiers(config, _tier_owner(context, config))
        self._keeper = _keeper(tiers)
        self._config = config = dataclasses.replace(
            config, threads=threads, transfer=transfer, tiers=tiers
        )
        self._launcher = launcher or functools.partial(process_launcher, context)
        self.node = node
        self.worker = WorkerNode(
            node,
            config,
            self._make_engine,
            node_card(context, "worker"),
            _secrets(context, node, self._keeper),
            context.metrics,
            context.degradations,
        )
        context.metrics.attach_node(lambda: sample_node(node, self.worker.topics))
        self._pulls_ended = GrowthCounter(context.metrics.kv_pulls_ended)
        self._pulls_refused = GrowthCounter(context.metrics.kv_pulls_refused)
        self._recent = EngineRecent(self.worker.service, node.now)
        self.worker.service.on_second = self._note_second
        StatusService(node, self._report, time.time)
        alone = context.config.process.role == "worker"
        self._traces = RoleTraces(context, node, export=alone)
        self._changes = self._traces.serve_changes()
        self._random = Random()
        self.worker.agent.mode.on_traced = self._trace_switch

    def _report(self) -> NodeReport:
        recent, minute = self._recent.windows()
        return replace(
            node_report(self._context, self),
            worker=self.worker.agent.load(),
            handoffs=self.worker.agent.handoffs(),
            paths=tuple(self.worker.service.engine.paths()),
            recent=recent,
            minute=minute,
            tiers=self.worker.service.tiers(),
            mode=self.worker.agent.mode.report(),
            ranks=self.worker.service.ranks(),
        )

    def _trace_switch(self, trace: StepTrace, outcome: str, failed: str) -> None:
        """A change of the mode is over."""
        now, wall = self.node.now(), time.time()
        self._changes.add(trace.built(now, wall, self._random, error=failed, result=outcome))

    def _make_engine(self, spec: EngineSpec) -> CoreClient:
        config = self._config
        options = CoreClientOptions(
            load_timeout=config.start_timeout,
            stall_timeout=config.stall_timeout,
            canary_interval=config.canary_interval,
        )
        cancelled = self._context.metrics.cancel_seconds
        return CoreClient(
            spec,
            options,
            on_state=self._note_state,
            on_news=self._note_news,
            on_cancelled=lambda phase, seconds: cancelled.labels(phase).observe(seconds),
            make_launcher=self._launcher,
        )

    def _note_news(self) -> None:
        self.worker.agent.wake()
        self.worker.service.wake()

    def _note_state(self, state: EngineState, reason: str) -> None:
        # The engine completes its change in this turn of the event loop; the agent reads it after.
        self.node.call_soon(self.worker.agent.tell)
        mode = self._config.mode
        name = "engine_down" if mode == "aggregated" else f"{mode}_engine_down"
        if state in (EngineState.RESTARTING, EngineState.FAILED):
            self._context.degradations.add(name, f"{state.phrase}: {reason}")
        else:
            self._context.degradations.clear(name)
        if state is EngineState.READY:
            if self._keeper is not None:
                self._keeper.opened()
            self._note_reduced()
            self._note_untested()
            self._note_missing_tiers()
            self._note_slow_kernels()
        if state is EngineState.FAILED and self.worker.service.cards():
            self._on_given_up()

    def _note_reduced(self) -> None:
        """Reports a context or KV pool that is smaller than requested as a degradation."""
        capabilities, degradations = (
            self.worker.service.engine.capabilities,
            self._context.degradations,
        )
        mode = self._config.mode
        name = "kv_reduced" if mode == "aggregated" else f"{mode}_kv_reduced"
        degradations.clear(name)
        if capabilities is not None and capabilities.reduced:
            degradations.add(name, capabilities.reduced)

    def _note_untested(self) -> None:
        """Reports an engine library of an untested version as a degradation."""
        capabilities = self.worker.service.engine.capabilities
        name = "engine_untested"
        self._context.degradations.clear(name)
        if capabilities is not None and capabilities.untested:
            self._context.degradations.add(name, capabilities.untested)

    def _note_missing_tiers(self) -> None:
        """Reports tiers that the operator asked for and the engine does not have."""
        capabilities = self.worker.service.engine.capabilities
        if capabilities is not None:
            self._note_reason("kv_tiers", missing_tiers(self._config, capabilities))

    def _note_slow_kernels(self) -> None:
        """Reports that a slower library computes in place of the engine's own kernels."""
        capabilities = self.worker.service.engine.capabilities
        if capabilities is not None:
            self._note_reason("slow_kernels", capabilities.slow_kernels)

    def _note_tier_trouble(self) -> None:
        """Reports tiers that work in part or not at all."""
        stats = self.worker.service.engine.stats()
        self._note_reason("kv_tier_trouble", tier_trouble(stats.tiers))

    def _note_reason(self, name: str, reason: str) -> None:
        """Reports a degradation of this worker; an empty reason ends it."""
        mode, degradations = self._config.mode, self._context.degradations
        name = name if mode == "aggregated" else f"{mode}_{name}"
        if degradations.reasons().get(name, "") != reason:
            degradations.clear(name)
        if reason:
            degradations.add(name, reason)

    def _note_second(self) -> None:
        self._recent.note()
        self._note_tier_trouble()
        fetches = self.worker.agent.kv_fetch
        if fetches is not None:
            self._pulls_ended.note(fetches.numbers.ended)
            self._pulls_refused.note(fetches.numbers.refused)

    async def begin(self) -> None:
        """Does nothing: the engine starts after joining, so that other nodes see it load."""

    async def join(self, seeds: tuple[str, ...] = ()) -> None:
        await self.worker.join(seeds)
        self._traces.start()

    async def load(self) -> None:
        """Finds the model and starts the engine. Errors: as `WorkerService.start`."""
        try:
            await self.worker.load(self._context.screen.progress)
        except BaseException:
            self._directory.discard()
            raise
        self._context.screen.finish()
        capabilities = self.worker.service.engine.capabilities
        if capabilities is not None and self._context.config.process.role == "worker":
            for model in self.worker.service.cards().values():
                mode = self._config.mode
                does = "" if mode == "aggregated" else f"; a {mode} worker"
                _log.info("%s%s", loaded_line(model, capabilities), does)
        self._tell_tiers()
        self._warn_of_unseen_tools()

    def _tell_tiers(self) -> None:
        tiers = describe_tiers(self._config.tiers)
        if tiers:
            _log.info("KV that the device evicts goes to %s", tiers)

    def _warn_of_unseen_tools(self) -> None:
        """Some families' templates show calls and not what may be called."""
        for card in self.worker.service.cards().values():
            if card.tool_parser and not shows_tools(card):
                _log.warning(
                    "model %s: its chat template does not show tools to the model, which learns of "
                    "a request's 'tools' only from its messages; --chat-template replaces it",
                    card.name,
                )

    async def drain(self, timeout: Seconds) -> None:
        left = self.worker.agent.requests
        if not await self.worker.drain(timeout):
            _log.warning(
                "not all of %d requests were gone within %.1f s: their frontends move the others",
                *(left, timeout),
            )

    async def undo_drain(self) -> None:
        self.worker.undo_drain()

    def needed(self) -> str:
        return self.worker.agent.mode.needed()

    @property
    def left(self) -> int:
        return self.worker.agent.left

    async def close(self) -> None:
        await self.worker.close()
        await self._traces.close()

    def unready_reason(self) -> str | None:
        return self.worker.service.unready_reason()


def _keeper(tiers: TierSpec | None) -> SecretKeeper | None:
    """Keeps the secret of a disk tier; None: there is none."""
    if tiers is None or not tiers.disk_path:
        return None
    return SecretKeeper(Path(tiers.disk_path), time.time)


def _secrets(context: RoleContext, node: Node, keeper: SecretKeeper | None) -> HashSecrets:
    """The node's hash secret; with a disk tier, the one that its blocks were written under."""
    if keeper is None:
        return context.membership.secrets(node, context.degradations)
    secrets = context.membership.secrets(node, context.degradations, keeper.kept())
    secrets.on_claim(keeper.keep)
    return secrets


def _tier_owner(context: RoleContext, config: WorkerConfig) -> str:
    """The worker's name on its disk: the same one after a restart."""
    name = context.config.cluster.node_name or context.membership.card("worker").host
    return name if config.mode == "aggregated" else f"{name}-{config.mode}"
