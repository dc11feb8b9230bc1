"""Measures how fast text becomes token ids, by the extension and by libraries, in the same run.

    python bench/micro/encode_text.py [tokenizer.json ...]
    pip install --target FOLDER fastokens tokie gigatoken sentencepiece mistral_common
    python bench/micro/encode_text.py --kinds --libraries FOLDER

Without arguments it measures the bundled model's tokenizer. With `--kinds` it makes one of each
kind (bench/tokenizer_kinds.py), and writes bench/results/encode_text.md.

Each class of text has eight texts of 10,000 characters (about 2,000 words of prose) that are all
different, since each encoder remembers words: a cell is the median CPU time of the eight, each
encoded once, after eight others. `fastokens`, `tokie` and `gigatoken` are measured where they are
installed. Code is the standard library's, prose is docs/, Chinese, Japanese and Korean come from
CPython's tests, all else is drawn. `differs` counts texts whose ids are not those of
`tokenizers`; `left` counts those that the extension leaves to it.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import json
import random
import statistics
import sys
import tempfile
import time
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers

from bench.machine import facts
from bench.tokenizer_kinds import write_kinds
from pdserve.text.tokenization.tokenization_cache import WORTH_FAST, TokenizationCache, plan_cuts
from pdserve.text.tokenization.tokenizer import Tokenizer
from pdserve.token_ids import TokenIds, token_ids

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


def extension(path: Path) -> Encode:
    ours = Tokenizer.from_bytes(path.read_bytes())
    choice = ours.choose_encoder()
    if ours._fast is None:
        raise ValueError(choice.uncovered or choice.difference)
    fast = ours._fast
    return lambda text: fast.encode(text, False)


def fast(path: Path) -> Encode:
    import fastokens

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


LIBRARIES = {
    "tokenizers": slow,
    "pdserve": extension,
    "fastokens": fast,
    "tokie": tokie,
    "gigatoken": gigatoken,
}
SHARED = 100_000
"""Characters of a prefix that several texts share."""


def measure(encode: Encode, texts: list[str]) -> tuple[float, list[int | None]]:
    """Median CPU microseconds of a text, and a digest of each text's ids; None: left to another."""
    times: list[float] = []
    digests: list[int | None] = []
    for text in texts:
        begin = time.thread_time()
        ids = encode(text)
        times.append(time.thread_time() - begin)
        left = ids is None
        digests.append(None if left else zlib.crc32(repr(list(map(int, ids))).encode()))
    return statistics.median(times[TEXTS:]) * 1e6, digests


def resident() -> float:
    """MiB of memory that this process has."""
    line = next(
        line for line in Path("/proc/self/status").read_text().splitlines() if "VmRSS" in line
    )
    return int(line.split()[1]) / 1024


def cell(micros: float, digests: list[int | None], base: tuple[float, list[int | None]]) -> str:
    first, expected = base
    left = digests.count(None)
    wrong = sum(a not in (None, b) for a, b in zip(digests, expected, strict=True))
    found = f"{micros:.0f} ({first / micros:.1f})" if left < len(digests) else "-"
    return found + (f", left {left}" if left else "") + (f", differs {wrong}" if wrong else "")


def row(name: str, path: Path, texts: dict[str, list[str]], base: dict[str, Any]) -> list[str]:
    """The line of a library; none if it is not installed."""
    before, begin = resident(), time.thread_time()
    try:
        encode = LIBRARIES[name](path)
    except ImportError:
        return []
    except BaseException as error:  # gigatoken panics
        return [f"| {name} | does not take it: {str(error).splitlines()[0][:80]} |"]
    cells = [f"{(time.thread_time() - begin) * 1e3:.0f}", f"{resident() - before:.0f}"]
    for kind, some in texts.items():
        measured = measure(encode, some)
        cells.append(cell(*measured, base.setdefault(kind, measured)))
    return [f"| {name} | {' | '.join(cells)} |"]


