from pdserve.frontend.output.chunk_coalescer import ChunkCoalescer
from pdserve.frontend.output.output_processor import OutputDelta


def piece(text: str, tokens: int = 1) -> OutputDelta:
    return OutputDelta(text, list(range(tokens)))


def taken(interval: ChunkCoalescer, texts: str, size: int = 1) -> list[str | None]:
    found = [
        interval.take(piece(text), size, last=number == len(texts))
        for number, text in enumerate(texts, 1)
    ]
    return [None if one is None else one.text for one in found]


def test_the_first_goes_at_once_then_one_per_so_many_tokens():
    assert taken(ChunkCoalescer(3), "abcdefghi") == [
        "a",
        None,
        None,
        "bcd",
        None,
        None,
        "efg",
        None,
        "hi",
    ]


def test_a_piece_of_several_tokens_counts_them_all():
    interval = ChunkCoalescer(3)
    interval.take(piece("a"), 1, last=False)
    assert interval.take(piece("b", 2), 1, last=False) is None
    whole = interval.take(piece("c", 1), 1, last=False)
    assert whole is not None
    assert whole.tokens == [0, 1, 0]


def test_what_is_held_back_can_be_had_and_is_held_no_longer():
    interval = ChunkCoalescer(9)
    assert taken(interval, "ab")[0] == "a"
    interval.take(piece("c"), 1, last=False)
    rest = interval.rest()
    assert rest is not None
    assert rest.text == "c"
    assert interval.rest() is None


def test_little_is_held_back_however_long_the_interval():
    assert taken(ChunkCoalescer(65536), "abcde", size=1 << 15) == ["a", None, "bc", None, "de"]
