"""The embedded PyTorch engine: checkpoints of the families in docs/models.md, CPU and CUDA.

An executor of pdserve's scheduler: it computes steps and knows nothing of requests, queues or
sockets. Read `executor.py` first, then `engines/pdserve_engines/torch/models/torch_model.py`.
"""

from pdserve.engine_core.support import EngineSupport
from pdserve_engines.torch.executor import TorchExecutor

__all__ = ["SUPPORT", "TorchExecutor", "create"]

SUPPORT = EngineSupport(
    features=("bans", "grammar", "thinking", "embeddings", "classify"),
    exact="all requests: on CPUs in float32 with native kernels; elsewhere but for near ties",
    prompt_logprobs="yes",
    kv_events="yes",
    disaggregation="pdserve's transfers",
    devices="CPUs, several ranks on CPUs, a GPU",
)


def create() -> TorchExecutor:
    """Make an executor with nothing loaded. Entry point `torch` of group `pdserve.engines`."""
    return TorchExecutor()
