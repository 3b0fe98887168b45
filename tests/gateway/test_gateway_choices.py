"""More outputs than are given back, outputs that are searched for, and deadlines: from HTTP to the record and back."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import pytest
from gateway_stage import EOS, Reply, Stage, eventually
from test_gateway_log import samples

from octavo_gateway.tokenizer import ModelTokenizer
from octavo_shared.records import EarlyStopping, EndReason, RequestRecord

MakeStage = Callable[..., AbstractContextManager[Stage]]
USER = [{"role": "user", "content": "hi"}]
ROUTES = [("/v1/completions", {"prompt": [5, 6, 7]}), ("/v1/chat/completions", {"messages": USER})]


@pytest.fixture
def ids(tokenizer: ModelTokenizer) -> list[int]:
    return tokenizer.encode(["The quick brown fox jumps over the lazy dog"], add_special_tokens=False)[0]


def text_of(choice: dict[str, Any]) -> str:
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


# --- what is refused --------------------------------------------------------------------------------------------------

# (fields, message, param)
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"n": 0}, "n must be at least 1, got 0.", "n"),
    ({"n": 129}, "n must be at most 128, got 129.", "n"),
    ({"n": 2, "temperature": 0}, "n must be 1 when using greedy sampling, got 2.", "n"),
    (
        {"n": 2, "best_of": 1},
        "best_of must be greater than or equal to n, got n=2 and best_of=1.",
        "best_of",
    ),
    ({"best_of": 129}, "best_of must be at most 128, got 129.", "best_of"),
    ({"best_of": 2, "temperature": 0}, "best_of must be 1 when using greedy sampling, got 2.", "best_of"),
    (
        {"best_of": 3, "n": 2, "stream": True},
        "Results cannot be streamed when best_of is greater than n, got n=2 and best_of=3.",
        "best_of",
    ),
    (
        {"use_beam_search": True, "n": 3, "best_of": 2},
        "best_of must be greater than or equal to n, got n=3 and best_of=2.",
        "best_of",
    ),
    ({"use_beam_search": True, "best_of": 129}, "best_of must be at most 128, got 129.", "best_of"),
    (
        {"use_beam_search": True, "prompt_logprobs": 1},
        "Log-probabilities of the prompt are not available with beam search.",
        "prompt_logprobs",
    ),
    ({"use_beam_search": True, "n": 0}, "n must be at least 1, got 0.", "n"),
    (
        {"use_beam_search": True, "length_penalty": "nan"},
        "length_penalty must be in [-10, 10], got nan.",
        "length_penalty",
    ),
    (
        {"use_beam_search": True, "length_penalty": 11},
        "length_penalty must be in [-10, 10], got 11.0.",
        "length_penalty",
    ),
    (
        {"length_penalty": 0.5},
        "length_penalty has no effect and must be 1.0 when not using beam search.",
        "length_penalty",
    ),
    (
        {"early_stopping": True},
        "early_stopping has no effect and must be False when not using beam search.",
        "early_stopping",
    ),
    (
        {"early_stopping": "never"},
        "early_stopping has no effect and must be False when not using beam search.",
        "early_stopping",
    ),
    ({"timeout": 0}, "timeout must be above 0 and at most 1e+09 s, got 0.0.", "timeout"),
    ({"timeout": -1}, "timeout must be above 0 and at most 1e+09 s, got -1.0.", "timeout"),
    ({"timeout": "nan"}, "timeout must be above 0 and at most 1e+09 s, got nan.", "timeout"),
    ({"timeout": "inf"}, "timeout must be above 0 and at most 1e+09 s, got inf.", "timeout"),
]


@pytest.mark.parametrize(("path", "fields"), ROUTES)
@pytest.mark.parametrize(("bad", "message", "param"), REFUSED)
def test_what_means_nothing_is_refused(
    stage: Stage, path: str, fields: dict[str, Any], bad: dict[str, Any], message: str, param: str
) -> None:
    error = stage.error(path, 400, **(fields | bad))
    assert error == {"message": message, "type": "BadRequestError", "param": param, "code": None}
    assert not stage.engine.records


# --- best_of ----------------------------------------------------------------------------------------------------------

# Per choice: tokens and their log-probabilities. Means: -2, -0.75, -0.5, none.
VALUES = [[-1.0, -3.0], [-0.5, -1.0], [-0.25, -0.5, -0.75], []]


def ranked(record: RequestRecord, choice: int) -> Reply:
    values = VALUES[choice]
    return Reply([70 + choice] * len(values), values=values)


@pytest.mark.parametrize(("path", "fields"), ROUTES)
def test_the_best_by_mean_logprob_come_back_in_order(
    stage: Stage, tokenizer: ModelTokenizer, path: str, fields: dict[str, Any]
) -> None:
    stage.engine.reply = ranked
    answer = stage.post(path, n=2, best_of=4, max_tokens=8, **fields).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    expected = [tokenizer.decode([70 + which] * len(VALUES[which]), skip_special_tokens=True) for which in (2, 1)]
    assert [text_of(choice) for choice in answer["choices"]] == expected
    # Ranking needs log-probabilities; the client did not ask for any.
    assert all(choice["logprobs"] is None for choice in answer["choices"])
    (record,) = stage.engine.records
    assert (record.n, record.sampling.logprobs) == (4, 0)
    assert answer["usage"]["completion_tokens"] == sum(map(len, VALUES))


def test_several_prompts_are_ranked_each_by_itself(stage: Stage) -> None:
    order = {5: [0, 1, 2], 6: [2, 1, 0]}

    def reply(record: RequestRecord, choice: int) -> Reply:
        value = -1.0 - order[int(record.prompt[0])].index(choice)
        return Reply([80 + choice], values=[value])

    stage.engine.reply = reply
    answer = stage.post("/v1/completions", prompt=[[5], [6]], n=2, best_of=3, max_tokens=4, logprobs=0).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    values = [choice["logprobs"]["token_logprobs"] for choice in answer["choices"]]
    assert values == [[-1.0], [-2.0], [-1.0], [-2.0]]
    texts = [choice["text"] for choice in answer["choices"]]
    assert (texts[0], texts[1]) != (texts[2], texts[3])
    assert answer["usage"]["completion_tokens"] == 6


def test_a_stop_string_bounds_what_is_ranked(stage: Stage, ids: list[int]) -> None:
    """What stands behind the stop string, however unlikely, does not count against an output."""

    def reply(record: RequestRecord, choice: int) -> Reply:
        if choice == 0:
            return Reply(ids, values=[-0.5] * 4 + [-50.0] * (len(ids) - 4))
        return Reply([70] * 4, values=[-1.0] * 4)

    stage.engine.reply = reply
    answer = stage.post("/v1/completions", prompt=[5], best_of=2, stop=" fox", max_tokens=20).json()
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("The quick brown", "stop", " fox")
    assert answer["usage"]["completion_tokens"] == 4 + 4


def test_of_equals_the_first_is_the_best(stage: Stage) -> None:
    stage.engine.reply = lambda record, choice: Reply([70 + choice], values=[-1.0])
    answer = stage.post("/v1/completions", prompt=[5], best_of=3, max_tokens=1, logprobs=0).json()
    first = stage.post("/v1/completions", prompt=[5], max_tokens=1).json()
    assert answer["choices"][0]["text"] == first["choices"][0]["text"]


def test_best_of_one_is_nothing_special(stage: Stage) -> None:
    events = stage.stream("/v1/completions", prompt=[5, 6], best_of=2, n=2, max_tokens=2)
    assert len(events) >= 2
    assert stage.engine.records[0].n == 2
    assert stage.engine.records[0].sampling.logprobs is None
    # Where only the prompt is wanted there is nothing to choose from.
    assert (
        stage.post("/v1/completions", prompt="hi", echo=True, max_tokens=0, best_of=3).json()["choices"][0]["text"]
        == "hi"
    )
    assert stage.engine.records[1].n == 1


def test_metrics_tell_what_was_made_and_what_was_asked_for(make_stage: MakeStage) -> None:
    with make_stage() as stage:
        stage.engine.reply = ranked
        assert stage.post("/v1/completions", prompt=[5], n=2, best_of=4, max_tokens=8).status_code == 200
        found = samples(stage)
        assert found["vllm:generation_tokens_total"] == sum(map(len, VALUES))
        assert found["vllm:request_params_n_sum"] == 2
        assert found['vllm:request_success_total{finished_reason="length"}'] == 4


# --- beam search ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("path", "fields"), ROUTES)
@pytest.mark.parametrize(
    ("asked", "n", "width", "penalty", "early"),
    [
        ({"n": 3}, 3, 3, 1.0, EarlyStopping.HEURISTIC),
        ({"n": 2, "best_of": 6, "length_penalty": 0.5}, 2, 6, 0.5, EarlyStopping.HEURISTIC),
        ({"best_of": 4, "early_stopping": True, "length_penalty": -1}, 1, 4, -1.0, EarlyStopping.FIRST),
        ({"n": 2, "early_stopping": "never", "length_penalty": None}, 2, 2, 1.0, EarlyStopping.NEVER),
        ({"n": 2, "early_stopping": False}, 2, 2, 1.0, EarlyStopping.HEURISTIC),
        # What draws means nothing here, greedy or not; what shapes the scores stays.
        ({"n": 2, "temperature": 0, "top_k": 5, "presence_penalty": 1}, 2, 2, 1.0, EarlyStopping.HEURISTIC),
        ({"n": 2, "temperature": 1.5, "top_p": 0.5, "min_p": 0.1}, 2, 2, 1.0, EarlyStopping.HEURISTIC),
    ],
)
def test_beam_search_arrives_as_sent(
    stage: Stage,
    path: str,
    fields: dict[str, Any],
    asked: dict[str, Any],
    n: int,
    width: int,
    penalty: float,
    early: EarlyStopping,
) -> None:
    answer = stage.post(path, use_beam_search=True, **asked, **fields)
    assert answer.status_code == 200, answer.text
    assert len(answer.json()["choices"]) == n
    (record,) = stage.engine.records
    sampling = record.sampling
    assert (record.n, sampling.beam_width, sampling.length_penalty, sampling.early_stopping) == (
        n,
        width,
        penalty,
        early,
    )
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.0, 1.0, 0, 0.0)
    assert sampling.presence_penalty == asked.get("presence_penalty", 0.0)
    assert sampling.logprobs is None


@pytest.mark.parametrize(("path", "fields"), ROUTES)
def test_hypotheses_stream_as_they_become_final(
    stage: Stage, tokenizer: ModelTokenizer, ids: list[int], path: str, fields: dict[str, Any]
) -> None:
    """As the fold gives them: both grow by the common prefix, in leaps; then each leaps to its own end at once."""
    tails = [[*ids[5:], EOS], [70, 71, 72, 73]]
    ends = [EndReason.STOP, EndReason.LENGTH]

    def reply(record: RequestRecord, choice: int) -> Reply:
        tokens = ids[:5] + tails[choice]
        stop = EOS if ends[choice] is EndReason.STOP else -1
        return Reply(tokens, ends[choice], stop, sizes=(1, 0, 3, 0, 0, len(tokens) - 4))

    stage.engine.reply = reply
    asked = {"use_beam_search": True, "n": 2, "best_of": 4, "max_tokens": 40, **fields}
    events = [json.loads(event) for event in stage.stream(path, stream_options={"include_usage": True}, **asked)]
    whole = stage.post(path, **asked).json()
    for index in range(2):
        own = [event["choices"][0] for event in events if event["choices"] and event["choices"][0]["index"] == index]
        pieces = [choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in own]
        text = text_of(whole["choices"][index])
        assert "".join(pieces) == text == tokenizer.decode(ids[:5] + tails[index], skip_special_tokens=True)
        assert own[-1]["finish_reason"] == whole["choices"][index]["finish_reason"] == ends[index].finish_reason
        assert all(choice["finish_reason"] is None for choice in own[:-1])
        # The common prefix was sent before the end was known.
        assert "".join(pieces[:-1]).startswith("The quick brown"[: len("".join(pieces[:-1]))])
        assert len("".join(pieces[:-1])) > 0
    assert events[-1]["usage"] == whole["usage"]
    assert whole["usage"]["completion_tokens"] == 10 + sum(map(len, tails))


def test_a_stop_string_in_the_common_prefix_ends_all_hypotheses(stage: Stage, ids: list[int]) -> None:
    stage.engine.reply = lambda record, choice: Reply([*ids, 70 + choice], sizes=(3, len(ids) - 2))
    asked = {"prompt": [5], "use_beam_search": True, "n": 2, "stop": [" brown"], "max_tokens": 40}
    answer = stage.post("/v1/completions", **asked).json()
    assert [choice["text"] for choice in answer["choices"]] == ["The quick"] * 2
    assert {choice["stop_reason"] for choice in answer["choices"]} == {" brown"}


def test_logprobs_go_with_hypotheses(stage: Stage, ids: list[int]) -> None:
    stage.engine.reply = lambda record, choice: Reply(ids, sizes=(2, len(ids)))
    asked = {"prompt": [5, 6], "use_beam_search": True, "n": 2, "logprobs": 2, "max_tokens": 40}
    answer = stage.post("/v1/completions", **asked).json()
    for choice in answer["choices"]:
        assert len(choice["logprobs"]["tokens"]) == len(ids)


def test_a_width_beyond_what_runs_at_once_is_refused(make_stage: MakeStage) -> None:
    with make_stage() as stage:
        stage.engine.limits = replace(stage.engine.limits, max_num_seqs=4)
        limits = stage.server.gateway.limits
        eventually(lambda: limits.latest is not None and limits.latest.max_num_seqs == 4, "the limits arrive")
        error = stage.error("/v1/completions", 400, prompt="x", use_beam_search=True, n=2, best_of=5)
        assert error["message"] == "A beam search of width 5 needs more sequences at once than the server runs (4)."
        assert error["param"] == "best_of"
        assert stage.post("/v1/completions", prompt="x", use_beam_search=True, n=2, best_of=4).status_code == 200
        assert stage.post("/v1/completions", prompt="x", n=5).status_code == 200, "what is drawn may wait its turn"


# --- deadlines --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("path", "fields"), ROUTES)
def test_a_deadline_counts_from_the_requests_arrival(stage: Stage, path: str, fields: dict[str, Any]) -> None:
    before = time.time()
    assert stage.post(path, timeout=12.5, **fields).status_code == 200
    after = time.time()
    assert stage.post(path, timeout=None, **fields).status_code == 200
    timed, untimed = stage.engine.records
    assert before + 12.4 < timed.deadline_us / 1e6 < after + 12.6
    assert untimed.deadline_us == 0


@pytest.mark.parametrize(("path", "fields"), ROUTES)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("before", [0, 3])
def test_what_a_deadline_cuts_says_timeout(
    stage: Stage, path: str, fields: dict[str, Any], stream: bool, before: int
) -> None:
    stage.engine.reply = lambda record, choice: Reply([70] * before, EndReason.TIMEOUT, fence=True)
    asked = {"timeout": 5, "max_tokens": 20, "n": 2, **fields}
    if stream:
        events = [json.loads(event) for event in stage.stream(path, **asked)]
        ends = [event["choices"][0]["finish_reason"] for event in events if event["choices"][0]["finish_reason"]]
        assert ends == ["timeout", "timeout"]
    else:
        answer = stage.post(path, **asked).json()
        assert [choice["finish_reason"] for choice in answer["choices"]] == ["timeout", "timeout"]
        assert answer["usage"]["completion_tokens"] == 2 * before
