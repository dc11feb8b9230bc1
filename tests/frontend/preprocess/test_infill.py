"""Texts with a gap: the prompts of each form, what ends the output, and what is refused."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Raw

from pdserve.errors import InvalidRequest
from pdserve.frontend.preprocess.infill import infill_format, infill_prompts
from pdserve.text.tokenization.tokenizer import Tokenizer
from tests.frontend.support import MODEL, card, frontend
from tests.support.fake_backend import Script
from tests.text import builders

if TYPE_CHECKING:
    from collections.abc import Sequence

QWEN = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
LLAMA = ("▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>")
MISTRAL = ("[PREFIX]", "[SUFFIX]", "[MIDDLE]")


def raw_with(marks: Sequence[str], base: Raw | None = None, *, special: bool = True) -> Raw:
    raw = Raw.from_str((base or builders.byte_level()).to_str())
    raw.add_tokens([AddedToken(mark, special=special, normalized=False) for mark in marks])
    return raw


def tokenizer_with(marks: Sequence[str], base: Raw | None = None) -> Tokenizer:
    return Tokenizer.from_bytes(raw_with(marks, base).to_str().encode())


def named(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """The prompt as text, marks included."""
    return "".join(tokenizer.token_name(each) for each in ids).replace("Ġ", " ").replace("▁", " ")


@pytest.mark.parametrize(
    ("marks", "prompt"),
    [
        (QWEN, "<|fim_prefix|>a fox<|fim_suffix|> the dog<|fim_middle|>"),
        (
            ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
            "<fim_prefix>a fox<fim_suffix> the dog<fim_middle>",
        ),
        (
            ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
            "<fim-prefix>a fox<fim-suffix> the dog<fim-middle>",
        ),
        (
            ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
            "<｜fim begin｜>a fox<｜fim hole｜> the dog<｜fim end｜>",
        ),
        (
            ("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>"),
            "<[fim-suffix]> the dog<[fim-prefix]>a fox<[fim-middle]>",
        ),
        (MISTRAL, "[SUFFIX] the dog[PREFIX]a fox"),
    ],
)
def test_each_form_is_written_with_its_own_tokens(marks: tuple[str, ...], prompt: str) -> None:
    tokenizer = tokenizer_with(marks)
    (found,) = infill_prompts(tokenizer, ["a fox"], " the dog", special=False)
    assert named(tokenizer, found) == prompt
    assert sum(each in {tokenizer.token_to_id(mark) for mark in marks} for each in found) in (2, 3)


def test_only_the_first_text_begins_with_a_space_that_some_tokenizers_add() -> None:
    """As Code Llama was trained: `<s> <PRE> a fox <SUF>the dog <MID>`."""
    raw = json.loads(raw_with(LLAMA, builders.llama_like()).to_str())
    start = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    raw["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [start, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
    }
    tokenizer = Tokenizer.from_bytes(json.dumps(raw).encode())
    assert tokenizer.token_name(1) == "<s>"
    (found,) = infill_prompts(tokenizer, ["a fox"], "the dog", special=True)
    assert named(tokenizer, found) == "<s> <PRE> a fox <SUF>the dog <MID>"
    (bare,) = infill_prompts(tokenizer, [""], "\n", special=False)
    assert tokenizer.token_name(bare[0]) == LLAMA[0]
    mark = tokenizer.token_to_id(LLAMA[1])
    assert mark is not None
    inside = bare[bare.index(mark) + 1 : -1]
    assert tokenizer.decode(inside) == "\n"


def test_a_model_without_such_tokens_refuses() -> None:
    with pytest.raises(InvalidRequest, match="no tokens to fill in the middle"):
        infill_format(tokenizer_with(QWEN[:2]))


def test_marks_end_the_middle_as_ids_or_as_texts() -> None:
    special = tokenizer_with([*QWEN, "<|file_sep|>"])
    layout = infill_format(special)
    assert layout.end_ids(special) == tuple(
        special.token_to_id(mark) for mark in (*QWEN, "<|file_sep|>")
    )
    assert layout.end_texts(special) == ()
    shown = Tokenizer.from_bytes(raw_with(QWEN, special=False).to_str().encode())
    assert (layout.end_ids(shown), layout.end_texts(shown)) == ((), QWEN)


async def test_a_gap_is_filled_over_the_api() -> None:
    raw = raw_with(["<|file_sep|>"], raw_with(QWEN), special=False)
    end = raw.token_to_id("<|file_sep|>")
    assert end is not None
    made = card(tokenizer_json=raw.to_str().encode(), vocab_size=raw.get_vocab_size())
    words = [*raw.encode(" quick brown").ids, end]
    async with frontend(Script(tokens=words), {MODEL: made}) as client:
        answer = await client.complete(prompt="the", suffix=" fox", max_tokens=50, stop="!")
        (choice,) = answer["choices"]
        assert (choice["text"], choice["finish_reason"]) == (" quick brown", "stop")
        asked = client.backend.requests[-1]
        tokenizer = Tokenizer.from_card(made)
        assert named(tokenizer, asked.prompt) == "<|fim_prefix|>the<|fim_suffix|> fox<|fim_middle|>"
        assert answer["usage"]["prompt_tokens"] == len(asked.prompt)
        marks = tuple(tokenizer.token_to_id(mark) for mark in QWEN)
        assert asked.sampling.eos_token_ids == (1, *marks)
        several = await client.complete(prompt=["the", "a"], suffix=" fox", max_tokens=50)
        assert [each["text"] for each in several["choices"]] == [" quick brown"] * 2
        plain = await client.complete(prompt="the", suffix="", max_tokens=1)
        assert plain["usage"]["prompt_tokens"] == len(raw.encode("the").ids)
        assert client.backend.requests[-1].sampling.eos_token_ids == (1,)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"prompt": [5, 6]}, "prompt", "as text"),
        ({"echo": True}, "echo", "cannot be combined"),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens", "cannot be combined"),
        ({"suffix": "x" * 200_000}, "suffix", "context length"),
        ({"suffix": 3}, "suffix", "expected"),
    ],
)
async def test_what_has_no_meaning_for_a_gap_is_refused(
    fields: dict[str, Any], param: str, words: str
) -> None:
    raw = raw_with(QWEN)
    made = card(tokenizer_json=raw.to_str().encode(), vocab_size=raw.get_vocab_size())
    async with frontend(models={MODEL: made}) as client:
        body = {"prompt": "a", "suffix": "b"} | fields
        status, _, answer = await client.post("/v1/completions", body)
        assert (status, answer["error"]["param"]) == (400, param)
        assert words in answer["error"]["message"]


async def test_a_model_without_such_tokens_says_so_over_the_api() -> None:
    async with frontend() as client:
        body = {"prompt": "a", "suffix": "b"}
        status, _, answer = await client.post("/v1/completions", body)
        assert (status, answer["error"]["param"]) == (400, "suffix")
