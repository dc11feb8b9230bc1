"""Bugs that adapters of engines have had, planted one by one: a test must see each.

A bug is planted by replacing one function. The tests that see them are those of this folder; none
of them fails without the bug, which their own files show.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from pdserve.messages.kv_events import BlockStored
from pdserve.messages.lora import LoraAdapter
from pdserve_engines.vllm import choices, core, engine, params
from pdserve_engines.vllm.block_names import BlockNames
from pdserve_engines.vllm.choices import VllmChoice
from pdserve_engines.vllm.core import VllmCore
from pdserve_engines.vllm.engine import Engine
from pdserve_engines.vllm.grammar import ConstrainedChoice, Constraints
from pdserve_engines.vllm.kv_tiers.step_io import RankReport, StepIo
from tests.engines.vllm import fake_vllm, test_block_names, test_core, test_engine, test_grammar
from tests.engines.vllm import test_options as options_tests
from tests.engines.vllm import test_params as params_tests
from tests.engines.vllm.kv_tiers import test_step_io as step_io_tests
from tests.engines.vllm.test_core import Inline, request
from tests.engines.vllm.vllm_pool import Router

Patch = pytest.MonkeyPatch
Plant = Callable[[Patch], None]
BUGS: list[Any] = []


@pytest.fixture(autouse=True)
def _fake_vllm(monkeypatch: Patch) -> None:
    fake_vllm.install(monkeypatch)


def bug(seen_by: Callable[[], None]) -> Callable[[Plant], Plant]:
    """Add a bug to the list, with the test that sees it."""

    def add(plant: Plant) -> Plant:
        BUGS.append(pytest.param(plant, seen_by, id=plant.__name__))
        return plant

    return add


# ------------------------------------------------------------------ more tests


def a_request_is_served() -> None:
    """`OutputChecker` compares tokens, usage and ends."""
    with Inline() as inline:
        for shape in ({}, {"n": 3, "temperature": 1.0}, {"output": [[5, 6]], "max_tokens": 6}):
            ledger = inline.submit(request(**shape))
            inline.run()
            assert ledger.done
            assert ledger.error is None
            most = ledger.request.sampling.max_tokens
            assert {len(tokens) for tokens in ledger.tokens} == {most}
        inline.assert_empty()


def a_stop_token_is_seen() -> None:
    with Inline() as inline:
        ((whole,),) = inline.generate([request(max_tokens=8)])
        ledger = inline.submit(request(max_tokens=8, stop_token_ids=(whole[3],)))
        inline.run()
        assert ledger.tokens[0] == whole[: whole.index(whole[3]) + 1]
        assert ledger.finishes[0] is not None
        assert ledger.finishes[0].reason == "stop"


def an_abort_ends_nothing_else() -> None:
    with Inline() as inline:
        ledgers = [inline.submit(request(max_tokens=9)) for _ in range(12)]
        inline.step()
        inline.abort(ledgers[0])
        inline.run()
        assert all(ledger.done for ledger in ledgers)
        assert all(ledger.error is None for ledger in ledgers)


def adapters_of_one_name_differ() -> None:
    pair = tuple(
        LoraAdapter(name="a", path=f"/a/{revision}", revision=revision) for revision in "12"
    )
    prompt = tuple(range(4, 30))
    router = Router()
    with Inline(loras=pair) as inline:
        for adapter in pair:
            ledger = inline.submit(request(prompt, lora=adapter.id))
            inline.run()
            assert ledger.finishes[0] is not None
            assert ledger.finishes[0].cached_tokens == 0
        (one,), (two,) = inline.generate([request(prompt, lora=a.id) for a in pair])
        assert one != two
        router.hear(inline.kv_events)
        assert len(router.device) == 14


def choices_draw_other_numbers() -> None:
    with Inline() as inline:
        outputs = inline.generate([request(n=4, temperature=2.0, max_tokens=6)])[0]
        assert len({tuple(output) for output in outputs}) == 4


def logprobs_agree() -> None:
    with Inline() as inline:
        for top in (0, 2):
            inline.generate([request(logprobs=top, prompt_logprobs=top, n=2)])


def a_blocks_parent_is_the_block_before_it() -> None:
    with Inline() as inline:
        inline.generate([request(tuple(range(4, 80)), max_tokens=9)])
        stored = [event for event in inline.kv_events if isinstance(event, BlockStored)]
        known = {stored[0].parent}
        for event in stored:
            assert event.parent in known
            known |= set(event.hashes)


def pooled_of(changes: dict[str, Any]) -> Callable[[], None]:
    def test() -> None:
        test_block_names.test_blocks_that_no_frontend_can_name_are_passed_over(changes)

    return test


def grammars() -> Constraints:
    return Constraints(
        (test_grammar.BUNDLED / "tokenizer.json").read_bytes(),
        test_grammar.VOCAB,
        (test_grammar.END,),
    )


# ------------------------------------------------------------------ output


@bug(seen_by=a_request_is_served)
def output_so_far_is_taken_for_what_is_new(patch: Patch) -> None:
    take, made = VllmChoice.take, dict[str, list[int]]()

    def cumulative(self: VllmChoice, output: Any, now: float) -> Any:
        made.setdefault(self.id, []).extend(output.new_token_ids)
        output.new_token_ids = list(made[self.id])
        return take(self, output, now)

    patch.setattr(VllmChoice, "take", cumulative)


@bug(seen_by=a_stop_token_is_seen)
def the_stop_token_is_not_in_the_output(patch: Patch) -> None:
    take = VllmChoice.take

    def cut(self: VllmChoice, output: Any, now: float) -> Any:
        if output.stop_reason is not None:
            output.new_token_ids = output.new_token_ids[:-1]
        return take(self, output, now)

    patch.setattr(VllmChoice, "take", cut)


@bug(seen_by=a_request_is_served)
def usage_of_a_continued_request_is_off_by_one(patch: Patch) -> None:
    init = VllmChoice.__init__

    def off(self: VllmChoice, *args: Any) -> None:
        init(self, *args)
        self.made += bool(self.made)

    patch.setattr(VllmChoice, "__init__", off)


@bug(seen_by=test_core.test_a_request_that_vllm_ends_with_an_error_is_rejected)
def an_error_is_a_stop(patch: Patch) -> None:
    patch.setattr(choices, "finish_reason", lambda number: "stop")


@bug(seen_by=a_stop_token_is_seen)
def a_stop_is_a_length(patch: Patch) -> None:
    patch.setattr(choices, "finish_reason", lambda number: "length")


@bug(seen_by=logprobs_agree)
def alternatives_hold_the_sampled_token_too(patch: Patch) -> None:
    record = choices._record_row

    def wrong(ids: list[int], values: list[float], *rest: Any) -> Any:
        return record([ids[0], *ids], [values[0], *values], *rest)

    patch.setattr(choices, "_record_row", wrong)


# ------------------------------------------------------------------ requests


@bug(seen_by=params_tests.test_the_requests_own_bias_is_not_changed)
def a_map_of_the_request_is_not_copied(patch: Patch) -> None:
    def bias(sampling: Any, given: Any) -> Any:
        for token in given:
            sampling.logit_bias[token] = -sampling.frequency_penalty
        return sampling.logit_bias

    patch.setattr(params, "_bias", bias)


@bug(seen_by=params_tests.test_seeds_of_neighbours_differ)
def prompts_of_a_batch_have_one_seed(patch: Patch) -> None:
    seed = params.choice_seed
    same = lambda s, index, choice, position: seed(s, 0, choice, position)  # noqa: E731
    patch.setattr(params_tests, "choice_seed", same)


@bug(seen_by=choices_draw_other_numbers)
def all_choices_have_one_seed(patch: Patch) -> None:
    patch.setattr(params, "choice_seed", lambda seed, *_: seed)


@bug(seen_by=test_core.test_the_most_urgent_request_is_first)
def priorities_have_the_wrong_sign(patch: Patch) -> None:
    submit = Engine.submit

    def negated(self: Engine, key: str, request: Any, *rest: Any, **more: Any) -> None:
        other = msgspec.structs.replace(request, priority=-request.priority)
        submit(self, key, other, *rest, **more)

    patch.setattr(Engine, "submit", negated)


@bug(seen_by=an_abort_ends_nothing_else)
def an_abort_ends_all_whose_id_begins_alike(patch: Patch) -> None:
    abort = Engine.abort

    def prefix(self: Engine, keys: Any) -> None:
        heads = tuple(key.split(".")[0] for key in keys)
        abort(self, [key for key in self._scheduler.requests if key.startswith(heads)])

    patch.setattr(Engine, "abort", prefix)


@bug(seen_by=test_core.test_an_abort_frees_in_the_same_call)
def an_abort_ends_only_the_first_choice(patch: Patch) -> None:
    abort = Engine.abort
    patch.setattr(Engine, "abort", lambda self, keys: abort(self, list(keys)[:1]))


@bug(seen_by=adapters_of_one_name_differ)
def two_adapters_have_one_name(patch: Patch) -> None:
    make = engine._lora_requests

    def named(spec: Any) -> Any:
        found = make(spec)
        for one in found.values():
            one.lora_name = one.lora_name.split("@")[0]
        return found

    patch.setattr(engine, "_lora_requests", named)


@bug(seen_by=test_core.test_what_vllm_refuses_rejects_one_request)
def what_vllm_refuses_ends_the_core(patch: Patch) -> None:
    patch.setattr(engine, "_refusals", lambda *others: (ValueError, *others))


@bug(seen_by=test_core.test_choices_after_the_first_wait_for_its_first_token)
def all_choices_compute_the_prompt(patch: Patch) -> None:
    submit = VllmCore._submit_first

    def together(self: VllmCore, handle: int, submission: Any) -> None:
        later, submission.later = submission.later[1:], submission.later[:1]
        submit(self, handle, submission)
        for choice in later:
            self._submit_choice(submission, choice)

    patch.setattr(VllmCore, "_submit_first", together)


@bug(seen_by=a_request_is_served)
def a_choice_that_has_ended_is_kept(patch: Patch) -> None:
    patch.setattr(VllmCore, "_end", lambda self, choice: None)


@bug(seen_by=options_tests.test_adapters_are_loaded_with_room_for_the_largest)
def no_place_of_adapters_stays_empty(patch: Patch) -> None:
    made = options_tests.arguments

    def full(**changes: Any) -> Any:
        return made(**changes) | {"max_loras": len(changes["loras"])}

    patch.setattr(options_tests, "arguments", full)


@bug(seen_by=test_engine.test_bad_words_do_not_occur)
def bad_words_are_lost(patch: Patch) -> None:
    sampling = Engine._sampling

    def without(self: Engine, wanted: Any, *rest: Any) -> Any:
        return sampling(self, msgspec.structs.replace(wanted, bad_words=()), *rest)

    patch.setattr(Engine, "_sampling", without)


# ------------------------------------------------------------------ blocks


@bug(seen_by=pooled_of({"block_size": test_block_names.SIZE // 2}))
def events_of_partial_blocks_are_kept(patch: Patch) -> None:
    stored = BlockNames._stored

    def kept(self: BlockNames, event: Any) -> Any:
        event.block_size = self._block_size
        return stored(self, event)

    patch.setattr(BlockNames, "_stored", kept)


@bug(seen_by=pooled_of({"group_idx": 1}))
def blocks_of_another_group_are_named(patch: Patch) -> None:
    one = BlockNames._one

    def every(self: BlockNames, event: Any) -> Any:
        event.group_idx = self._group
        return one(self, event)

    patch.setattr(BlockNames, "_one", every)


@bug(seen_by=a_blocks_parent_is_the_block_before_it)
def a_runs_parent_is_its_own_first_block(patch: Patch) -> None:
    stored = BlockNames._stored

    def wrong(self: BlockNames, event: Any) -> Any:
        for ours in stored(self, event):
            assert isinstance(ours, BlockStored)
            yield msgspec.structs.replace(ours, parent=ours.hashes[0])

    patch.setattr(BlockNames, "_stored", wrong)


@bug(seen_by=test_block_names.test_a_second_copy_is_not_reported_and_the_last_one_that_goes_is)
def every_copy_of_a_block_is_reported(patch: Patch) -> None:
    add = BlockNames._add

    def always(self: BlockNames, *args: Any) -> bool:
        add(self, *args)
        return True

    patch.setattr(BlockNames, "_add", always)


@bug(seen_by=test_block_names.test_salts_keep_tenants_adapters_and_secrets_apart)
def adapters_share_their_blocks(patch: Patch) -> None:
    salt = BlockNames.salt
    patch.setattr(BlockNames, "salt", lambda self, cache_salt, lora: salt(self, cache_salt, ""))


@bug(seen_by=test_core.test_a_cache_that_is_cleared_is_told_at_once)
def a_cleared_cache_is_told_with_the_next_step(patch: Patch) -> None:
    patch.setattr(VllmCore, "clear_cache", lambda self: self._vllm.reset_prefix_cache())


@bug(seen_by=test_core.test_statistics_count_vllms_blocks)
def the_null_block_counts(patch: Patch) -> None:
    counts = Engine.block_counts

    def more(self: Engine) -> dict[str, int]:
        found = counts(self)
        return found | {"blocks_used": found["blocks_used"] + 1}

    patch.setattr(Engine, "block_counts", more)


# ------------------------------------------------------------------ grammars and steps


@bug(seen_by=test_core.test_output_that_leaves_its_grammar_ends_one_request)
def a_fault_is_passed_over(patch: Patch) -> None:
    compiled = Constraints.compile

    def lenient(self: Constraints, text: str) -> ConstrainedChoice:
        wanted = msgspec.json.decode(text)
        wanted[2] = []
        return compiled(self, msgspec.json.encode(wanted).decode())

    patch.setattr(Constraints, "compile", lenient)


@bug(seen_by=lambda: test_grammar.test_a_budget_alone_has_a_least_length_too(grammars(), True))
def a_budget_forgets_the_least_length(patch: Patch) -> None:
    mask = ConstrainedChoice._mask

    def without(self: ConstrainedChoice) -> bytes | None:
        found = mask(self)
        return None if self._state.allowed() is None else found

    patch.setattr(ConstrainedChoice, "_mask", without)


@bug(seen_by=lambda: test_grammar.test_after_the_end_only_the_end_is_allowed(grammars()))
def a_complete_grammar_allows_everything(patch: Patch) -> None:
    patch.setattr(ConstrainedChoice, "is_terminated", lambda self: True)


@bug(seen_by=test_core.test_a_step_that_computes_nothing_pauses)
def waiting_for_a_grammar_spins(patch: Patch) -> None:
    patch.setattr(core, "_PAUSE", 0.0)


@bug(seen_by=test_core.test_more_than_may_wait_are_refused)
def there_is_no_bound(patch: Patch) -> None:
    opened = VllmCore.open

    def unbounded(self: VllmCore, *args: Any) -> Any:
        capabilities = opened(self, *args)
        self._limit = 1 << 30
        return capabilities

    patch.setattr(VllmCore, "open", unbounded)


@bug(seen_by=step_io_tests.test_ranks_may_be_at_different_steps)
def reports_of_ranks_count_for_the_oldest_step(patch: Patch) -> None:
    reported = StepIo.reported

    def in_order(self: StepIo, report: RankReport) -> None:
        reported(self, replace(report, number=min(self._steps)))

    patch.setattr(StepIo, "reported", in_order)


@pytest.mark.parametrize(("plant", "seen_by"), BUGS)
def test_a_planted_bug_is_seen(
    monkeypatch: Patch, plant: Plant, seen_by: Callable[[], None]
) -> None:
    plant(monkeypatch)
    with pytest.raises(Exception) as failure:  # noqa: PT011
        seen_by()
    kinds = (AssertionError, fake_vllm.VLLMError, KeyError)
    assert isinstance(failure.value, kinds), failure.value


def test_the_tests_of_this_file_pass_without_a_bug() -> None:
    for check in (
        a_request_is_served,
        a_stop_token_is_seen,
        an_abort_ends_nothing_else,
        adapters_of_one_name_differ,
        choices_draw_other_numbers,
        logprobs_agree,
        a_blocks_parent_is_the_block_before_it,
    ):
        check()
