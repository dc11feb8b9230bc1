from itertools import cycle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.protocols.sse import DONE_EVENT, EventTooLarge, SseDecoder, SseEvent, encode_event


def decode(raw, cuts=()):
    decoder, events, last = SseDecoder(), [], 0
    for cut in sorted(cuts):
        events += decoder.feed(raw[last:cut])
        last = max(last, cut)
    return events + decoder.feed(raw[last:], final=True)


def test_one_event_is_one_data_line():
    assert encode_event(b'{"a":1}') == b'data: {"a":1}\n\n'
    assert decode(DONE_EVENT)[0].done


TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\r"))


@given(st.lists(TEXTS, max_size=6), st.data())
def test_what_was_encoded_is_decoded_however_it_is_split(texts, data):
    raw = b"".join(encode_event(text.encode()) for text in texts)
    cuts = data.draw(st.lists(st.integers(0, len(raw)), max_size=8))
    assert [event.data for event in decode(raw, cuts)] == texts


LINES = st.lists(
    st.sampled_from(
        [
            "",
            "data: a",
            "data:b",
            "data",
            "data: ü漢",
            ": ping",
            "event: x",
            "id: 7",
            "retry: 5",
            "zz",
        ]
    ),
    max_size=12,
)


@given(LINES, st.sampled_from([["\n"], ["\r\n"], ["\r"], ["\r\n", "\n", "\n"]]), st.data())
def test_line_ends_and_splits_do_not_change_the_events(lines, ends, data):
    plain = "".join(line + "\n" for line in lines).encode()
    raw = "".join(line + end for line, end in zip(lines, cycle(ends), strict=False)).encode()
    cuts = data.draw(st.lists(st.integers(0, len(raw)), max_size=8))
    assert decode(raw, cuts) == decode(plain)


def test_comments_names_and_ids_are_understood():
    raw = b": hello\n\nevent: ping\nid: 3\ndata: a\ndata: b\n\ndata: c\n\n"
    assert decode(raw) == [SseEvent("a\nb", "ping", "3"), SseEvent("c", "message", "3")]


def test_a_byte_order_mark_is_dropped_and_bad_utf8_is_replaced():
    assert decode(b"\xef\xbb\xbfdata: a\n\n")[0].data == "a"
    assert decode(b"data: \xff\n\n")[0].data == "�"


def test_an_event_that_was_cut_is_not_given():
    assert decode(b"data: a\n\ndata: b\n") == [SseEvent("a")]


def test_an_endless_event_is_an_error():
    decoder = SseDecoder(max_event=100)
    with pytest.raises(EventTooLarge):
        decoder.feed(b"data: " + b"x" * 200)
    decoder = SseDecoder(max_event=100)
    with pytest.raises(EventTooLarge):
        decoder.feed(b"data: y\n" * 200)


def test_many_events_in_one_piece_are_no_long_event():
    decoder = SseDecoder(max_event=100)
    assert len(decoder.feed(b"data: y\n\n" * 200)) == 200
