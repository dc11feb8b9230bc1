"""Renders Hugging Face chat templates as `transformers` does: messages to prompt text.

A template sees only plain JSON values: messages, tools, documents, the model's special tokens and
the request's `chat_template_kwargs`. An error in a template is an `InvalidRequest` with the
template's message; a served model's template that does not compile is a `ConfigError`. This file
does not know tokens or requests. `template_sandbox.py` says what a template may do and use.
"""

from __future__ import annotations

import time
from datetime import datetime
from typing import TYPE_CHECKING, Any

import jinja2

from pdserve.errors import ConfigError, InvalidRequest
from pdserve.text.chat.chat_messages import (
    ChatMessage,
    copy_plain_json,
    cut_at_mark,
    mark_final,
    prepare_messages,
)
from pdserve.text.chat.message_forms import ProbedForms
from pdserve.text.chat.template_limits import TemplateLimits
from pdserve.text.chat.template_sandbox import TemplateSandbox, metered
from pdserve.text.tokenization.tokenizer_config import parse_tokenizer_config

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pdserve.messages.card import ModelCard
    from pdserve.text.chat.chat_messages import ContentFormat

DEFAULT_LIMITS = TemplateLimits()

_RESERVED = frozenset(
    {
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template",
        "tokenize",
        "return_dict",
    }
)


class ChatTemplate:
    """One compiled template. Immutable; any number of threads may render it."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str] | None = None,
        *,
        limits: TemplateLimits = DEFAULT_LIMITS,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """Compile `source`. Raises `InvalidRequest` if it is too long or does not compile.

        `special_tokens`: variables such as `bos_token`. `clock` is monotonic seconds, for the time
        limit; `now` the local time, for `strftime_now`.
        """
        if len(source) > limits.source_chars:
            raise InvalidRequest(
                f"the chat template is longer than {limits.source_chars} characters",
                param="chat_template",
            )
        self.source = source
        self._special_tokens = dict(special_tokens or {})
        self._limits = limits
        self._clock = clock
        self._forms = ProbedForms(self._probe)
        environment = TemplateSandbox(now)
        try:
            self._compiled = environment.from_string(source)
            # Copying jinja2's chain of dictionaries takes half the time of a short rendering.
            self._compiled.globals = dict(self._compiled.globals)
        except Exception as error:
            raise InvalidRequest(
                f"the chat template does not compile: {_words(error)}", param="chat_template"
            ) from None

    @property
    def content_format(self) -> ContentFormat:
        """Form of a user's content that the template accepts."""
        if not self._forms.takes_text:
            return "parts"
        return "either" if self._forms.takes_parts("user") else "string"

    def render(
        self,
        messages: Sequence[ChatMessage],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text for `messages`; tokenise it without adding special tokens.

        `continue_final_message` leaves the last message open for the model to go on with; it
        excludes `add_generation_prompt`. Raises `InvalidRequest`.
        """
        if not messages:
            raise InvalidRequest("messages must not be empty", param="messages")
        if continue_final_message and add_generation_prompt:
            raise InvalidRequest(
                "add_generation_prompt and continue_final_message exclude each other",
                param="continue_final_message",
            )
        variables = self._variables(template_kwargs or {})
        chat = prepare_messages(messages, self._forms)
        final = mark_final(chat) if continue_final_message else None
        text = self._run(
            variables
            | {
                "messages": chat,
                "tools": copy_plain_json(tools, "tools"),
                "documents": copy_plain_json(documents, "documents"),
                "add_generation_prompt": add_generation_prompt,
            }
        )
        return text if final is None else cut_at_mark(text, final)

    def _probe(self, chat: list[dict[str, Any]]) -> str:
        """Render a test chat; return an empty string if the template refuses it."""
        try:
            return self._run({**self._special_tokens, "messages": chat, "tools": None})
        except InvalidRequest:
            return ""

    def _variables(self, template_kwargs: Mapping[str, Any]) -> dict[str, Any]:
        for name in template_kwargs:
            if name in _RESERVED:
                raise InvalidRequest(
                    f"chat_template_kwargs cannot set {name!r}",
                    param=f"chat_template_kwargs.{name}",
                )
        return {**self._special_tokens, **copy_plain_json(template_kwargs, "chat_template_kwargs")}

    def _run(self, variables: dict[str, Any]) -> str:
        try:
            with metered(self._limits, self._clock):
                text = self._compiled.render(variables)
        except Exception as error:
            # A template may raise any exception; the template or its input is the cause.
            raise InvalidRequest(
                f"the chat template refused: {_words(error)}", param="messages"
            ) from None
        if len(text) > self._limits.output_chars:
            raise InvalidRequest(
                f"the rendered chat is longer than {self._limits.output_chars} characters",
                param="messages",
            )
        return text


class ChatTemplates:
    """The templates of one served model, by name."""

    def __init__(
        self,
        sources: Mapping[str, str],
        special_tokens: Mapping[str, str] | None = None,
        *,
        limits: TemplateLimits = DEFAULT_LIMITS,
    ) -> None:
        """Compile all templates. Raises `ConfigError` when one does not compile."""
        self.special_tokens = dict(special_tokens or {})
        self.limits = limits
        try:
            self._templates = {
                name: ChatTemplate(source, self.special_tokens, limits=limits)
                for name, source in sources.items()
            }
        except InvalidRequest as error:
            words = error.message.removeprefix("the ")
            raise ConfigError(f"the model's {words}") from None

    @classmethod
    def from_card(
        cls, card: ModelCard, *, limits: TemplateLimits = DEFAULT_LIMITS
    ) -> ChatTemplates:
        """The card's own template is the default; tokenizer_config.json may name others."""
        config = parse_tokenizer_config(card.tokenizer_config_json)
        sources = dict(config.chat_templates)
        if card.chat_template is not None:
            sources["default"] = card.chat_template
        return cls(sources, config.special_tokens, limits=limits)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the templates in the model's order; empty if the model has no chat template."""
        return tuple(self._templates)

    def select(self, name: str | None = None, *, tools: bool = False) -> ChatTemplate:
        """Return the template called `name`, or the one for requests with or without `tools`.

        Raises `InvalidRequest` when there is none.
        """
        wanted = [name] if name is not None else ["tool_use", "default"] if tools else ["default"]
        for candidate in wanted:
            if candidate in self._templates:
                return self._templates[candidate]
        if not self._templates:
            raise InvalidRequest("the model has no chat template", param="messages")
        raise InvalidRequest(
            f"choose a chat template of this model: {', '.join(self._templates)}",
            param="chat_template",
        )

    def compile(self, source: str) -> ChatTemplate:
        """Compile a template that came with a request. Raises `InvalidRequest`."""
        return ChatTemplate(source, self.special_tokens, limits=self.limits)


def _words(error: Exception) -> str:
    """Return a readable message for an exception raised in a template."""
    if isinstance(error, jinja2.TemplateSyntaxError):
        return f"{error.message} (line {error.lineno})"
    if isinstance(error, jinja2.TemplateError):
        return error.message or type(error).__name__
    if isinstance(error, RecursionError):
        return "it recurses too deeply"
    return f"{type(error).__name__}: {error}"
