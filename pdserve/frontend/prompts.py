"""From a decoded request to a `Plan`: template, tokens, limits, parameters, one submission each.

The order of checks is the order in which a client can fix them: the model, the messages, what the
prompt leaves room for. Long text work goes to the pool, everything else is plain code.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from pdserve.errors import ContextLengthExceeded, InvalidRequest
from pdserve.frontend.config import FrontendConfig
from pdserve.frontend.keys import ApiKey, check_priority, shared_salt
from pdserve.frontend.markup import callable_tools, check_reasoning, read_markup
from pdserve.frontend.models import ServedModel
from pdserve.frontend.naming import NAMELESS, Naming
from pdserve.frontend.plan import Plan, Prompt
from pdserve.frontend.sampling import (
    bad_word_ids,
    check_answer,
    check_bans,
    check_prompt_logprobs,
    check_prompt_tokens,
    choices,
    repetition,
    sampling_params,
    scores_only,
    stop_strings,
    truncated,
)
from pdserve.frontend.structure import grammar_of, thinking_of
from pdserve.ids import Seconds, new_seed
from pdserve.messages.request import GenerateRequest
from pdserve.openai.schema import (
    ChatRequest,
    CompletionRequest,
    Message,
    TokenizeRequest,
    Tool,
)
from pdserve.text.pool import TextPool
from pdserve.text.reasoning import opens_reasoning

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pdserve.messages.card import ModelCard

_MAX_CHARS = 1 << 20
"""Text that is tokenised at once: tokenizers need about 150 bytes a character meanwhile."""
_MAX_CONTEXT_CHARS = 8
"""Per token of the context, if that is more: what a model takes can also be counted."""
_MESSAGE_CHARS = 64
"""What an empty message costs, in characters of text: many of them are long work, too."""


class Context(msgspec.Struct, frozen=True, kw_only=True):
    """What a plan depends on besides the request."""

    model: ServedModel
    config: FrontendConfig
    pool: TextPool
    request_id: str
    naming: Naming = NAMELESS
    key: ApiKey | None = None
    deadline: Seconds | None = None
    """Seconds that remain."""


async def plan_chat(request: ChatRequest, context: Context) -> Plan:
    """Errors: `InvalidRequest` and its kin, `Overloaded`."""
    check_reasoning(request, context.model)
    tools = callable_tools(request, context.model)
    prompt = await _chat_prompt(request, tools, context)
    if not prompt.tokens:
        raise InvalidRequest(
            "the chat template writes nothing for these 'messages'", param="messages"
        )
    check_prompt_tokens(prompt.tokens, context.model.card, "messages")
    plan = await _plan(request, context, [prompt], chat=True, prefix="chatcmpl-")
    return read_markup(plan, request, tools)


async def plan_completion(request: CompletionRequest, context: Context) -> Plan:
    """Errors: `InvalidRequest` and its kin, `Overloaded`."""
    prompts = await _completion_prompts(request, context)
    return await _plan(request, context, prompts, chat=False, prefix="cmpl-")


# ---------------------------------------------------------------- chat


async def chat_tokens(request: ChatRequest | TokenizeRequest, context: Context) -> list[int]:
    """The tokens of a conversation, as the model's template writes it.

    Errors: `InvalidRequest` for what the template or its arguments refuse.
    """
    if isinstance(request, ChatRequest):
        tools = callable_tools(request, context.model)
    else:
        tools = tuple(request.tools or ())
    return (await _chat_prompt(request, tools, context)).tokens


async def _chat_prompt(
    request: ChatRequest | TokenizeRequest, tools: Sequence[Tool], context: Context
) -> Prompt:
    messages: list[Message] = request.messages or []
    _check_contents(messages)
    source = request.chat_template
    options = _options(request, tools)
    if source is None or source in context.model.templates.names:
        size = sum(map(_chars, messages)) + _template_chars(options)
        return await context.pool.run(size, _render_and_encode, request, messages, options, context)
    if not context.config.trust_request_chat_template:
        raise InvalidRequest(
            "'chat_template' is refused: this server uses its model's own template only",
            param="chat_template",
        )
    text = await context.pool.render_foreign(
        source,
        context.model.templates.special_tokens,
        [_builtins(message) for message in messages],
        options,
    )
    return await context.pool.run(len(text), _encode_chat, request, text, context)


def _check_contents(messages: Sequence[Message]) -> None:
    """An assistant's message may consist of tool calls; any other without content is a slip, and a
    template would write it as if nothing had been said."""
    for index, message in enumerate(messages):
        if message.content is None and message.role != "assistant":
            raise InvalidRequest(
                f"'messages[{index}].content' is required", param=f"messages[{index}].content"
            )


def _render_and_encode(
    request: ChatRequest | TokenizeRequest,
    messages: Sequence[Message],
    options: dict[str, Any],
    context: Context,
) -> Prompt:
    templates = context.model.templates
    template = templates.select(request.chat_template, tools=bool(options["tools"]))
    text = template.render([_builtins(message) for message in messages], **options)
    return _encode_chat(request, text, context)


def _encode_chat(request: ChatRequest | TokenizeRequest, text: str, context: Context) -> Prompt:
    model = context.model
    if isinstance(request, ChatRequest):
        _check_chars(text, request, model, "messages")
    final = _said(request.messages[-1]) if request.messages else ""
    continued = final if request.continue_final_message else ""
    begun = model.reasoning is not None and opens_reasoning(text, model.reasoning, continued)
    tokens = model.tokenizer.encode(text, bool(request.add_special_tokens))
    if not isinstance(request, ChatRequest):
        return Prompt(tokens, reasoning=begun)
    return Prompt(truncated(tokens, request, model.card), _chat_echo(request), reasoning=begun)


def _chat_echo(request: ChatRequest) -> str:
    """The last message's text, if the model was the one who said it."""
    message = request.messages[-1]
    return _said(message) if request.echo and message.role == "assistant" else ""


