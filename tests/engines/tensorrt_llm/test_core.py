"""The core over the fake: the conformance suite, and what TensorRT-LLM makes special."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from pdserve.blocks.hashing import block_hashes, prompt_root
from pdserve.engine.client import CoreClient
from pdserve.messages.engine import EngineSpec, TransferSpec
from pdserve.messages.kv_events import BlockStored
from pdserve.testing.engine_conformance import EngineConformance
from pdserve.testing.sinks import until
from pdserve.testing.thread_launcher import ThreadLauncher
from tests.conformance.test_engines import write_model
from tests.engines.tensorrt_llm import fake_engine

if TYPE_CHECKING:
    from pathlib import Path

    from pdserve.engine.port import Engine
    from pdserve.messages.kv_events import KvEvent

SECRET = b"a secret of these tests"


class Conformance(EngineConformance):
    prompt = (17, 42, 8)
    entry: str
    transfer: TransferSpec | None = None
    steering: ClassVar[dict[str, Any]] = {}

    @pytest.fixture(autouse=True)
    def _model(self, tmp_path: Path) -> None:
        write_model(tmp_path)
        self.spec = EngineSpec(
            engine=self.entry,
            model=str(tmp_path),
            max_sequences=8,
            block_size=8,
            hash_secret=SECRET,
            transfer=self.transfer,
        )

    def make_engine(self) -> Engine:
        return CoreClient(self.spec, make_launcher=ThreadLauncher)

    async def test_choices_go_on_after_every_cut(self) -> None:
        """Greedy, since TensorRT-LLM's noise does not repeat."""
        async with self.running() as engine:
            shape = {"n": 3, "max_tokens": 9, "logprobs": 1, **self.steering}
            whole = await self.complete(engine, **shape)
            for cut in range(10):
                lengths = (cut, cut * 3 % 10, cut * 7 % 10)
                given = [whole.tokens[choice][:length] for choice, length in enumerate(lengths)]
                ended = tuple(choice for choice, length in enumerate(lengths) if length == 9)
                if len(ended) == 3:
                    continue
                ledger = await self.complete(engine, output=given, ended=ended, **shape)
                assert ledger.tokens == whole.tokens
            await self.nothing_left(engine)

    async def test_reused_blocks_were_announced(self) -> None:
        """The events are polled, so they come after the output."""
        events: list[KvEvent] = []
        async with self.running() as engine:
            engine.subscribe_kv(events.extend)
            prompt = (self.prompt * 8)[:17]
            await self.complete(engine, prompt=prompt, max_tokens=1)
            ledger = await self.complete(engine, prompt=prompt, max_tokens=1)
            assert ledger.finishes[0] is not None
            assert ledger.finishes[0].cached_tokens == 16

            def stored() -> list[bytes]:
                return [h for e in events if isinstance(e, BlockStored) for h in e.hashes]

            await until(lambda: len(stored()) == 2)
            model = self.capabilities(engine).compat_hash
            root = prompt_root(SECRET, model, "")
            assert stored() == block_hashes(prompt, 8, parent=root, secret=SECRET)


class TestOver12(Conformance):
    entry = fake_engine.ENGINE


class TestOver14(Conformance):
    entry = fake_engine.ENGINE_14
    steering: ClassVar[dict[str, Any]] = {
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.2,
    }


class TestWithPeers(Conformance):
    """A worker that hands prompts over serves all others as well."""

    entry = fake_engine.ENGINE
    transfer = TransferSpec()
