"""The engine kit: request checks, deadlines, queues, ends of choices, cores with threads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pdserve.clock import ManualClock
from pdserve.engine_core.kit import (
    STATS_INTERVAL,
    ChoiceOutput,
    ModelLimits,
    RequestDeadlines,
    RequestQueue,
    SelfSchedulingCore,
    capabilities_without_kv,
    check_options,
    check_request,
    read_model_limits,
)
from pdserve.errors import (
    ConfigError,
    ContextLengthExceeded,
    InvalidRequest,
    Overloaded,
    StepFailed,
)
from pdserve.messages.engine import (
    Abort,
    AbsorbKv,
    ClearCache,
    DropKv,
    EngineSpec,
    KvAbsorbed,
    KvChainsListed,
    KvDropped,
    KvPullServed,
    ListKvChains,
    LoadProgress,
    QueryStats,
    ServeKvPull,
    SetNodeLife,
    Stats,
    StopCore,
    StopKvPull,
    Submit,
    SubmitRemote,
)
from pdserve.messages.kv_pull import KvChains, KvPullGrant
from pdserve.messages.request import Finish, GenerateRequest, SamplingParams, TokenDelta
from pdserve.messages.transfer import TransferTicket
from pdserve.wire.length_prefixed import MAX_FRAME

if TYPE_CHECKING:
    from collections.abc import Sequence


def request(**changes: object) -> GenerateRequest:
    fields = {"request_id": "r", "model": "m", "prompt": [1, 2, 3]} | changes
    fields.setdefault("sampling", SamplingParams(max_tokens=4, min_tokens=2, stop_token_ids=(7,)))
    return GenerateRequest(**fields)  # type: ignore[arg-type]


def test_prompt_logprobs_that_fit_no_frame_are_refused():
    wants = SamplingParams(max_tokens=1, prompt_logprobs=20)
    fits = MAX_FRAME // 23 // 21
    checked: dict[str, Any] = {"max_model_len": 1 << 20, "vocab_size": 10}
    check_request(request(prompt=[1] * (fits // 2), sampling=wants), **checked)
    with pytest.raises(InvalidRequest) as caught:
        check_request(request(prompt=[1] * fits, sampling=wants), **checked)
    assert caught.value.param == "logprobs"


@pytest.mark.parametrize("ended", [(0, 1), (2,), (-1,), (0, 5)])
def test_one_choice_at_least_is_left_and_none_unknown(ended: tuple[int, ...]):
    with pytest.raises(InvalidRequest) as caught:
        check_request(request(n=2, ended=ended), max_model_len=100, vocab_size=10)
    assert caught.value.param == "ended"
    check_request(request(n=2, ended=(1, 1)), max_model_len=100, vocab_size=10)


def test_a_vectors_prompt_may_be_as_long_as_the_context():
    checked: dict[str, Any] = {"max_model_len": 3, "vocab_size": 10, "embeds": True}
    wants = request(pooling="last")
    check_request(wants, **checked)
    with pytest.raises(ContextLengthExceeded):
        check_request(request(pooling="last", prompt=[1] * 4), **checked)
    with pytest.raises(InvalidRequest, match="makes no embeddings"):
        check_request(wants, **(checked | {"embeds": False}))


def test_images_need_an_engine_that_takes_them():
    checked: dict[str, Any] = {"max_model_len": 30, "vocab_size": 10, "embeds": True}
    two = request(images=(b"one", b"two"))
    check_request(two, **checked, images=2)
    check_request(request(), **checked)
    for most, words in ((0, "takes no images"), (1, "has 2 images; this engine takes 1")):
        with pytest.raises(InvalidRequest, match=words):
            check_request(two, **checked, images=most)
    with pytest.raises(InvalidRequest, match="neither embeddings"):
        check_request(request(pooling="last", images=(b"one",)), **checked, images=2)


def test_deadlines_pass_in_order_and_can_be_withdrawn():
    deadlines = RequestDeadlines()
    for handle, at in enumerate([3.0, 1.0, 2.0, 2.0]):
        deadlines.add(at, handle)
    deadlines.discard(2.0, 3)
    deadlines.discard(2.0, 99)
    assert deadlines.next() == 1.0
    assert deadlines.passed(0.5) == []
    assert deadlines.passed(2.0) == [1, 2]
    assert len(deadlines) == 3
    assert RequestDeadlines().next() is None


def limited(**changes: Any) -> EngineSpec:
    return EngineSpec(**({"engine": "mine", "model": ""} | changes))


class ThreadedCore(SelfSchedulingCore):
    """Computes nothing by itself: a test posts, as an engine's threads do."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock)
        self.taken: list[int] = []
        self.dropped: list[int] = []
        self.wakes = 0
        self.wake = self._note_wake
        self.freed: list[tuple[int, str]] = []
        self.on_freed = lambda handle, phase: self.freed.append((handle, phase))

    def _note_wake(self) -> None:
        self.wakes += 1

    def open(self, spec, progress):
        progress(LoadProgress(stage="loading"))
        return capabilities_without_kv(spec, ModelLimits("toy", 50, 20, ()), features=("bans",))

    def add(self, handle, request):
        if request.priority < 0:
            raise Overloaded("no room")
        self.taken.append(handle)

    def drop(self, handle):
        self.dropped.append(handle)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def core(clock: ManualClock) -> ThreadedCore:
    core = ThreadedCore(clock)
    capabilities = core.load(limited(), lambda progress: None)
    assert capabilities.features == ("bans",)
    return core


