"""Staging blocks on vLLM's own device, so that GPUs exchange KV by `cuda_ipc`.

    stages_on_device   whether they go there: one rank, which computes with CUDA in this process
    keeping_room       vLLM's executor, which leaves memory for them when vLLM sizes its cache
    device_pool        allocates them there
    tensor_of          how the connector's worker half finds them: by a number, in this process

Other configurations stage in host memory (`disagg`). Needs torch, imports no vLLM. `VllmStaging`
owns the pool.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from pdserve.engine_core.staged_kv.pool import StagingPool
from pdserve.errors import ConfigError, EngineError
from pdserve.transfer.copy_plan import block_bytes, blocks_for

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pdserve.engine_core.staged_kv.pool import StagingHandle
    from pdserve.ids import Bytes
    from pdserve.messages.transfer import RankKvLayout
    from pdserve.transfer.base import Region

__all__ = [
    "StagingTensor",
    "device_pool",
    "keeping_room",
    "kept_for_staging",
    "room_for_staging",
    "stages_on_device",
    "synchronise",
    "tensor_of",
]

_TENSORS: dict[int, Any] = {}
"""Staging memory of this process by its number, until `StagingTensor.close`."""
_NUMBERS = itertools.count(1)


def stages_on_device(config: Any, backends: Sequence[str]) -> bool:
    """Return whether staging blocks go to the device. `backends`: those that may be used; empty:
    all.

    Only if `cuda_ipc` is asked for by name: memory on the device is not reached by shm and tcp, and
    by rdma only with the right driver. With host memory workers on any two hosts find a way."""
    parallel = config.parallel_config
    here = parallel.world_size == 1 and parallel.distributed_executor_backend == "uni"
    on_gpu = str(config.device_config.device_type) == "cuda"
    return here and on_gpu and "cuda_ipc" in backends


# ------------------------------------------------------------------ room on the device


def room_for_staging(free: Bytes, whole: Bytes, unfilled: float) -> Bytes:
    """How much of the `free` memory for KV vLLM leaves: `unfilled` times what it takes itself, and
    enough for two sequences of `whole` bytes if that is no more than a third."""
    return max(int(free * unfilled / (1 + unfilled)), min(2 * whole, free // 3))


def keeping_room(executor: Any, unfilled: float) -> Any:
    """vLLM's executor class `executor`, but with less memory for vLLM's cache. vLLM asks it how
    much there is, by whichever option that is decided."""

    class KeepingRoom(executor):  # type: ignore[misc]
        kept_for_staging: Bytes = 0

        def determine_available_memory(self) -> list[int]:
            (free,) = super().determine_available_memory()
            (layers,) = self.get_kv_cache_specs()
            whole = _sequence_bytes(layers, int(self.vllm_config.model_config.max_model_len))
            self.kept_for_staging = room_for_staging(int(free), whole, unfilled)
            return [int(free) - self.kept_for_staging]

    return KeepingRoom


def _sequence_bytes(layers: Mapping[str, Any], tokens: int) -> Bytes:
    """KV of a sequence of this length. `layers`: vLLM's `KVCacheSpec` of each."""
    return sum(
        int(each.page_size_bytes) * blocks_for(tokens, int(each.block_size))
        for each in layers.values()
    )


def kept_for_staging(core: Any) -> Bytes:
    """What vLLM's `EngineCore` has left on its device for staging blocks; 0: they go elsewhere."""
    return int(getattr(core.model_executor, "kept_for_staging", 0))


# ------------------------------------------------------------------ the memory


def device_pool(layout: RankKvLayout, blocks: int) -> StagingPool:
    """Allocate staging blocks on the device on which vLLM computes in this thread. Raises
    `ConfigError` if there is too little memory, or other processes could not open it."""
    import torch

    device = _device()
    try:
        tensor = torch.zeros(blocks * block_bytes(layout), dtype=torch.uint8, device=device)
        synchronise(device)
    except torch.OutOfMemoryError as error:
        raise ConfigError(f"{device} has no room for {blocks} staging blocks") from error
    pool = StagingPool(layout, blocks, StagingTensor(tensor))
    why_not = _unsupported(pool.region)
    if why_not:
        pool.close()
        raise ConfigError(why_not)
    return pool


def _device() -> Any:
    import torch

    return torch.device("cuda", torch.cuda.current_device())


def _unsupported(region: Region) -> str:
    from pdserve.transfer.cuda.nvidia import unavailable_reason
    from pdserve.transfer.same_host.cuda_ipc import unsupported_reason

    return unavailable_reason() or unsupported_reason([region])


class StagingTensor:
    """A tensor of bytes as `StagingMemory`."""

    def __init__(self, tensor: Any) -> None:
        self.local = next(_NUMBERS)
        self.address = int(tensor.data_ptr())
        _TENSORS[self.local] = tensor

    def close(self) -> None:
        """Forget the tensor, whose memory is freed with its last view. Idempotent."""
        _TENSORS.pop(self.local, None)


def tensor_of(handle: StagingHandle) -> Any:
    """The tensor of staging memory in this process. Raises `EngineError` if it is not there."""
    tensor = _TENSORS.get(handle.local)
    if tensor is None or tensor.nbytes != handle.size:
        raise EngineError(f"there is no staging memory {handle.local} in this process")
    return tensor


def synchronise(device: Any) -> None:
    """Wait until the device has done what this thread has asked of it."""
    if device.type == "cuda":
        import torch

        torch.cuda.current_stream(device).synchronize()
