"""Beam searches at the gateway: what is certain is streamed while the search goes on, its end tells the choices apart."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from gateway_stage import EOS, TERM, Reply, Stage, eventually

from octavo_gateway.tokenizer import ModelTokenizer
from octavo_shared.entries import encode_beams
from octavo_shared.fold_beams import BeamEnd, BeamEvent
from octavo_shared.ids import Attempt
from octavo_shared.records import EarlyStopping, EndReason, RequestRecord, TokenLogprobs
from octavo_shared.streams import Streams

BODY = {"prompt": [5, 6, 7], "use_beam_search": True, "n": 2, "best_of": 3, "max_tokens": 8}


class Search:
    """The scheduler's part: steps of one request's beam search, written into the gateway's log from the test."""

    def __init__(self, stage: Stage, redis_url: str, record: RequestRecord) -> None:
        self._stage = stage
        self._redis_url = redis_url
        self.record = record

    def step(
        self, position: int, live: list[tuple[int, int]], *ended: BeamEnd, end: EndReason = EndReason.NONE
    ) -> None:
        """Live hypotheses as (parent, token); those that ended are kept in their order."""
        asked = self.record.sampling.logprobs is not None
        event = BeamEvent(
            serial=self.record.id.serial,
            attempt=Attempt(TERM, 1),
            position=position,
            n=self.record.n,
            parents=tuple(parent for parent, _ in live),
            tokens=tuple(token for _, token in live),
            scores=tuple(-1.0 for _ in live),
            finished=ended,
            ranking=tuple(range(len(ended))),
            logprobs=tuple(probs(token) for _, token in live) if asked else None,
            end=end,
        )
        asyncio.run(self._append(encode_beams([event])))
        if end:
            for choice in self._stage.engine._live[self.record.id.log, self.record.id.serial]:
                choice.ended = True

    async def _append(self, entry: bytes) -> None:
        streams = Streams.connect(self._redis_url, self._stage.engine._model)
        await streams.append_log(self.record.id.log, entry)
        await streams.close()


def probs(token: int) -> TokenLogprobs:
    return TokenLogprobs(-0.5, 1, ((token, -0.5),))


@pytest.fixture
def words(tokenizer: ModelTokenizer) -> list[int]:
    return tokenizer.encode([" one two three four five six"], add_special_tokens=False)[0]


@pytest.fixture
def ask(stage: Stage, redis_url: str) -> Iterator[Any]:
    """Post a request in the background; returns its search and where its answer will be."""
    waiting = threading.Event()
    stage.engine.reply = lambda record, choice: Reply([0], gate=waiting)
    threads = []

    def ask(**fields: Any) -> tuple[Search, dict[str, Any]]:
        answer: dict[str, Any] = {}

        def post() -> None:
            answer.update(stage.post("/v1/completions", **(BODY | fields)).json())

        threads.append(threading.Thread(target=post))
        threads[-1].start()
        eventually(lambda: stage.engine.records, "the request is admitted")
        return Search(stage, redis_url, stage.engine.records[-1]), answer

    yield ask
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()


def finish(search: Search, words: list[int], logprobs: bool = False) -> None:
    """After two steps: one choice ends by the model's own end, one by its length."""
    first, second = BeamEnd(0, EOS, -1.0, EndReason.STOP), BeamEnd(1, words[3], -2.0, EndReason.LENGTH)
    if logprobs:
        first, second = (BeamEnd(e.parent, e.token, e.score, e.end, probs(e.token)) for e in (first, second))
    search.step(2, [], first, second, end=EndReason.LENGTH)


def test_choices_are_the_best_hypotheses(ask: Any, words: list[int], tokenizer: ModelTokenizer, stage: Stage) -> None:
    search, answer = ask(length_penalty=0.5, early_stopping=True, logprobs=0)
    assert (search.record.n, search.record.sampling.beam_width) == (2, 3)
    assert search.record.sampling.early_stopping is EarlyStopping.FIRST
    search.step(0, [(0, words[0]), (0, words[1])])
    search.step(1, [(0, words[1]), (0, words[2])])
    # A snapshot in the middle of it changes nothing.
    reader = stage.server.gateway.reader
    assert stage.loop is not None
    eventually(lambda: reader._fold.beams, "the gateway knows of the search")
    asyncio.run_coroutine_threadsafe(reader.trim(), stage.loop).result(10)
    finish(search, words, logprobs=True)
    choices = eventually(lambda: answer.get("choices"), "the answer comes")
    texts = [tokenizer.decode([words[0], words[at]], skip_special_tokens=True) for at in (1, 2)]
    assert [choice["text"] for choice in choices] == [
        texts[0],
        texts[1] + tokenizer.decode([words[3]], skip_special_tokens=True),
    ]
    assert [choice["finish_reason"] for choice in choices] == ["stop", "length"]
    assert [len(choice["logprobs"]["tokens"]) for choice in choices] == [3, 3]
    assert answer["usage"]["completion_tokens"] == 6


def test_what_is_certain_is_streamed_before_the_end(
    stage: Stage, redis_url: str, words: list[int], tokenizer: ModelTokenizer
) -> None:
    never, told = threading.Event(), threading.Event()
    stage.engine.reply = lambda record, choice: Reply([0], gate=never)
    admitted: list[Search] = []

    def begin() -> None:
        eventually(lambda: stage.engine.records, "the request is admitted")
        admitted.append(Search(stage, redis_url, stage.engine.records[-1]))
        admitted[0].step(0, [(0, words[0]), (0, words[1])])
        admitted[0].step(1, [(0, words[1]), (0, words[2])])

    thread = threading.Thread(target=begin)
    thread.start()
    texts, reasons = ["", ""], [None, None]
    with stage.client.stream("POST", "/v1/completions", json=BODY | {"stream": True}) as answer:
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                texts[choice["index"]] += choice["text"]
                reasons[choice["index"]] = choice["finish_reason"]
            if all(texts) and not told.is_set():
                # Both have been told the first word, and nothing has ended.
                certain = tokenizer.decode([words[0]], skip_special_tokens=True)
                assert (texts, reasons) == ([certain, certain], [None, None])
                told.set()
                finish(admitted[0], words)
    thread.join()
    assert reasons == ["stop", "length"]
    assert texts == [
        tokenizer.decode(tokens, skip_special_tokens=True)
        for tokens in ([words[0], words[1]], [words[0], words[2], words[3]])
    ]


def test_a_stop_string_in_what_is_certain_ends_every_choice(ask: Any, words: list[int], stage: Stage) -> None:
    search, answer = ask(stop=["one"])
    search.step(0, [(0, words[0]), (0, words[1])])
    search.step(1, [(0, words[1]), (0, words[2])])
    choices = eventually(lambda: answer.get("choices"), "the answer comes")
    assert [(choice["text"], choice["finish_reason"]) for choice in choices] == [(" ", "stop")] * 2
    eventually(lambda: len(stage.engine.aborts) >= 2, "both choices are aborted")
    assert {abort.choice for abort in stage.engine.aborts} <= {-1, 0, 1}