def _said(message: Message) -> str:
    content = message.content
    if content is None or isinstance(content, str):
        return content or ""
    return "".join([part.text or "" for part in content])


def _options(request: ChatRequest | TokenizeRequest, tools: Sequence[Tool]) -> dict[str, Any]:
    """The template's own arguments. Without a word from the request, whoever is to go on speaking
    follows from whether the last message is to be continued."""
    continues = bool(request.continue_final_message)
    asked = request.add_generation_prompt
    return {
        "add_generation_prompt": not continues if asked is None else asked,
        "continue_final_message": continues,
        "tools": [_tool(tool) for tool in tools] or None,
        "documents": request.documents or None,
        "template_kwargs": {**_effort(request), **(request.chat_template_kwargs or {})},
    }


def _effort(request: ChatRequest | TokenizeRequest) -> dict[str, Any]:
    """How much the model is to think, in the words that templates know; most know only whether."""
    effort = request.reasoning_effort if isinstance(request, ChatRequest) else None
    if effort is None:
        return {}
    if effort != "none":
        return {"reasoning_effort": effort}
    return {"reasoning_effort": effort, "enable_thinking": False, "thinking": False}


def _tool(tool: Tool) -> dict[str, Any]:
    """As clients write it: a template may print all there is."""
    return {"type": tool.type, "function": _without_none(msgspec.to_builtins(tool.function))}


def _builtins(message: Message) -> dict[str, Any]:
    if message.content.__class__ is not str or message.tool_calls is not None:
        full: dict[str, Any] = msgspec.to_builtins(message)
        if message.tool_calls is not None:
            full["tool_calls"] = [_without_none(call) for call in full["tool_calls"]]
        return full
    plain: dict[str, Any] = {"role": message.role, "content": message.content}
    for name in ("name", "tool_call_id", "reasoning", "reasoning_content"):
        value = getattr(message, name)
        if value is not None:
            plain[name] = value
    return plain


def _without_none(value: dict[str, Any]) -> dict[str, Any]:
    return {name: item for name, item in value.items() if item is not None}


def _template_chars(options: dict[str, Any]) -> int:
    """What tools and documents add to the prompt, about."""
    given = [value for name in ("tools", "documents") if (value := options[name])]
    return len(msgspec.json.encode(given)) if given else 0


