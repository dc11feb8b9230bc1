"""Prefill and decode apart with vLLM: what the core needs besides a plain vLLM engine.

The configuration that makes vLLM load our connector, the models whose KV can be exchanged, and
`VllmStaging`, which joins staging blocks, the connector's planner and held prefixes. It knows no
transports.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from pdserve.engine_core.staged_kv.pool import StagingPool
from pdserve.engine_core.tiers.core_tiers import frames_of
from pdserve.errors import ConfigError
from pdserve.limits.memory import available
from pdserve.messages.transfer import RankKvLayout
from pdserve.transfer.copy_plan import block_bytes, blocks_for
from pdserve_engines.vllm.kv_transfer.device_staging import device_pool, kept_for_staging
from pdserve_engines.vllm.kv_transfer.prefix_holds import PrefixHolds

if TYPE_CHECKING:
    from pdserve.ids import Bytes
    from pdserve.messages.engine import EngineCapabilities
    from pdserve.messages.tiers import TierSpec
    from pdserve_engines.vllm.kv_transfer.copy_planner import Copied, CopyPlanner, LetGo
    from pdserve_engines.vllm.kv_transfer.kv_copy import CacheForm

__all__ = [
    "VllmStaging",
    "block_layout",
    "check_exchangeable",
    "common_form",
    "core_layout",
    "immovable",
    "movable_refusal",
    "settle_failed_loads",
    "transfer_config",
]

_LOG = logging.getLogger("pdserve.engines.vllm")

_HOST_SHARE = 0.25
"""Most of the host's free memory that staging blocks may take."""


def transfer_config() -> Any:
    """The `KVTransferConfig` that makes vLLM load our connector."""
    from vllm.config import KVTransferConfig

    return KVTransferConfig(
        kv_connector="PdserveConnector",
        kv_connector_module_path="pdserve_engines.vllm.kv_transfer.connector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
    )


def settle_failed_loads(config: Any) -> None:
    """Choose what vLLM does with a request whose KV could not be loaded.

    It computes the blocks itself, but not with asynchronous scheduling: there the next step is
    under way already, and vLLM would report its token, which follows from blocks that hold nothing.
    It then ends the request with an error, and the frontend sends it to a worker again.
    """
    if config.scheduler_config.async_scheduling:
        config.kv_transfer_config.kv_load_failure_policy = "fail"


def check_exchangeable(config: Any) -> None:
    """Raise `ConfigError` for a configuration of vLLM whose KV cannot be exchanged, before the
    model is loaded. Some models show it only when they are loaded: `VllmStaging` refuses those."""
    reason = immovable(config)
    if reason:
        raise _refused(reason)


def immovable(config: Any) -> str:
    """Why the KV of this configuration cannot leave vLLM's cache; empty: as far as is known before
    the model is loaded, it can."""
    model, parallel = config.model_config, config.parallel_config
    refusals = {
        "its attention is latent (MLA)": model.use_mla,
        "it has state-space or linear-attention layers": model.is_hybrid,
        "it has no attention": model.is_attention_free,
        "it has an encoder": model.is_encoder_decoder,
        "it spans several machines": parallel.nnodes > 1,
        "pipeline_parallel_size is over 1": parallel.pipeline_parallel_size > 1,
        "decode_context_parallel_size is over 1": parallel.decode_context_parallel_size > 1,
        "prefill_context_parallel_size is over 1": parallel.prefill_context_parallel_size > 1,
        "it decodes speculatively": config.speculative_config is not None,
    }
    return next((refusal for refusal, holds in refusals.items() if holds), "")


def _refused(reason: str) -> ConfigError:
    return ConfigError(
        f"the vllm engine cannot exchange the KV of this model: {reason}; run it with "
        "--mode=aggregated"
    )


