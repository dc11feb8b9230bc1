"""lm-eval's `local-completions` against pdserve: scores of a server and of transformers beside.

    python -m bench.peers.lm_eval --lm-eval PYTHON [--model DIR] [--write FILE]

PYTHON is the interpreter of an environment that has lm-eval and what its API models need:

    pip install --no-deps lm_eval tqdm && pip install aiohttp requests tenacity transformers

lm-eval scores texts with `/v1/completions`: it sends token ids, and gets them back with logprobs
and one more token, which it ignores. Here it scores sentences with several endings, as a
multiple-choice task does, in batches and one by one; a whole text (perplexity); and a generation up
to a stop string. `transformers` scores the same texts from the same checkpoint in this process. A
difference above `TOLERANCE` is a failure.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from bench.machine import facts

if TYPE_CHECKING:
    from collections.abc import Iterator

TOLERANCE: Final = 1e-3
"""Largest allowed difference of the summed logprobs of one ending."""
BUNDLED: Final = Path(__file__).parents[2] / "pdserve" / "bundled"
STARTS: Final = [
    "Once upon a time there was a",
    "The little girl went to the",
    "One day, Tom and his dog",
    "It was a sunny day and the bird",
    "Mum said: \"Do not",
    "In the big forest lived a",
    "They were very happy because",
    "Lily wanted to play with her",
    "The end of the story is",
    "A cat sat on the mat. The cat",
    "",
    "É um dia — ou não? 👍",
]  # fmt: skip
ENDINGS: Final = [" little girl named Lily.", " park to play.", " were good friends", " 42\n\n"]

_INSIDE: Final = """
import json, sys
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI

asked = json.load(sys.stdin)
def instances(kind, arguments):
    return [Instance(request_type=kind, doc={}, arguments=tuple(a), idx=i)
            for i, a in enumerate(arguments)]
answers = {}
for size in (1, 8):
    model = LocalCompletionsAPI(
        model=asked["name"], base_url=asked["url"] + "/v1/completions", batch_size=size,
        tokenizer_backend="huggingface", tokenizer=asked["model"], max_length=asked["length"])
    answers[f"batches of {size}"] = model.loglikelihood(instances("loglikelihood", asked["pairs"]))
    prefix = model.prefix_token_id
rolling = model.loglikelihood_rolling(instances("loglikelihood_rolling", [[asked["text"]]]))
until = {"until": ["."], "max_gen_toks": 24}
said = model.generate_until(instances("generate_until", [[asked["start"], until]]))
json.dump({"answers": answers, "rolling": rolling, "said": said, "prefix": prefix}, sys.stdout)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lm-eval", required=True, help="an interpreter that has lm-eval")
    parser.add_argument("--model", type=Path, default=BUNDLED)
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    pairs = [(start, ending) for start in STARTS for ending in ENDINGS]
    text = " ".join(start + ending for start, ending in pairs[:16])
    with serving(options.model) as (url, name, length):
        asked = {
            "url": url,
            "name": name,
            "model": str(options.model),
            "length": length,
            "pairs": pairs,
            "text": text,
            "start": STARTS[0],
        }
        begun = time.perf_counter()
        found = inside(options.lm_eval, asked)
        took = time.perf_counter() - begun
    reference = Reference(options.model, found["prefix"])
    lines = report(pairs, text, found, reference, took)
    print("\n".join(lines))
    if options.write:
        options.write.write_text("\n".join(lines) + "\n")


@contextlib.contextmanager
def serving(model: Path) -> Iterator[tuple[str, str, int]]:
    """Starts a server of `model`; gives its address, the model's name and its context length."""
    command = [sys.executable, "-m", "pdserve", "--model", str(model), "--port", "0"]
    command += ["--dtype", "float32"]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            url = f"http://127.0.0.1:{_port(process, log)}"
            (served,) = _models(url)
            yield url, served["id"], served["max_model_len"]
        finally:
            process.terminate()
            process.wait(30)


def _port(process: subprocess.Popen[bytes], log: Any) -> int:
    until = time.monotonic() + 120
    while time.monotonic() < until and process.poll() is None:
        log.seek(0)
        for line in log.read().splitlines():
            if "listening on" in line and "port " in line:
                return int(re.findall(r"port (\d+)", line)[-1])
        time.sleep(0.1)
    log.seek(0)
    sys.exit(f"the server did not start:\n{log.read()}")


