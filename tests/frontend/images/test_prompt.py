"""Images of chats in prompts: rendered, counted, named by what they show; in all three APIs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from pdserve.blocks.hashing import HASH_SECRET_TEST, joined_hashes, prompt_root
from pdserve.blocks.image_hashes import (
    IMAGE_FILLER,
    PlacedImage,
    image_block_hashes,
    image_digest,
)
from pdserve.errors import InvalidRequest
from pdserve.frontend.config import FrontendConfig
from pdserve.frontend.images.loader import ImageLoader
from pdserve.frontend.model_registry import PreparedModel
from pdserve.frontend.preprocess.input_processor import PlanContext, plan_chat
from pdserve.frontend.preprocess.prompt_hashes import PromptHasher
from pdserve.frontend.service import FrontendService
from pdserve.messages.card import ImagePlaceholder, ModelCard
from pdserve.observe.metrics import Metrics
from pdserve.protocols.request_decoder import CHAT
from pdserve.text.text_pool import TextPool
from tests.frontend.images.pictures import data_url, png, user
from tests.frontend.support import TOKENIZER, Client, card, tokens
from tests.support.fake_backend import FakeBackend, Script

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from pdserve.frontend.plan import RequestPlan
    from pdserve.messages.request import GenerateRequest

MARK = 2
TEXT = TOKENIZER.decode([MARK], skip_special_tokens=False)
CAT, DOG, WIDE = png(shows=b"a cat"), png(shows=b"a dog"), png(90, 20, b"a street")
PARTS = (
    "{% for m in messages %}<s>{{ m.role }}: {% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}" + TEXT + "{% else %}{{ p.text }}"
    "{% endif %}{% endfor %}{% endif %}</s>{% endfor %}"
)
ONLY_USER = PARTS.replace("p.type == 'image'", "p.type == 'image' and m.role == 'user'")


def model(**changes: Any) -> ModelCard:
    fields: dict[str, Any] = {
        "block_size": 4,
        "compat_hash": "sees",
        "features": ("images",),
        "image": ImagePlaceholder(token=MARK, text=TEXT, most=4),
        "chat_template": PARTS,
        "engine": "vllm",
    }
    return card(**(fields | changes))


class Planning:
    """Plans chats of one model, as one frontend does."""

    def __init__(self, **changes: Any) -> None:
        self.pool = TextPool()
        self.card = model(**changes)
        self.metrics = Metrics()
        self.loader = ImageLoader(FrontendConfig(), self.metrics)
        self._model = PreparedModel.from_card(self.card)

    async def plan(self, *messages: dict[str, object], **fields: Any) -> RequestPlan:
        body = json.dumps({"messages": messages, "max_tokens": 5} | fields).encode()
        intake = self.loader.intake()
        context = PlanContext(
            model=self._model,
            config=FrontendConfig(),
            pool=self.pool,
            request_id="r",
            naming=PromptHasher(lambda: HASH_SECRET_TEST),
            images=intake,
        )
        try:
            return await plan_chat(CHAT.decode(body).request, context)
        finally:
            intake.release()

    async def request(self, *messages: dict[str, object], **fields: Any) -> GenerateRequest:
        (found,) = (await self.plan(*messages, **fields)).requests
        return found

    async def refused(self, *messages: dict[str, object], **fields: Any) -> InvalidRequest:
        with pytest.raises(InvalidRequest) as caught:
            await self.plan(*messages, **fields)
        return caught.value

    def names(self, pieces: list[int | tuple[bytes, int]], salt: str = "") -> bytes:
        """The hashes of an expanded prompt."""
        prompt: list[int] = []
        images = []
        for piece in pieces:
            if isinstance(piece, int):
                prompt.append(piece)
            else:
                images.append(PlacedImage(len(prompt), image_digest(piece[0])))
                prompt += [IMAGE_FILLER] * piece[1]
        root = prompt_root(HASH_SECRET_TEST, "sees", salt)
        return image_block_hashes(prompt, images, 4, parent=root, secret=HASH_SECRET_TEST)


@pytest.fixture
async def planning() -> AsyncIterator[Planning]:
    made = Planning()
    yield made
    await made.loader.close()
    await made.pool.close()


# ------------------------------------------------------------------ plans


async def test_a_prompt_has_a_placeholder_for_each_image(planning: Planning) -> None:
    request = await planning.request(user("see", CAT, "and", DOG))
    expected = f"<s>user: see{TEXT}and{TEXT}</s>"
    assert TOKENIZER.decode(request.prompt, skip_special_tokens=False) == expected
    assert request.images == (CAT, DOG)
    assert request.image_tokens == (0, 0)
    assert request.needs == ("images",)


async def test_text_alone_is_as_before(planning: Planning) -> None:
    request = await planning.request(user("only text in parts"))
    root = prompt_root(HASH_SECRET_TEST, "sees", "")
    names = joined_hashes(request.prompt, 4, parent=root, secret=HASH_SECRET_TEST)
    assert (request.images, request.needs, request.block_names) == ((), (), names)


async def test_a_template_without_parts_gets_the_placeholders_text() -> None:
    planning = Planning(chat_template="{% for m in messages %}{{ m.content }}{% endfor %}")
    request = await planning.request(user(CAT, "what is it?"))
    text = TOKENIZER.decode(request.prompt, skip_special_tokens=False)
    assert text == f"{TEXT}\nwhat is it?"
    await planning.pool.close()


async def test_names_end_at_an_image_of_unknown_size(planning: Planning) -> None:
    head = "a text before the picture which is long enough for some blocks"
    request = await planning.request(user(head, CAT, head))
    before = request.prompt[: request.prompt.index(MARK)]
    assert request.block_names == planning.names(list(before)) != b""
    assert planning.metrics.image_prompts_unnamed.value == 1


async def test_sizes_are_learned_and_prompts_named_whole(planning: Planning) -> None:
    messages = user("see", CAT, "and", WIDE, "well")
    plan = await planning.plan(messages)
    plan.on_image_tokens((6, 11))
    request = await planning.request(messages)
    assert request.image_tokens == (6, 11)
    assert request.prompt_tokens == len(request.prompt) + 5 + 10
    sizes = [(CAT, 6), (WIDE, 11)]
    pieces = [sizes.pop(0) if token == MARK else token for token in request.prompt]
    assert request.block_names == planning.names(pieces)
    again = await planning.plan(messages)
    assert again.prompt_tokens == request.prompt_tokens
    other = await planning.request(user("see", DOG, "and", WIDE, "well"))
    assert other.prompt == request.prompt
    assert other.image_tokens == request.image_tokens, "of the same sizes"
    assert other.block_names[16:] != request.block_names[16:]
    assert planning.metrics.image_prompts_unnamed.value == 1


async def test_a_prompt_that_its_images_fill_is_refused() -> None:
    planning = Planning(max_model_len=60)
    messages = user("see", CAT)
    (await planning.plan(messages)).on_image_tokens((60,))
    error = await planning.refused(messages)
    assert error.code == "context_length_exceeded"
    await planning.pool.close()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"features": ()}, "takes no images with the engine 'vllm'"),
        ({"features": (), "image": None, "engine": "torch"}, "with the engine 'torch'"),
        ({"image": None}, "'--engine vllm' serves them"),
    ],
)
async def test_models_that_see_nothing(changes: dict[str, Any], words: str) -> None:
    planning = Planning(**changes)
    error = await planning.refused(user("see", CAT))
    assert error.param == "messages[0].content[1].image_url"
    assert words in error.message
    await planning.pool.close()


async def test_no_text_stands_for_an_image(planning: Planning) -> None:
    error = await planning.refused(user(f"see {TEXT} here", CAT))
    assert "stands for an image, 1 times without an image" in error.message
    error = await planning.refused({"role": "user", "content": f"see {TEXT} here"})
    assert error.param == "messages"
    error = await planning.refused(
        {"role": "user", "content": [{"type": "image", "text": "x"}, {"type": "text", "text": "y"}]}
    )
    assert error.param == "messages[0].content[0].type"


async def test_a_template_that_leaves_images_out() -> None:
    planning = Planning(chat_template=ONLY_USER)
    await planning.request(user("see", CAT))
    error = await planning.refused(user("see", CAT), user("see", DOG) | {"role": "assistant"})
    assert "has places for 1 of 2 images" in error.message
    await planning.pool.close()


@pytest.mark.parametrize("field", ["truncate_prompt_tokens", "prompt_logprobs"])
async def test_fields_that_exclude_images(planning: Planning, field: str) -> None:
    error = await planning.refused(user("see", CAT), **{field: 3})
    assert error.param == field


# ------------------------------------------------------------------ the three APIs


class Served:
    """A frontend over a worker whose images take six tokens."""

    def __init__(self, client: Client, metrics: Metrics) -> None:
        self.client, self.metrics = client, metrics

    @property
    def requests(self) -> list[GenerateRequest]:
        return self.client.backend.requests

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        status, _, answer = await self.client.post(path, body)
        assert status == 200, answer
        return answer

    async def refused(self, path: str, body: dict[str, Any]) -> Any:
        status, _, answer = await self.client.post(path, body)
        assert status == 400, answer
        return answer["error"]


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    script = Script(tokens=tokens("a cat"), image_tokens=(6, 6, 6), repeat=False)
    backend = FakeBackend({"tiny": model()}, script)
    metrics = Metrics()
    service = FrontendService(FrontendConfig(port=0, max_image_pixels=5000), backend, metrics)
    await service.start()
    await service._models.prepare()
    try:
        async with aiohttp.ClientSession() as http:
            yield Served(Client(service, backend, http), metrics)
    finally:
        await service.stop(0)
    assert service._generations.images.held == 0


BLOCK = {"type": "base64", "media_type": "image/png", "data": data_url(CAT).partition(",")[2]}
CHAT_BODY = {"messages": [user("see", CAT)], "max_tokens": 5}
RESPONSES_BODY = {
    "input": [
        {
            "role": "user",
            "content": [
                {"type": "input_text", "text": "see"},
                {"type": "input_image", "image_url": data_url(CAT), "detail": "high"},
            ],
        }
    ],
    "max_output_tokens": 5,
}
MESSAGES_BODY = {
    "messages": [
        {
            "role": "user",
            "content": [{"type": "text", "text": "see"}, {"type": "image", "source": BLOCK}],
        }
    ],
    "max_tokens": 5,
}
APIS = {
    "/v1/chat/completions": CHAT_BODY,
    "/v1/responses": RESPONSES_BODY,
    "/v1/messages": MESSAGES_BODY,
}


@pytest.mark.parametrize("path", APIS)
async def test_each_api_takes_images(served: Served, path: str) -> None:
    for _ in range(2):
        answer = await served.post(path, APIS[path])
        usage = answer["usage"]
        told = usage.get("prompt_tokens") or sum(
            usage.get(name, 0)
            for name in ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
        )
        first = served.requests[0]
        assert told == len(first.prompt) + 5
    assert [request.images for request in served.requests] == [(CAT,), (CAT,)]
    assert [request.image_tokens for request in served.requests] == [(0,), (6,)]
    assert TOKENIZER.decode(first.prompt, skip_special_tokens=False) == f"<s>user: see{TEXT}</s>"
    assert served.metrics.request_images.labels("data").value == 2


async def test_the_apis_make_one_prompt(served: Served) -> None:
    for path, body in APIS.items():
        await served.post(path, body)
    assert len({tuple(request.prompt) for request in served.requests}) == 1
    assert [request.images for request in served.requests] == [(CAT,)] * 3


async def test_a_stream_says_what_images_took(served: Served) -> None:
    body = CHAT_BODY | {"stream_options": {"include_usage": True}}
    events = await served.client.events("/v1/chat/completions", body)
    *_, last, end = events
    assert end.done
    assert json.loads(last.data)["usage"]["prompt_tokens"] == len(served.requests[0].prompt) + 5


LARGE = png(100, 51)
PLACES: dict[str, tuple[dict[str, Any], str]] = {
    "/v1/chat/completions": (
        {"messages": [user("see", LARGE)]},
        "messages[0].content[1].image_url",
    ),
    "/v1/responses": (
        {
            "instructions": "look",
            "input": [
                {"role": "user", "content": "hello"},
                {
                    "role": "user",
                    "content": [{"type": "input_image", "image_url": data_url(LARGE)}],
                },
            ],
        },
        "input[1].content[0].image_url",
    ),
    "/v1/messages": (
        {
            "system": "look",
            "max_tokens": 5,
            "messages": [
                {"role": "user", "content": "hello"},
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "image",
                            "source": BLOCK | {"data": data_url(LARGE).partition(",")[2]},
                        }
                    ],
                },
            ],
        },
        "messages[1].content[0].source.data",
    ),
}


@pytest.mark.parametrize("path", PLACES)
async def test_errors_name_the_clients_own_field(served: Served, path: str) -> None:
    body, place = PLACES[path]
    error = await served.refused(path, body)
    assert f"'{place}' has 100 by 51 pixels; 5000 are allowed" in error["message"]
    assert place in json.dumps(error)
    assert served.metrics.images_refused.labels("pixels").value == 1
    assert served.requests == []


@pytest.mark.parametrize(
    ("source", "place", "words"),
    [
        ({"type": "file", "file_id": "1"}, "source.type", "use base64 or url"),
        ({"type": "url"}, "source.url", "required"),
        ({"type": "base64", "data": "x"}, "source.media_type", "required"),
        ({"type": "base64", "media_type": "image/png"}, "source.data", "required"),
        ({"type": "url", "url": "http://10.0.0.1/"}, "source.url", "--allowed-media-domains"),
        (None, "source", "required"),
    ],
)
async def test_blocks_of_anthropic(served: Served, source: Any, place: str, words: str) -> None:
    block = {"type": "image", "source": source}
    body = {"max_tokens": 5, "messages": [{"role": "user", "content": [block]}]}
    error = await served.refused("/v1/messages", body)
    assert f"messages[0].content[0].{place}" in error["message"]
    assert words in error["message"]


async def test_images_in_results_of_tools(served: Served) -> None:
    """An agent's screenshot."""
    use = {"type": "tool_use", "id": "1", "name": "look", "input": {}}
    content = [{"type": "text", "text": "done"}, {"type": "image", "source": BLOCK}]
    result = {"type": "tool_result", "tool_use_id": "1", "content": content}
    messages = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result]},
    ]
    await served.post("/v1/messages", {"max_tokens": 5, "messages": messages})
    assert served.requests[0].images == (CAT,)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages/count_tokens", MESSAGES_BODY),
        ("/v1/responses/input_tokens", RESPONSES_BODY),
        ("/tokenize", {"messages": [user("see", CAT)]}),
    ],
)
async def test_where_tokens_are_only_counted(
    served: Served, path: str, body: dict[str, Any]
) -> None:
    error = await served.refused(path, {k: v for k, v in body.items() if k != "max_tokens"})
    assert "leave images out here" in error["message"]