def submit(core: ThreadedCore, handle: int, **changes: object) -> None:
    core.handle(Submit(handle=handle, request=request(**changes)))


def token(handle: int, token: int, finish: str = "", choice: int = 0) -> TokenDelta:
    ended = Finish(reason="length") if finish else None
    return TokenDelta(handle, choice, [token], ended)


def reported(core: ThreadedCore) -> list[Any]:
    """A step's events but the statistics."""
    return [event for event in core.step() if not isinstance(event, Stats)]


def kinds(events: Sequence[object]) -> list[str]:
    return [type(event).__name__ for event in events]


def test_what_threads_post_wakes_the_host_and_comes_in_order(core: ThreadedCore):
    submit(core, 1)
    submit(core, 2)
    assert not core.has_work
    core.post(token(1, 5))
    core.post(token(2, 6))
    core.post_error(2, StepFailed("out of memory"))
    core.post(token(2, 7))
    core.post(token(1, 8, "length"))
    assert core.wakes == 5
    assert core.has_work
    first, error, second = reported(core)
    assert [d.tokens for d in first.deltas] == [[5], [6]]
    assert (error.handle, error.kind) == (2, "StepFailed")
    assert [d.tokens for d in second.deltas] == [[8]]
    stats = core.stats()
    assert (stats.finished, stats.output_tokens, stats.running) == (1, 3, 0)


def test_a_core_ends_with_the_failure_of_its_thread(core: ThreadedCore):
    submit(core, 1)
    core.post(token(1, 5))
    core.post_failure(RuntimeError("the device is gone"))
    events = reported(core)
    assert kinds(events) == ["StepOutput", "CoreFailed"]
    assert events[-1].message == "RuntimeError: the device is gone"


def test_nothing_about_an_aborted_submission_leaves(core: ThreadedCore):
    submit(core, 1)
    submit(core, 2)
    core.post(token(1, 5))
    core.step()
    core.post(token(1, 6))
    core.post(token(2, 6))
    for handle in (1, 2, 3):
        core.handle(Abort(handle=handle))
    assert core.freed == [(1, "decoding"), (2, "queued"), (3, "")]
    assert core.dropped == [1, 2]
    assert kinds(reported(core)) == []
    assert core.stats().aborted == 2


def test_an_abort_takes_the_refusal_back(core: ThreadedCore):
    submit(core, 1, prompt=[])
    submit(core, 2, priority=-1)
    core.handle(Abort(handle=1))
    (refusal,) = reported(core)
    assert (refusal.handle, refusal.kind) == (2, "Overloaded")
    assert core.taken == []


def test_deadlines_wake_and_reject(core: ThreadedCore, clock: ManualClock):
    submit(core, 1, deadline=2.0)
    submit(core, 2, deadline=1.0)
    core.post(token(2, 5))
    core.step()
    assert core.wake_at() == 1.0
    clock.advance(1.5)
    (late,) = reported(core)
    assert (late.handle, late.kind) == (2, "DeadlineExceeded")
    assert "while decoding, 1 tokens done" in late.message
    assert core.wake_at() == 2.0
    assert core.dropped == [2]


def test_statistics_come_at_intervals_and_when_it_rests(core: ThreadedCore, clock: ManualClock):
    submit(core, 1)
    core.post(token(1, 5))
    assert kinds(reported(core)) == ["StepOutput"]
    clock.advance(STATS_INTERVAL)
    core.post(token(1, 5))
    assert isinstance(core.step()[-1], Stats)
    core.post(token(1, 5, "length"))
    assert isinstance(core.step()[-1], Stats)
    assert not core.has_work


def test_a_submission_that_does_not_count_is_in_no_counter(core: ThreadedCore):
    core.handle(Submit(handle=1, request=request(), counted=False))
    assert core.stats().running == 1
    core.post(token(1, 5, "length"))
    core.step()
    stats = core.stats()
    assert (stats.prompt_tokens, stats.output_tokens, stats.finished) == (0, 0, 0)


