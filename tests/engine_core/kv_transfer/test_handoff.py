"""A prompt that is prefilled by one core and decoded by another: the tokens are the same.

The scripted executor's tokens depend on the bytes in the blocks, and the receiver's counters say
that it computed none of the prompt: so the bytes came from the sender, to the right places.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from pdserve.messages.engine import EngineSpec, PrefillLocally, TransferSpec
from pdserve.messages.request import GenerateRequest, SamplingParams
from pdserve.testing.scripted import ENGINE, ScriptedExecutor, reference_tokens
from pdserve.token_ids import token_ids
from tests.support.disagg_pair import DisaggPair, make_pair

if TYPE_CHECKING:
    from collections.abc import Sequence

BLOCK = 4
MAX_LEN = 96
SPEC = EngineSpec(
    engine=ENGINE,
    model="",
    block_size=BLOCK,
    max_model_len=MAX_LEN,
    hash_secret=b"secret",
    options={"blocks": "100", "layers": "8"},
    transfer=TransferSpec(verify="all"),
)
UNCHECKED = TransferSpec(verify="off")


def request(prompt: Sequence[int], **changes: Any) -> GenerateRequest:
    """Greedy unless it says otherwise."""
    fields = SamplingParams.__struct_fields__
    sampling = {name: changes.pop(name) for name in list(changes) if name in fields}
    defaults: dict[str, Any] = {"max_tokens": 9, "temperature": 0.0, "eos_token_ids": (2,)}
    return GenerateRequest(
        request_id="r",
        model="m",
        prompt=token_ids(prompt),
        sampling=SamplingParams(**(defaults | sampling)),
        **changes,
    )


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(3, 97), k=length)


def reference(wanted: GenerateRequest) -> list[list[int]]:
    return [reference_tokens(wanted, choice, max_len=MAX_LEN) for choice in range(wanted.n)]


def pair(**changes: Any) -> DisaggPair:
    return make_pair(ScriptedExecutor, SPEC, **changes)


def check_received(both: DisaggPair, prompts: int, cached: int = 0) -> None:
    """Everything but what was cached came from P, by counters and by bytes."""
    stats = both.d.stats
    assert stats.computed_tokens == stats.output_tokens - stats.finished
    assert (stats.prompt_tokens, stats.cached_tokens) == (prompts, cached)
    assert stats.received_tokens == prompts - cached
    block_bytes = both.d.engine.capabilities.block_bytes
    assert stats.received_bytes == stats.received_blocks * block_bytes == both.net.bytes_applied
    assert both.p.stats.sent_bytes == stats.received_bytes
    assert both.p.stats.sent_blocks == stats.received_blocks


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63])
@pytest.mark.parametrize("batch", [6, 2048])
def test_every_prompt_length_gives_the_same_tokens(length: int, batch: int):
    both = pair(p={"max_batch_tokens": batch, "max_sequences": 4})
    wanted = request(prompt_of(length))
    (ledger,) = both.generate([wanted])
    assert ledger.tokens == reference(wanted)
    check_received(both, length)
    assert both.p.stats.computed_tokens == length
    assert ledger.starts[0] is not None
    assert ledger.starts[0].received_tokens == length
    both.close()


@pytest.mark.parametrize("cached_p", [0, 8, 12, 20])
@pytest.mark.parametrize("cached_d", [0, 4, 12, 24])
@pytest.mark.parametrize("batch", [6, 2048])
def test_prefixes_that_either_end_has_change_nothing(cached_p: int, cached_d: int, batch: int):
    """What D has is not sent, what P has is not computed."""
    both = pair(p={"max_batch_tokens": batch, "max_sequences": 4})
    prompt = prompt_of(29)
    for end, cached in ((both.p, cached_p), (both.d, cached_d)):
        if cached:
            end.engine.generate([request(prompt[:cached], max_tokens=1)])
    before_p, before_d = both.p.stats, both.d.stats
    wanted = request(prompt)
    (ledger,) = both.generate([wanted])
    assert ledger.tokens == reference(wanted)
    assert both.p.stats.computed_tokens - before_p.computed_tokens == 29 - cached_p
    after = both.d.stats
    assert after.computed_tokens - before_d.computed_tokens == len(ledger.tokens[0]) - 1
    assert after.cached_tokens == cached_d
    assert after.received_blocks == -(-(29 - cached_d) // BLOCK)
    assert after.received_blocks * both.d.engine.capabilities.block_bytes == both.net.bytes_applied
    both.close()


def test_what_was_received_is_reusable_and_announced():
    both = pair()
    prompt = prompt_of(18)
    both.generate([request(prompt, max_tokens=1)])
    stored = [name for event in both.d.engine.kv_events for name in getattr(event, "hashes", ())]
    assert len(stored) == 4
    wanted = request(prompt)
    assert both.d.engine.generate([wanted]) == [reference(wanted)]
    assert both.d.stats.cached_tokens == 16
    both.close()


def test_a_prefix_that_d_learns_before_the_attempt_is_opened_is_used():
    both = pair()
    prompt = prompt_of(21)
    handle, ledger = both.submit(request(prompt))
    both.step_d()
    assert both.admitted == {handle: 0}
    both.d.engine.submit(request(prompt[:16], max_tokens=1))
    both.d.engine.run()
    both.open(handle)
    both.net.run()
    both.step_d()
    assert both.opened[handle].ticket.first_token == 16
    both.prefill(both.opened[handle])
    both.run()
    assert ledger.tokens == reference(request(prompt))
    assert both.d.stats.received_blocks == 2
    both.close()


VARIANTS: dict[str, dict[str, Any]] = {
    "seeded": {"temperature": 0.9, "seed": 11},
    "several choices": {"temperature": 0.9, "seed": 5, "n": 3},
    "several greedy choices": {"n": 2},
    "logprobs": {"logprobs": 2},
    "prompt logprobs": {"prompt_logprobs": 1, "logprobs": 0},
    "prompt logprobs of several": {"prompt_logprobs": 1, "n": 2},
    "one token": {"max_tokens": 1},
    "one token of several": {"max_tokens": 1, "n": 3, "temperature": 1.0, "seed": 1},
    "two tokens": {"max_tokens": 2, "n": 2},
    "min tokens": {"min_tokens": 6, "stop_token_ids": tuple(range(3, 50))},
    "stops": {"stop_token_ids": tuple(range(3, 97, 2)), "n": 4, "temperature": 1.0, "seed": 3},
    "every token stops": {"stop_token_ids": tuple(range(97)), "n": 3},
    "given output": {"output": [[5, 6, 7]], "temperature": 0.8, "seed": 2},
    "all but one given": {"output": [[5, 6, 7, 8, 9, 10, 11, 12]]},
    "the model's length": {"max_tokens": 500, "ignore_eos": True},
}


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("length", [3, 4, 5, 13, 16, 17])
def test_every_kind_of_request_gives_the_same_tokens(name: str, length: int):
    wanted = request(prompt_of(length, seed=4), **VARIANTS[name])
    both = pair(p={"max_batch_tokens": 7, "max_sequences": 7})
    (ledger,) = both.generate([wanted], random.Random(length))
    assert ledger.tokens == reference(wanted)
    assert both.d.stats.received_tokens == length
    alone = both.d.engine.submit(wanted)
    both.run()
    for mine, plain in zip(ledger.finishes, alone.finishes, strict=True):
        assert mine is not None
        assert plain is not None
        assert (mine.reason, mine.stop_reason) == (plain.reason, plain.stop_reason)
    assert ledger.logprobs == alone.logprobs
    assert ledger.prompt_logprobs == alone.prompt_logprobs
    both.close()


def test_choices_compute_nothing_of_the_prompt_again():
    both = pair()
    wanted = request(prompt_of(18), n=3, temperature=1.0, seed=8, max_tokens=6, ignore_eos=True)
    (ledger,) = both.generate([wanted])
    assert ledger.tokens == reference(wanted)
    assert both.d.stats.computed_tokens == 3 * 5
    assert all(start is not None and start.received_tokens == 18 for start in ledger.starts)
    both.close()


@pytest.mark.parametrize("place", range(6))
def test_a_byte_that_changes_on_its_way_is_never_served(place: int):
    """With checksums the attempt is lost, and the next one serves."""
    both = pair(p={"max_batch_tokens": 8, "max_sequences": 4})
    both.net.faults = [""] * place + ["corrupt"]
    handle, ledger = both.submit(request(prompt_of(30)))
    both.run()
    assert both.net.counts["corrupted"] == 1
    assert [event.kind for event in both.lost] == ["TransferCorrupt"]
    assert not ledger.deltas
    assert both.d.stats.attempts_failed == 1
    both.open(handle)
    both.run()
    assert ledger.tokens == reference(request(prompt_of(30)))
    both.close()


def test_without_checksums_a_changed_byte_changes_the_answer():
    """So the answer depends on what was received: it was not computed here."""
    both = make_pair(ScriptedExecutor, msgspec.structs.replace(SPEC, transfer=UNCHECKED))
    both.net.faults = ["corrupt"]
    wanted = request(prompt_of(30), ignore_eos=True)
    (ledger,) = both.generate([wanted])
    # P has said the first token; all others come from what D has.
    assert ledger.tokens[0][0] == reference(wanted)[0][0]
    assert ledger.tokens != reference(wanted)
    both.close()


def test_who_wants_all_checked_has_it_from_a_worker_that_checks_nothing():
    both = make_pair(ScriptedExecutor, SPEC, p={"transfer": UNCHECKED})
    both.net.faults = ["corrupt"]
    handle, ledger = both.submit(request(prompt_of(30)))
    both.step_d()
    both.open(handle)
    both.run()
    (lost,) = both.lost
    assert lost.kind == "TransferCorrupt"
    assert "the checksum of its block 0 differs" in lost.message
    assert not ledger.tokens[0]
    both.d.core.handle(PrefillLocally(handle))
    both.run()
    assert ledger.tokens == reference(request(prompt_of(30)))
    both.close()


def test_an_activated_sequence_that_is_preempted_computes_again():
    both = pair(d={"options": {"blocks": "26", "layers": "8"}, "max_sequences": 4})
    wanted = [request(prompt_of(9, n), max_tokens=50, ignore_eos=True) for n in range(4)]
    ledgers = both.generate(wanted)
    assert [ledger.tokens for ledger in ledgers] == [reference(one) for one in wanted]
    assert both.d.stats.preemptions > 0
    both.close()


def test_many_prompts_at_once_in_any_order_of_bytes(seed: int):
    rng = random.Random(seed)
    both = pair(p={"max_batch_tokens": 16, "max_sequences": 4})
    wanted = [
        request(
            prompt_of(rng.randint(1, 40), n % 3),
            temperature=rng.choice([0.0, 1.0]),
            seed=n,
            n=rng.choice([1, 1, 3]),
        )
        for n in range(12)
    ]
    ledgers = both.generate(wanted, rng)
    assert [ledger.tokens for ledger in ledgers] == [reference(one) for one in wanted]
    assert both.d.stats.waiting == both.d.stats.remote == both.p.stats.sending == 0
    both.close()
