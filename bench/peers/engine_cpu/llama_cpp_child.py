"""llama.cpp through llama-cpp-python: `python -m bench.peers.engine_cpu.llama_cpp_child FOLDER
DTYPE THREADS`.

The checkpoint, a Llama of `transformers`, is written as GGUF first: matrices in the dtype, norms in
float32, query and key rows in the order of GGUF's rotary embedding. `pip install llama-cpp-python
gguf safetensors`; build it for the machine (`CMAKE_ARGS=-DGGML_NATIVE=ON`).
"""

from __future__ import annotations

import json
import sys
from ctypes import POINTER, c_float, cast
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np
from safetensors.numpy import load_file

from bench.peers.engine_cpu.child import serve

SEQUENCES = 16
BATCH = 2048
NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
}


def named(name: str) -> str:
    """The name of a tensor in GGUF."""
    stem = name.removesuffix(".weight")
    if stem in NAMES:
        return f"{NAMES[stem]}.weight"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{NAMES[rest]}.weight"


def paired(weight: Any, heads: int) -> Any:
    """Rows of queries or keys, of which halves of a head rotate together, in an order in which
    neighbours do."""
    halves = weight.reshape(heads, 2, -1, weight.shape[-1])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def write(folder: Path, dtype: str) -> Path:
    """Writes the checkpoint of a folder as GGUF; returns the file."""
    config = json.loads((folder / "config.json").read_text())
    path = folder / f"{dtype}.gguf"
    out = gguf.GGUFWriter(path, "llama")
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head = config.get("head_dim") or config["hidden_size"] // heads
    out.add_context_length(config["max_position_embeddings"])
    out.add_embedding_length(config["hidden_size"])
    out.add_block_count(config["num_hidden_layers"])
    out.add_feed_forward_length(config["intermediate_size"])
    out.add_head_count(heads)
    out.add_head_count_kv(kv_heads)
    out.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config.get("rope_parameters") or config
    out.add_rope_freq_base(rope["rope_theta"])
    out.add_rope_dimension_count(head)
    out.add_vocab_size(config["vocab_size"])
    out.add_tokenizer_model("no_vocab")
    for name, weight in load_file(folder / "model.safetensors").items():
        if "q_proj" in name or "k_proj" in name:
            weight = paired(weight, heads if "q_proj" in name else kv_heads)
        data = np.ascontiguousarray(weight, np.float32)
        if dtype == "bfloat16" and data.ndim > 1:
            kind = gguf.GGMLQuantizationType.BF16
            out.add_tensor(named(name), gguf.quants.quantize(data, kind), raw_dtype=kind)
        else:
            out.add_tensor(named(name), data)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return path


class Llama:
    """A model and one context for all measurements."""

    name = f"llama.cpp ({llama_cpp.__version__} of llama-cpp-python)"

    def __init__(self, folder: Path, dtype: str, threads: int) -> None:
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        path = str(write(folder, dtype)).encode()
        self._model = llama_cpp.llama_model_load_from_file(path, params)
        self.vocab = json.loads((folder / "config.json").read_text())["vocab_size"]
        options = llama_cpp.llama_context_default_params()
        options.n_ctx = 1024 * SEQUENCES
        options.n_batch, options.n_seq_max = BATCH, SEQUENCES
        options.n_threads = options.n_threads_batch = threads
        if dtype == "float32":
            options.type_k = options.type_v = llama_cpp.GGML_TYPE_F32
        self._context = llama_cpp.llama_init_from_model(self._model, options)
        self._batch = llama_cpp.llama_batch_init(BATCH, 0, 1)

    def generate(self, prompts: list[list[int]], outputs: int) -> list[list[int]]:
        memory = llama_cpp.llama_get_memory(self._context)
        llama_cpp.llama_memory_clear(memory, 1)
        tokens = [
            (token, place, row, place == len(prompt) - 1)
            for row, prompt in enumerate(prompts)
            for place, token in enumerate(prompt)
        ]
        made: list[list[int]] = [[] for _ in prompts]
        place = len(prompts[0])
        for step in range(outputs):
            for row, token in self._decode(tokens):
                made[row].append(token)
            tokens = [(one[-1], place + step, row, True) for row, one in enumerate(made)]
        return made

    def _decode(self, tokens: list[tuple[int, int, int, bool]]) -> list[tuple[int, int]]:
        """Computes tokens (token, place, sequence, whether its logits are wanted); returns the best
        next token of each sequence whose logits were."""
        found = []
        for first in range(0, len(tokens), BATCH):
            part = tokens[first : first + BATCH]
            batch = self._batch
            batch.n_tokens = len(part)
            for at, (token, place, row, wanted) in enumerate(part):
                batch.token[at], batch.pos[at] = token, place
                batch.n_seq_id[at], batch.seq_id[at][0] = 1, row
                batch.logits[at] = wanted
            if llama_cpp.llama_decode(self._context, batch):
                raise RuntimeError("llama_decode failed")
            for at, (_, _, row, wanted) in enumerate(part):
                if wanted:
                    found.append((row, self._best(at)))
        return found

    def _best(self, at: int) -> int:
        logits = cast(llama_cpp.llama_get_logits_ith(self._context, at), POINTER(c_float))
        return int(np.ctypeslib.as_array(logits, (self.vocab,)).argmax())


if __name__ == "__main__":
    serve(Llama(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