def test_commands_about_kv_are_refused_or_ignored(core: ThreadedCore):
    core.handle(SubmitRemote(handle=1, request=request()))
    core.handle(SetNodeLife(node="n", epoch=1))
    core.handle(QueryStats())
    core.handle(ClearCache())
    (refused,) = reported(core)
    assert (refused.handle, refused.kind) == (1, "TransferRefused")
    with pytest.raises(ValueError, match="StopCore is for the host"):
        core.handle(StopCore())


def test_fetches_of_kv_are_refused(core: ThreadedCore):
    ticket = TransferTicket(
        transfer="pull 1",
        attempt=0,
        epoch=1,
        slot=0,
        generation=1,
        first_token=0,
        tokens=4,
        blocks=(5,),
    )
    serve = ServeKvPull(number=1, node="p", epoch=1, hashes=bytes(16), ticket=ticket, timeout=1.0)
    absorb = AbsorbKv(
        number=2, node="p", epoch=1, first=0, parent=b"", hashes=bytes(16), timeout=1.0
    )
    for command in (serve, absorb, ListKvChains(3, 10), StopKvPull(1)):
        core.handle(command)
    assert core.step() == [
        KvPullServed(1, KvPullGrant(refused="misfit")),
        KvAbsorbed(2, 0, 0, "misfit"),
        KvChainsListed(3, KvChains()),
    ]


def test_all_that_is_cached_can_be_dropped_and_no_part(core: ThreadedCore):
    core.handle(DropKv(1))
    core.handle(DropKv(2, owners=("tenant:t",)))
    core.handle(DropKv(3, older=60.0))
    done, part, old = [event for event in core.step() if isinstance(event, KvDropped)]
    assert done == KvDropped(1)
    assert (part.kind, old.kind) == ("ConfigError", "ConfigError")
    assert part.message == "this engine can only drop all: --all"


def test_closing_drops_what_is_left(core: ThreadedCore):
    submit(core, 1, n=2)
    assert core.sequences == 2
    assert core.close() == 0
    assert (core.dropped, core.sequences) == ([1], 0)


def test_a_queue_is_bounded_and_sorted_by_priority():
    queue = RequestQueue(3)
    for handle, priority in ((1, 0), (2, 5), (3, 0)):
        queue.push(handle, request(priority=priority, n=2))
    with pytest.raises(Overloaded, match="3 requests are waiting"):
        queue.push(4, request())
    assert queue.choices == 6
    assert queue.discard(1)
    assert not queue.discard(1)
    assert [queue.pop()[0] for _ in range(2)] == [2, 3]
    assert (len(queue), queue.choices) == (0, 0)


@pytest.mark.parametrize(
    ("sampling", "given", "end"),
    [
        ({}, [], ("length", None, 6)),
        ({"max_tokens": 99}, [], ("length", None, 17)),
        ({"stop_token_ids": (2,)}, [], ("stop", 2, 3)),
        ({"eos_token_ids": (2,)}, [], ("stop", None, 3)),
        ({"eos_token_ids": (2,), "ignore_eos": True}, [], ("length", None, 6)),
        ({"stop_token_ids": (2,), "min_tokens": 3}, [], ("length", None, 6)),
        ({"stop_token_ids": (2,)}, [0, 1], ("stop", 2, 3)),
        ({}, [0, 1, 2, 3, 4, 5], ("length", None, 6)),
        ({"stop_token_ids": (2,)}, [0, 1, 2], ("stop", 2, 3)),
    ],
)
def test_a_choice_ends_where_it_must(sampling, given, end):
    wants = SamplingParams(**({"max_tokens": 6} | sampling))
    asked = request(sampling=wants, output=[given] if given else [])
    choice = ChoiceOutput(1, 0, asked, 1.0, 20)
    delta = choice.begin(2.0)
    first = None
    while delta is None or delta.finish is None:
        delta = choice.take(len(choice.tokens), 4.0)
        first = first or delta
    assert (delta.finish.reason, delta.finish.stop_reason, len(choice.tokens)) == end
    assert delta.finish.queue_seconds == 1.0
    if first is not None:
        assert first.started is not None
        assert (first.started.queue_seconds, first.started.prefill_seconds) == (1.0, 2.0)


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "cannot be read"), ("{", "is not JSON"), ("[]", "holds no JSON object")],
)
def test_a_configuration_that_does_not_serve_is_named(tmp_path, content, message):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=rf"config\.json {message}"):
        read_model_limits(limited(model=str(tmp_path)))


def test_options_are_checked_by_name():
    check_options("mine", {"a": "1"}, ["a", "b"])
    with pytest.raises(ConfigError, match="the mine engine has no option c; it has a, b"):
        check_options("mine", {"c": "1"}, ["a", "b"])
