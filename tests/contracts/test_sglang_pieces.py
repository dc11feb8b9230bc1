"""Parts of SGLang that run without a GPU, from its wheel, against the adapter."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.blocks.hashing import block_hashes, prompt_root
from pdserve.errors import StepFailed
from pdserve.messages.kv_events import BlockRemoved, BlockStored, PoolCleared
from pdserve.messages.request import GenerateRequest, SamplingParams
from pdserve.token_ids import token_ids
from pdserve_engines.sglang.choices import SglangChoice
from pdserve_engines.sglang.event_feed import EventFeed, zmq_sockets
from pdserve_engines.sglang.events import NamedBlocks
from pdserve_engines.sglang.options import event_endpoints
from pdserve_engines.sglang.params import request_arguments
from tests.contracts.contract import load
from tests.contracts.wheels import find_wheel, function_of, module_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from types import ModuleType

VOCABULARY = 64
tokens = st.integers(0, VOCABULARY - 1)


@pytest.fixture(scope="module")
def wheel() -> Path:
    return find_wheel("sglang", load("sglang").version)


# ---------------------------------------------------------------- sampling parameters


@pytest.fixture(scope="module")
def sampling_module(wheel: Path) -> Iterator[ModuleType]:
    stubs: dict[str, dict[str, Any]] = {
        "sglang.srt.sampling.watermarking.core": {
            "WatermarkRequestConfig": dict,
            "normalize_watermark_request": lambda watermark: watermark,
        }
    }
    with module_of(wheel, "sglang.srt.sampling.sampling_params", stubs) as module:
        yield module


@given(
    st.builds(
        SamplingParams,
        max_tokens=st.integers(1, 200),
        temperature=st.floats(0, 5),
        top_p=st.floats(0.01, 1),
        top_k=st.integers(0, 50),
        min_p=st.floats(0, 1),
        presence_penalty=st.floats(-2, 2),
        frequency_penalty=st.floats(-2, 2),
        repetition_penalty=st.floats(0.01, 2),
        logit_bias=st.dictionaries(tokens, st.floats(-100, 100), max_size=3),
        min_tokens=st.integers(0, 20),
        stop_token_ids=st.lists(tokens, max_size=3, unique=True).map(tuple),
        eos_token_ids=st.lists(tokens, max_size=2, unique=True).map(tuple),
        ignore_eos=st.booleans(),
        seed=st.integers(0, (1 << 64) - 1),
        grammar=st.sampled_from(["", "start: /a/"]),
    ),
    st.lists(tokens, max_size=30),
)
@settings(max_examples=200)
def test_sglang_accepts_what_is_sent_and_reads_it_so(
    sampling_module: ModuleType, sampling: SamplingParams, output: list[int]
):
    """SGLang's own checks and its own rules of greedy sampling and of the whole vocabulary."""
    output = output[: sampling.max_tokens - 1]
    request = GenerateRequest(
        request_id="r", model="m", prompt=token_ids([1, 2]), sampling=sampling, output=[output]
    )
    sent = request_arguments(request, 0, 1000)["sampling_params"]
    theirs = sampling_module.SamplingParams(**sent)
    theirs.normalize(SimpleNamespace(eos_token_id=VOCABULARY - 1))
    theirs.verify(VOCABULARY)
    if sampling.temperature < sampling_module._SAMPLING_EPS:
        assert theirs.top_k == 1
    else:
        assert theirs.top_k == (sampling.top_k or sampling_module.TOP_K_ALL)
        assert theirs.temperature == sampling.temperature
    ends = () if sampling.ignore_eos else sampling.eos_token_ids
    assert (theirs.stop_token_ids or set()) == {*sampling.stop_token_ids, *ends}
    assert (theirs.stop_strs, theirs.n, theirs.beam_width) == ([], 1, None)
    assert bool(theirs.ebnf) == bool(sampling.grammar)


# ---------------------------------------------------------------- ends and chunks

BATCH = "sglang.srt.managers.schedule_batch:"
MANAGER = "sglang.srt.managers.tokenizer_manager:"


class Matched:
    """SGLang's record of a token that ended a request."""

    def __init__(self, matched: int) -> None:
        self.matched = matched


