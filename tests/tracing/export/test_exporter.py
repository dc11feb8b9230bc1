"""The exporter in virtual time: every behaviour of a collector, and its end."""

import asyncio
import functools
import logging
from random import Random

import pytest

from pdserve.observe.degraded import Degradations
from pdserve.observe.metrics import Metrics
from pdserve.testing import virtual_time
from pdserve.tracing.export import exporter as exporter_module
from pdserve.tracing.export.delivery import BATCH_SPANS, QUEUE_SPANS, RETRY_FOR, CollectorAnswer
from pdserve.tracing.export.exporter import FLUSH, SLICE_SPANS, TraceExporter
from pdserve.tracing.export.otlp import RequestFrame, encode_span
from tests.support.otlp import parse_request
from tests.support.traces import make_trace

make_trace = functools.cache(make_trace)
SPANS = len(make_trace("r0").spans)
OK = CollectorAnswer(200, body=b"{}")
GONE = CollectorAnswer(failure="it cannot be reached")


class ScriptedCollector:
    """Answers by a script, whose last step stays; a step is an answer, or seconds to hang."""

    def __init__(self, *script):
        self.script = list(script) or [OK]
        self.posts = []
        self.taken = []
        self.closed = False

    async def post(self, body, *, gzip, timeout):
        loop = asyncio.get_running_loop()
        self.posts.append(loop.time())
        step = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        if step == "hang":
            await asyncio.sleep(timeout)
            return CollectorAnswer(failure=f"it does not answer within {timeout:g} s")
        if isinstance(step, Exception):
            raise step
        if step.status == 200:
            (resource,) = parse_request(body).resource_spans
            self.taken.append([span.trace_id for span in resource.scope_spans[0].spans])
        return step

    async def close(self):
        self.closed = True

    @property
    def spans(self):
        return sum(map(len, self.taken))


class Scene:
    """One exporter and what it tells."""

    def __init__(self, *script):
        self.collector = ScriptedCollector(*script)
        self.metrics = Metrics()
        self.degradations = Degradations(self.metrics)
        self.exporter = TraceExporter(
            self.collector,
            RequestFrame({"service.name": "pdserve"}),
            self.metrics,
            self.degradations,
            where="http://c:4318",
            gzip=False,
            random=Random(7),
            wall=lambda: 1_790_000_000.0,
        )
        self.added = 0

    def add(self, number=1):
        for _ in range(number):
            self.exporter.add(make_trace(f"r{self.added % 2000}"))
            self.added += 1

    @property
    def dropped(self):
        return {labels[0]: c.value for labels, c in self.metrics.trace_spans_dropped if c.value}

    @property
    def exported(self):
        return self.metrics.trace_spans_exported.value

    @property
    def problem(self):
        return self.degradations.reasons().get("trace_export", "")

    def check_balance(self):
        """Each span that came is exported, dropped, or still here."""
        total = self.exported + sum(self.dropped.values()) + self.exporter.waiting
        assert total == self.added * SPANS


def play(scene, *script):
    """Run a scene in virtual time; nothing is lost uncounted, and nothing is left."""

    async def main():
        made = Scene(*script)
        made.exporter.start()
        try:
            await scene(made)
            made.check_balance()
        finally:
            await made.exporter.close()
        made.check_balance()
        assert made.exporter.waiting == 0
        assert made.collector.closed
        assert len(asyncio.all_tasks()) == 1, "no task is left"
        return made

    return virtual_time.run(main())


def test_spans_are_sent_after_a_second_together():
    async def scene(s):
        s.add(3)
        await asyncio.sleep(0.99)
        assert s.collector.posts == []
        await asyncio.sleep(0.02)
        assert s.collector.posts == [1.0]
        assert s.exported == 3 * SPANS

    play(scene)


def test_an_exporter_without_work_does_nothing():
    async def scene(s):
        await asyncio.sleep(3600)
        assert s.collector.posts == []

    play(scene)


