"""vLLM on CPUs: `python -m bench.peers.engine_cpu.vllm_child FOLDER DTYPE THREADS`, in an
environment of `make vllm`."""

from __future__ import annotations

import os
import sys

os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
os.environ["VLLM_CPU_NUM_OF_RESERVED_CPU"] = "0"
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"

import vllm

from bench.peers.engine_cpu.child import serve


class Vllm:
    """The offline engine, greedy, without a prefix cache."""

    name = f"vLLM {vllm.__version__}"

    def __init__(self, folder: str, dtype: str) -> None:
        self._engine = vllm.LLM(
            folder,
            dtype=dtype,
            skip_tokenizer_init=True,
            max_model_len=1024,
            max_num_seqs=16,
            enable_prefix_caching=False,
            disable_log_stats=True,
        )
        self.vocab = self._engine.llm_engine.model_config.get_vocab_size()

    def generate(self, prompts: list[list[int]], outputs: int) -> list[list[int]]:
        params = vllm.SamplingParams(
            temperature=0.0, max_tokens=outputs, ignore_eos=True, detokenize=False
        )
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        made = self._engine.generate(asked, params, use_tqdm=False)
        return [list(one.outputs[0].token_ids) for one in made]


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = sys.argv[3]
    serve(Vllm(sys.argv[1], sys.argv[2]))
