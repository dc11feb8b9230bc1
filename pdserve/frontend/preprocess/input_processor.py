"""Turns a decoded request into a `RequestPlan`: template, tokens, limits, parameters.

Checks run in the order in which a client can fix them: the model, the messages, the room that the
prompt leaves. Long text work goes to the pool; everything else is plain code.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from msgspec.structs import replace

from pdserve.errors import InvalidRequest
from pdserve.frontend.access.api_keys import ApiKey, cache_salt_of, check_priority
from pdserve.frontend.config import FrontendConfig
from pdserve.frontend.images.loader import ImageIntake
from pdserve.frontend.images.prompt import (
    check_no_images,
    image_names,
    learning,
    place_images,
    take_images,
)
from pdserve.frontend.model_registry import PreparedModel
from pdserve.frontend.plan import Prompt, RequestPlan
from pdserve.frontend.preprocess.cache_wishes import cache_wish
from pdserve.frontend.preprocess.context_length import ContextFit, check_prompt_length
from pdserve.frontend.preprocess.error_fields import reword_errors
from pdserve.frontend.preprocess.infill import infill_format, infill_prompts
from pdserve.frontend.preprocess.normalize import normalize_chat, normalize_messages
from pdserve.frontend.preprocess.output_parsers import (
    callable_tools,
    check_reasoning,
    with_output_parser,
)
from pdserve.frontend.preprocess.prompt_hashes import NO_HASHING, PromptHasher
from pdserve.frontend.preprocess.sampling import (
    bad_word_ids,
    check_prompt_logprobs,
    check_prompt_tokens,
    check_response_size,
    check_token_bans,
    choice_count,
    repetition_detector,
    sampling_params,
    scores_only,
    stop_strings,
    truncate_prompt,
)
from pdserve.frontend.preprocess.structured_output import grammar_of, thinking_of
from pdserve.frontend.preprocess.text_cost import chat_cost, texts_cost
from pdserve.ids import Seconds, new_seed
from pdserve.messages.request import GenerateRequest
from pdserve.protocols.completion_requests import (
    ChatRequest,
    CompletionRequest,
    Message,
    TokenizeRequest,
    Tool,
)
from pdserve.text.text_pool import TextWork
from pdserve.token_ids import TokenIds, token_ids

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pdserve.messages.card import ModelCard

_MAX_CHARS = 1 << 20
"""Most characters that are tokenized at once: tokenizers need about 150 bytes per character
meanwhile."""
_MAX_CONTEXT_CHARS = 8
"""Per token of the context, if that is more: text that the model can take can also be counted."""

_USUAL_CHARS = 3
"""Per token of the context: a text up to this length is likely to fit and is not counted before."""


class PlanContext(msgspec.Struct, frozen=True, kw_only=True):
    """What a plan depends on besides the request."""

    model: PreparedModel
    config: FrontendConfig
    pool: TextWork
    request_id: str
    naming: PromptHasher = NO_HASHING
    key: ApiKey | None = None
    deadline: Seconds | None = None
    """Seconds left until the deadline."""
    images: ImageIntake | None = None
    """Takes the request's images; None: it may have none."""
    any_output: bool = False
    """True if more output than the whole context may be requested."""
    arrival: Seconds = 0.0
    """Time at which the request arrived, by `time`."""
    time: Callable[[], Seconds] = time.monotonic

    @property
    def fit(self) -> ContextFit:
        """What happens to a request for too much output."""
        if self.config.strict_api:
            return ContextFit.STRICT
        return ContextFit.ANY if self.any_output else ContextFit.WITHIN


async def plan_chat(request: ChatRequest, context: PlanContext) -> RequestPlan:
    """Makes the plan of a chat. Errors: `InvalidRequest` and its subclasses, `Overloaded`."""
    usual, places = normalize_chat(request)
    with reword_errors({}, places):
        return await _plan_usual(usual, context)