@pytest.mark.parametrize(
    ("ignore_eos", "stops", "ends", "token", "ended"),
    [
        (False, {9}, set(), 9, True),
        (False, set(), {9}, 9, True),
        (False, set(), set(), 63, True),  # the tokenizer's
        (False, {9}, {8}, 7, False),
        (True, {9}, {9}, 9, False),
    ],
)
def test_with_end_tokens_ignored_no_stop_token_counts(
    wheel: Path, ignore_eos: bool, stops: set[int], ends: set[int], token: int, ended: bool
):
    """So the adapter looks for them itself."""
    check = function_of(
        wheel, BATCH + "Req._check_token_based_finish", {"FINISH_MATCHED_TOKEN": Matched}
    )
    request = SimpleNamespace(
        sampling_params=SimpleNamespace(ignore_eos=ignore_eos, stop_token_ids=stops),
        eos_token_ids=ends,
        tokenizer=SimpleNamespace(eos_token_id=63, additional_stop_token_ids=None),
        output_ids=[1, 2, token],
        finished_len=None,
    )
    assert check(request, [token]) is ended
    # The output goes through the stop token, so that it is a part of it.
    assert request.finished_len == (3 if ended else None)


def choice_of(**changes: Any) -> SglangChoice:
    sampling = SamplingParams(max_tokens=50, ignore_eos=True, **changes)
    request = GenerateRequest(
        request_id="r", model="m", prompt=token_ids([1, 2, 3]), sampling=sampling
    )
    return SglangChoice(1, 0, request, 0.0, 1000)


@given(st.lists(st.integers(1, 3), min_size=1, max_size=6), st.data())
def test_chunks_that_sglang_joins_are_read_whole(
    wheel: Path, sizes: list[int], data: st.DataObject
):
    """Deltas with their logprobs, sliced and joined by SGLang's own functions."""
    keys = (
        "output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs",
        "output_token_sampling_mask", "output_token_sampling_logprobs",
    )  # fmt: skip
    names = {"_INCREMENTAL_STREAMING_META_INFO_KEYS": keys, "logger": logging.getLogger("test")}
    cut = function_of(wheel, MANAGER + "_slice_streaming_output_meta_info", names)
    join = function_of(wheel, MANAGER + "TokenizerManager._coalesce_streaming_chunks", names)
    chunks, done = [], 0
    for size in sizes:
        known, done = done, done + size
        meta: dict[str, Any] = {
            "finish_reason": None,
            "completion_tokens": done,
            "output_token_logprobs": [(-1.0, token, None) for token in range(done)],
            "output_top_logprobs": [[(-1.0, token, None)] for token in range(done)],
        }
        cut(meta, known)
        chunks.append({"text": "", "output_ids": list(range(known, done)), "meta_info": meta})
    choice, tokens, logprobs = choice_of(logprobs=1), list[int](), list[int]()
    while chunks:
        count = data.draw(st.integers(1, len(chunks)))
        taken, chunks = chunks[:count], chunks[count:]
        delta = choice.take(join(None, taken, "r") if count > 1 else taken[0], 1.0)
        assert delta is not None
        assert delta.logprobs is not None
        tokens += delta.tokens
        logprobs += [entry.token for entry in delta.logprobs]
    assert tokens == logprobs == list(range(done))


def test_the_last_chunk_of_a_waiting_request_repeats_a_token(wheel: Path):
    """It is an error for the adapter, and never a delta with a token twice."""
    names = {
        "is_health_check_generate_req": lambda request: False,
        "logger": logging.getLogger("test"),
    }
    handle = function_of(wheel, MANAGER + "TokenizerManager._handle_abort_req", names)
    stats = SimpleNamespace(set_finished_time=lambda: None, get_e2e_latency=lambda: 0.0)
    state = SimpleNamespace(
        obj=SimpleNamespace(stream=True, return_logprob=False),
        time_stats=stats,
        output_ids=[5, 6],
        get_text=lambda: "",
        prompt_token_ids=None,
        out_list=[],
        event=SimpleNamespace(set=lambda: None),
        finished=False,
    )
    manager = SimpleNamespace(
        rid_to_state={"r": state},
        config_value=lambda name: None,
        incremental_streaming_output=True,
        _release_lora_once=lambda state: None,
    )
    request = SimpleNamespace(
        rid="r", abort_message=None, finished_reason=None, weight_versions=None
    )
    handle(manager, request)
    (chunk,) = state.out_list
    assert chunk["output_ids"] == [6]
    choice = choice_of()
    meta = {"finish_reason": None, "completion_tokens": 2}
    choice.take({"output_ids": [5, 6], "meta_info": meta}, 1.0)
    with pytest.raises(StepFailed, match="waiting queue"):
        choice.take(chunk, 1.0)


def test_an_abort_is_sent_once_and_for_known_ids_only(wheel: Path):
    sent: list[Any] = []
    names = {
        "AbortReq": lambda **fields: fields,
        "get_serving": lambda: SimpleNamespace(tokenizer_worker_num=1),
        "logger": logging.getLogger("test"),
    }
    abort = function_of(wheel, MANAGER + "TokenizerManager.abort_request", names)
    manager = SimpleNamespace(
        rid_to_state={"r": SimpleNamespace(abort_sent=False)},
        _dispatch_to_scheduler=sent.append,
        enable_metrics=False,
    )
    for rid in ("r", "r", "other", ""):
        abort(manager, rid)
    assert sent == [{"rid": "r", "abort_all": False}]


