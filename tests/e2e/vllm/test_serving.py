"""What users of the API get from two real vLLM engines behind a router, and what operators see."""

from __future__ import annotations

import json
import subprocess
from typing import TYPE_CHECKING, Any

import openai
import pytest

from pdserve.launch import exit_codes
from tests.chaos.cluster import eventually
from tests.e2e.openai_client import client_of
from tests.e2e.server import PATIENCE
from tests.e2e.vllm.cluster import BLOCK, PYTHON, TokenStream

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.e2e.vllm.cluster import VllmCluster

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

HELLO: Any = [{"role": "user", "content": "hello there"}]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"enum": ["Ada", "Bob"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture
def client(cluster: VllmCluster) -> Iterator[openai.OpenAI]:
    with client_of(cluster.front.url) as client:
        yield client


def chat(client: openai.OpenAI, **fields: Any) -> Any:
    fields = {"model": "tiny", "messages": HELLO, "max_tokens": 12, "temperature": 0} | fields
    return client.chat.completions.create(**fields)


# ---------------------------------------------------------------------- the API


def test_a_chat_and_its_stream_have_the_same_text(client):
    whole = chat(client)
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == 12
    with chat(client, stream=True, stream_options={"include_usage": True}) as stream:
        chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == 12


def test_an_answer_has_the_form_of_its_schema(client):
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
    # A model of random weights likes white space between the words.
    answer = chat(client, max_tokens=1000, temperature=1.0, seed=4, response_format=form)
    person = json.loads(answer.choices[0].message.content)
    assert person["name"] in ("Ada", "Bob")
    assert 0 <= person["age"] <= 99
    assert answer.choices[0].finish_reason == "stop"


def test_a_tool_is_called_as_its_schema_says(client):
    answer = chat(client, max_tokens=1000, tools=[WEATHER], tool_choice="required")
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")
    assert answer.choices[0].finish_reason == "tool_calls"


def test_logprobs_rank_the_alternatives(client):
    answer = chat(client, logprobs=True, top_logprobs=3)
    content = answer.choices[0].logprobs.content
    assert len(content) == 12
    for entry in content:
        ranked = [alternative.logprob for alternative in entry.top_logprobs]
        assert len(ranked) == 3
        assert ranked == sorted(ranked, reverse=True)
        assert entry.logprob == pytest.approx(ranked[0])


def test_two_choices_differ_and_repeat_by_their_seed(client):
    def texts() -> list[str]:
        answer = chat(client, n=2, temperature=1.0, seed=3)
        return [choice.message.content for choice in answer.choices]

    first = texts()
    assert len(set(first)) == 2
    assert texts() == first


def test_a_model_that_makes_no_vectors_says_so(client):
    with pytest.raises(openai.BadRequestError, match="makes no vectors"):
        client.embeddings.create(model="tiny", input="hello")


# ---------------------------------------------------------------------- cancellation


def test_a_client_that_goes_away_frees_its_blocks_at_once(cluster):
    stream = TokenStream(cluster.front, "A long answer, please. " * 20, 1500)
    stream.read(5)
    worker = cluster.workers[stream.worker]
    worker.wait_count("pdserve_num_requests_running", 1)
    assert worker.count("pdserve_kv_blocks_used") > 0
    steps = worker.count("pdserve_engine_steps_total")
    stream.close()
    worker.wait_count("pdserve_kv_blocks_used", 0)
    worker.wait_count("pdserve_num_requests_running", 0)
    # The whole answer would have taken 1,500 steps.
    assert worker.count("pdserve_engine_steps_total") - steps < 750


# ---------------------------------------------------------------------- routing


@pytest.mark.parametrize("number", range(3))
def test_a_second_turn_goes_where_its_blocks_are(cluster, client, number):
    first = f"Story {number}: " + f"a prompt of its own, number {number}. " * 30
    talk: Any = [{"role": "user", "content": first}]
    begun = client.chat.completions.with_raw_response.create(
        model="tiny", messages=talk, max_tokens=40, extra_body={"ignore_eos": True}
    )
    name = begun.headers["x-pdserve-worker"]
    said = begun.parse().choices[0].message.content
    talk += [{"role": "assistant", "content": said}, {"role": "user", "content": "Go on."}]

    def known() -> bool:
        explained = cluster.front.post("/route", {"model": "tiny", "messages": talk})
        overlaps = {one["worker"]: one["overlap_tokens"] for one in explained["candidates"]}
        # A load report may count the first turn for a while after its end, and before there is a
        # fitted model of latency one request more weighs as much as these blocks.
        return overlaps[name] >= 5 * BLOCK and explained["worker"] == name

    eventually(known, "the router never chose the worker with the blocks")
    counted = {n: cached(worker) for n, worker in cluster.workers.items()}
    again = client.chat.completions.with_raw_response.create(
        model="tiny", messages=talk, max_tokens=4
    )
    assert again.headers["x-pdserve-worker"] == name
    told = int(again.headers["x-pdserve-cached-tokens"])
    assert told >= 5 * BLOCK
    assert told % BLOCK == 0
    assert int(again.headers["x-pdserve-overlap-tokens"]) == told, "the router knew"
    counted[name] += told
    for worker, count in counted.items():
        cluster.workers[worker].wait_count("pdserve_cached_prompt_tokens_total", count)


def cached(worker: Any) -> float:
    return worker.count("pdserve_cached_prompt_tokens_total")


# ---------------------------------------------------------------------- what operators see


def test_status_and_metrics_show_model_blocks_and_requests(cluster):
    stream = TokenStream(cluster.front, "Look at this one while it runs. " * 10, 1500)
    stream.read(3)
    worker = cluster.workers[stream.worker]
    worker.wait_count("pdserve_num_requests_running", 1)
    used = worker.count("pdserve_kv_blocks_used")
    assert 0 < used < worker.count("pdserve_kv_blocks")
    member = eventually(lambda: running_one(cluster, stream.worker), "status shows no request")
    assert member["models"] == ["tiny"]
    assert member["report"]["worker"]["ready"] is True
    assert (
        0 < member["report"]["worker"]["blocks_used"] < member["report"]["worker"]["blocks_total"]
    )
    stream.close()
    worker.wait_count("pdserve_num_requests_running", 0)
    (model,) = shown(cluster)["models"]
    assert (model["name"], model["engine"]) == ("tiny", "vllm")
    assert model["workers"] == ["left", "right"]


def running_one(cluster: VllmCluster, name: str) -> Any:
    """What `pdserve status` says of a worker; None if it runs nothing."""
    (member,) = (m for m in shown(cluster)["members"] if m["node"] == name)
    return member if member["report"]["worker"]["running"] else None


def shown(cluster: VllmCluster) -> Any:
    done = command(cluster, "status", "--json", "--join", cluster.address)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def command(cluster: VllmCluster, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(PYTHON), "-m", "pdserve", *words],
        env=cluster.front.environ,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def test_a_mistyped_option_ends_the_process_with_a_hint(cluster):
    done = command(cluster, "--engine", "vllm", "--engine-option", "enforce_eagr=1", "--port=0")
    assert done.returncode == exit_codes.USAGE
    assert "did you mean 'enforce_eager'?" in done.stderr