async def _plan_usual(request: ChatRequest, context: PlanContext) -> RequestPlan:
    check_reasoning(request, context.model)
    tools = callable_tools(request, context.model)
    request, images = await take_images(request, context)
    prompt = await _chat_prompt(request, tools, context)
    if not prompt.tokens:
        raise InvalidRequest(
            "the chat template writes nothing for these 'messages'", param="messages"
        )
    check_prompt_tokens(prompt.tokens, context.model.card, "messages")
    prompt = place_images(prompt, images, context)
    plan = await _plan(request, context, [prompt], chat=True, prefix="chatcmpl-")
    if images:
        plan = replace(plan, on_image_tokens=learning(images, context))
    return with_output_parser(plan, request, tools)


async def plan_completion(request: CompletionRequest, context: PlanContext) -> RequestPlan:
    """Makes the plan of a completion. Errors: `InvalidRequest` and its subclasses, `Overloaded`."""
    prompts = await _completion_prompts(request, context)
    plan = await _plan(request, context, prompts, chat=False, prefix="cmpl-")
    return _ending_with_middle(plan) if request.suffix else plan


# ---------------------------------------------------------------- chat


async def chat_tokens(request: ChatRequest | TokenizeRequest, context: PlanContext) -> TokenIds:
    """The tokens of a conversation, rendered by the model's template.

    Errors: `InvalidRequest` for what the template or its arguments refuse.
    """
    request = replace(request, messages=normalize_messages(request.messages or []))
    await check_no_images(request.messages or (), context.pool)
    if isinstance(request, ChatRequest):
        tools = callable_tools(request, context.model)
    else:
        tools = tuple(request.tools or ())
    return (await _chat_prompt(request, tools, context)).tokens


async def _chat_prompt(
    request: ChatRequest | TokenizeRequest, tools: Sequence[Tool], context: PlanContext
) -> Prompt:
    _check_contents(request.messages or ())
    source = request.chat_template
    size = chat_cost(request, tools, context.model.tokenizer)
    if source is None or source in context.model.templates.names:
        return await context.pool.run(size, _render_and_encode, request, tools, context)
    if not context.config.trust_request_chat_template:
        raise InvalidRequest(
            "'chat_template' is refused: this server uses its model's own template only",
            param="chat_template",
        )
    given = await context.pool.run(size, _template_input, request, tools, context)
    special = context.model.templates.special_tokens
    text = await context.pool.render_foreign(source, special, *given)
    return await context.pool.run(len(text), _encode_chat, request, text, context)


def _check_contents(messages: Sequence[Message]) -> None:
    """Checks that messages have content. An assistant's message may have tool calls instead; any
    other message without content is a mistake, and a template would render it as empty."""
    for index, message in enumerate(messages):
        if message.content is None and message.role != "assistant":
            raise InvalidRequest(
                f"'messages[{index}].content' is required", param=f"messages[{index}].content"
            )


def _render_and_encode(
    request: ChatRequest | TokenizeRequest, tools: Sequence[Tool], context: PlanContext
) -> Prompt:
    messages, options = _template_input(request, tools, context)
    templates = context.model.templates
    template = templates.select(request.chat_template, tools=bool(options["tools"]))
    return _encode_chat(request, template.render(messages, **options), context)


