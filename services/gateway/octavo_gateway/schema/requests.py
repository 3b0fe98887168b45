"""Bodies of requests. Names, defaults and meanings are OpenAI's and, beyond those, vLLM's.

Ranges are checked in ``sampling`` with vLLM's texts; here stands only what the types say.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag

# Far more than any context holds; checking messages beyond would only keep the interpreter busy.
MAX_MESSAGES = 1 << 14
# Each entry is work in every step of every choice.
MAX_LOGIT_BIASES = 1024
MAX_STOP_TOKENS = 1024
# Kept with the request for as long as it lives.
MAX_SALT_CHARS = 1024

Int32 = Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)]


def _prompt_kind(value: Any) -> str:
    """Which of the four kinds a prompt is, by its first element."""
    if not isinstance(value, list):
        return "text"
    first = value[0] if value else ""
    return "texts" if isinstance(first, str) else "lists" if isinstance(first, list) else "ids"


# Told apart by hand, and given up at the first fault: trying a long list of ids as each kind in turn, and collecting what
# is wrong with every element, would take seconds.
Prompt = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[list[str], Field(fail_fast=True), Tag("texts")]
    | Annotated[list[int], Field(fail_fast=True), Tag("ids")]
    | Annotated[list[Annotated[list[int], Field(fail_fast=True)]], Field(fail_fast=True), Tag("lists")],
    Discriminator(_prompt_kind),
]


def _few_biases(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > MAX_LOGIT_BIASES:
        raise ValueError(f"logit_bias may have at most {MAX_LOGIT_BIASES} entries, got {len(value)}.")
    return value


class Body(BaseModel):
    """Unknown fields are ignored, as OpenAI's servers do."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())


class StreamOptions(Body):
    """What a stream carries besides text."""

    include_usage: bool | None = Field(True, description="One more chunk with the usage before [DONE].")
    continuous_usage_stats: bool | None = Field(False, description="With include_usage: usage in every chunk.")


class GenerationBody(Body):
    """What completions and chat have in common."""

    model: str | None = Field(None, description="Served model; may be left out.")
    temperature: float | None = Field(None, description="0 is greedy; 0 to 2. Default from the model, else 1.")
    top_p: float | None = Field(None, description="Nucleus mass in (0, 1].")
    top_k: Int32 | None = Field(None, description="Keep the k likeliest tokens; 0 or -1 = all.")
    min_p: float | None = Field(None, description="Least share of the likeliest token's probability, 0 to 1.")
    presence_penalty: float | None = Field(0.0, description="-2 to 2.")
    frequency_penalty: float | None = Field(0.0, description="-2 to 2.")
    repetition_penalty: float | None = Field(None, description="Above 0; 1 = off.")
    logit_bias: Annotated[dict[str, float], BeforeValidator(_few_biases)] | None = Field(
        None, description="Token id to what is added to its logit."
    )
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 64)] | None = Field(
        None, description="Same seed, same tokens; choice i draws with seed + i."
    )
    n: Int32 | None = Field(1, description="Choices per prompt.")
    max_tokens: Int32 | None = Field(None, description="Most output tokens.")
    min_tokens: Int32 | None = Field(0, description="No end before this many output tokens.")
    stop: str | Annotated[list[str], Field(fail_fast=True)] | None = Field(
        None, description="Strings that end the output."
    )
    stop_token_ids: Annotated[list[Int32], Field(max_length=MAX_STOP_TOKENS, fail_fast=True)] | None = Field(
        None, description="Token ids that end the output."
    )
    ignore_eos: bool | None = Field(False, description="Go on after the model's own end.")
    include_stop_str_in_output: bool | None = Field(False, description="Keep what ended the output in the text.")
    skip_special_tokens: bool | None = Field(True, description="Leave special tokens out of the text.")
    spaces_between_special_tokens: bool | None = Field(True, description="Accepted for compatibility; no effect.")
    prompt_logprobs: Int32 | None = Field(None, description="Log-probabilities of the prompt; -1 = whole vocabulary.")
    return_tokens_as_token_ids: bool | None = Field(None, description="Name tokens in log-probabilities token_id:N.")
    stream: bool | None = Field(False, description="Answer with server-sent events.")
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, description="A label; no effect.")
    priority: Int32 | None = Field(0, description="Lower runs first, where the server schedules by priority.")
    cache_salt: Annotated[str, Field(max_length=MAX_SALT_CHARS)] | None = Field(
        None, description="Only requests with equal salts share cached prefixes."
    )
    best_of: Int32 | None = Field(
        None, description="Make so many, give the n best back by mean log-probability; with beam search, the width."
    )
    use_beam_search: bool | None = Field(False, description="Search for the likeliest outputs instead of drawing.")
    length_penalty: float | None = Field(
        1.0, description="Beam search ranks by log-probability / length ** length_penalty; above 0 favours longer ones."
    )
    early_stopping: bool | Literal["never"] | None = Field(
        False, description="Beam search: true ends it with the first best_of hypotheses, never searches to the end."
    )
    timeout: float | None = Field(None, description="Seconds after which the output ends where it stands.")


class CompletionRequest(GenerationBody):
    """Body of ``POST /v1/completions``."""

    prompt: Prompt | None = Field(None, description="Text, texts, token ids, or lists of token ids.")
    max_tokens: Int32 | None = Field(None, description="Most output tokens; default 16. 0 is for echo.")
    logprobs: Int32 | None = Field(None, description="Alternatives per token.")
    echo: bool | None = Field(False, description="Give the prompt back in front of the output.")
    suffix: str | None = Field(None, description="Not supported.")
    add_special_tokens: bool | None = Field(True, description="Let the tokenizer add its begin-of-sequence token.")


class Message(Body):
    """One turn of a conversation."""

    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None


class ResponseFormat(Body):
    """Only text is supported."""

    type: str = "text"


class ChatPrompt(Body):
    """How messages become a prompt."""

    messages: Annotated[list[Message], Field(max_length=MAX_MESSAGES, fail_fast=True)]
    add_generation_prompt: bool | None = Field(True, description="Open the assistant's turn.")
    continue_final_message: bool | None = Field(False, description="Go on with the last message.")
    add_special_tokens: bool | None = Field(False, description="Usually the template has them already.")
    chat_template: str | None = Field(None, description="Not accepted from requests.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Variables for the template.")
    documents: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = Field(None, description="Not supported yet.")


class ChatCompletionRequest(ChatPrompt, GenerationBody):
    """Body of ``POST /v1/chat/completions``."""

    max_completion_tokens: Int32 | None = Field(None, description="Most output tokens; wins over max_tokens.")
    logprobs: bool | None = Field(False, description="Log-probabilities of the output.")
    top_logprobs: Int32 | None = Field(0, description="Alternatives per token.")
    echo: bool | None = Field(False, description="Put the last message in front if it has the answer's role.")
    response_format: ResponseFormat | None = None
    tool_choice: Any = Field(None, description='Only "none".')


class TokenizeRequest(Body):
    """Body of ``POST /tokenize``: either a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    add_special_tokens: bool | None = Field(None, description="Default: true for prompts, false for messages.")
    return_token_strs: bool | None = Field(False, description="Also give the tokens' names.")
    add_generation_prompt: bool | None = True
    continue_final_message: bool | None = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None


class DetokenizeRequest(Body):
    """Body of ``POST /detokenize``."""

    model: str | None = None
    tokens: Annotated[list[int], Field(fail_fast=True)]


FinishReason = Literal["stop", "length", "abort", "error", "timeout"]
