"""Microseconds per token of detokenising one token at a time, against the library and the limit.

    python bench/micro/detokenize.py [TOKENIZER_JSON] [--tokens N] [--rounds N]

Without a file, a byte-level tokenizer is trained on Python's own library first. Every way reads the
same ids in the same process; the rounds are interleaved and the best of each is kept, so that the
ratios hold on a noisy machine. The limit is one list look-up per token: no detokeniser that is
asked for one token at a time can be faster.
"""

from __future__ import annotations

import argparse
import pathlib
import sysconfig
import time
from typing import TYPE_CHECKING

from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers
from tokenizers.decoders import DecodeStream

from pdserve.text.stop_matcher import StopMatcher
from pdserve.text.tokenization.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable


def main() -> None:
    arguments = _arguments()
    texts = _corpus()
    content = arguments.tokenizer.read_bytes() if arguments.tokenizer else _train(texts)
    tokenizer = Tokenizer.from_bytes(content)
    ids = tokenizer.encode("".join(texts))[: arguments.tokens].tolist()
    ways = _ways(tokenizer, RawTokenizer.from_buffer(content), ids)
    best = _measure(ways, arguments.rounds)
    limit = best["limit: a list look-up"] / len(ids)
    print(f"{len(ids)} ids, best of {arguments.rounds} rounds")
    for name, seconds in best.items():
        each = seconds / len(ids)
        print(f"{name:42} {each * 1e6:7.3f} us/token {each / limit:7.1f} x limit")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tokenizer", nargs="?", type=pathlib.Path, help="a tokenizer.json")
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=5)
    return parser.parse_args()


def _corpus() -> list[str]:
    folder = pathlib.Path(sysconfig.get_path("stdlib"))
    files = sorted(folder.glob("*.py"))[:60]
    return [path.read_text(encoding="utf-8", errors="replace") for path in files]


def _train(texts: list[str]) -> bytes:
    raw = RawTokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=8000,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|end|>"],
        show_progress=False,
    )
    raw.train_from_iterator(texts, trainer)
    return raw.to_str().encode()


def _ways(
    tokenizer: Tokenizer, raw: RawTokenizer, ids: list[int]
) -> dict[str, Callable[[], object]]:
    table = [tokenizer.token_text(token_id) for token_id in range(tokenizer.vocab_size)]
    single, eights = ([ids[at : at + n] for at in range(0, len(ids), n)] for n in (1, 8))
    return {
        "limit: a list look-up": lambda: _look_up(table, ids),
        "feed": lambda: _feed(tokenizer, ids),
        "feed_json, one id a call": lambda: _feed_json(tokenizer, single),
        "feed_json, eight ids a call": lambda: _feed_json(tokenizer, eights),
        "feed and a stop string": lambda: _feed_and_stop(tokenizer, ids),
        "tokenizers' DecodeStream": lambda: _decode_stream(raw, ids),
        "decode of the last 16 ids, each time": lambda: _decode_window(raw, ids),
    }


def _look_up(table: list[str], ids: list[int]) -> None:
    for token_id in ids:
        table[token_id]


def _feed(tokenizer: Tokenizer, ids: list[int]) -> None:
    stream = tokenizer.detokenizer()
    for token_id in ids:
        stream.feed(token_id)


def _feed_json(tokenizer: Tokenizer, deltas: list[list[int]]) -> None:
    stream = tokenizer.detokenizer()
    for delta in deltas:
        stream.feed_json(delta)


def _feed_and_stop(tokenizer: Tokenizer, ids: list[int]) -> None:
    stream, stops = tokenizer.detokenizer(), StopMatcher(["\n\nUser:"])
    for token_id in ids:
        stops.feed(stream.feed(token_id))


def _decode_stream(raw: RawTokenizer, ids: list[int]) -> None:
    stream = DecodeStream(skip_special_tokens=True)
    for token_id in ids:
        stream.step(raw, token_id)


def _decode_window(raw: RawTokenizer, ids: list[int]) -> None:
    for end in range(len(ids)):
        raw.decode(ids[max(0, end - 16) : end], skip_special_tokens=True)


def _measure(ways: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(rounds + 1):  # the first round fills tables and is slower
        for name, way in ways.items():
            started = time.perf_counter()
            way()
            best[name] = min(best[name], time.perf_counter() - started)
    return best


if __name__ == "__main__":
    main()
