"""`/v1/embeddings`: from a decoded request to a plan, and its vectors to an answer.

Each input is a submission of its own, whose engine computes the prompt and returns a vector instead
of a token. Everything else is as with generation: `generation` puts the steps in order.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import msgspec

from pdserve.errors import ContextLengthExceeded, InvalidRequest
from pdserve.frontend.answer import Answer, Choice
from pdserve.frontend.keys import check_priority, shared_salt
from pdserve.frontend.naming import NAMELESS
from pdserve.frontend.plan import Plan, Prompt
from pdserve.frontend.prompts import check_prompt_chars, most_chars
from pdserve.frontend.sampling import check_prompt_tokens
from pdserve.frontend.vectors import Shape
from pdserve.messages.request import GenerateRequest, SamplingParams
from pdserve.openai.embeddings import MAX_INPUTS, Embedding, EmbeddingList

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pdserve.frontend.gathered import Gathered
    from pdserve.frontend.models import ServedModel
    from pdserve.frontend.prompts import Context
    from pdserve.ids import Bytes, Seconds
    from pdserve.messages.card import ModelCard
    from pdserve.messages.request import TokenDelta
    from pdserve.observe.metrics import Metrics
    from pdserve.openai.embeddings import EmbeddingRequest

_encode_json = msgspec.json.Encoder().encode

_VECTOR = SamplingParams(max_tokens=1, temperature=0.0)
"""Nothing is sampled; other parts of the way want to know how much comes."""
_MIXTURE = (
    "'input' must be one text, a list of texts, a list of token ids, or a list of lists of token "
    "ids, not a mixture"
)


async def plan_embeddings(request: EmbeddingRequest, context: Context) -> Plan:
    """Errors: `InvalidRequest` and its kin, `Overloaded`."""
    card = context.model.card
    shape = shape_of(request, card)
    inputs = input_list(request.input)
    limit = context.config.max_answer
    if shape.size * len(inputs) > limit:
        raise InvalidRequest(
            f"{len(inputs)} vectors of {shape.kept} numbers would take about "
            f"{shape.size * len(inputs)} bytes; the limit is {limit}: send fewer inputs, or ask "
            "for 'encoding_format': \"base64\"",
            param="input",
        )
    prompts = [Prompt(tokens) for tokens in await _tokens(request, inputs, context)]
    return Plan(
        chat=False,
        model=context.model,
        model_name=request.model or card.name,
        answer_id="",
        created=int(time.time()),
        prompts=prompts,
        requests=await _submissions(request, context, prompts),
        n=1,
        vectors=shape,
    )


def shape_of(request: EmbeddingRequest, card: ModelCard) -> Shape:
    """What the answer's vectors look like.

    Errors: `InvalidRequest` if the model makes none, or none of that size.
    """
    if "embeddings" not in card.features or not card.pooling or not card.embedding_size:
        raise InvalidRequest(
            f"'{card.name}' makes no vectors: neither its files nor its workers' settings say how. "
            "Start its workers with --pooling=mean or --pooling=last, or name another model",
            param="model",
        )
    kept = card.embedding_size if request.dimensions is None else request.dimensions
    if kept != card.embedding_size:
        _check_dimensions(kept, card)
    return Shape(
        made=card.embedding_size,
        kept=kept,
        normalize=card.normalize or kept < card.embedding_size,
        base64=request.encoding_format == "base64",
    )


def _check_dimensions(wanted: int, card: ModelCard) -> None:
    allowed = card.dimensions
    if wanted in allowed or (0 in allowed and wanted < card.embedding_size):
        return
    whole = card.embedding_size
    if 0 in allowed:
        may = f"may have 1 to {whole} numbers"
    elif allowed:
        may = f"may have {', '.join(map(str, allowed))} or {whole} numbers"
    else:
        may = f"have {whole} numbers, and a part of them means nothing: leave 'dimensions' out"
    raise InvalidRequest(
        f"'dimensions' is {wanted}; vectors of '{card.name}' {may}", param="dimensions"
    )


# ---------------------------------------------------------------- inputs


def input_list(given: str | list[str | int | list[int]]) -> list[str | list[int]]:
    """The inputs, each a text or token ids, none of them empty.

    Errors: `InvalidRequest`.
    """
    if isinstance(given, list) and given and all(type(item) is int for item in given):
        return [given]  # type: ignore[list-item]  # just checked
    inputs: list[str | int | list[int]] = [given] if isinstance(given, str) else given
    if not 0 < len(inputs) <= MAX_INPUTS:
        raise InvalidRequest(
            f"'input' holds {len(inputs)} inputs; send 1 to {MAX_INPUTS}", param="input"
        )
    kind = type(inputs[0])
    for index, item in enumerate(inputs):
        name = "input" if isinstance(given, str) else f"input[{index}]"
        if type(item) is not kind or isinstance(item, int):
            raise InvalidRequest(_MIXTURE, param=name)
        if not item:
            raise InvalidRequest(f"'{name}' must not be empty", param=name)
    return inputs  # type: ignore[return-value]  # just checked


async def _tokens(
    request: EmbeddingRequest, inputs: Sequence[str | list[int]], context: Context
) -> list[list[int]]:
    """Of each input, cut if that is wished. Errors: `InvalidRequest`, `ContextLengthExceeded`."""
    model = context.model
    keep = _kept_tokens(request, model.card)
    batch = isinstance(request.input, list) and type(request.input[0]) is not int
    names = [f"input[{index}]" if batch else "input" for index in range(len(inputs))]
    texts = [each for each in inputs if isinstance(each, str)]
    encoded: Iterator[list[int]] = iter(())
    if texts:  # then all of them are
        special = request.add_special_tokens is not False
        size = sum(map(len, texts))
        encoded = iter(await context.pool.run(size, _encode, texts, names, special, keep, model))
    found = []
    for name, each in zip(names, inputs, strict=True):
        ids = next(encoded) if isinstance(each, str) else each[:keep]
        check_prompt_tokens(ids, model.card, name)
        _check_length(ids, model.card, name)
        found.append(ids)
    return found


def _kept_tokens(request: EmbeddingRequest, card: ModelCard) -> int | None:
    """Of an input, at most; None: all, or it is refused."""
    wanted = request.truncate_prompt_tokens
    if wanted == 0:
        raise InvalidRequest(
            "'truncate_prompt_tokens' must be at least 1, or -1 for what fits",
            param="truncate_prompt_tokens",
        )
    return card.max_model_len if wanted == -1 else wanted


def _check_length(ids: Sequence[int], card: ModelCard, name: str) -> None:
    if len(ids) > card.max_model_len:
        raise ContextLengthExceeded(
            f"'{name}' has {len(ids)} tokens; the context of '{card.name}' is "
            f"{card.max_model_len}: send less, or let it be cut by 'truncate_prompt_tokens': -1",
            param=name,
        )


def _encode(
    texts: Sequence[str], names: Sequence[str], special: bool, keep: int | None, model: ServedModel
) -> list[list[int]]:
    for text, name in zip(texts, names, strict=True):
        if keep is None:
            check_prompt_chars(text, model, name)
        elif len(text) > (most := most_chars(model.card)):
            raise InvalidRequest(
                f"'{name}' has {len(text)} characters; {most} may be sent with "
                "'truncate_prompt_tokens': shorten it",
                param=name,
            )
    found = model.tokenizer.encode_batch(texts, special)
    if keep is None or all(len(ids) <= keep for ids in found):
        return found
    bare = model.tokenizer.encode_batch(texts, False) if special else found
    return [cut(ids, inner, keep) for ids, inner in zip(found, bare, strict=True)]


def cut(ids: list[int], bare: list[int], keep: int) -> list[int]:
    """The first `keep` tokens of a text, of which those that the tokenizer puts around it (`bare`
    is without them) are always some: a last one may be what the vector is made of.

    Errors: `InvalidRequest` if nothing of the text would be left.
    """
    if len(ids) <= keep:
        return ids
    around = len(ids) - len(bare)
    if keep <= around:
        raise InvalidRequest(
            f"'truncate_prompt_tokens' of {keep} leaves no room for text beside {around} special "
            "tokens",
            param="truncate_prompt_tokens",
        )
    places = (n for n in range(around + 1) if ids[n : n + len(bare)] == bare)
    before = next(places, 0)
    after = ids[before + len(bare) :]
    return ids[: before + keep - around] + after


async def _submissions(
    request: EmbeddingRequest, context: Context, prompts: Sequence[Prompt]
) -> list[GenerateRequest]:
    card, priority = context.model.card, request.priority or 0
    check_priority(priority, context.key, context.config.max_priority)
    wanted = request.cache_salt
    salt = shared_salt(wanted) if context.key is None else context.key.cache_salt(wanted)
    tokens = [prompt.tokens for prompt in prompts]
    # A mean is taken of what is computed: wherever its blocks are cached, they are of no use to it.
    naming = NAMELESS if card.pooling == "mean" else context.naming
    names = await naming.of(card, salt, tokens, context.pool)
    return [
        GenerateRequest(
            request_id=context.request_id,
            model=card.name,
            prompt=ids,
            sampling=_VECTOR,
            prompt_index=index,
            cache_salt=salt,
            priority=priority,
            deadline=context.deadline,
            block_names=named.hashes,
            names_id=named.id,
            pooling=card.pooling,
        )
        for index, (ids, named) in enumerate(zip(tokens, names, strict=True))
    ]


# ---------------------------------------------------------------- the answer


class VectorChoice:
    """Waits for one input's vector."""

    def __init__(self, index: int, shape: Shape, grow: Callable[[Bytes], None]) -> None:
        self._shape = shape
        self._grow = grow
        self.index = index
        self.completion_tokens = 0
        self.reasoning_tokens = 0
        self.vector = b""
        self.done = False
        """The vector is here."""
        self.over = asyncio.Event()
        """The same, to be waited for."""

    def on_delta(self, delta: TokenDelta, now: Seconds) -> None:
        """See `answer.Choice`. Errors: `EngineError` for anything but a vector."""
        finish = delta.finish
        self.vector = self._shape.checked(b"" if finish is None else finish.embedding)
        self._grow(len(self.vector))
        self.done = True
        self.over.set()