class VllmStaging:
    """The staging blocks of one vLLM engine, and the copies from and to them."""

    def __init__(
        self,
        core: Any,
        capabilities: EngineCapabilities,
        unfilled: float,
        tiers: TierSpec | None = None,
    ) -> None:
        """`core`: vLLM's `EngineCore`. `unfilled`: staging blocks, as a share of vLLM's blocks.
        They are on the device if the executor has kept memory for them there; else the frames of
        `tiers` are in their memory. Raises `ConfigError` if this model's KV cannot be exchanged."""
        connector = core.scheduler.connector
        layout = core_layout(core, capabilities)
        frames = 0 if tiers is None else frames_of(tiers, block_bytes(layout))
        self.pool = _make_pool(layout, capabilities, unfilled, kept_for_staging(core), frames)
        connector.staging = self.pool.handle()
        self.planner: CopyPlanner = connector.planner
        self.holds = PrefixHolds(core)
        _LOG.info(
            "KV is exchanged by %d staging blocks of %d bytes in %s memory, packed as %s",
            self.pool.blocks.num_blocks,
            self.pool.block_bytes,
            "device" if self.pool.in_device else "host",
            common_form(connector).packing,
        )

    def events(self) -> list[tuple[int, Copied | LetGo]]:
        """What has happened to staging blocks since the last call, each with its handle."""
        return [(int(each.key.partition(".")[0]), each) for each in self.planner.take_events()]


def movable_refusal(connector: Any) -> str:
    """Why the KV cannot leave vLLM's cache, as vLLM's ranks have said it; empty: it can."""
    forms = [] if connector is None else connector.forms
    refusals = [each.refusal for each in forms if each.form is None]
    if refusals or not forms:
        return str(refusals[0]) if refusals else "its ranks have not described their caches"
    if any(each.form != forms[0].form for each in forms):
        return "its ranks keep KV in different forms"
    return ""


def common_form(connector: Any) -> CacheForm:
    """The form of the cache on all ranks. Raises `ConfigError`."""
    refusal = movable_refusal(connector)
    if refusal:
        raise _refused(refusal)
    form: CacheForm = connector.forms[0].form
    return form


def core_layout(core: Any, capabilities: EngineCapabilities) -> RankKvLayout:
    """The layout of the blocks of vLLM's `EngineCore`. Raises `ConfigError`."""
    form = common_form(core.scheduler.connector)
    heads = int(core.vllm_config.model_config.get_total_num_kv_heads())
    return block_layout(form, heads, capabilities)


def block_layout(form: CacheForm, heads: int, capabilities: EngineCapabilities) -> RankKvLayout:
    """What a block means to peers. Processors may pack the same model's KV in different ways, and
    only equal ones may exchange it."""
    return RankKvLayout(
        content=f"{capabilities.compat_hash} {form.packing}",
        layers=form.layers,
        heads=heads,
        tokens=form.tokens,
        dim=form.dim,
        itemsize=form.itemsize,
    )


def _make_pool(
    layout: RankKvLayout,
    capabilities: EngineCapabilities,
    unfilled: float,
    kept: Bytes,
    frames: int,
) -> StagingPool:
    """On the device in the `kept` bytes, or in host memory, before `frames` frames, if there are
    none or the device refuses. Raises `ConfigError`."""
    most = kept // block_bytes(layout)
    if most:
        try:
            return device_pool(layout, _count(layout, capabilities, unfilled, most))
        except ConfigError as error:
            _LOG.warning("staging blocks are in host memory: %s", error.message)
    most = int(_HOST_SHARE * available().free) // block_bytes(layout)
    return StagingPool(layout, _count(layout, capabilities, unfilled, most), frames=frames)


def _count(
    layout: RankKvLayout, capabilities: EngineCapabilities, unfilled: float, most: int
) -> int:
    """How many staging blocks: a share of vLLM's, at least two whole sequences, and no more than
    the memory holds."""
    whole = blocks_for(capabilities.max_model_len, layout.tokens)
    wanted = max(2 * whole, int(unfilled * capabilities.num_blocks))
    if most < 1:
        raise ConfigError("there is no memory for staging blocks of KV")
    if most < min(wanted, whole):
        _LOG.warning(
            "staging holds %d tokens: longer prompts are prefilled where they are decoded",
            most * layout.tokens,
        )
    return min(wanted, most)
