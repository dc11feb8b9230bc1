"""Encodes hostile texts within a bound on memory. A program:

    python -m tests.text.tokenization.hostile_texts SECONDS

Texts of a megabyte, of every class that costs an encoder most, go through a tokenizer in three
threads at once, for some seconds. The process may not have more address space than they need
together, and in the end it may not hold more memory than after the first round. A text may not
take longer than `WORK`. It runs in a process of its own: an explosion ends it and nothing else.
"""

from __future__ import annotations

import resource
import sys
import threading
import time
from importlib.resources import files
from random import Random
from typing import TYPE_CHECKING

from pdserve.text.tokenization.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable

SIZE = 1 << 20
ADDRESS_SPACE = 768 << 20
"""Each thread may need some hundred bytes a character, and glibc reserves 64 MiB for each."""
GROWTH = 24 << 20
WORK = 2.0
THREADS = 3
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def classes(draw: Random) -> dict[str, Callable[[], str]]:
    """What each class of text is made of."""

    def some(letters: str, low: int, high: int) -> str:
        return "".join(draw.choices(letters, k=draw.randrange(low, high)))

    ideographs = "".join(map(chr, range(0x4E00, 0x9FFF)))
    return {
        "short words": lambda: " " + some(LETTERS, 2, 9),
        "long words": lambda: " " + some(LETTERS, 16, 60),
        "very long words": lambda: " " + some(LETTERS, 300, 3000),
        "one word": lambda: some(LETTERS, 1000, 1001),
        "one letter": lambda: "a" * 1000,
        "two letters": lambda: "th" * 500,
        "upper case": lambda: some(LETTERS[26:], 1000, 1001),
        "ideographs": lambda: some(ideographs, 300, 301),
        "Cyrillic": lambda: " " + "".join(chr(draw.randrange(0x400, 0x460)) for _ in range(9)),
        "emoji": lambda: "".join(chr(draw.randrange(0x1F300, 0x1F600)) for _ in range(9)),
        "marks": lambda: "e" + "\u0301\u0323" * 50,
        "digits": lambda: some("0123456789", 1, 40),
        "punctuation": lambda: some("!\"#$%&'()*+,-./:;<=>?@[]^_`{|}~", 3, 30),
        "blanks": lambda: some(" \n\t", 3, 200) + "a" * draw.randrange(2),
        "only blanks": lambda: " " * 1000,
        "only newlines": lambda: "\r\n" * 500,
        "quotes": lambda: "'S'll'" * 100,
        "added tokens": lambda: "<|im_start|><|im_end|><|",
        "brackets": lambda: "<" * 1000,
        "controls": lambda: "\x00\x1b\x7f\u200d\ufeff" * 50,
    }


def text_of(one: Callable[[], str]) -> str:
    parts = []
    size = 0
    while size < SIZE:
        parts.append(one())
        size += len(parts[-1].encode())
    return "".join(parts)


def memory(what: str) -> int:
    """Bytes of memory that the process has, by name of the kernel's line."""
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith(what))
    return int(line.split()[1]) << 10


def encode_all(tokenizer: Tokenizer, texts: dict[str, str], slow: dict[str, float]) -> None:
    for name, text in texts.items():
        begin = time.thread_time()
        tokenizer.encode(text, add_special_tokens=False)
        slow[name] = max(slow.get(name, 0.0), time.thread_time() - begin)


def in_threads(tokenizer: Tokenizer, texts: dict[str, str], slow: dict[str, float]) -> None:
    threads = [
        threading.Thread(target=encode_all, args=(tokenizer, texts, slow)) for _ in range(THREADS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def main() -> None:
    content = files("pdserve").joinpath("bundled", "tokenizer.json").read_bytes()
    tokenizer = Tokenizer.from_bytes(content)
    assert tokenizer.choose_encoder().fast
    made = {name: text_of(one) for name, one in classes(Random(1)).items()}
    space = memory("VmSize") + ADDRESS_SPACE
    resource.setrlimit(resource.RLIMIT_AS, (space, resource.RLIM_INFINITY))
    slow: dict[str, float] = {}
    in_threads(tokenizer, made, slow)
    held, end, rounds = memory("VmRSS"), time.monotonic() + float(sys.argv[1]), 1
    while time.monotonic() < end:
        in_threads(tokenizer, made, slow)
        rounds += 1
    grown = memory("VmRSS") - held
    print(f"{rounds} rounds, {held >> 20} MiB held, {grown >> 20} MiB more at the end")
    print(", ".join(f"{name} {seconds:.3f} s" for name, seconds in slow.items()))
    assert grown < GROWTH, "memory grows"
    assert max(slow.values()) < WORK, "a text takes too long"


if __name__ == "__main__":
    main()
