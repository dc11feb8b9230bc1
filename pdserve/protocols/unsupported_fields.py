"""Lists request fields that no record has: refused and ignored ones; all others are unknown.

A field that would change the answer but is not supported is *refused*, unless its value is the
default behaviour. A field that cannot change the answer is *accepted without effect*. Every other
field is *unknown*: the caller decides between a log line and a 400.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdserve.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


@dataclass(frozen=True, slots=True)
class UnsupportedField:
    """A known field that is not supported."""

    remedy: str
    neutral: tuple[object, ...] = ()
    """Values of the default behaviour, which are accepted; `null` always is."""

    def allows(self, value: object) -> bool:
        return value is None or any(
            value == neutral and type(value) is type(neutral) for neutral in self.neutral
        )


_PLACES = re.compile(r"\[\d+\]")
_TOOLS = "use `tools` and `tool_choice`"
_STRUCTURED = "use `structured_outputs`"
_BEAMS = "beam search is not supported; use sampling with `n`"
_ADAPTERS = "use the adapter's name as `model`"
_OTHER_SAMPLER = "this sampler is not supported; use `top_p`, `top_k` or `min_p`"
_NOTHING_IS_CUT = "a prompt is counted whole; leave it out"
_BY_ARGUMENTS = "set the template's variable in `chat_template_kwargs`"

OF_OTHER_SERVERS: Mapping[str, UnsupportedField] = {
    "adapter_id": UnsupportedField(_ADAPTERS),
    "ebnf": UnsupportedField(_STRUCTURED),
    "grammar": UnsupportedField("use `structured_outputs` with `grammar`", ("",)),
    "guided_choice": UnsupportedField(_STRUCTURED),
    "guided_grammar": UnsupportedField(_STRUCTURED),
    "guided_json": UnsupportedField(_STRUCTURED),
    "guided_regex": UnsupportedField(_STRUCTURED),
    "guided_whitespace_pattern": UnsupportedField(_STRUCTURED),
    "json_schema": UnsupportedField("use `structured_outputs` with `json`"),
    "lora": UnsupportedField(_ADAPTERS, ([],)),
    "lora_path": UnsupportedField(_ADAPTERS),
    "min_new_tokens": UnsupportedField("use `min_tokens`", (0,)),
    "mirostat": UnsupportedField(_OTHER_SAMPLER, (0,)),
    "regex": UnsupportedField(_STRUCTURED),
    "typical_p": UnsupportedField(_OTHER_SAMPLER, (1, 1.0)),
}
"""Fields that change the answer of vLLM, SGLang, llama.cpp or TGI; every endpoint that generates
refuses them."""

_REFUSED_BY_BOTH: dict[str, UnsupportedField] = {
    **OF_OTHER_SERVERS,
    "early_stopping": UnsupportedField(_BEAMS, (False,)),
    "ec_transfer_params": UnsupportedField("only text is understood; leave it out"),
    "kv_transfer_params": UnsupportedField("pdserve moves KV itself; leave it out"),
    "length_penalty": UnsupportedField(_BEAMS, (1, 1.0)),
    "logits_processors": UnsupportedField("not supported; leave it out", ([],)),
    "use_beam_search": UnsupportedField(_BEAMS, (False,)),
    "vllm_xargs": UnsupportedField(
        "engines here take no arguments of extensions; leave it out", ({},)
    ),
    "watermarking": UnsupportedField("not supported; leave it out", (False,)),
}

REFUSED_BY_CHAT: Mapping[str, UnsupportedField] = {
    **_REFUSED_BY_BOTH,
    "audio": UnsupportedField("only text is produced; leave it out"),
    "best_of": UnsupportedField("use `n` for several choices", (1,)),
    "function_call": UnsupportedField(_TOOLS, ("none",)),
    "functions": UnsupportedField(_TOOLS, ([],)),
    "media_io_kwargs": UnsupportedField("only text is understood; leave it out", ({},)),
    "modalities": UnsupportedField("only text is produced", (["text"],)),
    "prediction": UnsupportedField("not supported; leave it out"),
    "mm_processor_kwargs": UnsupportedField("only text is understood; leave it out", ({},)),
    "return_prompt_text": UnsupportedField("use `return_token_ids` and `/detokenize`", (False,)),
    "web_search_options": UnsupportedField("not supported; leave it out"),
}
REFUSED_BY_COMPLETIONS: Mapping[str, UnsupportedField] = {
    **_REFUSED_BY_BOTH,
    "prompt_embeds": UnsupportedField("send `prompt` as text or token ids"),
    "thinking_token_budget": UnsupportedField("only a chat's reasoning is known to begin", (-1,)),
}
REFUSED_BY_TOKENIZE: Mapping[str, UnsupportedField] = {
    "adapter_id": UnsupportedField(_ADAPTERS),
    "lora": UnsupportedField(_ADAPTERS, ([],)),
    "lora_path": UnsupportedField(_ADAPTERS),
    "reasoning_effort": UnsupportedField(_BY_ARGUMENTS),
    "truncate_prompt_tokens": UnsupportedField(_NOTHING_IS_CUT),
    "verbosity": UnsupportedField(_BY_ARGUMENTS),
}

WITHOUT_EFFECT: frozenset[str] = frozenset(
    {
        "metadata",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)
"""Hints to OpenAI's own platform: the answer would be the same without them."""

NESTED_WITHOUT_EFFECT: frozenset[str] = frozenset(
    {
        "messages[].annotations",
        "messages[].audio",
        "messages[].refusal",
        "messages[].tool_calls[].index",
        "stream_options.include_obfuscation",
    }
)
"""Fields that clients send inside of objects: padding, and parts of earlier answers."""


def unknown_fields(
    body: Mapping[str, object], known: frozenset[str], refused: Mapping[str, UnsupportedField]
) -> list[str]:
    """Return the field names that are in no table, in the body's order.

    Errors: `InvalidRequest` for a refused field whose value is not the default behaviour.
    """
    unknown = []
    for name in body:
        if name in known or name in WITHOUT_EFFECT:
            continue
        refusal = refused.get(name)
        if refusal is None:
            unknown.append(name)
        elif not refusal.allows(body[name]):
            raise InvalidRequest(
                f"'{name}' is not supported: {refusal.remedy}", param=shorten(name)
            )
    return unknown


def refuse_unknown(unknown: Iterable[str], known: Iterable[str]) -> None:
    """The strict policy: `InvalidRequest` for the first unknown field, with the nearest name."""
    for name in unknown:
        near = difflib.get_close_matches(without_indices(name[:128]), known, n=1)
        hint = f"; did you mean '{near[0]}'?" if near else "; leave it out"
        raise InvalidRequest(f"'{shorten(name)}' is not a known field{hint}", param=shorten(name))


def without_indices(path: str) -> str:
    """`messages[3].content` becomes `messages[].content`: the number of such paths is bounded."""
    return _PLACES.sub("[]", path)


def shorten(name: str, limit: int = 64) -> str:
    """A client's text, shortened and made safe to repeat in answers, logs and labels."""
    clean = "".join(char if char.isprintable() else "�" for char in name[: limit + 1])
    return clean if len(clean) <= limit else clean[: limit - 1] + "…"
