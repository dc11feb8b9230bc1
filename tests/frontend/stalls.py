"""Runs hostile requests against a frontend, and says what they cost it. A program:

    python -m tests.frontend.stalls SEED COUNT [PLANTED]

Measured per request are the longest callback of the event loop, in processor time of its thread;
the processor time of all threads; and the memory that is added at the peak. A busy machine changes
little of these. The first request that costs too much is printed, and the program ends with 1. It
runs in a process of its own, with bounds on memory and time: an explosion ends it and nothing else.
Grammars are not compiled here: that is done in a process that can be killed.

PLANTED is the name of an old bug that is put back first, so that a test sees that it is found.
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import json
import os
import resource
import signal
import sys
import time
import traceback
from random import Random
from typing import Any

import aiohttp

from pdserve import accel
from pdserve.frontend.api.adapters.responses_request import _Conversation
from pdserve.frontend.config import FrontendConfig
from pdserve.frontend.preprocess import input_processor
from pdserve.frontend.service import FrontendService
from pdserve.text import text_pool
from pdserve.text.tool_parsers.python_calls.pythonic_grammar import PythonicGrammar
from pdserve.text.tool_parsers.schema_budget import SchemaBudget
from pdserve.text.tool_parsers.tool_call_grammar import resolve_reference
from pdserve.text.tool_parsers.typed_values import ParameterTypes
from tests.frontend.support import card, tokens
from tests.fuzz.hostile import FORMATS, OTHER_FORMATS, Case, draw
from tests.support.fake_backend import FakeBackend, Script

STALL = 0.1
"""Seconds of the event loop's thread that one callback may take."""
WORK = 2.0
"""Seconds of processor time of all threads together for one request."""
GROWTH = 64 << 20
"""Bytes of memory for one request."""
LONG_STALL = 0.3
"""The same for a body of megabytes, whose decoding alone takes a tenth of a second."""
TRIES = 3
SMALL = "small"
"""A model whose context is too short for megabytes: these are not tokenised."""
ADDRESS_SPACE = 2 << 30
"""More than the process has when the requests begin."""
FEATURES = ("grammar", "thinking", "bans", "embeddings", "classify")
TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
    "{% for t in custom_tools or [] %}{{ t | tojson }}{% endfor %}"
    "{% for a in loops or [] %}{% for b in a %}{{ b }}{% endfor %}{% endfor %}"
    "{% for d in documents or [] %}{{ d.title }}{{ d.text | tojson }}{% endfor %}"
    "{% for m in messages %}{% if m.role in ('query', 'document') %}!{% endif %}"
    "{{ m.role }}:{{ m.reasoning_content or '' }}{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}"
    "{% endfor %}|{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


class Watch:
    """The longest callback since the last look."""

    def __init__(self) -> None:
        self.longest = 0.0
        handles: Any = asyncio.Handle
        run = handles._run

        def timed(handle: asyncio.Handle) -> None:
            before = time.thread_time()
            run(handle)
            self.longest = max(self.longest, time.thread_time() - before)

        handles._run = timed


def long_cases() -> list[tuple[Case, float]]:
    """What is cheap by the piece, with the stall that it may cause."""
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "a" * 800}]}
    user = {"role": "user", "content": "hi"}
    function = {"name": "f", "arguments": json.dumps({"a": "word " * 160_000})}
    called = {"role": "assistant", "tool_calls": [{"function": function}]}
    joined = {"model": SMALL, "input": [thought] * 18_000}
    ranked = {"model": "hermes", "query": "word " * 100, "documents": ["a"] * 2000}
    turns = {"model": "hermes", "messages": [user, called, user], "max_tokens": 1}
    return [
        (Case("/v1/responses/input_tokens", joined), LONG_STALL),
        (Case("/v1/chat/completions", turns), STALL),
        (Case("/v1/rerank", ranked), STALL),
    ]


