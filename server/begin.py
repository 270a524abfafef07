"""From the body of a completion or a chat to a generation that can begin, with its warnings.

Knows what bodies mean; neither how they came nor what is sent back (replies.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from server.chat_output import ChatOutput, completion_grammar
from server.chat_template import TemplateRefusedError
from server.choice import PromptText, TextOptions, prompt_text
from server.engine.messages import GrammarSpec
from server.errors import bad_request
from server.generation import Generation
from server.replies import CHAT, COMPLETION, Reply
from server.sampling import sampling_params
from server.schemas import REASONS, ChatBody, CompletionBody, GenerationBody, fields_without_effect, unknown_fields
from server.service import Service
from server.text import decode

COMPLETION_TOKENS = 16
"""OpenAI's default of max_tokens for completions; chat takes the rest of the context."""


def read_warnings(service: Service, body: GenerationBody) -> list[str]:
    """One entry a field that means nothing here; with --strict-params the first one is refused."""
    try:
        unknown = [ascii(name)[1:-1] for name in unknown_fields(body)]
    except ValueError as error:
        name = str(error)
        reason = REASONS.get(name, "this server does not support this field, or not this value of it")
        raise bad_request(f"{name}: {reason}", name) from None
    without_effect = [f"{name}: accepted, has no effect here" for name in fields_without_effect(body)]
    return warn_unknown(service, unknown) + without_effect


def warn_unknown(service: Service, unknown: Sequence[str]) -> list[str]:
    if unknown and service.config.strict_params:
        raise bad_request(f"{unknown[0]}: there is no such field (--strict-params)", unknown[0])
    return [f"{name}: unknown field, ignored" for name in unknown]


async def begin_completion(service: Service, body: CompletionBody, request_id: str) -> Reply:
    model, limits = service.check_model(body.model), service.limits
    hide_output = body.max_tokens == 0
    if hide_output and not body.echo:
        raise bad_request("max_tokens: 0 gives nothing but an echo; set echo, or ask for at least 1", "max_tokens")
    prompts = await completion_prompts(service, body)
    echo_logprobs = body.logprobs if body.echo else None
    params = []
    for prompt in prompts:
        limits.check_prompt(prompt.tokens)
        budget = limits.output_budget(1 if hide_output else body.max_tokens, len(prompt.tokens), COMPLETION_TOKENS)
        params.append(sampling_params(body, limits, budget, body.logprobs, echo_logprobs))
    options = text_options(body, echo=bool(body.echo), hide_output=hide_output, echo_logprobs=echo_logprobs)
    grammar = await service.checked(completion_grammar(body))
    generation = make_generation(service, body, request_id, prompts, params, options, grammar)
    vocabulary = service.tokenizer.vocabulary
    return Reply(COMPLETION, model, generation, vocabulary, body.logprobs is not None, body.usage)


async def completion_prompts(service: Service, body: CompletionBody) -> list[PromptText]:
    vocabulary, prompt = service.tokenizer.vocabulary, body.prompt
    ids = await prompt_tokens(service, prompt, body.add_special_tokens is not False)
    texts: Any = [prompt] if isinstance(prompt, str) else prompt
    if texts and isinstance(texts[0], str):
        return [prompt_text(vocabulary, tokens, text) for tokens, text in zip(ids, texts, strict=True)]
    for tokens in ids:
        service.limits.check_ids(tokens, "prompt")
    return [prompt_text(vocabulary, tokens, decode(vocabulary, tokens) if body.echo else "") for tokens in ids]


async def prompt_tokens(service: Service, prompt: Any, add_special_tokens: bool) -> list[list[int]]:
    """Texts are tokenised together; control tokens in them count, since the caller renders such prompts itself."""
    if isinstance(prompt, str):
        return await service.tokenizer.encode_aside([prompt], add_special_tokens)
    if prompt and isinstance(prompt[0], str):
        return await service.tokenizer.encode_aside(prompt, add_special_tokens)
    return prompt if prompt and isinstance(prompt[0], list) else [prompt]


async def begin_chat(service: Service, body: ChatBody, request_id: str) -> Reply:
    model, limits = service.check_model(body.model), service.limits
    output = ChatOutput(body, service.style, service.tokenizer.vocabulary)
    text, marker = render_chat(service, body, output)
    tokens = await service.tokenizer.encode_rendered_aside(text, marker)
    limits.check_prompt(tokens, "messages")
    asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if asked == 0:
        raise bad_request("max_tokens: 0 gives nothing; ask for at least 1", "max_tokens")
    budget = limits.output_budget(asked, len(tokens), None)
    params = sampling_params(body, limits, budget, (body.top_logprobs or 0) if body.logprobs else None)
    options = replace(
        text_options(body),
        shown=output.shown_tokens(),
        parser=output.parser(text),
        calls_finish="stop" if output.is_named else "tool_calls",
    )
    grammar = await service.checked(output.grammar(text))
    generation = make_generation(service, body, request_id, [PromptText(tokens)], [params], options, grammar)
    return Reply(CHAT, model, generation, service.tokenizer.vocabulary, bool(body.logprobs), body.usage)


async def chat_tokens(service: Service, body: ChatBody) -> list[int]:
    """The prompt of a conversation."""
    output = ChatOutput(body, service.style, service.tokenizer.vocabulary)
    return await service.tokenizer.encode_rendered_aside(*render_chat(service, body, output))


def render_chat(service: Service, body: ChatBody, output: ChatOutput) -> tuple[str, str]:
    """The prompt and the marker of the user's words in it. What the template refuses is the caller's to mend."""
    if service.template is None:
        raise bad_request("this model has no chat template; use /v1/completions", "messages")
    continue_final = bool(body.continue_final_message)
    opens = not continue_final if body.add_generation_prompt is None else body.add_generation_prompt
    try:
        variables = {"add_generation_prompt": opens} | output.variables() | (body.chat_template_kwargs or {})
        return service.template.render(output.messages(), variables, continue_final)
    except TemplateRefusedError as error:
        raise bad_request(str(error), "messages") from None


def text_options(
    body: GenerationBody, *, echo: bool = False, hide_output: bool = False, echo_logprobs: int | None = None
) -> TextOptions:
    return TextOptions(
        stops=body.stops,
        include_stop=bool(body.include_stop_str_in_output),
        skip_special=body.skip_special_tokens is not False,
        echo=echo,
        hide_output=hide_output,
        echo_logprobs=echo_logprobs,
        prompt_logprobs=body.prompt_logprobs,
    )


def make_generation(
    service: Service,
    body: GenerationBody,
    request_id: str,
    prompts: list[PromptText],
    params: list[Any],
    options: TextOptions,
    grammar: GrammarSpec | None,
) -> Generation:
    """The engine's ids begin with the request's own id; a number keeps them apart when a client repeats it."""
    return Generation(
        f"{request_id}.{service.next_serial()}",
        prompts,
        params,
        service.tokenizer.vocabulary,
        options,
        service.metrics,
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
        grammar=grammar,
    )
