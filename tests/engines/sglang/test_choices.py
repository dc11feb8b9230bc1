"""Chunks of SGLang become deltas."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from pdserve.errors import InvalidRequest, Overloaded, StepFailed
from pdserve.messages.request import GenerateRequest, SamplingParams, TokenDelta
from pdserve.testing.output_checker import OutputChecker
from pdserve_engines.sglang.choices import SglangChoice

if TYPE_CHECKING:
    from collections.abc import Mapping


def choice_of(**changes: Any) -> SglangChoice:
    fields = SamplingParams.__struct_fields__
    sampling = {name: changes.pop(name) for name in list(changes) if name in fields}
    request = GenerateRequest(
        request_id="r",
        model="m",
        prompt=changes.pop("prompt", [1, 2, 3]),
        sampling=SamplingParams(**{"max_tokens": 20, "ignore_eos": True} | sampling),
        **changes,
    )
    return SglangChoice(7, 0, request, 10.0, 1000)


def chunk(
    ids: list[int], total: int, reason: dict[str, Any] | None = None, **meta: Any
) -> dict[str, Any]:
    return {
        "output_ids": ids,
        "meta_info": {"finish_reason": reason, "completion_tokens": total, **meta},
    }


def some(delta: TokenDelta | None) -> TokenDelta:
    assert delta is not None
    return delta


STOPPED = {"type": "stop", "matched": 9}
ENDED = {"type": "length", "length": 20}


def test_the_first_token_tells_what_was_cached():
    choice = choice_of()
    first = some(choice.take(chunk([5], 1, cached_tokens=2, num_retractions=0), 11.5))
    assert first.started is not None
    assert (first.started.cached_tokens, first.started.prefill_seconds) == (2, 1.5)
    second = some(choice.take(chunk([6], 2, ENDED, cached_tokens=99, num_retractions=1), 12.0))
    assert second.started is None
    assert second.finish is not None
    assert (second.finish.cached_tokens, second.finish.preemptions) == (2, 1)
    assert second.finish.prefill_seconds == 1.5


@given(st.lists(st.integers(0, 50), min_size=1, max_size=20), st.data())
def test_deltas_and_whole_outputs_are_told_apart(tokens: list[int], data: st.DataObject):
    """Whatever a release sends, and however chunks were joined, each token comes once."""
    cumulative = data.draw(st.booleans())
    cuts = sorted({len(tokens), *data.draw(st.lists(st.integers(1, len(tokens))))})
    choice, found, sent = choice_of(max_tokens=100), list[int](), 0
    for cut in cuts:
        ids = tokens[:cut] if cumulative else tokens[sent:cut]
        found += some(choice.take(chunk(ids, cut), 11.0)).tokens
        sent = cut
    assert found == tokens


class Careless(SglangChoice):
    """A planted bug: the delta holds SGLang's own list."""

    def take(self, chunk: Mapping[str, Any], now: float) -> TokenDelta | None:
        delta = super().take(chunk, now)
        return None if delta is None else replace(delta, tokens=chunk["output_ids"])


@pytest.mark.parametrize(("kind", "copies"), [(SglangChoice, True), (Careless, False)])
def test_a_list_that_grows_later_is_copied(kind: type[SglangChoice], copies: bool):
    choice, theirs = kind(7, 0, choice_of().request, 10.0, 1000), [5]
    delta = some(choice.take(chunk(theirs, 1), 11.0))
    theirs.append(6)
    assert (delta.tokens == [5]) == copies


@pytest.mark.parametrize("total", [0, 4])
def test_tokens_that_are_missing_are_noticed(total: int):
    choice = choice_of()
    choice.take(chunk([5], 1), 11.0)
    with pytest.raises(StepFailed, match=f"counts {total} tokens"):
        choice.take(chunk([6], total), 11.0)


def test_a_chunk_without_news_is_no_delta():
    choice = choice_of()
    choice.take(chunk([5], 1), 11.0)
    assert choice.take(chunk([], 1), 11.0) is None


# ---------------------------------------------------------------- ends


def end_of(choice: SglangChoice, *chunks: dict[str, Any]) -> tuple[list[int], Any, Any, int]:
    tokens: list[int] = []
    for each in chunks:
        delta = some(choice.take(each, 11.0))
        tokens += delta.tokens
    assert delta.finish is not None
    finish = delta.finish
    return tokens, finish.reason, finish.stop_reason, finish.completion_tokens


def test_a_stop_token_is_in_the_output_and_named():
    choice = choice_of(ignore_eos=False, stop_token_ids=(9,))
    assert end_of(choice, chunk([5, 9], 2, STOPPED)) == ([5, 9], "stop", 9, 2)


def test_an_end_token_is_not_named():
    choice = choice_of(ignore_eos=False, eos_token_ids=(9,))
    assert end_of(choice, chunk([5, 9], 2, STOPPED)) == ([5, 9], "stop", None, 2)


def test_an_end_token_that_only_the_tokenizer_knows():
    choice = choice_of(ignore_eos=False)
    assert end_of(choice, chunk([5, 9], 2, STOPPED)) == ([5, 9], "stop", None, 2)


def test_with_end_tokens_ignored_the_adapter_looks_at_stop_tokens():
    """SGLang looks at none then, and goes on."""
    choice = choice_of(stop_token_ids=(9,), min_tokens=2)
    found = end_of(choice, chunk([9, 9], 2), chunk([9, 4, 4], 5))
    assert found == ([9, 9, 9], "stop", 9, 3)


