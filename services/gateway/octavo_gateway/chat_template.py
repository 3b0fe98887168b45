"""Chat templates: Jinja in a sandbox, with what Hugging Face's templates may rely on.

The environment follows what transformers documents for chat templates: ``trim_blocks``, ``lstrip_blocks``, loop controls,
``raise_exception``, ``strftime_now``, a ``tojson`` that escapes nothing for HTML, and a ``generation`` block tag.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from octavo_gateway.errors import bad_request


class _GenerationTag(Extension):
    """``{% generation %}`` marks the model's own turns for training; here it just shows its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> str:
    raise TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """A compiled chat template with the model's special tokens."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = _environment()
        self._special_tokens = dict(special_tokens)
        self._template = environment.from_string(source)
        # Templates that loop over a message's content want its parts; all others want one string.
        self.wants_parts = _loops_over_content(environment, source)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        variables: Mapping[str, Any],
    ) -> str:
        """The prompt for a conversation.

        Raises:
            ApiError: the template refuses the messages, or the last one cannot be continued.
        """
        context = {"tools": None, "documents": None, **self._special_tokens, **variables}
        try:
            text = self._template.render(
                **(context | {"messages": list(messages), "add_generation_prompt": add_generation_prompt})
            )
        except Exception as error:
            # Templates are small programs: on odd messages they fail in every way a program can.
            raise bad_request(f"The chat template cannot render these messages: {error}", "messages") from error
        return _cut_after_last(text, messages[-1]) if continue_final_message else text


def _cut_after_last(text: str, message: Mapping[str, Any]) -> str:
    """The rendered text up to the end of the last message's content, so that the model goes on with it."""
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = content[-1].get("text", "") if content else ""
    place = text.rfind(content.strip())
    if not content.strip() or place < 0:
        raise bad_request("The last message cannot be continued: its content is not in the rendered chat.", "messages")
    with_end = content.lstrip()
    keep = with_end if text.startswith(with_end, place) else content.strip()
    return text[: place + len(keep)]


def _loops_over_content(environment: ImmutableSandboxedEnvironment, source: str) -> bool:
    def names_content(node: nodes.Node) -> bool:
        if isinstance(node, nodes.Getattr):
            return node.attr == "content"
        return isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) and node.arg.value == "content"

    tree = environment.parse(source)
    aliases = {
        assign.target.name
        for assign in tree.find_all(nodes.Assign)
        if isinstance(assign.target, nodes.Name) and names_content(assign.node)
    }
    is_content: Callable[[nodes.Node], bool] = lambda node: (  # noqa: E731
        names_content(node) or (isinstance(node, nodes.Name) and node.name in aliases)
    )
    return any(is_content(loop.iter) for loop in tree.find_all(nodes.For))
