"""Holds blocks of vLLM's prefix cache, so that they are not evicted while a peer sends the rest.

It touches vLLM's cache manager and block pool, between steps, in the core's thread. A held block is
used for vLLM: it cannot be given to running requests. So only a share of the pool is ever held;
beyond it nothing is, and the peer sends all blocks. If held blocks are what the next request lacks,
they are given up: what had relied on them is computed.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from pdserve_engines.vllm.params import given_output

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.messages.request import GenerateRequest

__all__ = ["HELD_SHARE", "PrefixHolds"]

HELD_SHARE = 0.25
"""Most of vLLM's blocks that are held at once."""


class PrefixHolds:
    """The held blocks of one vLLM engine."""

    def __init__(self, core: Any) -> None:
        """`core`: vLLM's `EngineCore`."""
        self._manager = core.scheduler.kv_cache_manager
        self._hasher = core.request_block_hasher
        self._pool = self._manager.block_pool
        self._references: Counter[int] = Counter()
        """Block -> how often it is held."""

    @property
    def held(self) -> int:
        """References that are held now; a block may be held more than once."""
        return self._references.total()

    def find(self, request: GenerateRequest, salt: str | None, lora: Any) -> list[int]:
        """Ids of the leading blocks of a request that vLLM has cached, never the block with its
        last token."""
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        choice = next(iter(request.live))
        asked = Request(
            request_id="prefix",
            prompt_token_ids=[*request.prompt, *given_output(request, choice)],
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
            lora_request=lora,
            cache_salt=salt,
            block_hasher=self._hasher,
        )
        (group,) = self._manager.get_computed_blocks(asked)[0].blocks
        return [block.block_id for block in group]

    def hold(self, blocks: Sequence[int]) -> list[int]:
        """Take a reference to blocks that `find` has just returned; returns those that are held:
        all, or none if too many are held already."""
        if self.held + len(blocks) > int(HELD_SHARE * self._pool.num_gpu_blocks):
            return []
        self._pool.touch([self._pool.blocks[block] for block in blocks])
        self._references.update(blocks)
        return list(blocks)

    def release(self, blocks: Sequence[int]) -> None:
        """Give these references back, except for those that were given up."""
        # vLLM evicts what is freed first, and a block is of no use without those before it.
        kept = [block for block in reversed(blocks) if self._references[block] > 0]
        self._references -= Counter(kept)
        self._pool.free_blocks([self._pool.blocks[block] for block in kept])

    def give_up(self) -> int:
        """Release all references of all requests; returns how many. The blocks stay cached until
        vLLM needs them."""
        blocks = list(self._references.elements())
        self.release(blocks)
        return len(blocks)
