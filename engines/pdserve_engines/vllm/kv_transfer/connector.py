"""vLLM's KV connector for staging blocks and lower tiers. vLLM itself imports and creates it.

    scheduler half   in the engine process: asks `CopyPlanner` which blocks a step copies
    worker half      in each rank: copies them by `RankCopier`, loads before the step computes and
                     saves after it, and reports the step

Both halves also serve the tiers below vLLM's cache, if there are any: `kv_tiers.tiers` says what is
copied, and a request that loads from there waits while others compute. A request whose KV is in
staging blocks loads from the tiers in the same step as from those.

Staging is synchronous: a step that loads computes with what it has loaded, and what a step saved
is in staging when the step is reported. A block that cannot be loaded is reported to vLLM, which
computes it or ends the request (`settle_failed_loads`). It knows no peers.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from pdserve_engines.vllm.kv_tiers.tier_copier import TierCopier
from pdserve_engines.vllm.kv_transfer.copy_planner import CopyPlanner, StepCopies
from pdserve_engines.vllm.kv_transfer.kv_copy import CacheForm, HostMaps, RankCopier

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.engine_core.staged_kv.pool import StagingHandle
    from pdserve_engines.vllm.kv_tiers.step_io import RankReport, TierCopies
    from pdserve_engines.vllm.kv_tiers.tiers import VllmTiers

__all__ = ["PdserveConnector"]

_log = logging.getLogger(__name__)

_ROWS = ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION")
"""Attention back ends whose cache has a row of k and a row of v for each token."""


@dataclass
class _Form(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """What a rank says of its cache, once."""

    form: CacheForm | None
    refusal: str = ""


@dataclass
class _Copies(KVConnectorMetadata):  # type: ignore[misc]
    """What the ranks copy in a step, and where the staging memory is."""

    copies: StepCopies | None = None
    staging: StagingHandle | None = None
    tiers: TierCopies | None = None
    arena: StagingHandle | None = None


@dataclass
class _Report(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """The copies of a step are done, by so many ranks."""

    step: int
    """0: nothing was copied from or to staging blocks."""
    ranks: int = 1
    failed: set[int] = field(default_factory=set)
    saved: bool = True
    tiers: RankReport | None = None

    def aggregate(self, other: KVConnectorWorkerMetadata) -> _Report:
        ranks, failed = self.ranks + other.ranks, self.failed | other.failed
        tiers = self.tiers
        if tiers is not None and other.tiers is not None:
            tiers = tiers.joined(other.tiers)
        return _Report(self.step, ranks, failed, self.saved and other.saved, tiers)


class PdserveConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Both halves; vLLM creates one object for each."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._tp = int(vllm_config.parallel_config.tensor_parallel_size)
        self.planner: CopyPlanner | None = None
        self.staging: StagingHandle | None = None
        """Set by the core once the staging memory is there; until then nothing is copied."""
        self.tiers: VllmTiers | None = None
        """Set by the core while there are tiers below vLLM's cache."""
        self.forms: list[_Form] = []
        """What the ranks said."""
        self._copier: RankCopier | None = None
        self._tier_copier: TierCopier | None = None
        self._form = _Form(None, "its cache was never registered")
        self._report: _Report | None = None
        self._failed: set[int] = set()
        if role == KVConnectorRole.SCHEDULER:
            groups = kv_cache_config.kv_cache_groups
            size = groups[0].kv_cache_spec.block_size if groups else 1
            self.planner = CopyPlanner(int(size), self._tp)

    @property
    def requires_kv_delivery(self) -> bool:
        """False: blocks are copied before vLLM may free them."""
        return False

    # ------------------------------------------------------------------ worker half

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Take vLLM's tensors, by layer name."""
        from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

        groups = self._kv_cache_config.kv_cache_groups
        names = list(groups[0].layer_names) if groups else []
        refusal = self._refusal(names, kv_caches)
        if refusal:
            self._form = _Form(None, refusal)
            return
        form = self._describe(names, kv_caches)
        self._form = _Form(form)
        caches = [kv_caches[name] for name in names]
        rank = get_tensor_model_parallel_rank()
        maps = HostMaps()
        self._copier = RankCopier(caches, form, self._tp, rank, maps)
        self._tier_copier = TierCopier(RankCopier(caches, form, self._tp, rank, maps))

    def _refusal(self, names: list[str], kv_caches: dict[str, Any]) -> str:
        """Why this cache cannot be exchanged; empty: it can."""
        groups = self._kv_cache_config.kv_cache_groups
        if len(groups) != 1:
            kinds = ", ".join(sorted({type(each.kv_cache_spec).__name__ for each in groups}))
            return f"its layers have {len(groups)} kinds of KV pools ({kinds or 'none'})"
        spec = groups[0].kv_cache_spec
        kind = type(spec).__name__
        if kind != "FullAttentionSpec":
            return f"its KV is of the kind {kind}"
        if spec.head_size != spec.head_size_v or spec.num_heads != spec.num_kv_heads:
            return "its k and v differ in size, or its heads are packed"
        if str(spec.kv_quant_mode.name) not in ("NONE", "FP8_PER_TENSOR"):
            return f"its KV is quantised as {spec.kv_quant_mode.name}"
        backends = {self._backend(name) for name in names}
        unknown = backends - {*_ROWS, "CPU_ATTN"}
        if unknown or len(backends) != 1:
            return f"the cache layout of its attention ({', '.join(sorted(backends))}) is unknown"
        shapes = {tuple(kv_caches[name].shape[1:]) for name in names}
        return "" if len(shapes) == 1 else "its layers have caches of different shapes"

    def _layer(self, name: str) -> Any:
        return self._vllm_config.compilation_config.static_forward_context[name]

    def _backend(self, name: str) -> str:
        return str(self._layer(name).attn_backend.get_name())

    def _describe(self, names: list[str], kv_caches: dict[str, Any]) -> CacheForm:
        spec = self._kv_cache_config.kv_cache_groups[0].kv_cache_spec
        cache = kv_caches[names[0]]
        packing = "rows"
        if self._backend(names[0]) == "CPU_ATTN":
            # The kernels pack k for the processor, in blocks of their own size.
            packing = f"planes {self._layer(names[0]).isa} {cache.shape[2]}"
        return CacheForm(
            packing=packing,
            layers=len(names),
            heads=int(spec.num_kv_heads),
            tokens=int(spec.block_size),
            dim=int(spec.head_size),
            itemsize=int(cache.element_size()),
            blocks=int(self._kv_cache_config.num_blocks),
        )

    def get_handshake_metadata(self) -> _Form:
        """What this rank says of its cache."""
        return self._form

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """Copy to lower tiers what this step may overwrite, before it computes."""
        if kv_connector_metadata.tiers is not None and self._tier_copier is not None:
            self._tier_copier.copy_out(kv_connector_metadata.tiers, kv_connector_metadata.arena)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Load what this step needs, before it computes, and what waiting requests need."""
        meta = self._connector_metadata
        if meta is not None and meta.tiers is not None and self._tier_copier is not None:
            self._tier_copier.copy_in(meta.tiers, meta.arena)
        copies = self._mapped()
        if copies is None:
            return
        for key, pairs in copies.loads.items():
            try:
                assert self._copier is not None
                self._copier.load(pairs)
            except Exception:
                # vLLM is told of these blocks; a request is not worth an engine.
                _log.exception("the staged KV of request %s cannot be loaded", key)
                self._failed.update(block for block, _ in pairs)

    def _mapped(self) -> StepCopies | None:
        """This step's copies, if there are any, with the staging memory at hand."""
        meta = self._connector_metadata
        if meta is None or meta.copies is None or self._copier is None:
            return None
        copies: StepCopies = meta.copies
        self._copier.map(meta.staging)
        return copies

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to do: loads are done before the first layer."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kw: Any) -> None:
        """Nothing to do: saves follow the last layer."""

    def wait_for_save(self) -> None:
        """Save what this step has computed, and note that its copies are done."""
        copies = self._mapped()
        if copies is None:
            return
        saved = True
        try:
            assert self._copier is not None
            if copies.saves:
                self._copier.save(copies.saves)
        except Exception:
            # The prompts for peers of this step fail; the others are not worth an engine, either.
            _log.exception("the KV of a step cannot be saved")
            saved = False
        self._report = _Report(copies.number, 1, set(self._failed), saved)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that were not loaded in this step."""
        failed, self._failed = self._failed, set()
        return failed

    def build_connector_worker_meta(self) -> _Report | None:
        """The report of this step's copies; None if it had none."""
        report, self._report = self._report, None
        tiers = None if self._tier_copier is None else self._tier_copier.take_report()
        if tiers is not None:
            report = report or _Report(0)
            report.tiers = tiers
        return report

    def shutdown(self) -> None:
        """Let go of the staging memory."""
        for copier in (self._copier, self._tier_copier):
            if copier is not None:
                copier.close()

    # ------------------------------------------------------------------ scheduler half

    @property
    def _plan(self) -> CopyPlanner:
        assert self.planner is not None, "this is a worker half"
        return self.planner

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        """Take what the ranks say of their caches."""
        self.forms = [metadata[rank] for rank in sorted(metadata)]

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens that can be loaded: from staging blocks in the step that begins the request, from
        lower tiers before that step."""
        key = request.request_id
        staged = self._plan.matched(key, num_computed_tokens, request.num_tokens)
        if self.tiers is None:
            return staged, False
        if self._plan.loads(key):
            self.tiers.know(request)
            return staged, False
        tokens = self.tiers.matched(request, num_computed_tokens)
        return tokens, bool(tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Note the blocks into which a request is loaded."""
        (block_ids,) = blocks.get_block_ids()
        if self.tiers is None or self._plan.loads(request.request_id):
            self._plan.allocated(request.request_id, num_external_tokens, block_ids)
        else:
            self.tiers.allocated(request, num_external_tokens, block_ids)

    def build_connector_meta(self, scheduler_output: Any) -> _Copies:
        """This step's copies."""
        counts = scheduler_output.num_scheduled_tokens
        computed = {
            each.req_id: each.num_computed_tokens + counts[each.req_id]
            for each in scheduler_output.scheduled_new_reqs
        }
        cached = scheduler_output.scheduled_cached_reqs
        for key, before in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            computed[key] = before + counts[key]
        copies = self._plan.plan(computed, self._blocks_of)
        meta = _Copies()
        if copies.loads or copies.saves:
            meta = _Copies(copies, self.staging)
        if self.tiers is not None:
            meta.tiers = self.tiers.copies(computes=bool(counts))
            meta.arena = self.tiers.frames.handle
        return meta

    def _blocks_of(self, key: str) -> list[int]:
        (block_ids,) = self._kv_cache_manager.get_block_ids(key)
        return list(block_ids)

    def update_connector_output(self, connector_output: Any) -> None:
        """Take the ranks' reports."""
        report = connector_output.kv_connector_worker_meta
        if report is None:
            return
        if report.step:
            self._plan.reported(report.step, report.ranks, report.failed, saved=report.saved)
        if report.tiers is not None and self.tiers is not None:
            self.tiers.reported(report.tiers)

    def has_pending_push_work(self) -> bool:
        """True: copies to lower tiers wait for a step, so vLLM makes one though no request does."""
        return self.tiers is not None and self.tiers.waits

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request has ended; vLLM may free its blocks."""
        return self._finished(request, block_ids)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request has ended; vLLM may free its blocks."""
        return self._finished(request, block_ids[0] if len(block_ids) == 1 else ())

    def _finished(
        self, request: Any, block_ids: Sequence[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._plan.finished(request.request_id)
        if self.tiers is not None:
            self.tiers.finished(request, block_ids)
        return False, None
