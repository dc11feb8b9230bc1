"""Keeps the served models: their cards, and the tokenizer and templates made from each.

A LoRA adapter is served by its model's card, so it shares tokenizer, templates and limits with it.

Making a tokenizer takes up to seconds, so it happens once per card, in a thread, before the first
request where possible. The backend knows which workers serve a model.
"""

from __future__ import annotations

import asyncio
import difflib
import hashlib
import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, TypeVar

from msgspec import structs

from pdserve import __version__
from pdserve.errors import (
    ConfigError,
    Forbidden,
    InvalidRequest,
    ModelNotFound,
    NotReady,
    PdserveError,
)
from pdserve.protocols.completion_responses import Model
from pdserve.protocols.unsupported_fields import shorten
from pdserve.text.reasoning_parsers import REASONING_PARSERS, reasoning_format
from pdserve.text.text_pool import LARGE_CHARS
from pdserve.text.tokenization.encoder_choice import SLOW, EncoderChoice
from pdserve.text.tool_parsers import TOOL_PARSERS, tool_format

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from pdserve.frontend.access.api_keys import ApiKey
    from pdserve.frontend.dispatch.backend import Backend
    from pdserve.messages.card import ModelCard
    from pdserve.text.chat.chat_template import ChatTemplates
    from pdserve.text.reasoning_parsers.base import ReasoningFormat
    from pdserve.text.text_pool import TextPool
    from pdserve.text.tokenization.tokenizer import Tokenizer
    from pdserve.text.tool_parsers.base import ToolFormat

logger = logging.getLogger("pdserve.frontend.models")

F = TypeVar("F")

_ALWAYS_A_THREAD = LARGE_CHARS
"""A text cost that the pool never runs on the event loop, and that does not count as a long
text."""

_LONGEST_GUESS: Final = 256
"""Characters of an unknown name up to which a similar one is looked for."""
_MOST_GUESSES: Final = 1024
"""Names that are compared with an unknown one; more would take milliseconds."""

_NO_TENANT = "\0models"
"""Name under which this work takes its turn in the text pool; no key can have it."""


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """One model with its tokenizer and templates."""

    card: ModelCard
    tokenizer: Tokenizer
    templates: ChatTemplates
    fingerprint: str
    """OpenAI's `system_fingerprint`: changes when answers to equal requests and seeds may
    change."""
    tools: ToolFormat | None = None
    """The format of tool calls; None: unknown."""
    reasoning: ReasoningFormat | None = None
    """The format of reasoning; None: unknown."""
    tool_marks: frozenset[int] = frozenset()
    """Special tokens that mark tool calls."""
    reasoning_marks: frozenset[int] = frozenset()
    lora: str = ""
    """Id of the adapter that requests use; empty: the model itself."""
    encoder: EncoderChoice = SLOW
    """Whether the extension encodes its texts, or `tokenizers`."""

    @classmethod
    def from_card(cls, card: ModelCard, modules: Collection[str] = ()) -> PreparedModel:
        """Makes the tokenizer and templates; blocks for as long as that takes.

        `modules`: formats `module:attribute` that may be imported. Errors: `ConfigError`.
        """
        # Imported with the first model, in its thread: the server listens and joins before.
        from pdserve.text.chat.chat_template import ChatTemplates
        from pdserve.text.tokenization.tokenizer import Tokenizer

        templates = ChatTemplates.from_card(card)
        if "default" in templates.names:
            # Computed here, so that the first request does not wait for it.
            _ = templates.select().content_format
        tokenizer = Tokenizer.from_card(card)
        encoder = tokenizer.choose_encoder()
        tools = reasoning = None
        if _known(card, "tool-parser", card.tool_parser, TOOL_PARSERS, modules):
            tools = _format(tool_format, card.tool_parser, card)
        if _known(card, "reasoning-parser", card.reasoning_parser, REASONING_PARSERS, modules):
            reasoning = _format(reasoning_format, card.reasoning_parser, card)
        return cls(
            card,
            tokenizer,
            templates,
            fingerprint(card),
            tools,
            reasoning,
            _marks(tools, tokenizer, card),
            _marks(reasoning, tokenizer, card),
            encoder=encoder,
        )

    def adapted(self, name: str | None) -> PreparedModel:
        """This model as requests for `name` use it: with its adapter if that is its name."""
        lora = None if name is None else self.card.lora(name)
        if lora is None:
            return self
        return replace(self, lora=lora.id, fingerprint=fingerprint(self.card, lora.id))

    def marks(self, tools: bool) -> frozenset[int]:
        """Special tokens that a parser must see; those of tool calls only with `tools`."""
        return self.reasoning_marks | self.tool_marks if tools else self.reasoning_marks