def test_a_full_batch_is_sent_at_once():
    async def scene(s):
        s.add(BATCH_SPANS // SPANS + 1)
        await asyncio.sleep(0.5)
        assert [len(taken) <= BATCH_SPANS for taken in s.collector.taken] == [True] * 2
        assert s.exported == s.added * SPANS

    play(scene)


def test_spans_arrive_whole_and_in_order():
    async def scene(s):
        s.add(5)
        await asyncio.sleep(2)
        expected = [make_trace(f"r{n}").trace_id for n in range(5) for _ in range(SPANS)]
        assert s.collector.taken == [expected]

    play(scene)


# ---------------------------------------------------------------- failures


def test_what_is_busy_is_asked_again_until_it_takes_them():
    async def scene(s):
        s.add(2)
        await asyncio.sleep(20)
        assert len(s.collector.posts) == 4
        assert s.exported == 2 * SPANS
        assert s.dropped == {}
        pauses = [b - a for a, b in zip(s.collector.posts, s.collector.posts[1:], strict=False)]
        assert pauses == sorted(pauses)

    busy = CollectorAnswer(503)
    play(scene, busy, GONE, CollectorAnswer(502), OK)


def test_retry_after_is_heeded():
    async def scene(s):
        s.add()
        await asyncio.sleep(8.0)
        assert len(s.collector.posts) == 1
        await asyncio.sleep(1.1)
        assert s.collector.posts == [1.0, 9.0]
        assert s.exported == SPANS

    play(scene, CollectorAnswer(429, retry_after="8"), OK)


def test_a_collector_that_asks_for_a_long_pause_gets_it_and_loses_spans():
    async def scene(s):
        s.add()
        await asyncio.sleep(100)
        s.add()
        await asyncio.sleep(20)
        assert len(s.collector.posts) == 1, "not within the 300 s"
        assert s.dropped == {"undelivered": SPANS}
        await asyncio.sleep(190)
        s.add()
        await asyncio.sleep(30)
        assert len(s.collector.posts) == 2
        assert s.dropped == {"undelivered": 2 * SPANS}
        assert s.exported == SPANS

    play(scene, CollectorAnswer(503, retry_after="100000"), OK)


def test_one_batch_is_tried_for_30_seconds():
    async def scene(s):
        s.add()
        await asyncio.sleep(1 + RETRY_FOR + 0.1)
        assert s.dropped == {"undelivered": SPANS}
        assert s.collector.posts[-1] <= 1 + RETRY_FOR
        assert 5 <= len(s.collector.posts) <= 12
        assert "it cannot be reached" in s.problem
        assert "check that a collector listens there" in s.problem

    play(scene, GONE)


def test_a_collector_that_hangs_is_given_up():
    async def scene(s):
        s.add()
        await asyncio.sleep(1 + RETRY_FOR + 0.2)
        assert s.dropped == {"undelivered": SPANS}
        assert 3 <= len(s.collector.posts) <= 4
        assert "does not answer within" in s.problem

    play(scene, "hang")


def test_a_refusal_is_final_and_said_once(caplog):
    async def scene(s):
        with caplog.at_level(logging.INFO, "pdserve"):
            for _ in range(200):
                s.add()
                await asyncio.sleep(5)
        assert len(s.collector.posts) == 200, "no batch is sent twice"
        assert s.dropped == {"refused": 200 * SPANS}
        assert "HEADERS" in s.problem
        assert len(caplog.records) == 1, caplog.text

    play(scene, CollectorAnswer(401))


def test_what_some_lack_is_counted_and_said():
    body = b'{"partialSuccess":{"rejectedSpans":"3","errorMessage":"too old"}}'

    async def scene(s):
        s.add(2)
        await asyncio.sleep(2)
        assert s.exported == 2 * SPANS - 3
        assert s.dropped == {"rejected": 3}
        assert "it has not taken 3 spans: too old" in s.problem
        s.add()
        await asyncio.sleep(2)
        assert s.problem == "", "it has taken all since"

    play(scene, CollectorAnswer(200, body=body), OK)


def test_a_collector_cannot_reject_more_than_it_got():
    body = b'{"partialSuccess":{"rejectedSpans":"999999"}}'

    async def scene(s):
        s.add()
        await asyncio.sleep(2)
        assert (s.exported, s.dropped) == (0, {"rejected": SPANS})

    play(scene, CollectorAnswer(200, body=body))


def test_a_hiccup_is_no_degradation_and_recovery_ends_one(caplog):
    async def scene(s):
        s.add()
        await asyncio.sleep(5)
        assert (s.problem, s.exported) == ("", SPANS)
        s.collector.script = [GONE, GONE, GONE, OK]
        s.add()
        await asyncio.sleep(2.2)
        assert s.problem
        await asyncio.sleep(10)
        assert (s.problem, s.exported) == ("", 2 * SPANS)

    with caplog.at_level(logging.INFO, "pdserve"):
        play(scene, GONE, GONE, OK)
    assert [r.levelname for r in caplog.records] == ["WARNING", "INFO"]


def test_a_defect_loses_one_batch_and_is_counted(caplog):
    async def scene(s):
        s.add()
        await asyncio.sleep(2)
        s.add()
        await asyncio.sleep(2)
        assert s.dropped == {"invalid": SPANS}
        assert s.exported == SPANS

    play(scene, RuntimeError("broken"), OK)
    assert "7 spans could not be exported" in caplog.text


# ---------------------------------------------------------------- bounds


def test_an_hour_without_a_collector_costs_a_full_queue_and_a_line_a_minute(caplog):
    async def scene(s):
        with caplog.at_level(logging.INFO, "pdserve"):
            for _ in range(3600):
                s.add(3)
                await asyncio.sleep(1)
                assert s.exporter.waiting <= QUEUE_SPANS + BATCH_SPANS
        assert set(s.dropped) == {"queue_full", "undelivered"}
        s.check_balance()
        assert 50 <= len(caplog.records) <= 61
        assert "no longer" not in caplog.text
        s.collector.script = [OK]
        await asyncio.sleep(10)
        assert s.exporter.waiting == 0
        assert QUEUE_SPANS - SPANS < s.exported <= QUEUE_SPANS + BATCH_SPANS
        assert s.problem == ""

    play(scene, GONE)


def test_a_full_queue_drops_the_newest():
    async def scene(s):
        s.add(1)
        await asyncio.sleep(5)
        s.add(QUEUE_SPANS)
        full = QUEUE_SPANS // SPANS
        assert s.dropped == {"queue_full": (QUEUE_SPANS - full) * SPANS}
        s.collector.script = [OK]
        await asyncio.sleep(100)
        arrived = {one for taken in s.collector.taken for one in taken}
        assert arrived == {make_trace(f"r{n}").trace_id for n in range(1, full + 1)} | {
            make_trace("r0").trace_id
        }

    play(scene, "hang")


def test_a_slow_collector_is_named():
    async def scene(s):
        s.add(1)
        await asyncio.sleep(2)
        s.add(QUEUE_SPANS)
        assert "slower than they come" in s.problem

    play(scene, "hang")


def spans_per_turn(monkeypatch, number):
    """How many spans were encoded in each turn of the loop."""
    turns = []

    async def scene(s):
        count = 0
        encode = encode_span

        def counted(trace, span):
            nonlocal count
            count += 1
            return encode(trace, span)

        monkeypatch.setattr(exporter_module, "encode_span", counted)

        def turn():
            nonlocal count
            turns.append(count)
            count = 0
            if s.exported < s.added * SPANS:
                loop.call_soon(turn)

        loop = asyncio.get_running_loop()
        s.add(number)
        loop.call_soon(turn)
        await asyncio.sleep(1)
        assert sum(turns) == number * SPANS

    play(scene)
    return turns


def test_no_turn_of_the_loop_encodes_more_than_a_slice(monkeypatch):
    turns = spans_per_turn(monkeypatch, 300)
    assert max(turns) == SLICE_SPANS
    assert sum(map(bool, turns)) >= 300 * SPANS // SLICE_SPANS


def test_planted_bug_encoding_without_a_pause_is_seen(monkeypatch):
    monkeypatch.setattr(exporter_module, "SLICE_SPANS", 10**9)
    assert max(spans_per_turn(monkeypatch, 300)) > SLICE_SPANS


@pytest.mark.parametrize("script", [(GONE,), ("hang",), (CollectorAnswer(400),)])
def test_planted_bug_a_drop_that_is_not_counted_is_seen(monkeypatch, script):
    monkeypatch.setattr(TraceExporter, "_drop", lambda self, spans, reason: None)

    async def scene(s):
        s.add(2000)
        await asyncio.sleep(100)

    with pytest.raises(AssertionError):
        play(scene, *script)


# ---------------------------------------------------------------- the end


def test_the_end_delivers_what_waits():
    async def scene(s):
        s.add(2 * BATCH_SPANS // SPANS)

    s = play(scene)
    assert s.exported == s.added * SPANS
    assert s.dropped == {}


@pytest.mark.parametrize("step", [GONE, "hang", CollectorAnswer(503, retry_after="60")])
def test_the_end_waits_two_seconds_at_most(step):
    async def main():
        s = Scene(step)
        s.exporter.start()
        s.add(500)
        await asyncio.sleep(20)
        began = asyncio.get_running_loop().time()
        await s.exporter.close()
        await s.exporter.close()
        assert asyncio.get_running_loop().time() - began <= FLUSH
        s.check_balance()
        assert s.dropped["shutdown"] > 0

    virtual_time.run(main())


@pytest.mark.parametrize("script", [("hang",), (GONE,)])
def test_spans_that_are_lost_at_the_end_are_told(script, caplog):
    async def main():
        s = Scene(*script)
        s.exporter.start()
        s.add(300)
        with caplog.at_level(logging.WARNING):
            await s.exporter.close()
            await s.exporter.close()
        s.check_balance()

    virtual_time.run(main())
    (line,) = [text for text in caplog.messages if "degraded" not in text]
    assert line.startswith(f"the last {300 * SPANS} spans were not exported to http://c:4318: ")


def test_an_end_without_loss_is_silent(caplog):
    async def scene(s):
        s.add(3)

    play(scene)
    assert not caplog.messages


def test_what_comes_after_the_end_is_dropped_and_counted():
    async def main():
        s = Scene()
        s.add()
        s.exporter.start()
        await s.exporter.close()
        s.add()
        assert s.dropped == {"shutdown": 2 * SPANS}
        assert s.exporter.waiting == 0

    virtual_time.run(main())


def test_an_exporter_that_was_never_started_can_be_closed():
    async def main():
        s = Scene()
        await s.exporter.close()
        assert s.collector.closed

    virtual_time.run(main())
