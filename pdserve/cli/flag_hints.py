"""Maps flags and sub-commands of other servers to pdserve's.

Users come from vLLM, SGLang, llama.cpp and Ollama, and the nearest name by spelling would mislead
them. A table only.
"""

from __future__ import annotations

from typing import Final

__all__ = ["COMMANDS", "FLAGS"]

_PARALLEL: Final = (
    "one worker computes on one device, tensor and pipeline parallelism are not built: start "
    "several workers (--role=worker --device cuda:N) behind a router"
)
_QUANTISED: Final = "quantised weights are not supported: serve the checkpoint in bfloat16"
_HTTPS: Final = "the API speaks plain HTTP: put a proxy that ends TLS before it"
_ADAPTERS: Final = "use --lora NAME=DIR, once for each adapter"
_KEYS: Final = "use --api-keys-file"
_CONTEXT: Final = "use --max-model-len"

FLAGS: Final = {
    "-v": "use --version",
    "--tp": _PARALLEL,
    "-tp": _PARALLEL,
    "--tp-size": _PARALLEL,
    "--tensor-parallel-size": _PARALLEL,
    "--pp": _PARALLEL,
    "--pp-size": _PARALLEL,
    "--pipeline-parallel-size": _PARALLEL,
    "--dp": _PARALLEL,
    "--dp-size": _PARALLEL,
    "--data-parallel-size": _PARALLEL,
    "-q": _QUANTISED,
    "--quantization": _QUANTISED,
    "--load-format": _QUANTISED,
    "--ssl-certfile": _HTTPS,
    "--ssl-keyfile": _HTTPS,
    "--enable-lora": _ADAPTERS,
    "--lora-modules": _ADAPTERS,
    "--lora-paths": _ADAPTERS,
    "--api-key": _KEYS,
    "-m": "use --model, or `pdserve serve MODEL`",
    "--model-path": "use --model, or `pdserve serve MODEL`",
    "--revision": "use --model organisation/name@revision",
    "--trust-remote-code": "pdserve never runs a checkpoint's code, leave it out",
    "-c": _CONTEXT,
    "--ctx-size": _CONTEXT,
    "--context-length": _CONTEXT,
    "--max-total-tokens": "use --kv-memory",
    "--kv-cache-memory-bytes": "use --kv-memory",
    "--mem-fraction-static": "use --gpu-memory-utilization",
    "--max-num-seqs": "use --max-sequences",
    "--max-running-requests": "use --max-sequences",
    "--max-num-batched-tokens": "use --max-batch-tokens",
    "--chunked-prefill-size": "use --max-batch-tokens",
    "--page-size": "use --block-size",
    "--enable-prefix-caching": "use --prefix-cache, which is the default",
    "--no-enable-prefix-caching": "use --no-prefix-cache",
    "--disable-radix-cache": "use --no-prefix-cache",
    "--tool-call-parser": "use --tool-parser",
    "--enable-auto-tool-choice": "tools are on where the model has a format for them, leave it out",
    "--disaggregation-mode": "use --mode",
    "--log-requests": "use --log-level debug",
    "--disable-log-requests": "requests are not logged, leave it out",
}
"""Flag to a remedy, which follows "is unknown: "."""

COMMANDS: Final = {
    "run": "serve",
    "start": "serve",
    "launch": "serve",
    "server": "serve",
    "launch_server": "serve",
    "complete": "chat",
    "benchmark": "bench",
    "ps": "status",
    "list": "status",
    "ls": "status",
    "show": "config",
    "collect-env": "doctor",
    "help": "--help",
}
"""Sub-command to pdserve's."""
