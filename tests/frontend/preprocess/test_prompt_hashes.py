"""A frontend's names are the engine's, whoever asks; without a secret there are none."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from pdserve.blocks.hashing import HASH_SECRET_TEST, hash_secret_id
from pdserve.engine_core.scheduler.block_hasher import BlockHasher
from pdserve.engine_core.scheduler.sequence import Sequence
from pdserve.frontend.access.api_keys import ApiKey
from pdserve.frontend.config import FrontendConfig
from pdserve.frontend.model_registry import PreparedModel
from pdserve.frontend.preprocess.input_processor import PlanContext, plan_chat, plan_completion
from pdserve.frontend.preprocess.prompt_hashes import NO_HASHING, PromptHasher, PromptHashes
from pdserve.messages.lora import LoraSummary
from pdserve.protocols.request_decoder import CHAT, COMPLETION
from pdserve.text.text_pool import TextPool
from tests.frontend.support import card

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from pdserve.messages.request import GenerateRequest

SIZE = 4
LORAS = (LoraSummary(name="poet", revision="1"), LoraSummary(name="clerk", revision="2"))
MODEL = card(block_size=SIZE, compat_hash="compat", loras=LORAS)
NAMING = PromptHasher(lambda: HASH_SECRET_TEST)
ENGINE = BlockHasher(HASH_SECRET_TEST, SIZE, "compat")


@pytest.fixture
async def pool() -> AsyncIterator[TextPool]:
    made = TextPool()
    yield made
    await made.close()


def context(
    pool: TextPool, naming: PromptHasher, key: ApiKey | None = None, name: str | None = None
) -> PlanContext:
    return PlanContext(
        model=PreparedModel.from_card(MODEL).adapted(name),
        config=FrontendConfig(),
        pool=pool,
        request_id="r",
        naming=naming,
        key=key,
    )


async def completion(context: PlanContext, **fields: Any) -> list[GenerateRequest]:

    body = msgspec.json.encode({"max_tokens": 1} | fields)
    return (await plan_completion(COMPLETION.decode(body).request, context)).requests


def engines_names(request: GenerateRequest) -> list[bytes]:
    """What the engine would make itself of the prompt."""
    root = ENGINE.root(request.cache_salt, request.lora)
    prompt = request.prompt
    sequence = Sequence(1, 0, request, prompt, len(prompt), 0.0, root=root)
    return ENGINE.of(sequence, len(prompt) // SIZE)


async def test_every_prompt_carries_the_names_that_the_engine_would_give(pool: TextPool) -> None:
    prompts = [[3, 4, 5], list(range(3, 12)), [7] * 40]
    requests = await completion(context(pool, NAMING), prompt=prompts)
    assert [len(request.block_names) for request in requests] == [0, 32, 160]
    for request in requests:
        assert request.names_id == ENGINE.id
        assert ENGINE.given(request, ENGINE.root(request.cache_salt)) == engines_names(request)


async def test_salts_and_tenants_have_names_of_their_own(pool: TextPool) -> None:
    tenant = context(pool, NAMING, ApiKey(digest=b"d" * 32, tenant="t", cache_isolation=True))
    anybody = context(pool, NAMING)
    made = []
    for where, fields in ((anybody, {}), (anybody, {"cache_salt": "s"}), (tenant, {})):
        (request,) = await completion(where, prompt=[5] * 8, **fields)
        assert ENGINE.given(request, ENGINE.root(request.cache_salt)) == engines_names(request)
        made.append(request.block_names)
    assert len(set(made)) == 3


async def test_adapters_have_names_of_their_own(pool: TextPool) -> None:
    made = {}
    for name in (None, "poet", "clerk"):
        (request,) = await completion(context(pool, NAMING, name=name), prompt=[5] * 8)
        root = ENGINE.root(request.cache_salt, request.lora)
        assert ENGINE.given(request, root) == engines_names(request)
        made[request.lora] = request.block_names
    assert list(made) == ["", "poet@1", "clerk@2"]
    assert len(set(made.values())) == 3


async def test_a_chat_is_named_too(pool: TextPool) -> None:
    body = b'{"messages": [{"role": "user", "content": "a long story about nothing at all"}]}'
    (request,) = (await plan_chat(CHAT.decode(body).request, context(pool, NAMING))).requests
    assert len(request.block_names) >= 32
    assert ENGINE.given(request, ENGINE.root(request.cache_salt)) == engines_names(request)


async def test_without_a_secret_nothing_is_named_and_nothing_waits(pool: TextPool) -> None:
    (request,) = await completion(context(pool, NO_HASHING), prompt=[5] * 8)
    assert (request.block_names, request.names_id) == (b"", b"")
    assert NO_HASHING.of_one(MODEL, "", [5] * 8) == PromptHashes()


async def test_the_secret_is_the_one_of_the_moment(pool: TextPool) -> None:
    secrets = [b"", b"first", b"second"]
    naming = PromptHasher(lambda: secrets.pop(0))
    ids = [(await naming.of(MODEL, "", [[5] * 8], pool))[0].id for _ in range(3)]
    assert ids == [b"", hash_secret_id(b"first"), hash_secret_id(b"second")]


async def test_long_prompts_are_named_in_the_pool(pool: TextPool) -> None:
    before = pool.stats()
    short, long = [5] * 4000, [5] * 40_000
    (named,) = await NAMING.of(MODEL, "", [short], pool)
    assert pool.stats().handed_over == before.handed_over
    (longer,) = await NAMING.of(MODEL, "", [long], pool)
    assert pool.stats().handed_over == before.handed_over + 1
    assert longer.hashes.startswith(named.hashes)
    assert longer == NAMING.of_one(MODEL, "", long)
