"""Maps flags and sub-commands of other servers to pdserve's.

Users come from vLLM, SGLang, TensorRT-LLM, llama.cpp and Ollama, and the nearest name by spelling
would mislead them. A table only.
"""

from __future__ import annotations

from typing import Final

__all__ = ["COMMANDS", "FLAGS"]

_ENGINE: Final = "use --engine vllm --engine-option "
_TENSOR: Final = (
    "use --tp N with engine torch, --engine-option tensor_parallel_size=N with vllm, "
    "--engine-option tp_size=N with sglang"
)
_PIPELINE: Final = (
    f"{_ENGINE}pipeline_parallel_size=N (sglang: pp_size=N); torch computes on one device"
)
_DATA: Final = "start N workers (--role=worker --device cuda:N), a router and a frontend"
_QUANTISED: Final = (
    f"{_ENGINE}quantization=NAME; the torch engine serves no quantised weights but GPT-OSS's"
)
_HTTPS: Final = "the API speaks plain HTTP: put a proxy that ends TLS before it"
_ADAPTERS: Final = "use --lora NAME=DIR, once for each adapter"
_KEYS: Final = "use --api-keys-file"
_CONTEXT: Final = "use --max-model-len"

FLAGS: Final = {
    "-v": "use --version",
    "-tp": _TENSOR,
    "--tp-size": _TENSOR,
    "--tp_size": _TENSOR,
    "--tensor-parallel-size": _TENSOR,
    "-pp": _PIPELINE,
    "--pp": _PIPELINE,
    "--pp-size": _PIPELINE,
    "--pp_size": _PIPELINE,
    "--pipeline-parallel-size": _PIPELINE,
    "-dp": _DATA,
    "--dp": _DATA,
    "--dp-size": _DATA,
    "--data-parallel-size": _DATA,
    "-q": _QUANTISED,
    "--quantization": _QUANTISED,
    "--load-format": f"{_ENGINE}load_format=NAME; the torch engine reads safetensors",
    "--enforce-eager": f"{_ENGINE}enforce_eager=true",
    "--speculative-config": f"{_ENGINE}speculative_config='{{…}}'",
    "--enable-expert-parallel": f"{_ENGINE}enable_expert_parallel=true",
    "--kv-cache-dtype": f"{_ENGINE}kv_cache_dtype=NAME",
    "--hf-overrides": f"{_ENGINE}hf_overrides='{{…}}'",
    "--limit-mm-per-prompt": "use --max-images, fewer by --engine-option limit_mm_per_prompt='{…}'",
    "--allowed-local-media-path": "pdserve reads no local files for clients, leave it out",
    "--ssl-certfile": _HTTPS,
    "--ssl-keyfile": _HTTPS,
    "--enable-lora": _ADAPTERS,
    "--lora-modules": _ADAPTERS,
    "--lora-paths": _ADAPTERS,
    "--api-key": _KEYS,
    "-m": "use --model, or `pdserve serve MODEL`",
    "--model-path": "use --model, or `pdserve serve MODEL`",
    "--revision": "use --model organisation/name@revision",
    "--trust-remote-code": "pdserve itself never runs a checkpoint's code; with --engine=vllm or "
    "sglang: --engine-option trust_remote_code=true",
    "-c": _CONTEXT,
    "--ctx-size": _CONTEXT,
    "--context-length": _CONTEXT,
    "--max-seq-len": _CONTEXT,
    "--max_seq_len": _CONTEXT,
    "--max-total-tokens": "use --kv-memory",
    "--kv-cache-memory-bytes": "use --kv-memory",
    "--mem-fraction-static": "use --gpu-memory-utilization",
    "--kv_cache_free_gpu_memory_fraction": "use --gpu-memory-utilization",
    "--max-num-seqs": "use --max-sequences",
    "--max-running-requests": "use --max-sequences",
    "--max_batch_size": "use --max-sequences",
    "--max-num-batched-tokens": "use --max-batch-tokens",
    "--chunked-prefill-size": "use --max-batch-tokens",
    "--max_num_tokens": "use --max-batch-tokens",
    "--enable-chunked-prefill": "prompts are computed in chunks anyway, leave it out",
    "--runner": "vectors need no flag; see --pooling",
    "--task": "vectors need no flag; see --pooling",
    "--page-size": "use --block-size",
    "--enable-prefix-caching": "use --prefix-cache, which is the default",
    "--no-enable-prefix-caching": "use --no-prefix-cache",
    "--disable-radix-cache": "use --no-prefix-cache",
    "--tool-call-parser": "use --tool-parser",
    "--enable-auto-tool-choice": "tools are on where the model has a format for them, leave it out",
    "--disaggregation-mode": "use --mode",
    "--kv-transfer-config": "use --mode=prefill and --mode=decode",
    "--kv-events-config": "routers get the events of all workers, leave it out",
    "--api-server-count": "use --frontends",
    "--allowed-origins": "use --cors-origins",
    "--disable-log-requests": "requests are not logged without --log-requests, leave it out",
    "--enable-log-requests": "use --log-requests",
    "--otlp-traces-endpoint": "use --otlp-endpoint with the collector's HTTP port",
    "--enable-trace": "use --trace-sample",
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
