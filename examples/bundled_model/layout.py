"""The files that make a Hugging Face model directory out of a tokenizer and trained weights.

Byte-level BPE, so that any text round-trips; ChatML-like messages; weights in bfloat16.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

PAD, BOS, START, END = "<|pad|>", "<|bos|>", "<|im_start|>", "<|im_end|>"
SPECIAL = (PAD, BOS, START, END)
CONTEXT = 2048

CHAT_TEMPLATE = (
    "{{- bos_token -}}"
    "{%- for message in messages -%}"
    "{%- set role = 'system' if message['role'] == 'developer' else message['role'] -%}"
    "{{- '<|im_start|>' + role + '\n' -}}"
    "{%- if message['content'] is string -%}"
    "{{- message['content'] -}}"
    "{%- elif message['content'] -%}"
    "{%- for part in message['content'] -%}"
    "{%- if part['type'] == 'text' -%}{{- part['text'] -}}{%- endif -%}"
    "{%- endfor -%}"
    "{%- endif -%}"
    "{{- '<|im_end|>\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learn a byte-level BPE from the texts; the same texts give the same tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    # Plain prompts begin with the same token as the chat template's output.
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, SPECIAL.index(BOS))]
    )
    return tokenizer


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": END,
        "pad_token": PAD,
        "model_max_length": CONTEXT,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    write_json(folder / "tokenizer_config.json", config)


def write_generation_config(folder: Path) -> None:
    """Greedy by default: the first answer that a newcomer sees is the one that was learned."""
    config = {
        "bos_token_id": SPECIAL.index(BOS),
        "eos_token_id": [SPECIAL.index(END)],
        "pad_token_id": SPECIAL.index(PAD),
        "do_sample": False,
        "temperature": 0.0,
    }
    write_json(folder / "generation_config.json", config)


def write_json(path: Path, value: object) -> None:
    """Indented JSON with a newline at the end, so that differences can be read."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", "utf-8")
