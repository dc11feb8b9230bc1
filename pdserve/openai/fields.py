"""Fields that are not in a request's record: refused ones, harmless ones, and strangers.

A field that would change the answer but is not built is *refused* unless its value asks for
nothing. A field that cannot change the answer here is *accepted without effect*. Every other one is
*unknown*: the caller decides whether that is worth a line in the log or a 400.
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
class Refusal:
    """A known field that is not supported."""

    remedy: str
    neutral: tuple[object, ...] = ()
    """Values that ask for nothing and are therefore accepted; `null` always is."""

    def allows(self, value: object) -> bool:
        return value is None or any(
            value == neutral and type(value) is type(neutral) for neutral in self.neutral
        )


_PLACES = re.compile(r"\[\d+\]")
_TOOLS = "use `tools` and `tool_choice`"
_STRUCTURED = "use `structured_outputs`"
_BEAMS = "beam search is not supported; use sampling with `n`"

_REFUSED_BY_BOTH: dict[str, Refusal] = {
    "early_stopping": Refusal(_BEAMS, (False,)),
    "ebnf": Refusal(_STRUCTURED),
    "guided_choice": Refusal(_STRUCTURED),
    "guided_grammar": Refusal(_STRUCTURED),
    "guided_json": Refusal(_STRUCTURED),
    "guided_regex": Refusal(_STRUCTURED),
    "guided_whitespace_pattern": Refusal(_STRUCTURED),
    "kv_transfer_params": Refusal("pdserve moves KV itself; leave it out"),
    "length_penalty": Refusal(_BEAMS, (1, 1.0)),
    "logits_processors": Refusal("not supported; leave it out", ([],)),
    "regex": Refusal(_STRUCTURED),
    "use_beam_search": Refusal(_BEAMS, (False,)),
}

REFUSED_BY_CHAT: Mapping[str, Refusal] = {
    **_REFUSED_BY_BOTH,
    "audio": Refusal("only text is produced; leave it out"),
    "best_of": Refusal("use `n` for several choices", (1,)),
    "function_call": Refusal(_TOOLS, ("none",)),
    "functions": Refusal(_TOOLS, ([],)),
    "modalities": Refusal("only text is produced", (["text"],)),
    "prediction": Refusal("not supported; leave it out"),
    "mm_processor_kwargs": Refusal("only text is understood; leave it out", ({},)),
    "verbosity": Refusal("say it in the prompt, or by `chat_template_kwargs`", ("medium",)),
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
"""What clients send along inside of objects: padding, and parts of earlier answers."""


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


def refuse_unknown(unknown: Iterable[str], known: Iterable[str]) -> None:
    """The strict policy: `InvalidRequest` for the first unknown field, with the nearest name."""
    for name in unknown:
        near = difflib.get_close_matches(without_places(name[:128]), known, n=1)
        hint = f"; did you mean '{near[0]}'?" if near else "; leave it out"
        raise InvalidRequest(f"'{shorten(name)}' is not a known field{hint}", param=shorten(name))


def without_places(path: str) -> str:
    """`messages[3].content` becomes `messages[].content`: there are only so many of these."""
    return _PLACES.sub("[]", path)


def shorten(name: str, limit: int = 64) -> str:
    """A client's word made safe to repeat in answers, logs and labels."""
    clean = "".join(char if char.isprintable() else "�" for char in name[: limit + 1])
    return clean if len(clean) <= limit else clean[: limit - 1] + "…"
