"""Chat templates: Jinja in a sandbox, with what Hugging Face's templates may rely on.

The environment follows what transformers documents for chat templates: ``trim_blocks``, ``lstrip_blocks``, loop controls,
``raise_exception``, ``strftime_now``, a ``tojson`` that escapes nothing for HTML, and a ``generation`` block tag.

Beyond Jinja's sandbox, which keeps a template away from Python's inside, a render has a budget: of loop steps, of processor time,
of text. A template comes with a model, but what it does with a conversation is for whoever writes the conversation to choose.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from octavo_gateway.errors import bad_request

MAX_LOOP_STEPS = 1_000_000
# Of the thread that renders.
MAX_RENDER_S = 10.0
# Characters that are put out, and characters or elements that a product makes.
MAX_TEXT = 32 << 20
MAX_INT_BITS = 4096
# The variable that holds a render's budget; no conversation can set it.
_BUDGET = "_octavo_budget"


class _Budget:
    """What one render may still spend."""

    __slots__ = ("_left", "_until_s")

    def __init__(self) -> None:
        self._left = MAX_LOOP_STEPS
        self._until_s = time.thread_time() + MAX_RENDER_S

    def step(self) -> None:
        """A loop goes round. Raises TemplateError when that is too much."""
        self._left -= 1
        if self._left < 0:
            raise TemplateError(f"its loops go round more than {MAX_LOOP_STEPS} times")
        if self._left % 64 == 0:
            self.check_time()

    def check_time(self) -> None:
        """Raises TemplateError when it takes too long."""
        if time.thread_time() > self._until_s:
            raise TemplateError(f"it takes more than {MAX_RENDER_S:g} s")


@pass_context
def _counted(context: Context, items: Iterable[Any]) -> Iterable[Any]:
    """What every loop of a template goes over."""
    budget = context.resolve(_BUDGET)
    assert isinstance(budget, _Budget), "a template is rendered without a budget"
    return _count(budget, items)


def _count(budget: _Budget, items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        budget.step()
        yield item


class _BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, whose loops are counted and whose products have bounds."""

    intercepted_binops = frozenset(("*", "**"))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, "_counted", [], [], None, None, lineno=loop.lineno)
        tree.set_environment(self)
        return tree

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """A product or a power, if it is not too large."""
        if operator == "**" and not (isinstance(right, int | float) and -64 <= right <= 64):
            raise SecurityError("a power beyond 64")
        for one, other in ((left, right), (right, left)):
            if isinstance(one, Sequence) and isinstance(other, int) and len(one) * other > MAX_TEXT:
                raise SecurityError("a product that is too large")
        factor = right if operator == "**" else 1
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * factor if operator == "**" else left.bit_length() + right.bit_length()
            if bits > MAX_INT_BITS:
                raise SecurityError("a number that is too large")
        return super().call_binop(context, operator, left, right)


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


def _environment(kind: type[ImmutableSandboxedEnvironment]) -> ImmutableSandboxedEnvironment:
    environment = kind(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
    environment.filters["_counted"] = _counted
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """A compiled chat template with the model's special tokens."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._special_tokens = dict(special_tokens)
        self._template = _environment(_BoundedEnvironment).from_string(source)
        # Templates that loop over a message's content want its parts; all others want one string.
        self.wants_parts = _loops_over_content(_environment(ImmutableSandboxedEnvironment), source)

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
        context |= {"messages": list(messages), "add_generation_prompt": add_generation_prompt}
        try:
            text = self._render(context)
        except Exception as error:
            # Templates are small programs: on odd messages they fail in every way a program can.
            raise bad_request(f"The chat template cannot render these messages: {error}", "messages") from error
        return _cut_after_last(text, messages[-1]) if continue_final_message else text

    def _render(self, context: Mapping[str, Any]) -> str:
        budget = _Budget()
        parts: list[str] = []
        size = 0
        for part in self._template.generate({**context, _BUDGET: budget}):
            parts.append(part)
            size += len(part)
            if size > MAX_TEXT:
                raise TemplateError(f"it puts out more than {MAX_TEXT} characters")
            budget.check_time()
        return "".join(parts)


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