def test_length():
    assert end_of(choice_of(), chunk([5], 1, ENDED)) == ([5], "length", None, 1)
    choice = choice_of(max_tokens=2)
    assert end_of(choice, chunk([5, 6, 7], 3)) == ([5, 6], "length", None, 2)


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ({"message": "too long", "status_code": 400}, InvalidRequest),
        ({"message": "queue is full", "status_code": 503}, Overloaded),
        ({"message": "Aborted", "status_code": None}, StepFailed),
        ({}, StepFailed),
    ],
)
def test_an_abort_by_sglang_is_an_error(reason: dict[str, Any], kind: type[Exception]):
    choice = choice_of()
    choice.take(chunk([5], 1), 11.0)
    with pytest.raises(kind, match=reason.get("message", "aborted")):
        # A waiting request's last chunk repeats the last token.
        choice.take(chunk([5], 1, {"type": "abort", **reason}), 11.0)


# ---------------------------------------------------------------- continuations


def test_usage_counts_given_output_as_output():
    choice = choice_of(output=[[5, 6]], max_tokens=4)
    found = end_of(choice, chunk([7], 1), chunk([8], 2, ENDED))
    assert found == ([7, 8], "length", None, 4)


@pytest.mark.parametrize(
    ("changes", "reason", "stop"),
    [
        ({"max_tokens": 2}, "length", None),
        ({"stop_token_ids": (6,)}, "stop", 6),
        ({"eos_token_ids": (6,), "ignore_eos": False}, "stop", None),
    ],
)
def test_given_output_may_have_ended_the_choice(
    changes: dict[str, Any], reason: str, stop: int | None
):
    delta = some(choice_of(output=[[5, 6]], **changes).ended_before(11.0))
    assert delta.finish is not None
    assert (delta.finish.reason, delta.finish.stop_reason) == (reason, stop)
    assert delta.finish.completion_tokens == 2


def test_given_output_that_ends_nothing():
    assert choice_of(output=[[5, 6]]).ended_before(11.0) is None
    assert choice_of(output=[[5, 6]], stop_token_ids=(6,), min_tokens=2).ended_before(11.0) is None
    assert choice_of().ended_before(11.0) is None


def test_a_replay_reports_only_what_is_new():
    choice = choice_of(output=[[5, 6]], grammar="start: /a/", max_tokens=4)
    assert choice.take(chunk([5], 1), 11.0) is None
    found = end_of(choice, chunk([6, 7], 3), chunk([8], 4, ENDED))
    assert found == ([7, 8], "length", None, 4)


def test_a_replay_that_differs_is_an_error():
    choice = choice_of(output=[[5, 6]], grammar="start: /a/")
    with pytest.raises(StepFailed, match="not repeated"):
        choice.take(chunk([5, 7], 2), 11.0)


def test_a_replay_that_ends_early_is_an_error():
    choice = choice_of(output=[[5, 6]], grammar="start: /a/")
    with pytest.raises(StepFailed, match="before it repeated"):
        choice.take(chunk([5], 1, STOPPED), 11.0)


# ---------------------------------------------------------------- logprobs


def triples(*ids: int) -> list[tuple[float, int, None]]:
    return [(-0.5 - index, id, None) for index, id in enumerate(ids)]


def test_logprobs_are_cut_to_the_tokens_that_count():
    choice = choice_of(logprobs=2, prompt_logprobs=1, max_tokens=2, output=[[4]], n=1)
    meta: dict[str, Any] = {
        "output_token_logprobs": triples(5, 6),
        "output_top_logprobs": [triples(5, 9), triples(9, 6)],
        "input_token_logprobs": [(None, 1, None), *triples(2, 3, 4)],
        "input_top_logprobs": [None, triples(2, 8), triples(8, 3), triples(4, 8)],
    }
    delta = some(choice.take(chunk([5, 6], 2, **meta), 11.0))
    assert delta.logprobs is not None
    (entry,) = delta.logprobs
    assert (entry.token, entry.rank, entry.top) == (5, 1, [(5, -0.5), (9, -1.5)])
    assert delta.prompt_logprobs is not None
    assert [(e.token, e.rank, len(e.top)) for e in delta.prompt_logprobs] == [(2, 1, 1), (3, 2, 1)]


def test_the_rank_of_an_unlikely_token_is_a_lower_bound():
    choice = choice_of(logprobs=1)
    meta: dict[str, Any] = {
        "output_token_logprobs": triples(5),
        "output_top_logprobs": [triples(9)],
    }
    delta = some(choice.take(chunk([5], 1, **meta), 11.0))
    assert delta.logprobs is not None
    assert delta.logprobs[0].rank == 2


def test_wanted_tokens_are_the_alternatives():
    choice = choice_of(logprobs=0, logprob_token_ids=(8, 9))
    meta: dict[str, Any] = {
        "output_token_logprobs": triples(5),
        "output_token_ids_logprobs": [triples(9, 8)],
    }
    delta = some(choice.take(chunk([5], 1, **meta), 11.0))
    assert delta.logprobs is not None
    assert [id for id, _ in delta.logprobs[0].top] == [9, 8]


@given(st.lists(st.integers(1, 4), min_size=1, max_size=6), st.integers(0, 3))
def test_every_stream_satisfies_the_checker(sizes: list[int], given_tokens: int):
    """`OutputChecker` holds for any way of cutting an output into chunks."""
    output = [[30] * given_tokens] if given_tokens else []
    total = sum(sizes)
    choice = choice_of(max_tokens=total + given_tokens, output=output, logprobs=0)
    checker, done = OutputChecker(choice.request), 0
    for size in sizes:
        done += size
        ids = list(range(done - size, done))
        reason = ENDED if done == total else None
        meta: dict[str, Any] = {"output_token_logprobs": triples(*ids)}
        checker.take(some(choice.take(chunk(ids, done, reason, **meta), 11.0)))
    assert checker.done
    assert checker.tokens[0] == [30] * given_tokens + list(range(total))
