from typing import Any

from pdserve.errors import PayloadTooLarge
from pdserve.frontend.output.response_memory import ResponseMemory, tokens_bytes
from tests.frontend.support import HELLO, frontend, tokens, until
from tests.support.fake_backend import Script


class Growing:
    def __init__(self):
        self.error = None

    def fail(self, error):
        self.error = error


def test_an_answer_that_grows_beyond_its_bound_fails():
    gathered, small, large = ResponseMemory(100, 1000), Growing(), Growing()
    gathered.grow(small, 100)
    gathered.grow(large, 60)
    assert small.error is large.error is None
    gathered.grow(large, 60)
    assert isinstance(large.error, PayloadTooLarge)
    assert small.error is None


def test_beyond_the_common_bound_the_largest_goes():
    gathered, small, large = ResponseMemory(100, 150), Growing(), Growing()
    gathered.grow(large, 90)
    gathered.grow(small, 60)
    assert large.error is None
    gathered.grow(small, 1)
    assert isinstance(large.error, PayloadTooLarge)
    assert small.error is None
    gathered.forget(large)
    gathered.forget(large)
    assert gathered.size == 61
    gathered.forget(small)
    assert gathered.size == 0


async def test_an_answer_that_asks_for_too_much_is_refused_with_what_would_help():
    limit = tokens_bytes(100, 2)
    rich: dict[str, Any] = {"logprobs": True, "top_logprobs": 2}
    async with frontend(Script(tokens=tokens("hi")), max_answer=limit) as client:
        await client.chat(max_tokens=100, **rich)
        body = HELLO | rich | {"max_tokens": 101}
        status, _, answer = await client.post("/v1/chat/completions", body)
        assert (status, answer["error"]["param"]) == (400, "max_tokens")
        assert "stream it" in answer["error"]["message"]
        body = HELLO | rich | {"max_tokens": 51, "n": 2}
        assert (await client.post("/v1/chat/completions", body))[0] == 400
        assert len(await client.chunks(max_tokens=101, **rich)) > 100


async def test_an_answer_that_becomes_too_large_ends_and_is_forgotten():
    limit = tokens_bytes(100, 2)
    script = Script(tokens=tokens("hi"))
    async with frontend(script, max_answer=limit) as client:
        body = HELLO | {"logprobs": True, "top_logprobs": 2}  # of any length
        status, _, answer = await client.post("/v1/chat/completions", body)
        assert (status, answer["error"]["code"]) == (413, PayloadTooLarge.code)
        await until(lambda: client.backend.idle)
        assert client.service._generations.gathered.size == 0
        await client.chat(max_tokens=5)


async def test_priorities_are_bounded_over_http(tmp_path):
    file = tmp_path / "keys.toml"
    file.write_text('[[key]]\nkey = "sk-12345678"\ntenant = "t"\nmax_priority = 2\n')
    file.chmod(0o600)
    auth = {"Authorization": "Bearer sk-12345678"}
    async with frontend(api_keys_file=file) as client:
        for priority, wanted in [(2, 200), (-9, 200), (3, 403)]:
            body = HELLO | {"priority": priority, "max_tokens": 1}
            status, _, answer = await client.post("/v1/chat/completions", body, auth)
            assert status == wanted
        assert answer["error"]["param"] == "priority"
    async with frontend(max_priority=0) as client:
        body = HELLO | {"priority": 1, "max_tokens": 1}
        assert (await client.post("/v1/chat/completions", body))[0] == 403