class Run:
    """One frontend, and the requests that it gets."""

    def __init__(self) -> None:
        self._says = ""
        common: dict[str, Any] = {
            "chat_template": TEMPLATE,
            "features": FEATURES,
            "pooling": "last",
            "embedding_size": 1,
            "num_labels": 1,
        }
        models = {
            name: card(name=name, tool_parser=name, max_model_len=2_000_000, **common)
            for name in (*FORMATS, *OTHER_FORMATS)
        }
        models[SMALL] = card(name=SMALL, **common)
        self._backend = FakeBackend(models, self._script)
        self._watch = Watch()

    def _script(self, request: Any) -> Script:
        return Script(
            tokens=tokens(self._says), repeat=False, burst=8, vector=lambda request: bytes(4)
        )

    async def all(self, seed: int, count: int) -> None:
        service = FrontendService(FrontendConfig(port=0, request_timeout=20), self._backend)
        await service.start()
        await service._models.prepare()
        chance = Random(seed)
        warm = Random(1)
        async with aiohttp.ClientSession(f"http://127.0.0.1:{service.port}") as http:
            for _ in range(20):
                await self._post(http, draw(warm))
            gc.collect()
            gc.freeze()
            for case, stall in long_cases():
                await self._checked(http, case, stall, ADDRESS_SPACE)
            for _ in range(count):
                await self._checked(http, draw(chance), STALL, GROWTH)
        await service.stop(0)

    async def _post(self, http: aiohttp.ClientSession, case: Case) -> int:
        self._says = case.says
        data = json.dumps(case.body).encode()
        async with http.post(case.path, data=data, headers=case.headers) as answer:
            await answer.read()
        for told in (self._backend.requests, self._backend.hints, self._backend.streams):
            told.clear()
        return answer.status

    async def _checked(
        self, http: aiohttp.ClientSession, case: Case, stall: float, growth: int
    ) -> None:
        """What costs too much must do so repeatedly: neighbours on the machine cost something."""
        signal.signal(signal.SIGPROF, lambda *_: _fail(case, "it takes too long", traced=True))
        why = ""
        for _ in range(TRIES):
            signal.setitimer(signal.ITIMER_PROF, 2 * WORK)
            why = await self._costs(http, case, stall, growth)
            signal.setitimer(signal.ITIMER_PROF, 0)
            if not why:
                return
        _fail(case, why)

    async def _costs(
        self, http: aiohttp.ClientSession, case: Case, stall: float, growth: int
    ) -> str:
        """What is too much; nothing if all is well."""
        self._watch.longest = 0.0
        memory, cpu = _memory("VmRSS", reset=True), time.process_time()
        status = await self._post(http, case)
        cpu = time.process_time() - cpu
        grown = _memory("VmHWM") - memory
        if self._watch.longest > stall:
            return f"the loop stood still for {self._watch.longest:.3f} s"
        if cpu > WORK:
            return f"it took {cpu:.3f} s"
        if grown > growth:
            return f"it took {grown >> 20} MiB"
        ended = status < 500 or (status, case.path) == (503, "/route")
        return "" if ended else f"it ended with {status}"


def _memory(what: str, *, reset: bool = False) -> int:
    """Bytes. `reset`: the peak begins anew."""
    if reset:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith(what))
    return int(line.split()[1]) << 10


def _fail(case: Case, why: str, *, traced: bool = False) -> None:
    """Threads may be stuck, so nothing is waited for."""
    print(why, str(case)[:10_000], sep="\n")
    if traced:
        traceback.print_stack(limit=12, file=sys.stdout)
    sys.stdout.flush()
    os._exit(1)


# ---------------------------------------------------------------------- old bugs


def _blind_references() -> None:
    """References are followed without a memory of where they were."""

    def types(self: Any, schema: Any, budget: Any, deep: int = 16) -> Any:
        if isinstance(schema, dict) and deep:
            for key in ("anyOf", "oneOf", "allOf"):
                for part in schema.get(key) or ():
                    yield from types(self, part, budget, deep - 1)
            if isinstance(schema.get("$ref"), str):
                found = resolve_reference(self._root, schema["$ref"])
                yield from types(self, found, budget, deep - 1)

    ParameterTypes._types = types  # type: ignore[method-assign]


def _items_twice() -> None:
    """What is written down twice is no rule, and characters are counted at the end."""
    PythonicGrammar._rule = lambda self, stem, body: f"({body})"  # type: ignore[method-assign]
    SchemaBudget.make = lambda self, text: text  # type: ignore[method-assign]


def _joined_one_by_one() -> None:
    """Neighbouring items are joined with all before them."""

    def reason(self: Any, item: Any, where: str) -> None:
        turn = self._unanswered()
        turn.thoughts[:] = ["\n".join([*turn.thoughts, *(part.text for part in item.summary)])]

    _Conversation._reason = reason  # type: ignore[method-assign]


def _content_only() -> None:
    """Arguments and reasoning count nothing, and `tokenizers` encodes: the extension is fast enough
    to hide it."""

    def cost(request: Any, tools: Any, tokenizer: Any) -> int:
        texts = [each.content for each in request.messages]
        return sum(len(text) for text in texts if isinstance(text, str))

    assert "chat_cost" in vars(input_processor), "the bug would change nothing"
    vars(input_processor)["chat_cost"] = cost
    accel.NATIVE = False


PLANTED = {
    "references without memory": _blind_references,
    "items written twice": _items_twice,
    "items joined one by one": _joined_one_by_one,
    "content counts only": _content_only,
}


async def _uncompiled(self: Any, tokenizer: Any, vocab_size: int, source: Any) -> str:
    return str(source.text)


def main() -> None:
    seed, count = int(sys.argv[1]), int(sys.argv[2])
    if len(sys.argv) > 3:
        PLANTED[sys.argv[3]]()
    faulthandler.enable()
    for kind in vars(text_pool).values():
        if hasattr(kind, "compile_grammar"):
            kind.compile_grammar = _uncompiled
    space = _memory("VmSize") + ADDRESS_SPACE
    resource.setrlimit(resource.RLIMIT_AS, (space, resource.RLIM_INFINITY))
    asyncio.run(Run().all(seed, count))
    print("all were cheap")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
