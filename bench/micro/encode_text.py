"""Measures how fast libraries turn text into token ids, beside `tokenizers` in the same run.

    python bench/micro/encode_text.py [tokenizer.json ...]

Without arguments it measures the bundled model's tokenizer and writes no file. Each class of
text has eight texts of 10,000 characters (about 2,000 words of prose) that are all different, since
some libraries remember words: a cell is the median CPU time of the eight, each encoded once, after
eight others. `tokie` and `gigatoken` are measured where they are installed. Code is the standard
library's, prose is docs/, Chinese, Japanese and Korean come from CPython's tests, all else is
drawn. `differs` counts texts whose ids are not those of `tokenizers`. Writes
bench/results/encode_text.md.
"""

from __future__ import annotations

import base64
import json
import random
import statistics
import sys
import time
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fastokens
import tokenizers

from bench.machine import facts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Encode = Callable[[str], Any]

ROOT = Path(__file__).parent.parent.parent
RESULT = ROOT / "bench" / "results" / "encode_text.md"
CHARS = 10_000
TEXTS = 8
STANDARD = Path(json.__file__).parent.parent


def joined(folder: Path, pattern: str) -> str:
    return "".join(path.read_text(errors="replace") for path in sorted(folder.glob(pattern)))


def pieces(text: str, draw: random.Random) -> list[str]:
    """Different parts of a text."""
    begins = draw.sample(range(0, max(1, len(text) - CHARS), 101), 2 * TEXTS)
    return [text[begin : begin + CHARS] for begin in begins]


def drawn(one: Callable[[], str]) -> list[str]:
    """Texts made of what `one` draws."""
    texts = []
    for _ in range(2 * TEXTS):
        text = ""
        while len(text) < CHARS:
            text += one()
        texts.append(text[:CHARS])
    return texts


def classes(draw: random.Random) -> dict[str, list[str]]:
    """Texts by their class; the first half of each only warms up."""
    prose = joined(ROOT / "docs", "*.md")
    east = joined(STANDARD / "test" / "cjkencodings", "*-utf8.txt")
    emoji = ["👍🏽", "😀", "👩‍👩‍👧", "🇩🇪", "❤️", "🏳️‍🌈", " ", "ok"]
    blanks = [" ", "  ", "\n", "\r\n", "\t", "\n\n\n", " " * 17, "a", "  b"]
    found = {
        "prose": pieces(prose, draw),
        "code": pieces(joined(STANDARD, "*.py"), draw),
        "emoji": drawn(lambda: draw.choice(emoji)),
        "numbers": drawn(lambda: f"{draw.random() * 1e6} {draw.randrange(10**12)} "),
        "JSON": drawn(
            lambda: json.dumps({"id": draw.randrange(10**9), "x": [draw.random()], "ok": None})
        ),
        "base64": drawn(lambda: base64.b64encode(draw.randbytes(300)).decode()),
        "blanks": drawn(lambda: draw.choice(blanks)),
    }
    if east:
        letters = [letter for letter in east if letter > "\u2e7f"]
        found["CJK"] = drawn(lambda: draw.choice(letters))
    return found


def fast(path: Path) -> Encode:
    raw = fastokens.Tokenizer.from_json_str(path.read_text())
    return lambda text: memoryview(raw.encode_batch_flat([text])[0]).cast("I")


def tokie(path: Path) -> Encode:
    import tokie

    raw = tokie.Tokenizer.from_json(str(path))
    return lambda text: memoryview(_packed(raw.encode(text, add_special_tokens=False).ids))


def gigatoken(path: Path) -> Encode:
    import gigatoken

    raw = gigatoken.Tokenizer.from_json(path.read_text())
    return lambda text: raw.encode(text)


def slow(path: Path) -> Encode:
    raw = tokenizers.Tokenizer.from_file(str(path))
    return lambda text: raw.encode_batch_fast([text], add_special_tokens=False)[0].ids


def _packed(ids: Sequence[int]) -> Any:
    import array

    return array.array("I", ids)


LIBRARIES = {"tokenizers": slow, "fastokens": fast, "tokie": tokie, "gigatoken": gigatoken}


def measure(encode: Encode, texts: list[str]) -> tuple[float, list[int]]:
    """Median CPU microseconds of a text, and a digest of each text's ids."""
    times, digests = [], []
    for text in texts:
        begin = time.thread_time()
        ids = encode(text)
        times.append(time.thread_time() - begin)
        digests.append(zlib.crc32(repr(list(map(int, ids))).encode()))
    return statistics.median(times[TEXTS:]) * 1e6, digests


def table(path: Path, texts: dict[str, list[str]]) -> list[str]:
    lines = ["", f"## {path.stem if path.stem != 'tokenizer' else path.parent.name}", ""]
    lines += [f"| library | load, ms | {' | '.join(texts)} |", "|---|---|" + "---|" * len(texts)]
    base: dict[str, tuple[float, list[int]]] = {}
    for name, load in LIBRARIES.items():
        begin = time.thread_time()
        try:
            encode = load(path)
        except ImportError:
            continue
        except BaseException as error:  # gigatoken panics
            lines.append(f"| {name} | does not take it: {str(error).splitlines()[0][:80]} |")
            continue
        cells = [f"{(time.thread_time() - begin) * 1e3:.0f}"]
        for kind, some in texts.items():
            micros, digests = measure(encode, some)
            first, expected = base.setdefault(kind, (micros, digests))
            wrong = sum(a != b for a, b in zip(digests, expected, strict=True))
            ratio = "" if name == "tokenizers" else f" ({first / micros:.1f})"
            cells.append(f"{micros:.0f}{ratio}" + (f", differs {wrong}" if wrong else ""))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    paths = [Path(each) for each in sys.argv[1:]] or [ROOT / "pdserve/bundled/tokenizer.json"]
    texts = classes(random.Random(7))
    lines = ["# Text to token ids", "", *__doc__.split("\n\n")[2].splitlines(), ""]
    lines += [
        "CPU microseconds per text; in brackets, how many times faster than `tokenizers`.",
        "",
    ]
    lines += [f"- {fact}" for fact in facts()]
    for path in paths:
        lines += table(path, texts)
    print("\n".join(lines))
    if sys.argv[1:]:
        RESULT.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