def table(path: Path, texts: dict[str, list[str]]) -> list[str]:
    lines = ["", f"## {path.stem if path.stem != 'tokenizer' else path.parent.name}", ""]
    lines += [f"| encoder | load, ms | memory, MiB | {' | '.join(texts)} |"]
    lines += ["|---|---|---|" + "---|" * len(texts)]
    base: dict[str, Any] = {}
    for name in LIBRARIES:
        lines += row(name, path, texts, base)
    return [*lines, *shared(path)]


def shared(path: Path) -> list[str]:
    """What the cache of segments saves where texts begin alike."""
    raw = tokenizers.Tokenizer.from_file(str(path))
    cuts = plan_cuts(raw)
    if not cuts:
        return []
    segments = TokenizationCache(cuts)
    prose = joined(STANDARD, "*.py")
    begin = prose[:SHARED] + next(iter(cuts))
    texts = [begin + prose[SHARED + 1000 * at :][:1000] for at in range(2 * TEXTS)]

    def pieces(some: Sequence[str]) -> list[TokenIds]:
        found = raw.encode_batch_fast([*some], add_special_tokens=False)
        return [token_ids(each.ids) for each in found]

    times = {"tokenizers": measure(lambda text: pieces([text])[0], texts)[0]}
    times["its cache of segments"] = measure(lambda text: segments.encode(text, pieces), texts)[0]
    with contextlib.suppress(ValueError):
        encode = extension(path)
        times["pdserve"] = measure(encode, texts)[0]
        again = TokenizationCache(cuts, shortest=WORTH_FAST)
        times["pdserve with the cache"] = measure(
            lambda text: again.encode(text, lambda some: [*map(encode, some)]), texts
        )[0]
    told = ", ".join(f"{name} {micros:.0f}" for name, micros in times.items())
    return ["", f"100,000 characters that all share, then 1,000 of their own: {told}."]


NOTES = """\
CPU microseconds per text; in brackets, how many times faster than `tokenizers`. "Memory" is what
the process grew by, so it says little after the first tables. The vocabulary of llama3, qwen and
deepseek is Mistral's tekken (131,072 tokens), behind the steps of those models; spm_v3 is
Mistral's SentencePiece model; wordpiece and metaspace (Unigram) are small ones.

`fastokens` 0.3.5 is the fastest, and is not used: each thread keeps the ids of up to 2,000,000
words for each of four tokenizers, some hundred MiB each under hostile texts, and a vocabulary of
131,072 takes 150 MB. A frontend with 50 models of one small tokenizer ran out of 2 GiB within
seconds, and a Rust library ends the process then. The extension holds 30 MiB for such a
vocabulary, and no more after any text: `python -m tests.text.tokenization.hostile_texts 60`.
`tokie` 0.1.4 differs. `gigatoken` 0.10.0 holds the interpreter lock for half a second in long
texts.

SentencePiece, Unigram and WordPiece are not covered: `tokenizers` encodes them. Nor are texts
that have to be normalised (qwen with compatibility ideographs, CJK below), and characters newer
than the table.
"""


def page(paths: Sequence[Path]) -> str:
    texts = classes(random.Random(7))
    about = (__doc__ or "").partition("\n\n")[2].rstrip()
    lines = ["# Text to token ids", "", about, "", *NOTES.splitlines(), ""]
    lines += [f"- {fact}" for fact in facts()]
    for path in paths:
        lines += table(path, texts)
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path, metavar="tokenizer.json")
    parser.add_argument("--kinds", action="store_true", help="one of each kind; writes the page")
    parser.add_argument("--libraries", metavar="FOLDER", help="where other encoders are installed")
    options = parser.parse_args()
    if options.libraries:
        sys.path.append(options.libraries)
    if not options.kinds:
        print(page(options.files or [ROOT / "pdserve/bundled/tokenizer.json"]))
        return
    with tempfile.TemporaryDirectory() as folder:
        RESULT.write_text(page(write_kinds(Path(folder))))


if __name__ == "__main__":
    main()
