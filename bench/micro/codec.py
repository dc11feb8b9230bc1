"""Measures the cost of typed messages: msgspec's msgpack against the plain `msgpack` package.

    python bench/micro/codec.py

The message is the most frequent one of the engine port: one step's frame with a token for each of
64 sequences. The plain package must also turn the decoded lists back into records and check their
types, since code behind the port relies on both. Another arm leaves this out. All arms take turns
in the same rounds; the result is their best round. Writes bench/results/codec.md.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgpack
import msgspec

from bench.machine import facts
from pdserve.messages.engine import Event, StepOutput
from pdserve.messages.request import TokenDelta

if TYPE_CHECKING:
    from collections.abc import Callable

SEQUENCES = 64
ROUNDS = 30
REPEATS = 200
RESULT = Path(__file__).parent.parent / "results" / "codec.md"


def step() -> StepOutput:
    """Makes a frame with one token for each sequence."""
    return StepOutput([TokenDelta(1_000 + i, 0, [50_000 + i]) for i in range(SEQUENCES)])


def pack_plain(message: StepOutput) -> bytes:
    """Packs by hand the same bytes that msgspec writes."""
    rows = [
        (d.handle, d.choice, d.tokens, d.finish, d.logprobs, d.prompt_logprobs, d.started)
        for d in message.deltas
    ]
    packed: bytes = msgpack.packb((3, rows))
    return packed


def unpack_plain(frame: bytes) -> StepOutput:
    """Lists to records, with the type checks that the record's fields promise."""
    tag, rows = msgpack.unpackb(frame)
    if tag != 3:
        raise ValueError("not a step")
    return StepOutput([_delta(row) for row in rows])


def _delta(row: list[object]) -> TokenDelta:
    handle, choice, tokens = row[0], row[1], row[2]
    if not (isinstance(handle, int) and isinstance(choice, int) and isinstance(tokens, list)):
        raise TypeError("a delta of the wrong shape")
    if not all(isinstance(token, int) for token in tokens):
        raise TypeError("a token is not an integer")
    return TokenDelta(handle, choice, tokens)


def arms() -> dict[str, Callable[[], object]]:
    """The arms by their names in the table."""
    message = step()
    encoder, decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Event)
    frame = encoder.encode(message)
    if pack_plain(message) != frame or unpack_plain(frame) != decoder.decode(frame) != message:
        raise AssertionError("the arms do not say the same thing")
    return {
        "encode, msgspec": lambda: encoder.encode(message),
        "encode, msgpack": lambda: pack_plain(message),
        "decode to records, msgspec": lambda: decoder.decode(frame),
        "decode to records, msgpack": lambda: unpack_plain(frame),
        "decode to plain lists, msgpack": lambda: msgpack.unpackb(frame),
    }


def measure() -> dict[str, float]:
    """Returns the best round of each arm, in microseconds per message."""
    best: dict[str, float] = {}
    measured = arms()
    for _ in range(ROUNDS):
        for name, call in measured.items():
            start = time.perf_counter()
            for _ in range(REPEATS):
                call()
            took = (time.perf_counter() - start) / REPEATS * 1e6
            best[name] = min(took, best.get(name, took))
    return best


def report(best: dict[str, float]) -> str:
    """Returns the result file."""
    rows = [f"| {name} | {us:.1f} | {us / SEQUENCES * 1e3:.0f} |" for name, us in best.items()]
    decode = best["decode to records, msgpack"] / best["decode to records, msgspec"]
    encode = best["encode, msgpack"] / best["encode, msgspec"]
    return "\n".join(
        [
            "# Typed messages",
            "",
            f"One step's frame, {SEQUENCES} sequences with one token each; best of {ROUNDS} rounds",
            "of every arm in turn. Repeat with `python bench/micro/codec.py`.",
            "",
            *[f"- {fact}" for fact in facts()],
            "",
            "| what | us per frame | ns per token |",
            "|---|---:|---:|",
            *rows,
            "",
            f"msgspec writes {encode:.1f} times and reads {decode:.1f} times as fast as the plain",
            "package with records and checks made by hand. The bytes are the same.",
            "",
        ]
    )


if __name__ == "__main__":
    text = report(measure())
    RESULT.write_text(text)
    print(text)