# ---------------------------------------------------------------- KV events over ZeroMQ


class Parallel:
    """What the publisher's module asks of SGLang's run-time."""

    pp_rank = attn_tp_rank = attn_cp_rank = 0


@pytest.fixture
def kv_events(wheel: Path) -> Iterator[ModuleType]:
    pytest.importorskip("zmq")
    stubs: dict[str, dict[str, Any]] = {
        "sglang.srt.runtime_context": {"get_parallel": Parallel},
        "sglang.srt.utils.network": {"NetworkAddress": None},
    }
    with module_of(wheel, "sglang.srt.disaggregation.kv_events", stubs) as module:
        yield module


class Follower:
    """The adapter's end: a feed and names, on real sockets."""

    def __init__(self, folder: Path) -> None:
        self.blocks = NamedBlocks(b"s" * 32, 4, "model")
        self.salt = self.blocks.salt("", "")
        self.changes: list[Any] = []
        self._news = asyncio.Event()
        sockets = zmq_sockets(*event_endpoints(str(folder)))
        self.feed = EventFeed(sockets, self._batch, self._lost)
        self.task = asyncio.create_task(self.feed.run())

    def _batch(self, events: list[dict[str, Any]]) -> None:
        self.changes += self.blocks.translate(events)
        self._news.set()

    def _lost(self) -> None:
        self.changes += self.blocks.clear()

    async def until(self, count: int) -> None:
        async with asyncio.timeout(20):
            while len(self.changes) < count:
                self._news.clear()
                await self._news.wait()

    async def end(self) -> None:
        self.task.cancel()
        await asyncio.wait([self.task])


def publisher_of(kv_events: ModuleType, folder: Path, **changes: Any) -> Any:
    live, replay = event_endpoints(str(folder))
    config = {"publisher": "zmq", "endpoint": live, "replay_endpoint": replay, **changes}
    checked = kv_events.KVEventsConfig(**config).model_dump()
    del checked["format"], checked["publisher"]
    return kv_events.ZmqEventPublisher(attn_dp_rank=0, **checked)


def batch(kv_events: ModuleType, *events: Any) -> Any:
    return kv_events.EventBatch(ts=1.0, events=list(events))


def stored(kv_events: ModuleType, key: int, parent: int | None, first: int, salt: str) -> Any:
    return kv_events.BlockStored(
        block_hashes=[key],
        parent_block_hash=parent,
        token_ids=list(range(first, first + 4)),
        block_size=4,
        lora_id=None,
        medium=kv_events.StorageMedium.GPU,
        cache_salt=salt,
    )


@pytest.mark.vllm  # its environment has pyzmq
async def test_sglangs_publisher_is_followed(kv_events: ModuleType, tmp_path: Path):
    publisher = publisher_of(kv_events, tmp_path)
    follower = Follower(tmp_path)
    try:
        salt = follower.salt
        publisher.publish(batch(kv_events, stored(kv_events, 1, None, 0, salt)))
        publisher.publish(
            batch(
                kv_events,
                stored(kv_events, -2, 1, 4, salt),
                kv_events.BlockRemoved(block_hashes=[-2], medium=kv_events.StorageMedium.GPU),
            )
        )
        publisher.publish(batch(kv_events, kv_events.AllBlocksCleared()))
        await follower.until(4)
    finally:
        await follower.end()
        publisher.shutdown()
    root = prompt_root(b"s" * 32, "model", "")
    names = block_hashes(list(range(8)), 4, parent=root, secret=b"s" * 32)
    assert follower.changes == [
        BlockStored(hashes=[names[0]], parent=root),
        BlockStored(hashes=[names[1]], parent=names[0]),
        BlockRemoved(hashes=[names[1]]),
        PoolCleared(tier="device"),
    ]


@pytest.mark.vllm
async def test_sglangs_replay_fills_a_gap_and_says_what_is_gone(
    kv_events: ModuleType, tmp_path: Path
):
    """Batches come before the follower does. Of the last three the publisher keeps two."""
    publisher = publisher_of(kv_events, tmp_path, buffer_steps=2)
    salt = NamedBlocks(b"s" * 32, 4, "model").salt("", "")
    for key in range(3):
        publisher.publish(batch(kv_events, stored(kv_events, key + 1, None, key * 4, salt)))
    # Until its thread has sent them all.
    await asyncio.to_thread(publisher._event_queue.join)
    follower = Follower(tmp_path)
    try:
        await follower.until(3)
    finally:
        await follower.end()
        publisher.shutdown()
    assert follower.feed.order.lost == 1
    assert isinstance(follower.changes[0], PoolCleared)
    assert len(follower.blocks) == 2