def _known(
    card: ModelCard, option: str, name: str, known: Collection[str], modules: Collection[str]
) -> bool:
    """True if the card names a format, and it may be loaded: a `module:attribute` only if this
    frontend's own options name it, since a worker's card must not decide which code is imported.
    """
    if ":" not in name or name in known or name in modules:
        return bool(name)
    logger.warning(
        "model %s: its worker reads its answers with %s, which this frontend was not told to load: "
        "start it with --%s=%s",
        *(card.name, name, option, name),
    )
    return False


def _format(load: Callable[[str], F], name: str, card: ModelCard) -> F | None:
    """Loads a format. A worker of another release may name one that is not known here."""
    try:
        return load(name)
    except ConfigError as error:
        logger.warning("model %s: its answers are not read: %s", card.name, error.message)
        return None


def _marks(
    format: ToolFormat | ReasoningFormat | None, tokenizer: Tokenizer, card: ModelCard
) -> frozenset[int]:
    """Special tokens of a format's markers that would not be shown; never those that end a text."""
    if format is None:
        return frozenset()
    ids = {tokenizer.token_to_id(marker) for marker in format.markers}
    return frozenset(id for id in ids if id in tokenizer.special_ids) - set(card.eos_token_ids)


def fingerprint(card: ModelCard, lora: str = "") -> str:
    """A short hash of everything that decides answers: pdserve's version, engine, precision, model,
    and the id of the adapter if there is one."""
    parts = [__version__, card.engine, card.dtype, card.compat_hash, card.name]
    parts += [lora] if lora else []
    return "fp_" + hashlib.blake2b("\0".join(parts).encode(), digest_size=6).hexdigest()


class ModelRegistry:
    """Looks models up by name. Owned by the service, used on the event loop's thread."""

    def __init__(self, backend: Backend, pool: TextPool, modules: Collection[str] = ()) -> None:
        """`modules`: formats `module:attribute` that workers may name."""
        self._backend = backend
        self._modules = modules
        self._work = pool.of(_NO_TENANT)
        # The keys are identities of cards, which every entry keeps alive.
        self._ready: dict[int, PreparedModel] = {}
        self._failed: dict[int, tuple[ModelCard, str]] = {}
        self._told: set[int] = set()
        """Failures that have been logged."""
        self._making: dict[int, asyncio.Task[PreparedModel]] = {}
        self.on_difference: Callable[[str], None] = lambda detail: None
        """Called when a model's texts are encoded slowly because the extension gives other ids."""

    def card(self, name: str | None, key: ApiKey | None = None) -> ModelCard:
        """Returns the card of `name`, a model, an alias or an adapter; without a name, that of the
        only model.

        Args: `key` restricts the models.

        Errors: `NotReady`, `ModelNotFound`, `Forbidden`, `InvalidRequest`.
        """
        cards = self._backend.cards()
        if not cards:
            reason = self._backend.unready_reason() or "no model is loaded"
            raise NotReady(f"the server is not ready: {reason}", retry_after=1.0)
        usable = _usable(cards, key)
        if name is None:
            # Models without a worker keep their cards; they count only if no model has a worker.
            models = [card for name, card in usable.items() if card.lora(name) is None]
            served = [card for card in models if self._backend.refusal(card) is None]
            return _only(served or models, usable)
        card = usable.get(name)
        if card is None and name in cards:
            raise Forbidden(f"this API key may not use the model '{shorten(name)}'", param="model")
        if card is None:
            known = ", ".join(sorted(usable)[:8]) or "nothing that this API key may use"
            raise ModelNotFound(
                f"the model '{shorten(name)}' is not served here{_guess(name, usable)}; "
                f"served: {known}",
                param="model",
            )
        return card

    def without_tag(self, name: str | None) -> str | None:
        """The name without Ollama's `:latest`, if only that is served."""
        if name is None or name in (cards := self._backend.cards()):
            return name
        bare = name.removesuffix(":latest")
        return bare if bare in cards else name

    def get_nowait(self, card: ModelCard) -> PreparedModel | None:
        """The model of a card if it has been prepared, else None."""
        model = self._ready.get(id(card))
        if model is not None and model.card is card:
            return model
        return self._renewed(card)

    def _renewed(self, card: ModelCard) -> PreparedModel | None:
        """The model of a card that replaces another one because workers with other features or
        adapters came or went: nothing has to be prepared again."""
        for model in self._ready.values():
            old = model.card
            if structs.replace(old, features=card.features, loras=card.loras) == card:
                model = self._ready[id(card)] = replace(model, card=card)
                return model
        return None

    async def get(self, card: ModelCard) -> PreparedModel:
        """The model of a card; prepares it if needed.

        Errors: `ConfigError` when that fails. Cancellation: the preparation goes on.
        """
        model = self.get_nowait(card)
        if model is not None:
            return model
        if id(card) in self._failed:
            raise ConfigError(self._failed[id(card)][1])
        making = self._making.get(id(card))
        if making is None:
            making = asyncio.get_running_loop().create_task(
                self._make(card), name=f"make-model-{card.name}"
            )
            self._making[id(card)] = making
        return await asyncio.shield(making)

    async def prepare(self) -> bool:
        """Prepares new models and drops those that are no longer served. Returns True if none is
        left to be prepared."""
        cards = {id(card): card for card in self._backend.cards().values()}
        for card in cards.values():
            self.get_nowait(card)  # takes over what a card that is dropped now has prepared
        for known in (self._ready, self._failed):
            for key in [key for key in known if key not in cards]:
                del known[key]
        self._told &= cards.keys()
        for card in cards.values():
            try:
                await self.get(card)
            except PdserveError as error:
                if id(card) not in self._told:
                    self._told.add(id(card))
                    logger.error("model %s cannot be served: %s", card.name, error.message)
        served = {id(card) for card in self._backend.cards().values()}
        return served <= self._ready.keys() | self._failed.keys()

    def listing(self, key: ApiKey | None = None) -> list[Model]:
        """Every name that can be requested, in `/v1/models`' format. A model's own name comes
        before its aliases, since clients without a name take the first."""
        usable = _usable(self._backend.cards(), key)
        return [model_object(name, card) for name, card in sorted(usable.items(), key=_place)]

    async def close(self) -> None:
        """Stops preparing models; callers that wait for one are cancelled."""
        for task in (making := tuple(self._making.values())):
            task.cancel()
        await asyncio.gather(*making, return_exceptions=True)

    async def _make(self, card: ModelCard) -> PreparedModel:
        try:
            model = await self._work.run(
                _ALWAYS_A_THREAD, PreparedModel.from_card, card, self._modules
            )
            self._ready[id(card)] = model
            self._tell_encoder(model)
            return model
        except ConfigError as error:
            self._failed[id(card)] = (card, error.message)
            raise
        except PdserveError:
            # The text pool has no place at the moment; a later call tries again.
            raise
        except Exception as error:
            logger.exception("making model %s failed", card.name)
            reason = f"it could not be prepared: {type(error).__name__}: {error}"
            self._failed[id(card)] = (card, reason)
            raise ConfigError(reason) from None
        finally:
            del self._making[id(card)]

    def _tell_encoder(self, model: PreparedModel) -> None:
        name, choice = model.card.name, model.encoder
        if choice.uncovered:
            logger.info(
                "model %s: tokenizers encodes its texts; the extension does not cover %s",
                *(name, choice.uncovered),
            )
        if choice.difference:
            self.on_difference(
                f"model {name}: its texts are encoded some ten times slower, by tokenizers, since "
                f"the extension gives other ids to {choice.difference!r}; report the model"
            )


