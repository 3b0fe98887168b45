"""Bounds on what a request may bring: each is a plain 400, and none takes the gateway long."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
from gateway_stage import Stage

from octavo_gateway.body import MAX_JSON_CONTAINERS, MAX_JSON_DEPTH
from octavo_gateway.chat_template import MAX_LOOP_STEPS, ChatTemplate
from octavo_gateway.errors import ApiError
from octavo_gateway.sampling import MAX_STOP_CHARS
from octavo_gateway.schema.requests import MAX_LOGIT_BIASES, MAX_SALT_CHARS, MAX_STOP_TOKENS

MakeStage = Callable[..., AbstractContextManager[Stage]]
ROUTES = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")


def nested(depth: int, kind: str) -> str:
    return "[" * depth + "]" * depth if kind == "list" else '{"a":' * depth + "1" + "}" * depth


def refused(stage: Stage, path: str, text: str | bytes) -> dict[str, Any]:
    answer = stage.client.post(path, content=text)
    assert answer.status_code == 400, answer.text[:300]
    assert set(answer.json()) == {"error"}
    return dict(answer.json()["error"])


@pytest.mark.parametrize("kind", ["list", "object"])
@pytest.mark.parametrize("path", ROUTES)
def test_deep_bodies(stage: Stage, path: str, kind: str) -> None:
    for depth in (MAX_JSON_DEPTH + 1, 900, 1020, 1030, 50_000):
        assert refused(stage, path, f'{{"metadata": {nested(depth, kind)}}}')["type"] == "Bad Request"
        refused(stage, path, nested(depth, kind))
    refused(stage, path, "[" * 100_000)
    # As deep as may be: refused, if at all, for what is missing.
    error = stage.client.post(path, content=f'{{"metadata": {nested(MAX_JSON_DEPTH - 1, kind)}}}')
    assert "nested" not in error.text


def test_depth_that_is_allowed_is_served(stage: Stage) -> None:
    deep = json.loads(nested(MAX_JSON_DEPTH - 3, "object"))
    body = {
        "messages": [{"role": "user", "content": "x", "extra": deep}],
        "chat_template_kwargs": deep,
        "max_tokens": 1,
    }
    assert stage.post("/v1/chat/completions", **body).status_code == 200


def test_many_containers(stage: Stage) -> None:
    many = ",".join(["[]"] * (MAX_JSON_CONTAINERS + 1))
    assert (
        "lists and objects" in refused(stage, "/v1/completions", f'{{"prompt": "x", "metadata": [{many}]}}')["message"]
    )
    # Brackets in a text are text, however it is written.
    text = json.dumps("[{\\" + '"' * 5)[1:-1] * MAX_JSON_CONTAINERS
    answer = stage.client.post("/tokenize", content=f'{{"prompt": "{text[: 200_000 * 8]}", "model": "other"}}')
    assert answer.status_code == 404
    # Strings that do not end are looked at once.
    refused(stage, "/v1/completions", b"[" * (MAX_JSON_CONTAINERS + 1) + b'"\\' * 2_000_000)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logit_bias": {str(token): 1 for token in range(MAX_LOGIT_BIASES + 1)}}, "logit_bias"),
        ({"logit_bias": {str(token): "x" for token in range(300_000)}}, "logit_bias"),
        ({"logit_bias": {"k" * 1_000_000: "x"}}, "logit_bias." + "k" * 100),
        ({"stop": ["x" * (MAX_STOP_CHARS + 1)]}, "stop"),
        ({"stop": "x" * (MAX_STOP_CHARS + 1)}, "stop"),
        ({"stop": ["x"] * 257}, "stop"),
        ({"stop": [1] * 500_000}, "stop.str"),
        ({"stop_token_ids": [1] * (MAX_STOP_TOKENS + 1)}, "stop_token_ids"),
        ({"cache_salt": "x" * (MAX_SALT_CHARS + 1)}, "cache_salt"),
        ({"prompt": [[1]] * 1025}, "prompt"),
        ({"n": 129}, "n"),
        ({"prompt": [[1]] * 100, "n": 41}, "n"),
        ({"prompt": [[1]] * 100, "use_beam_search": True, "best_of": 41}, "n"),
    ],
)
def test_sizes(stage: Stage, fields: dict[str, Any], param: str) -> None:
    error = refused(stage, "/v1/completions", json.dumps({"prompt": "x", **fields}))
    assert error["param"] == param
    assert len(error["message"]) < 10_000
    assert stage.engine.records == []


def test_sizes_that_are_allowed(stage: Stage) -> None:
    answer = stage.post(
        "/v1/completions",
        prompt="x",
        max_tokens=1,
        logit_bias={str(token): 1 for token in range(MAX_LOGIT_BIASES)},
        stop=["y" * MAX_STOP_CHARS] * 256,
        stop_token_ids=list(range(MAX_STOP_TOKENS)),
        cache_salt="x" * MAX_SALT_CHARS,
    )
    assert answer.status_code == 200


@pytest.mark.parametrize(
    ("headers", "carried"),
    [
        ({"traceparent": f"00-{'a' * 32}-{'b' * 16}-01", "tracestate": "k=v"}, True),
        ({"traceparent": f"00-{'a' * 32}-{'b' * 16}-01" + "x" * 60_000, "tracestate": "k=v"}, False),
        ({"traceparent": "nonsense"}, False),
        ({"traceparent": f"00-{'a' * 32}-{'b' * 16}-01", "tracestate": "k=" + "v" * 600}, True),
    ],
)
def test_trace_headers_are_passed_on_if_they_are_some(stage: Stage, headers: dict[str, str], carried: bool) -> None:
    stage.client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}, headers=headers)
    (record,) = stage.engine.records
    assert record.traceparent == (headers["traceparent"] if carried else "")
    assert len(record.tracestate) <= 512


# --- chat templates ---------------------------------------------------------------------------------------------------


def render(source: str, **variables: Any) -> str:
    messages = [{"role": "user", "content": "hello"}]
    return ChatTemplate(source, {}).render(
        messages, add_generation_prompt=True, continue_final_message=False, variables=variables
    )


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% for m in messages %}{{ loop.index }}/{{ loop.length }} {{ loop.last }}{% endfor %}", "1/1 True"),
        ("{% for x in [1, 2, 3] if x > 1 %}{{ x }}{% else %}none{% endfor %}", "23"),
        ("{% for x in nothing %}{{ x }}{% else %}none{% endfor %}", "none"),
        ("{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% endfor %}", "a1"),
        ("{% for c in 'abc' %}{{ loop.previtem }}{{ c }}{% endfor %}", "aabbc"),
        (
            "{% for x in [[1, [2]]] recursive %}{% if x is iterable %}({{ loop(x) }}){% else %}{{ x }}{% endif %}{% endfor %}",
            "(1(2))",
        ),
        ("{% macro f(xs) %}{% for x in xs %}{{ x }}{% endfor %}{% endmacro %}{{ f([1, 2]) }}", "12"),
        ("{% for x in range(5) %}{% if x == 3 %}{% break %}{% endif %}{{ x }}{% endfor %}", "012"),
        ("{{ '-' * 3 }}{{ 2 * 3 }}{{ 2 ** 10 }}{{ 0.5 ** 2 }}", "---610240.25"),
    ],
)
def test_templates_go_on_as_they_did(source: str, text: str) -> None:
    assert render(source) == text


R = "range(100000)"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (f"{{% for a in {R} %}}{{% for b in {R} %}}{{% endfor %}}{{% endfor %}}", f"more than {MAX_LOOP_STEPS} times"),
        (
            f"{{% macro f() %}}{{% for a in {R} %}}{{% endfor %}}{{% endmacro %}}{{% for a in {R} %}}{{{{ f() }}}}{{% endfor %}}",
            "times",
        ),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{{ 'x' * 999999999 }}", "a product that is too large"),
        ("{{ 999999999 * ['x'] }}", "a product that is too large"),
        ("{{ 9 ** 99999999 }}", "a power beyond"),
        ("{{ (2 ** 64) ** 64 * 2 ** 64 }}", "a number that is too large"),
        (
            "{% set n = namespace(x=3) %}{% for a in range(1000) %}{% set n.x = n.x * n.x %}{% endfor %}",
            "a number that is too large",
        ),
        ("{% for a in range(100000) %}{{ 'x' * 100000 }}{% endfor %}", "puts out more than"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ cycler.__init__.__globals__ }}", "unsafe"),
        ("{{ _octavo_budget._left + 1 }}", "unsafe"),
    ],
)
def test_templates_have_bounds(source: str, said: str) -> None:
    with pytest.raises(ApiError) as error:
        render(source)
    assert error.value.problem.status == 400
    assert said in error.value.problem.message


def test_time_has_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    from octavo_gateway import chat_template

    monkeypatch.setattr(chat_template, "MAX_RENDER_S", 0.0)
    with pytest.raises(ApiError, match="takes more than 0 s"):
        render("{% for a in range(1000) %}{% endfor %}")


def test_a_conversation_cannot_set_the_budget() -> None:
    source = "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}"
    with pytest.raises(ApiError, match="times"):
        render(source, _octavo_budget=None)
