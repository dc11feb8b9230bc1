"""Bugs that adapters of this kind have had, planted one at a time: a check must find each.

Every check passes without the bug; with it, it must fail.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import property as enum_property
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from pdserve_engines.tensorrt_llm import handoff, params
from pdserve_engines.tensorrt_llm.choices import Choice
from pdserve_engines.tensorrt_llm.events import KvNames
from pdserve_engines.tensorrt_llm.handoff import CancelAnswer, attempt_id, make_ticket
from pdserve_engines.tensorrt_llm.outputs import End, end_of
from pdserve_engines.tensorrt_llm.params import Part, Support, next_part, priority_of
from pdserve_engines.tensorrt_llm.requests import Requests
from tests.engines.tensorrt_llm.driver import Driver
from tests.engines.tensorrt_llm.fake_llm import FakeLlm14, RequestOutput

REQUESTS = "pdserve_engines.tensorrt_llm.requests"
Check = Callable[[Path], None]
Plant = Callable[[pytest.MonkeyPatch], None]


# -------------------------------------------------------------------- checks


def tokens_are_those_of_the_engine(folder: Path) -> None:
    with Driver(folder) as core:
        tokens = core.complete()
        assert tokens == core.llm.requests[0].outputs[0].token_ids
        assert len(tokens) == len(set(core.starts)) * 8


def output_goes_on_exactly(folder: Path) -> None:
    with Driver(folder, FakeLlm14) as core:
        steering = {"presence_penalty": 2.0, "frequency_penalty": 1.0, "max_tokens": 24}
        whole = core.complete(**steering)
        for handle, cut in enumerate((1, 9, 23), start=2):
            core.complete(output=[whole[:cut]], **steering)
            assert core.tokens[handle, 0] == whole[cut:]
            assert core.finishes[handle, 0].completion_tokens == 24
            assert core.finishes[handle, 0].prompt_tokens == 3


def penalties_leave_the_prompt_out(folder: Path) -> None:
    """One that counted the prompt would change the first token, where that is in the prompt."""
    with Driver(folder, FakeLlm14) as core:
        for token in range(64):
            prompt = [token, 1, 2, 3, 4]  # the engine looks at the last four only
            core.complete(prompt=prompt, max_tokens=1)
            core.complete(prompt=prompt, max_tokens=1, presence_penalty=2.0)
        tokens = [core.tokens[handle, 0] for handle in range(1, 129)]
        assert tokens[::2] == tokens[1::2]


def stop_tokens_are_in_the_output(folder: Path) -> None:
    with Driver(folder) as core:
        tokens = core.complete()
        stop = tokens[3]
        made = core.complete(stop_token_ids=(63, stop), eos_token_ids=(62,), ignore_eos=False)
        assert made == tokens[: tokens.index(stop) + 1]
        assert len(core.llm.requests) == 2


def no_end_token_comes_before_min_tokens(folder: Path) -> None:
    with Driver(folder) as core:
        tokens = core.complete()
        made = core.complete(stop_token_ids=tuple(tokens[:3]), min_tokens=4)
        assert not set(made[:4]) & set(tokens[:3])


def choices_differ(folder: Path) -> None:
    with Driver(folder) as core:
        handle = core.submit(core.request(n=3, temperature=1.0, seed=9))
        core.until(lambda: len(core.finishes) == 3)
        assert len({tuple(core.tokens[handle, choice]) for choice in range(3)}) == 3


def priorities_are_served_in_order(folder: Path) -> None:
    with Driver(folder, FakeLlm14, max_sequences=1) as core:
        core.hold()
        core.submit(core.request())
        core.wait_for(lambda: core.llm.running == 1)
        low, high = (core.submit(core.request(priority=p)) for p in (-3, 8))
        core.wait_for(lambda: len(core.llm.waiting) == 2)
        core.go()
        core.until(lambda: len(core.finishes) == 3)
        assert list(core.finishes)[1:] == [(high, 0), (low, 0)]
        assert all(0.0 <= request.priority <= 1.0 for request in core.llm.requests)


def an_odd_end_is_an_error(folder: Path) -> None:
    with Driver(folder) as core:
        core.hold()
        handle = core.submit(core.request())
        core.wait_for(lambda: core.llm.running == 1)
        result = core.llm.requests[0]

        def end() -> None:
            result._end("odd")
            core.llm.gate.set()

        generate = RequestOutput._generate
        try:
            RequestOutput._generate = lambda self, output: end()  # type: ignore[method-assign]
            core.go()
            core.until(lambda: handle in core.errors or (handle, 0) in core.finishes)
        finally:
            RequestOutput._generate = generate  # type: ignore[method-assign]
        assert handle in core.errors


def an_abort_reaches_the_engine(folder: Path) -> None:
    with Driver(folder) as core:
        core.hold()
        handle = core.submit(core.request())
        core.wait_for(lambda: core.llm.running == 1)
        core.abort(handle)
        core.in_loop(lambda: None)
        assert core.llm.requests[0].cancelled


def a_gap_clears_the_pool(folder: Path) -> None:
    names = KvNames(4, b"secret", "model")
    block = {"block_hash": 1, "tokens": [{"token_id": 1}] * 4, "cache_level": 0}
    stored = {"type": "stored", "parent_hash": None, "blocks": [block]}
    assert list(names.translate({"event_id": 0, "data": stored}))
    lost = {"event_id": 2, "data": {"type": "removed", "block_hashes": [9]}}
    assert [type(event).__name__ for event in names.translate(lost)] == ["PoolCleared"] * 2
    assert len(names) == 0


def only_safe_answers_free_blocks(folder: Path) -> None:
    safe = {answer.name for answer in CancelAnswer if answer.safe}
    assert safe == {"NOT_FOUND", "ALREADY_COMPLETE", "CANCELLED_BEFORE_ADVERTISE"}


def attempts_have_ids_of_their_own(folder: Path) -> None:
    tickets = [make_ticket(h, a, life, 1, 9) for h in (1, 2) for a in (1, 2) for life in (5, 6)]
    ids = {attempt_id(ticket) for ticket in tickets}
    assert len(ids) == 8
    assert all(number < 1 << 63 for number in ids)


# -------------------------------------------------------------------- bugs


def cumulative_chunks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(f"{REQUESTS}.new_tokens", lambda output, seen: list(output.token_ids))


def diff_read_late(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(f"{REQUESTS}.new_tokens", lambda output, seen: output.token_ids[seen + 1 :])


def output_forgotten(patch: pytest.MonkeyPatch) -> None:
    def forget(request: Any, output: Any, support: Support) -> Part:
        part = next_part(request, output, support)
        return Part(list(request.prompt), part.max_tokens, part.endless)

    patch.setattr(f"{REQUESTS}.next_part", forget)


def usage_without_earlier_output(patch: pytest.MonkeyPatch) -> None:
    take = Choice._completed

    def off(self: Choice, delta: Any) -> Any:
        delta = take(self, delta)
        if delta.finish is None or not self.request.output:
            return delta
        count = delta.finish.completion_tokens - len(self.request.output[0])
        return replace(delta, finish=replace(delta.finish, completion_tokens=count))

    patch.setattr(Choice, "_completed", off)


def prompt_counts_for_penalties(patch: pytest.MonkeyPatch) -> None:
    plain = params._penalty_arguments

    def count(request: Any, support: Support) -> dict[str, Any]:
        return plain(request, support) | {"prompt_ignore_length": 0}

    patch.setattr(params, "_penalty_arguments", count)


def earlier_output_does_not_count_for_penalties(patch: pytest.MonkeyPatch) -> None:
    plain = params._penalty_arguments

    def skip(request: Any, support: Support) -> dict[str, Any]:
        ignored = len(request.prompt) + len(request.given)
        return plain(request, support) | {"prompt_ignore_length": ignored}

    patch.setattr(params, "_penalty_arguments", skip)


def stop_token_cut(patch: pytest.MonkeyPatch) -> None:
    plain = params.sampling_arguments

    def cut(*given: Any) -> dict[str, Any]:
        return plain(*given) | {"include_stop_str_in_output": False}

    patch.setattr(f"{REQUESTS}.sampling_arguments", cut)


def ends_allowed_early(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(params, "_bias", lambda sampling, part, vocab_size: [])


def one_seed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(params, "choice_seed", lambda seed, prompt, choice, position: seed)


def priority_sign(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(f"{REQUESTS}.priority_of", lambda priority: 1.0 - priority_of(priority))


def priority_range(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(f"{REQUESTS}.priority_of", float)


def unknown_end_is_a_stop(patch: pytest.MonkeyPatch) -> None:
    def lenient(output: Any, finished: bool) -> End:
        end = end_of(output, finished)
        return "stop" if end == "error" else end

    patch.setattr(f"{REQUESTS}.end_of", lenient)
    patch.setattr(f"{REQUESTS}._goes_on", lambda *given: False)


def abort_kept_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Requests, "_cancel", lambda self, choice: None)


def gap_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KvNames, "_clear", lambda self: [])


def cancel_in_flight_taken_as_freed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        CancelAnswer, "safe", enum_property(lambda self: self.name != "BACKEND_UNHEALTHY")
    )


def id_of_the_handle_alone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(handoff, "attempt_id", lambda ticket: ticket.generation)
    patch.setitem(globals(), "attempt_id", handoff.attempt_id)


BUGS: list[tuple[Plant, Check]] = [
    (cumulative_chunks, tokens_are_those_of_the_engine),
    (diff_read_late, tokens_are_those_of_the_engine),
    (output_forgotten, output_goes_on_exactly),
    (usage_without_earlier_output, output_goes_on_exactly),
    (earlier_output_does_not_count_for_penalties, output_goes_on_exactly),
    (prompt_counts_for_penalties, penalties_leave_the_prompt_out),
    (stop_token_cut, stop_tokens_are_in_the_output),
    (ends_allowed_early, no_end_token_comes_before_min_tokens),
    (one_seed, choices_differ),
    (priority_sign, priorities_are_served_in_order),
    (priority_range, priorities_are_served_in_order),
    (unknown_end_is_a_stop, an_odd_end_is_an_error),
    (abort_kept_back, an_abort_reaches_the_engine),
    (gap_ignored, a_gap_clears_the_pool),
    (cancel_in_flight_taken_as_freed, only_safe_answers_free_blocks),
    (id_of_the_handle_alone, attempts_have_ids_of_their_own),
]
CHECKS = list(dict.fromkeys(check for _, check in BUGS))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_without_a_bug_the_check_passes(check: Check, tmp_path: Path) -> None:
    check(tmp_path)


@pytest.mark.parametrize(("plant", "check"), BUGS, ids=[plant.__name__ for plant, _ in BUGS])
def test_the_bug_is_found(
    plant: Plant, check: Check, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.engines.tensorrt_llm.driver.LONG", 2.0)
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        check(tmp_path)
