"""The bytes put together by hand decode as the records that describe them."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from pdserve.protocols.completion_responses import (
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    Completion,
    CompletionChoice,
    PromptTokensDetails,
    Usage,
)
from pdserve.protocols.sse import SseDecoder
from pdserve.protocols.stream_chunks import ChunkExtras, ChunkWriter

USAGE = Usage(
    prompt_tokens=3,
    completion_tokens=4,
    total_tokens=7,
    prompt_tokens_details=PromptTokensDetails(cached_tokens=2),
)
TEXTS = st.text(st.characters(codec="utf-8"))


def writer(chat=True, usage_field=False, model='a "model"\n'):
    return ChunkWriter(
        chat=chat,
        answer_id="chatcmpl-1",
        created=5,
        model=model,
        fingerprint="fp_1",
        usage_field=usage_field,
    )


def read(raw, kind):
    (event,) = SseDecoder().feed(raw)
    return msgspec.json.decode(event.data, type=kind)


def escaped(text):
    return msgspec.json.encode(text)[1:-1]


def chat(choices, usage=None):
    return ChatChunk(
        id="chatcmpl-1",
        created=5,
        model='a "model"\n',
        system_fingerprint="fp_1",
        choices=choices,
        usage=usage,
    )


@given(TEXTS, st.booleans(), st.integers(0, 300))
def test_a_tokens_chunk_is_the_chat_record(text, usage_field, index):
    form = writer(usage_field=usage_field).form(index)
    raw = form.head + escaped(text) + form.tail
    expected = chat([ChatChunkChoice(index=index, delta=ChatDelta(content=text))])
    assert read(raw, ChatChunk) == expected
    assert (b'"usage":null' in raw) == usage_field


@given(TEXTS, st.integers(0, 300))
def test_a_tokens_chunk_is_the_completion_record(text, index):
    form = writer(chat=False).form(index)
    got = read(form.head + escaped(text) + form.tail, Completion)
    assert got.choices == [CompletionChoice(index=index, text=text)]
    assert got.object == "text_completion"


def test_the_first_chunk_names_the_role():
    got = read(writer().role(2, [1, 2]), ChatChunk)
    assert got.choices == [ChatChunkChoice(index=2, delta=ChatDelta(role="assistant", content=""))]
    assert got.prompt_token_ids == [1, 2]


@given(TEXTS, st.sampled_from([None, "stop", "length"]), st.sampled_from([None, 7, 'st"op']))
def test_a_chunk_may_carry_everything(text, reason, stop_reason):
    out = writer(usage_field=True)
    extras = ChunkExtras(
        logprobs=b'{"content":[]}',
        finish_reason=reason,
        stop_reason=stop_reason,
        token_ids=[1, 2],
        usage=USAGE,
    )
    got = read(out.full(out.form(1), escaped(text), extras), ChatChunk)
    (choice,) = got.choices
    assert (choice.delta.content or "") == text
    assert choice.finish_reason == reason
    assert choice.stop_reason == (stop_reason if reason else None)
    assert choice.token_ids == [1, 2]
    assert choice.logprobs is not None
    assert got.usage == USAGE


def test_a_completions_chunk_may_carry_everything():
    out = writer(chat=False)
    extras = ChunkExtras(finish_reason="length", token_ids=[], prompt_token_ids=[9])
    got = read(out.full(out.form(0), b"", extras), Completion)
    assert got.choices == [
        CompletionChoice(
            index=0, text="", finish_reason="length", token_ids=[], prompt_token_ids=[9]
        )
    ]


def test_the_usage_chunk_has_no_choices():
    assert read(writer().usage(USAGE), ChatChunk) == chat([], USAGE)
