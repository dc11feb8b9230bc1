"""Fields that are not in a request's record: refused ones, harmless ones, and strangers.

A field that would change the answer but is not built is *refused* unless its value asks for
nothing. A field that cannot change the answer here is *accepted without effect*. Every other one is
*unknown*: the caller decides whether that is worth a line in the log or a 400.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdserve.errors import InvalidRequest
from pdserve.openai.schema import StreamOptions

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


@dataclass(frozen=True, slots=True)
class Refusal:
    """A known field that is not supported."""

    remedy: str
    neutral: tuple[object, ...] = ()
    """Values that ask for nothing and are therefore accepted; `null` always is."""

    def allows(self, value: object) -> bool:
        return value is None or any(
            value == neutral and type(value) is type(neutral) for neutral in self.neutral
        )


_TOOLS = "use `tools` and `tool_choice`"
_STRUCTURED = "use `structured_outputs`"
_BEAMS = "beam search is not supported; use sampling with `n`"

_REFUSED_BY_BOTH: dict[str, Refusal] = {
    "early_stopping": Refusal(_BEAMS, (False,)),
    "guided_choice": Refusal(_STRUCTURED),
    "guided_grammar": Refusal(_STRUCTURED),
    "guided_json": Refusal(_STRUCTURED),
    "guided_regex": Refusal(_STRUCTURED),
    "kv_transfer_params": Refusal("pdserve moves KV itself; leave it out"),
    "length_penalty": Refusal(_BEAMS, (1, 1.0)),
    "logits_processors": Refusal("not supported; leave it out", ([],)),
    "use_beam_search": Refusal(_BEAMS, (False,)),
}

REFUSED_BY_CHAT: Mapping[str, Refusal] = {
    **_REFUSED_BY_BOTH,
    "audio": Refusal("only text is produced; leave it out"),
    "function_call": Refusal(_TOOLS, ("none",)),
    "functions": Refusal(_TOOLS, ([],)),
    "modalities": Refusal("only text is produced", (["text"],)),
    "prediction": Refusal("not supported; leave it out"),
    "verbosity": Refusal("say it in the prompt"),
    "web_search_options": Refusal("not supported; leave it out"),
}
REFUSED_BY_COMPLETIONS: Mapping[str, Refusal] = {
    **_REFUSED_BY_BOTH,
    "prompt_embeds": Refusal("send `prompt` as text or token ids"),
    "suffix": Refusal("insertion is not supported; put the context into `prompt`", ("",)),
}

WITHOUT_EFFECT: frozenset[str] = frozenset(
    {
        "metadata",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
    }
)
"""Hints to OpenAI's own platform: the answer would be the same without them."""

STREAM_OPTIONS: frozenset[str] = frozenset(
    f"stream_options.{name}"
    for name in (*StreamOptions.__struct_fields__, "include_obfuscation")  # the last is padding
)
"""What may stand inside `stream_options`, as paths."""


def unknown_fields(
    body: Mapping[str, object], known: frozenset[str], refused: Mapping[str, Refusal]
) -> list[str]:
    """Names that nobody knows, in the body's order.

    Errors: `InvalidRequest` for a refused field whose value asks for something.
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


def unknown_stream_options(options: object) -> list[str]:
    """Names inside `stream_options` that nobody knows, as paths: a misspelt one goes unseen."""
    if not isinstance(options, dict):
        return []
    return [path for name in options if (path := f"stream_options.{name}") not in STREAM_OPTIONS]


def refuse_unknown(
    unknown: Iterable[str], known: frozenset[str], refused: Mapping[str, Refusal]
) -> None:
    """The strict policy: `InvalidRequest` for the first unknown field, with the nearest name."""
    for name in unknown:
        near = difflib.get_close_matches(name[:64], [*known, *refused], n=1)
        hint = f"; did you mean '{near[0]}'?" if near else "; leave it out"
        raise InvalidRequest(f"'{shorten(name)}' is not a known field{hint}", param=shorten(name))


def shorten(name: str, limit: int = 64) -> str:
    """A client's word made safe to repeat in answers, logs and labels."""
    clean = "".join(char if char.isprintable() else "�" for char in name[: limit + 1])
    return clean if len(clean) <= limit else clean[: limit - 1] + "…"
