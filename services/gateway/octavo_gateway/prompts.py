"""From prompts and messages to token ids. Everything here runs in worker threads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from octavo_gateway.errors import bad_request, context_overflow
from octavo_gateway.model_assets import ModelAssets
from octavo_gateway.schema.requests import ChatPrompt, CompletionRequest, Message, TokenizeRequest

EMPTY_PROMPT = "Either prompt or prompt_embeds must be provided and non-empty."


@dataclass(frozen=True, slots=True)
class Bounds:
    """What may be refused before tokenising (all in tokens): the model's length and the output asked for."""

    max_model_len: int
    max_tokens: int


def completion_prompts(
    body: CompletionRequest, assets: ModelAssets, bounds: Bounds, max_prompts: int
) -> list[list[int]]:
    """Token ids of each prompt of a completion.

    Raises:
        ApiError: 400 for prompts that are empty, too many or surely too long.
    """
    prompt = body.prompt
    if not prompt:
        raise bad_request(EMPTY_PROMPT, "prompt")
    if isinstance(prompt, str):
        texts, ids = [prompt], None
    elif isinstance(prompt[0], str):
        texts, ids = [text for text in prompt if isinstance(text, str)], None
    elif isinstance(prompt[0], int):
        texts, ids = [], [[token for token in prompt if isinstance(token, int)]]
    else:
        texts, ids = [], [one for one in prompt if isinstance(one, list)]
    count = len(texts) if ids is None else len(ids)
    if count > max_prompts:
        raise bad_request(f"A request may have at most {max_prompts} prompts, got {count}.", "prompt")
    if ids is None:
        for text in texts:
            refuse_hopeless(text, assets, bounds)
        ids = assets.tokenizer.encode(texts, add_special_tokens=body.add_special_tokens is not False)
    if not all(ids):
        raise bad_request(EMPTY_PROMPT, "prompt")
    return ids


def sizes(body: CompletionRequest | ChatPrompt) -> tuple[int, int]:
    """Characters and token ids of all prompts, or of a conversation without its template."""
    if isinstance(body, ChatPrompt):
        contents = [message.content for message in body.messages]
        parts = [part.get("text") for content in contents if isinstance(content, list) for part in content]
        return sum(len(text) for text in (*contents, *parts) if isinstance(text, str)), 0
    prompts = [body.prompt] if isinstance(body.prompt, str) else body.prompt or [""]
    if isinstance(prompts[0], int):
        return 0, len(prompts)
    return (
        sum(len(prompt) for prompt in prompts if isinstance(prompt, str)),
        sum(len(prompt) for prompt in prompts if isinstance(prompt, list)),
    )


def refuse_hopeless(text: str, assets: ModelAssets, bounds: Bounds) -> None:
    """Refuse a text that has more bytes than the longest allowed prompt could have, without tokenising it."""
    most = max(0, bounds.max_model_len - bounds.max_tokens)
    if len(text) > most * assets.tokenizer.max_token_bytes:
        raise context_overflow(bounds.max_model_len, bounds.max_tokens, most + 1, at_least=True)


def chat_text(body: ChatPrompt | TokenizeRequest, assets: ModelAssets) -> str:
    """The rendered conversation.

    Raises:
        ApiError: 400 for messages that cannot be rendered.
    """
    if body.chat_template is not None:
        raise bad_request("This server does not accept chat templates from requests.", "chat_template")
    if body.tools:
        raise bad_request("Tool calling is not supported yet.", "tools")
    if assets.chat_template is None:
        raise bad_request("The model has no chat template; start the server with --chat-template.", "messages")
    if not body.messages:
        raise bad_request("messages must not be empty.", "messages")
    opens, continues = body.add_generation_prompt is not False, bool(body.continue_final_message)
    if opens and continues:
        message = "Cannot set both `continue_final_message` and `add_generation_prompt` to True."
        raise bad_request(message, "continue_final_message")
    template = assets.chat_template
    return template.render(
        [plain_message(message, place, parts=template.wants_parts) for place, message in enumerate(body.messages)],
        add_generation_prompt=opens,
        continue_final_message=continues,
        variables={**(body.chat_template_kwargs or {}), **({"documents": body.documents} if body.documents else {})},
    )


def chat_ids(body: ChatPrompt, assets: ModelAssets, bounds: Bounds) -> list[int]:
    """Token ids of a conversation.

    Raises:
        ApiError: 400 for messages that cannot be rendered or are surely too long.
    """
    most = bounds.max_model_len - bounds.max_tokens
    if len(body.messages) > max(0, most):
        # Any template spends a token on a message.
        raise context_overflow(bounds.max_model_len, bounds.max_tokens, most + 1, at_least=True)
    text = chat_text(body, assets)
    refuse_hopeless(text, assets, bounds)
    ids = assets.tokenizer.encode([text], add_special_tokens=bool(body.add_special_tokens))[0]
    if not ids:
        raise bad_request(EMPTY_PROMPT, "messages")
    return ids


def plain_message(message: Message, place: int, *, parts: bool) -> dict[str, Any]:
    """A message as templates expect it: content as one string, or as parts for templates that loop over them."""
    plain: dict[str, Any] = {"role": message.role, **(message.model_extra or {})}
    if message.name is not None:
        plain["name"] = message.name
    content = message.content
    if isinstance(content, list):
        texts = [_part_text(part, place) for part in content]
        plain["content"] = [{"type": "text", "text": text} for text in texts] if parts else "\n".join(texts)
    elif parts and content is not None:
        plain["content"] = [{"type": "text", "text": content}]
    else:
        plain["content"] = content if content is not None else ""
    return plain


def _part_text(part: dict[str, Any], place: int) -> str:
    kind, text = part.get("type", "text"), part.get("text")
    if kind not in ("text", "input_text", "output_text") or not isinstance(text, str):
        raise bad_request(f"Content of type {kind!r} is not supported by this model.", f"messages.{place}.content")
    return text


def echo_texts(body: CompletionRequest, assets: ModelAssets, prompts: Sequence[Sequence[int]]) -> list[str]:
    """The prompts as text: as they were sent, or decoded where ids were sent."""
    if isinstance(body.prompt, str):
        return [body.prompt]
    if body.prompt and isinstance(body.prompt[0], str):
        return [text for text in body.prompt if isinstance(text, str)]
    skip = body.skip_special_tokens is not False
    return [assets.tokenizer.decode(prompt, skip_special_tokens=skip) for prompt in prompts]