def _models(url: str) -> list[dict[str, Any]]:
    import urllib.request

    until = time.monotonic() + 120
    while time.monotonic() < until:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=60) as answer:
            listed: list[dict[str, Any]] = json.load(answer)["data"]
        if listed:
            return listed
        time.sleep(0.1)
    sys.exit("the server did not load its model")


def inside(python: str, asked: dict[str, Any]) -> dict[str, Any]:
    """Runs lm-eval in its own process and environment; returns its output."""
    with tempfile.TemporaryDirectory() as folder:  # this folder holds a file of lm-eval's name
        done = subprocess.run(
            [python, "-c", _INSIDE],
            input=json.dumps(asked),
            stdout=subprocess.PIPE,
            text=True,
            cwd=folder,
            timeout=600,
            check=True,
        )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


class Reference:
    """Computes the same scores with transformers."""

    def __init__(self, model: Path, prefix: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self._prefix = prefix
        self._torch = torch
        self._tokenizer = AutoTokenizer.from_pretrained(str(model))
        load: Any = AutoModelForCausalLM.from_pretrained
        self._model = load(str(model), dtype=torch.float32).eval()

    def score(self, start: str, ending: str) -> tuple[float, bool]:
        """Returns the ending's logprob, and whether greedy decoding gives it. Trailing spaces of
        the start belong to the ending, as in lm-eval."""
        bare = start.rstrip()
        start, ending = bare, start[len(bare) :] + ending
        context = self._ids(start) if start else [self._prefix]
        whole = self._ids(start + ending) if start else [self._prefix, *self._ids(ending)]
        return self._score(whole, len(context))

    def text(self, text: str) -> float:
        """Returns the logprob of a whole text."""
        return self._score([self._prefix, *self._ids(text)], 1)[0]

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def _score(self, ids: list[int], begin: int) -> tuple[float, bool]:
        with self._torch.inference_mode():
            logits = self._model(self._torch.tensor([ids])).logits[0].log_softmax(-1)
        rows, tokens = logits[begin - 1 : -1], self._torch.tensor(ids[begin:])
        own = rows.gather(1, tokens.unsqueeze(1)).squeeze(1)
        return float(own.sum()), bool((own == rows.amax(-1)).all())


def report(
    pairs: list[tuple[str, str]],
    text: str,
    found: dict[str, Any],
    reference: Reference,
    took: float,
) -> list[str]:
    """Returns the page; ends the program if something differs."""
    expected = [reference.score(*pair) for pair in pairs]
    rows, worst = [], 0.0
    for way, answers in found["answers"].items():
        differences = [
            abs(mine[0] - yours[0]) for mine, yours in zip(answers, expected, strict=True)
        ]
        greedy = sum(mine[1] == yours[1] for mine, yours in zip(answers, expected, strict=True))
        worst = max(worst, *differences)
        rows.append(
            f"| loglikelihood, {way} | {len(pairs)} | {max(differences):.1e} "
            f"| {greedy} of {len(pairs)} |"
        )
    rolling = found["rolling"][0]
    rolling = rolling[0] if isinstance(rolling, list) else rolling
    difference = abs(rolling - reference.text(text))
    worst = max(worst, difference)
    rows.append(f"| loglikelihood_rolling | 1 | {difference:.1e} | |")
    if worst > TOLERANCE:
        sys.exit(f"logprobs differ by {worst}: more than {TOLERANCE}\n" + "\n".join(rows))
    return [
        "# lm-eval against pdserve",
        "",
        "`python -m bench.peers.lm_eval`: lm-eval's `local-completions` against a real server of",
        "the bundled model, and the same texts scored by transformers from the same checkpoint",
        f"(float32). Tolerance {TOLERANCE:g}; all of it took lm-eval {took:.1f} s.",
        "",
        *[f"- {fact}" for fact in facts()],
        "",
        "| what | texts | largest difference of a sum of logprobs | greedy or not, agreed |",
        "|---|---:|---:|---:|",
        *rows,
        "",
        f"`generate_until` with a stop string said {found['said'][0]!r}.",
    ]


if __name__ == "__main__":
    main()
