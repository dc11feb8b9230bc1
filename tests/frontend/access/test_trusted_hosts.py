"""Who is answered without a key, and who with one."""

import json
from pathlib import Path

import pytest

from pdserve.errors import Forbidden
from pdserve.frontend.access.trusted_hosts import TrustedHosts
from pdserve.frontend.config import FrontendConfig
from tests.frontend.support import HELLO, frontend, raw_connection, read_answer

KEYS = Path("keys.toml")
EVIL = "http://evil.example"


def refused(headers, **config):
    try:
        TrustedHosts(FrontendConfig(**config), "box.example").check(headers)
    except Forbidden:
        return True
    return False


def test_without_keys_only_known_names_are_answered():
    assert refused({"Host": "evil.example"})
    for host in ("127.0.0.1:8000", "box.example:8000", "box", "localhost"):
        assert not refused({"Host": host})
    assert not refused({"Host": "llm.lan"}, host="llm.lan")
    assert not refused({"Host": "llm.lan"}, allowed_hosts=("llm.lan",))
    assert not refused({"Host": "evil.example"}, allowed_hosts=("*",))


def test_with_keys_names_are_compared_only_if_some_are_configured():
    assert not refused({"Host": "any.example", "Origin": EVIL}, api_keys_file=KEYS)
    assert refused({"Host": "any.example"}, api_keys_file=KEYS, allowed_hosts=("llm.lan",))


def test_a_known_host_does_not_let_a_foreign_page_in():
    visitors = TrustedHosts(FrontendConfig(), "box")
    visitors.check({"Host": "127.0.0.1"})
    visitors.check({"Host": "127.0.0.1"})
    for headers in ({"Host": "127.0.0.1", "Origin": EVIL}, {"Host": "evil.example"}):
        with pytest.raises(Forbidden):
            visitors.check(headers)


async def test_every_endpoint_asks_who_calls():
    """DNS rebinding, and a page's simple request, which needs no preflight."""
    async with frontend() as client:
        paths = [(p, m) for p, t in client.service._api._targets.items() for m in t.methods]
        assert ("/metrics", "GET") in paths
        for path, method in [*paths, ("/nowhere", "GET"), ("/v1/models/tiny", "GET")]:
            for more in (
                {"Host": "evil.example:8000"},
                {"Origin": EVIL, "Content-Type": "text/plain"},
            ):
                async with client.http.request(
                    method, client.url + path, data=json.dumps(HELLO), headers=more
                ) as answer:
                    assert answer.status == 403, path
                    assert "Access-Control-Allow-Origin" not in answer.headers
        async with client.http.options(
            client.url + "/tokenize", headers={"Origin": EVIL}
        ) as answer:
            assert answer.status == 403
        assert client.backend.requests == []


async def test_programs_need_not_say_anything():
    async with frontend() as client, raw_connection(client) as (reader, writer):
        writer.write(b"GET /health HTTP/1.0\r\n\r\n")
        assert (await read_answer(reader))[0] == 200
        status, _, _ = await client.post(
            "/tokenize", {"prompt": "x"}, {"Content-Type": "text/plain"}
        )
        assert status == 200
