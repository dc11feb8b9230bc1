"""The embedded PyTorch engine: Llama, Qwen, Mistral, Mixtral and Gemma 3 checkpoints, CPU and CUDA.

An executor of pdserve's scheduler: it computes steps and knows nothing of requests, queues or
sockets. Read `executor.py` first, then `engines/pdserve_engines/torch/models/torch_model.py`.
"""

from pdserve_engines.torch.executor import TorchExecutor

__all__ = ["TorchExecutor", "create"]


def create() -> TorchExecutor:
    """Make an executor with nothing loaded. Entry point `torch` of group `pdserve.engines`."""
    return TorchExecutor()
