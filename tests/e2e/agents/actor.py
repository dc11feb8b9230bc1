"""An engine that plays a model by a script: what it says depends on what its prompt contains.

The script is a JSON list of `{"if": REGEX, "say": TEXT}`. The first expression that is found in the
prompt wins; `\\g<1>` in the text is its first group. Everything else is the scripted executor's:
scheduler, blocks and lengths are real.

Engine name: `tests.e2e.agents.actor:create`; options: `script`, the file, and `step_ms`, how long a
step takes at least.
"""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace
from tokenizers import Tokenizer

from pdserve.testing.scripted import ScriptedExecutor

if TYPE_CHECKING:
    from pdserve.engine_core.executor import ModelInfo, ProgressFn, ScheduledChunk
    from pdserve.engine_core.scheduler.sequence import Sequence
    from pdserve.ids import SequenceKey
    from pdserve.messages.engine import EngineSpec

ENGINE = "tests.e2e.agents.actor:create"
EOS = 1
"""Of `write_model`'s checkpoints."""


def create() -> Actor:
    """The engine's factory."""
    return Actor()


class Actor(ScriptedExecutor):
    """Says what the script has for a prompt, then ends."""

    def load(self, spec: EngineSpec, progress: ProgressFn) -> ModelInfo:
        script = Path(spec.options["script"]).read_text()
        self._rules = [(re.compile(one["if"], re.DOTALL), one["say"]) for one in json.loads(script)]
        self._tokenizer = Tokenizer.from_file(str(Path(spec.model) / "tokenizer.json"))
        self._lines: dict[SequenceKey, list[int]] = {}
        vocab, length = self._tokenizer.get_vocab_size(), spec.max_model_len or 131_072
        sizes = {"vocab": str(vocab), "eos": str(EOS), "max_len": str(length)}
        sizes["blocks"] = str(3 * length // spec.block_size)
        sizes["step_ms"] = spec.options.get("step_ms", "0")
        info = super().load(replace(spec, options=sizes), progress)
        # Clients mark tools as strict; the script's calls are what their grammars allow.
        return dataclasses.replace(info, features=(*info.features, "grammar"))

    def _write(self, chunk: ScheduledChunk) -> None:
        pass  # what it says follows from the tokens alone

    def _next_token(self, sequence: Sequence) -> int:
        line = self._lines.get(sequence.key)
        if line is None:
            line = self._lines[sequence.key] = self._line(
                sequence.tokens[: sequence.prompt_len].tolist()
            )
        position = len(sequence.tokens) - sequence.prompt_len
        return line[position] if position < len(line) else EOS

    def _line(self, prompt: list[int]) -> list[int]:
        text = self._tokenizer.decode(prompt, skip_special_tokens=False)
        for wanted, said in self._rules:
            if found := wanted.search(text):
                encoded = self._tokenizer.encode(found.expand(said), add_special_tokens=False)
                return [*encoded.ids, EOS]
        return [EOS]