def _chars(message: Message) -> int:
    content = message.content
    if isinstance(content, str):
        return _MESSAGE_CHARS + len(content)
    return _MESSAGE_CHARS + sum(_MESSAGE_CHARS + len(part.text or "") for part in content or ())


# ---------------------------------------------------------------- completions


async def _completion_prompts(request: CompletionRequest, context: Context) -> list[Prompt]:
    given = prompt_list(request.prompt)
    if len(given) > context.config.max_prompts:
        raise InvalidRequest(
            f"'prompt' holds {len(given)} prompts; the limit is {context.config.max_prompts}",
            param="prompt",
        )
    single = len(given) == 1 and not _is_batch(request.prompt)
    texts = [prompt for prompt in given if isinstance(prompt, str)]
    special = request.add_special_tokens is not False
    names = ["prompt"] if single else [f"prompt[{index}]" for index in range(len(given))]
    encoded: Iterator[list[int]] = iter(())
    if texts:  # then all of them are
        size = sum(map(len, texts))
        encoded = iter(
            await context.pool.run(size, _encode, texts, names, special, request, context.model)
        )
    prompts = []
    for name, prompt in zip(names, given, strict=True):
        ids = next(encoded) if isinstance(prompt, str) else prompt
        check_prompt_tokens(ids, context.model.card, name)
        kept = truncated(ids, request, context.model.card)
        told = prompt if len(kept) == len(ids) else kept
        prompts.append(Prompt(kept, await _echo(request, told, context)))
    return prompts


def _encode(
    texts: Sequence[str],
    names: Sequence[str],
    special: bool,
    request: CompletionRequest,
    model: ServedModel,
) -> list[list[int]]:
    for text, name in zip(texts, names, strict=True):
        _check_chars(text, request, model, name)
    return model.tokenizer.encode_batch(texts, special)


async def _echo(request: CompletionRequest, prompt: str | list[int], context: Context) -> str:
    if not request.echo:
        return ""
    if isinstance(prompt, str):
        return prompt
    return await context.pool.run(
        4 * len(prompt),
        context.model.tokenizer.decode,
        prompt,
        skip_special_tokens=request.skip_special_tokens is not False,
    )


def prompt_list(prompt: str | list[str | int | list[int]]) -> list[str | list[int]]:
    """The prompts of a completion request, each a text or token ids.

    Errors: `InvalidRequest` for an empty list or a mixture.
    """
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise InvalidRequest("'prompt' must not be empty", param="prompt")
    if all(type(item) is int for item in prompt):
        return [prompt]  # type: ignore[list-item]  # just checked
    kind = type(prompt[0])
    for index, item in enumerate(prompt):
        if type(item) is not kind or kind is int:
            raise InvalidRequest(
                "'prompt' must be one text, a list of texts, a list of token ids, or a list of "
                "lists of token ids, not a mixture",
                param=f"prompt[{index}]",
            )
    return prompt  # type: ignore[return-value]  # just checked


def _is_batch(prompt: str | list[str | int | list[int]]) -> bool:
    return isinstance(prompt, list) and type(prompt[0]) is not int


# ---------------------------------------------------------------- both


def _check_chars(
    text: str, request: ChatRequest | CompletionRequest, model: ServedModel, param: str
) -> None:
    """Of a prompt that is cut all of it is encoded first: that has a bound of its own."""
    if request.truncate_prompt_tokens is None:
        check_prompt_chars(text, model, param)
    elif len(text) > (most := most_chars(model.card)):
        raise InvalidRequest(
            f"the prompt has {len(text)} characters; {most} may be sent with "
            "'truncate_prompt_tokens': shorten it",
            param=param,
        )


def most_chars(card: ModelCard) -> int:
    """How long a text may be that is encoded whatever becomes of it."""
    return max(_MAX_CHARS, _MAX_CONTEXT_CHARS * card.max_model_len)


