"""Measures a prompt's ids on their way to the engine: packed, and as lists of Python integers.

    python bench/micro/prompt_ids.py [--rounds N]

Each row is one place on the way of a request of 2,000 or 8,000 words, in this process. The list arm
does what releases without packed ids do there. The arms take turns; figures are medians over
rounds, with the smallest and largest round, and ratios are medians of each round's ratio. Pin it to
a core (`taskset -c 1`). Nothing passes or fails.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from typing import TYPE_CHECKING, Any

import msgspec

from pdserve.blocks.hashing import HASH_SECRET_TEST, joined_hashes, root_hash
from pdserve.engine_core.scheduler.submission import build_sequences
from pdserve.messages.request import GenerateRequest, SamplingParams
from pdserve.messages.worker_stream import OpenRequest
from pdserve.token_ids import largest_id, token_ids
from pdserve.wire.codec import PACKED_IDS, encoder_for

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Arm = Callable[[], Any]

VOCAB = 151_936
TOKENS_PER_WORD = 1.35
BLOCK = 16


class ListRequest(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The leading fields of a request as releases before read them."""

    request_id: str
    model: str
    prompt: list[int]
    sampling: SamplingParams


class ListOpen(msgspec.Struct, frozen=True, array_like=True, tag=1):
    number: int
    booking: int
    request: ListRequest


def places(ids: list[int]) -> dict[str, tuple[Arm, Arm]]:
    """What happens to the ids, and at which process: (packed, as a list)."""
    packed = token_ids(ids)
    sampling = SamplingParams(max_tokens=1)
    request = GenerateRequest(request_id="r", model="m", prompt=packed, sampling=sampling)
    opened = OpenRequest(1, 0, request)
    encode, encode_list = encoder_for(PACKED_IDS), msgspec.msgpack.Encoder().encode
    old = ListOpen(1, 0, ListRequest(request_id="r", model="m", prompt=ids, sampling=sampling))
    body, old_body = encode(opened), encode_list(old)
    decode = msgspec.msgpack.Decoder(OpenRequest).decode
    decode_list = msgspec.msgpack.Decoder(ListOpen).decode
    root = root_hash(HASH_SECRET_TEST, "m")

    def hashes(tokens: Sequence[int]) -> bytes:
        return joined_hashes(tokens, BLOCK, parent=root, secret=HASH_SECRET_TEST)

    return {
        "frontend: packed after the tokenizer": (lambda: token_ids(ids), lambda: None),
        "frontend: within the vocabulary": (lambda: largest_id(packed), lambda: max(ids)),
        "frontend: block hashes": (lambda: hashes(packed), lambda: hashes(ids)),
        "frontend: encode": (lambda: encode(opened), lambda: encode_list(old)),
        "worker: decode": (lambda: decode(body), lambda: decode_list(old_body)),
        "worker: encode for the core": (lambda: encode(opened), lambda: encode_list(old)),
        "core: decode": (lambda: decode(body), lambda: decode_list(old_body)),
        "core: within the vocabulary": (
            lambda: largest_id(packed),
            lambda: (min(ids), max(ids)),
        ),
        "core: a sequence's own copy": (
            lambda: build_sequences(1, request, 0.0, 0, 1 << 20),
            lambda: [*ids],
        ),
    }


def seconds(arm: Arm, calls: int) -> float:
    """Processor seconds of one call."""
    begin = time.thread_time()
    for _ in range(calls):
        arm()
    return (time.thread_time() - begin) / calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--calls", type=int, default=40)
    arguments = parser.parse_args()
    print("| place | words | packed us (least, most) | list us (least, most) | packed of list |")
    print("|---|---:|---:|---:|---:|")
    for words in (2000, 8000):
        count = int(words * TOKENS_PER_WORD)
        ids = random.Random(words).choices(range(1000, VOCAB), k=count)
        found: dict[str, list[tuple[float, float]]] = {}
        for _ in range(arguments.rounds):
            for name, (packed, listed) in places(ids).items():
                pair = seconds(packed, arguments.calls), seconds(listed, arguments.calls)
                found.setdefault(name, []).append(pair)
        rounds = range(arguments.rounds)
        for process in ("frontend", "worker", "core"):
            rows = [row for name, row in found.items() if name.startswith(process)]
            found[f"**{process}**"] = [
                (sum(row[at][0] for row in rows), sum(row[at][1] for row in rows)) for at in rounds
            ]
        for name, row in found.items():
            print(f"| {name} | {words:,} | {_column(row, 0)} | {_column(row, 1)} | {_ratio(row)} |")


def _column(row: list[tuple[float, float]], arm: int) -> str:
    values = [pair[arm] * 1e6 for pair in row]
    return f"{statistics.median(values):,.1f} ({min(values):,.1f}, {max(values):,.1f})"


def _ratio(row: list[tuple[float, float]]) -> str:
    ratios = [packed / listed for packed, listed in row if listed * 1e6 > 1]
    return f"{statistics.median(ratios):.3f}" if ratios else ""


if __name__ == "__main__":
    main()