class VectorAnswer(Answer):
    """Gathers the vectors of all inputs; `body` is the answer once `finished` is set."""

    choices: list[VectorChoice]  # type: ignore[assignment]  # made below, of this kind only

    def __init__(
        self,
        plan: Plan,
        metrics: Metrics,
        arrival: Seconds,
        time: Callable[[], Seconds],
        gathered: Gathered,
    ) -> None:
        """`gathered` bounds it, and is to forget it when it is over."""
        assert plan.vectors is not None
        self._shape = plan.vectors
        self._gathered = gathered
        super().__init__(plan, metrics, arrival, time)

    def begin(self, now: Seconds) -> None:
        """Not a token: the times to first tokens are not those of vectors."""
        self.first_token = now

    def cancel(self) -> None:
        super().cancel()
        self._gathered.forget(self)

    @property
    def stage(self) -> str:
        placed = any(sink.course.placement is not None for sink in self.sinks)
        if self.first_token is None and not placed:
            return "waiting for a worker"
        done = sum(choice.done for choice in self.choices)
        return f"computing vectors, {done} of {len(self.choices)} done"

    def _choice(self, index: int, prompt: Prompt) -> Choice:
        return VectorChoice(index, self._shape, self._grow)

    def _grow(self, more: Bytes) -> None:
        self._gathered.grow(self, more)

    @property
    def work(self) -> int:
        """What `body` takes, in characters of text to tokenise: writing a number takes as long."""
        return self._shape.kept * len(self.choices)

    def body(self) -> bytes:
        """The answer as JSON. May run in a thread: nothing else touches a finished answer."""
        written = self._shape.written
        return _encode_json(
            EmbeddingList(
                data=[
                    Embedding(index=choice.index, embedding=written(choice.vector))
                    for choice in self.choices
                ],
                model=self.plan.model_name,
                usage=self.usage(last=True),
            )
        )