def check_prompt_chars(text: str, model: ServedModel, param: str) -> None:
    """Spare the work of encoding what cannot fit.

    Errors: `ContextLengthExceeded`.
    """
    card = model.card
    if len(text) <= card.max_model_len:
        return
    fewest = model.tokenizer.fewest_tokens(len(text))
    if fewest > card.max_model_len:
        raise ContextLengthExceeded(
            f"the prompt has {len(text)} characters, which are {fewest} tokens or more, but the "
            f"context of '{card.name}' is {card.max_model_len} tokens, output included; shorten "
            "the prompt",
            param=param,
        )


async def _plan(
    request: ChatRequest | CompletionRequest,
    context: Context,
    prompts: list[Prompt],
    *,
    chat: bool,
    prefix: Literal["chatcmpl-", "cmpl-"],
) -> Plan:
    card = context.model.card
    n = choices(request, len(prompts), context.config.max_choices)
    check_prompt_logprobs(request, sum(len(prompt.tokens) for prompt in prompts), n)
    if request.stream_options is not None and not request.stream:
        raise InvalidRequest("'stream_options' needs 'stream': true", param="stream_options")
    options = request.stream_options
    continuous = options is not None and bool(options.continuous_usage_stats)
    check_bans(request, card)
    repeats = repetition(request)
    requests = await _submissions(request, context, prompts, n, card)
    check_answer(request, len(prompts) * n, context.config.max_answer)
    return Plan(
        chat=chat,
        model=context.model,
        model_name=request.model or card.name,
        answer_id=prefix + context.request_id,
        created=int(time.time()),
        prompts=prompts,
        requests=requests,
        n=n,
        stops=stop_strings(request),
        include_stop=bool(request.include_stop_str_in_output),
        min_tokens=request.min_tokens or 0,
        skip_special_tokens=request.skip_special_tokens is not False,
        spaces_between_special_tokens=request.spaces_between_special_tokens is not False,
        continues_text=not chat or bool(getattr(request, "continue_final_message", False)),
        logprobs=requests[0].sampling.logprobs is not None,
        echo=bool(request.echo) and (not chat or bool(prompts[0].echo)),
        scores_only=scores_only(request),
        token_ids=bool(request.return_token_ids),
        stream=bool(request.stream),
        include_usage=options is not None and bool(options.include_usage),
        continuous_usage=continuous,
        repetition=repeats,
        prompt_logprobs=request.prompt_logprobs,
        tokens_as_ids=bool(request.return_tokens_as_token_ids),
        stream_interval=request.stream_interval or 1,
    )


async def _submissions(
    request: ChatRequest | CompletionRequest,
    context: Context,
    prompts: Sequence[Prompt],
    n: int,
    card: ModelCard,
) -> list[GenerateRequest]:
    seed, priority = new_seed(), request.priority or 0
    check_priority(priority, context.key, context.config.max_priority)
    wanted = request.cache_salt
    salt = shared_salt(wanted) if context.key is None else context.key.cache_salt(wanted)
    tokens = [prompt.tokens for prompt in prompts]
    names = await context.naming.of(card, salt, tokens, context.pool)
    bad_words = await _bad_words(request, context)
    grammar = await grammar_of(request, context)
    thoughts = [thinking_of(request, context.model, each.reasoning) for each in prompts]
    return [
        GenerateRequest(
            request_id=context.request_id,
            model=card.name,
            prompt=prompt.tokens,
            sampling=sampling_params(
                request, card, len(prompt.tokens), seed, bad_words, grammar, thinking
            ),
            n=n,
            prompt_index=index,
            cache_salt=salt,
            priority=priority,
            deadline=context.deadline,
            block_names=named.hashes,
            names_id=named.id,
        )
        for index, (prompt, named, thinking) in enumerate(
            zip(prompts, names, thoughts, strict=True)
        )
    ]


async def _bad_words(
    request: ChatRequest | CompletionRequest, context: Context
) -> tuple[tuple[int, ...], ...]:
    words = request.bad_words
    if not words:
        return ()
    size = 2 * sum(map(len, words))
    return await context.pool.run(size, bad_word_ids, words, context.model.tokenizer)