def _place(entry: tuple[str, ModelCard]) -> tuple[str, int, str]:
    """The position of a name: aliases keep the operator's order, adapters come after them."""
    name, card = entry
    names = (card.name, *card.aliases)
    return card.name, names.index(name) if name in names else len(names), name


def model_object(name: str, card: ModelCard) -> Model:
    """One entry of `/v1/models`."""
    lora = card.lora(name)
    return Model(
        id=name,
        created=card.created,
        root=card.name if lora is None else lora.id,
        parent=None if lora is None else card.name,
        max_model_len=card.max_model_len,
        tool_parser=card.tool_parser or None,
        reasoning_parser=card.reasoning_parser or None,
    )


def _usable(cards: Mapping[str, ModelCard], key: ApiKey | None) -> Mapping[str, ModelCard]:
    if key is None or key.models is None:
        return cards
    return {name: card for name, card in cards.items() if key.may_use(card, name)}


def _guess(name: str, known: Iterable[str]) -> str:
    """A hint at the served name with the most similar spelling, if any is similar."""
    if len(name) > _LONGEST_GUESS:
        return ""
    close = difflib.get_close_matches(name, sorted(known)[:_MOST_GUESSES], n=1)
    return f", did you mean '{close[0]}'?" if close else ""


def _only(cards: Iterable[ModelCard], usable: Iterable[str]) -> ModelCard:
    """The only model. `usable`: all names that may be requested, adapters included."""
    distinct = {id(card): card for card in cards}
    if len(distinct) == 1:
        return next(iter(distinct.values()))
    names = sorted(card.name for card in distinct.values()) or sorted(usable)[:8]
    if not names:
        raise Forbidden("this API key may use none of the models served here", param="model")
    raise InvalidRequest(f"'model' is required; served: {', '.join(names)}", param="model")