def _template_input(
    request: ChatRequest | TokenizeRequest, tools: Sequence[Tool], context: PlanContext
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Messages and options for a template.

    Errors: `InvalidRequest` for tools whose calls could not be parsed in time.
    """
    if context.model.tools is not None:
        context.model.tools.check(tools)
    messages = [_builtins(message) for message in request.messages or ()]
    return messages, _options(request, tools)


def _encode_chat(request: ChatRequest | TokenizeRequest, text: str, context: PlanContext) -> Prompt:
    model = context.model
    if isinstance(request, ChatRequest):
        _check_chars(text, request, model, "messages")
    else:
        check_chars_to_count(text, model, "messages")
    final = request.messages[-1] if request.messages and request.continue_final_message else None
    continued = "" if final is None else _continued(final, model)
    begun = model.reasoning is not None and model.reasoning.opens(text, continued)
    salt = cache_salt_of(context.key, getattr(request, "cache_salt", None))
    tokens = model.tokenizer.encode(text, bool(request.add_special_tokens), salt)
    if not isinstance(request, ChatRequest):
        return Prompt(tokens, reasoning=begun)
    return Prompt(
        truncate_prompt(tokens, request, model.card), _chat_echo(request), reasoning=begun
    )


def _chat_echo(request: ChatRequest) -> str:
    """The last message's text, if it is the assistant's."""
    message = request.messages[-1]
    return _said(message) if request.echo and message.role == "assistant" else ""


def _continued(message: Message, model: PreparedModel) -> str:
    """The text that the model continues; its reasoning, if there is nothing else."""
    if (text := _said(message)) or model.reasoning is None:
        return text
    reasoning = message.reasoning_content or message.reasoning
    return model.reasoning.start + reasoning if reasoning else ""


def _said(message: Message) -> str:
    content = message.content
    if content is None or isinstance(content, str):
        return content or ""
    return "".join([part.text or "" for part in content])


def _options(request: ChatRequest | TokenizeRequest, tools: Sequence[Tool]) -> dict[str, Any]:
    """The template's own arguments. By default a generation prompt is added unless the last message
    is to be continued."""
    continues = bool(request.continue_final_message)
    asked = request.add_generation_prompt
    return {
        "add_generation_prompt": not continues if asked is None else asked,
        "continue_final_message": continues,
        "tools": [_tool(tool) for tool in tools] or None,
        "documents": request.documents or None,
        "template_kwargs": {
            **_effort(request),
            **_thinking(request),
            **_verbosity(request),
            **(request.chat_template_kwargs or {}),
        },
    }


def _effort(request: ChatRequest | TokenizeRequest) -> dict[str, Any]:
    """The reasoning effort in the words that templates know; most know only on and off."""
    effort = request.reasoning_effort if isinstance(request, ChatRequest) else None
    if effort is None:
        return {}
    if effort != "none":
        return {"reasoning_effort": effort}
    return {"reasoning_effort": effort, "enable_thinking": False, "thinking": False}


def _thinking(request: ChatRequest | TokenizeRequest) -> dict[str, Any]:
    """Return whether the model is to think, under both names that templates use."""
    wanted, switch = request.enable_thinking, request.thinking
    if wanted is None and switch is not None:
        wanted = {"enabled": True, "disabled": False}.get(switch.type)
    return {} if wanted is None else {"enable_thinking": wanted, "thinking": wanted}


def _verbosity(request: ChatRequest | TokenizeRequest) -> dict[str, Any]:
    wanted = request.verbosity if isinstance(request, ChatRequest) else None
    return {} if wanted is None else {"verbosity": wanted}


def _tool(tool: Tool) -> dict[str, Any]:
    """A tool as clients write it, because a template may print all of it."""
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


# ---------------------------------------------------------------- completions


async def _completion_prompts(request: CompletionRequest, context: PlanContext) -> list[Prompt]:
    _check_count(request, context.model.card)
    given = prompt_list(request.prompt)
    if len(given) > context.config.max_prompts:
        raise InvalidRequest(
            f"'prompt' holds {len(given)} prompts; the limit is {context.config.max_prompts}",
            param="prompt",
        )
    single = len(given) == 1 and not _is_batch(request.prompt)
    if request.suffix:
        _check_suffix(request, given)
    texts = [prompt for prompt in given if isinstance(prompt, str)]
    special = request.add_special_tokens is not False
    names = ["prompt"] if single else [f"prompt[{index}]" for index in range(len(given))]
    encoded: Iterator[TokenIds] = iter(())
    # Either all prompts are texts or none is.
    if texts:
        size = texts_cost([*texts, request.suffix or ""], context.model.tokenizer)
        encoded = iter(
            await context.pool.run(size, _encode, texts, names, special, request, context.model)
        )
    prompts = []
    for name, prompt in zip(names, given, strict=True):
        ids = next(encoded) if isinstance(prompt, str) else token_ids(prompt)
        check_prompt_tokens(ids, context.model.card, name)
        kept = truncate_prompt(ids, request, context.model.card)
        told = prompt if isinstance(prompt, str) and len(kept) == len(ids) else kept
        prompts.append(Prompt(kept, await _echo(request, told, context)))
    return prompts


def _check_count(request: CompletionRequest, card: ModelCard) -> None:
    """Refuses too many token ids before they are checked, which takes 35 ns each on the event loop.

    Errors: `ContextLengthExceeded`.
    """
    prompt = request.prompt
    if request.truncate_prompt_tokens is not None or not isinstance(prompt, list):
        return
    if prompt and type(prompt[0]) is int:
        check_prompt_length(len(prompt), card, "prompt")


def _encode(
    texts: Sequence[str],
    names: Sequence[str],
    special: bool,
    request: CompletionRequest,
    model: PreparedModel,
) -> list[TokenIds]:
    for text, name in zip(texts, names, strict=True):
        _check_chars(text, request, model, name)
    if not request.suffix:
        return model.tokenizer.encode_batch(texts, special)
    _check_chars(request.suffix, request, model, "suffix")
    return infill_prompts(model.tokenizer, texts, request.suffix, special)


def _check_suffix(request: CompletionRequest, given: Sequence[str | list[int]]) -> None:
    """Errors: `InvalidRequest` for fields that have no meaning for a gap."""
    if any(not isinstance(prompt, str) for prompt in given):
        raise InvalidRequest("'suffix' needs 'prompt' as text", param="prompt")
    for name in ("echo", "truncate_prompt_tokens"):
        if getattr(request, name):
            raise InvalidRequest(
                f"'{name}' cannot be combined with 'suffix': leave one of them out", param=name
            )


def _ending_with_middle(plan: RequestPlan) -> RequestPlan:
    """The plan with the tokens that end a gap's text, besides the model's own end tokens."""
    tokenizer = plan.model.tokenizer
    layout = infill_format(tokenizer)
    ends, requests = layout.end_ids(tokenizer), []
    for each in plan.requests:
        eos = tuple(dict.fromkeys((*each.sampling.eos_token_ids, *ends)))
        requests.append(replace(each, sampling=replace(each.sampling, eos_token_ids=eos)))
    stops = tuple(dict.fromkeys((*plan.stops, *layout.end_texts(tokenizer))))
    return replace(plan, requests=requests, stops=stops)


async def _echo(request: CompletionRequest, prompt: str | TokenIds, context: PlanContext) -> str:
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
    if set(map(type, prompt)) == {int}:
        return [prompt]  # type: ignore[list-item]  # checked above
    kind = type(prompt[0])
    for index, item in enumerate(prompt):
        if type(item) is not kind or kind is int:
            raise InvalidRequest(
                "'prompt' must be one text, a list of texts, a list of token ids, or a list of "
                "lists of token ids, not a mixture",
                param=f"prompt[{index}]",
            )
    return prompt  # type: ignore[return-value]  # checked above


def _is_batch(prompt: str | list[str | int | list[int]]) -> bool:
    return isinstance(prompt, list) and type(prompt[0]) is not int


# ---------------------------------------------------------------- chat and completions


def _check_chars(
    text: str, request: ChatRequest | CompletionRequest, model: PreparedModel, param: str
) -> None:
    """Checks a prompt's length. A prompt to be cut is encoded as a whole first, so it has a limit
    of its own."""
    if request.truncate_prompt_tokens is None:
        check_prompt_chars(text, model, param)
    elif len(text) > (most := max_prompt_chars(model.card)):
        raise InvalidRequest(
            f"the prompt has {len(text)} characters; {most} may be sent with "
            "'truncate_prompt_tokens': shorten it",
            param=param,
        )


def max_prompt_chars(card: ModelCard) -> int:
    """Most characters of a text that is encoded as a whole in any case."""
    return max(_MAX_CHARS, _MAX_CONTEXT_CHARS * card.max_model_len)


def check_chars_to_count(text: str, model: PreparedModel, param: str) -> None:
    """Errors: `InvalidRequest` for a text whose tokens would take seconds and hundreds of megabytes
    to count."""
    limit = max_prompt_chars(model.card)
    if len(text) > limit:
        raise InvalidRequest(
            f"'{param}' has {len(text)} characters; the limit is {limit}: send it in parts",
            param=param,
        )


def check_prompt_chars(text: str, model: PreparedModel, param: str) -> None:
    """Refuses a text that cannot fit before it is encoded. A text that is much too long is counted
    in slices first.

    Errors: `ContextLengthExceeded`.
    """
    card = model.card
    if len(text) <= card.max_model_len:
        return
    fewest = model.tokenizer.fewest_tokens(len(text))
    if fewest <= card.max_model_len and len(text) > max(
        _MAX_CHARS, _USUAL_CHARS * card.max_model_len
    ):
        fewest = model.tokenizer.count_up_to(text, card.max_model_len)
    if fewest > card.max_model_len:
        check_prompt_length(fewest, card, param, f" or more ({len(text)} characters)")


async def _plan(
    request: ChatRequest | CompletionRequest,
    context: PlanContext,
    prompts: list[Prompt],
    *,
    chat: bool,
    prefix: Literal["chatcmpl-", "cmpl-"],
) -> RequestPlan:
    card = context.model.card
    n = choice_count(request, len(prompts), context.config.max_choices)
    check_prompt_logprobs(request, sum(len(prompt.tokens) for prompt in prompts), n)
    if request.stream_options is not None and not request.stream:
        raise InvalidRequest("'stream_options' needs 'stream': true", param="stream_options")
    options = request.stream_options
    continuous = (
        options is not None
        and bool(options.continuous_usage_stats)
        and options.include_usage is not False
    )
    check_token_bans(request, card)
    repeats = repetition_detector(request)
    requests = await _submissions(request, context, prompts, n, card)
    most = max(each.sampling.max_tokens for each in requests)
    check_response_size(request, most, len(prompts) * n, context.config.max_answer)
    return RequestPlan(
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
        alternatives=0 if isinstance(request, ChatRequest) else request.logprobs or 0,
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
    context: PlanContext,
    prompts: Sequence[Prompt],
    n: int,
    card: ModelCard,
) -> list[GenerateRequest]:
    seed, priority = new_seed(), request.priority or 0
    check_priority(priority, context.key, context.config.max_priority)
    salt, wish = cache_salt_of(context.key, request.cache_salt), cache_wish(request)
    tokens = [prompt.tokens for prompt in prompts]
    if prompts[0].images:
        names = [await image_names(each, card, salt, context) for each in prompts]
    else:
        names = await context.naming.of(card, salt, tokens, context.pool, lora=context.model.lora)
    bad_words = await _bad_words(request, context)
    grammar = await grammar_of(request, context)
    thoughts = [thinking_of(request, context.model, each.reasoning) for each in prompts]
    found: list[GenerateRequest] = []
    for index, (prompt, named, thinking) in enumerate(zip(prompts, names, thoughts, strict=True)):
        sampling = sampling_params(
            *(request, card, prompt.size, seed, bad_words, grammar, thinking, context.fit),
            like=found[0].sampling if found else None,
        )
        found.append(
            GenerateRequest(
                request_id=context.request_id,
                model=card.name,
                prompt=prompt.tokens,
                sampling=sampling,
                n=n,
                prompt_index=index,
                cache_salt=salt,
                priority=priority,
                deadline=context.deadline,
                block_names=named.hashes,
                names_id=named.id,
                lora=context.model.lora,
                images=tuple(image.data for image in prompt.images),
                image_tokens=prompt.image_tokens,
                cache_ttl=wish.ttl,
                cache_scope=wish.scope,
            )
        )
    return found


async def _bad_words(
    request: ChatRequest | CompletionRequest, context: PlanContext
) -> tuple[tuple[int, ...], ...]:
    words = request.bad_words
    if not words:
        return ()
    size = 2 * texts_cost(words, context.model.tokenizer)
    return await context.pool.run(size, bad_word_ids, words, context.model.tokenizer)
