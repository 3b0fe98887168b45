"""An admitted request's answer: waits for the log, tells the client, and lets go when either is done."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from opentelemetry.trace import Span
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo_gateway.admission import Submission
from octavo_gateway.choice_view import ChoiceView, Delta
from octavo_gateway.errors import ApiError, error_body, unavailable
from octavo_gateway.event_ids import EventIds, Position
from octavo_gateway.ranking import best_slots
from octavo_gateway.render_chat import ChatRenderer
from octavo_gateway.render_completion import CompletionRenderer
from octavo_gateway.rendering import DONE, Renderer, Usage, error_events, shown_tokens, usage_of
from octavo_gateway.slot import Presentation, Slot
from octavo_gateway.tracing import describe_answer
from octavo_shared.fold import ChoiceFold
from octavo_shared.ids import RequestId
from octavo_shared.records import ANY_GENERATION, AbortRecord, Problem, RequestRecord

if TYPE_CHECKING:
    from octavo_gateway.gateway import Gateway

_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


# What is rendered before the client has taken what it was sent, apart from the chunk of one choice.
MOST_BYTES = 1 << 16


class Answer(Response):
    """The HTTP answer of one submission, streamed or in one piece.

    Nothing is sent before the log has said something, so that a refusal is still a proper status (rule L14).
    """

    def __init__(
        self,
        gateway: Gateway,
        submission: Submission,
        presentation: Presentation,
        *,
        arrival_s: float,
        echo_texts: Sequence[str],
        span: Span | None,
        position: Position | None = None,
        is_copy: bool = False,
    ) -> None:
        """``position``: a client that has reconnected knows so much already. ``is_copy``: another client has been given, or is
        being given, the same from its beginning; what is made for both counts in the metrics once.
        """
        # Starlette's constructor would render a body; there is none yet.
        self.background = None
        self.status_code = 200
        self._gateway = gateway
        self._metrics = gateway.metrics
        self._watcher = submission.watcher
        self._watcher.counts = not is_copy
        self._records = submission.records
        self._ticket = submission.ticket
        self._charge = submission.charge
        self._presentation = presentation
        self._arrival_s = arrival_s
        self._first_event_s = 0.0
        self._span = span
        self._stream_span: Span | None = None
        self._slots = self._make_slots(echo_texts)
        self._open = len(self._slots)
        self._open_by_serial = {record.id.serial: record.n for record in self._records}
        self._began: set[int] = set()
        self._started = False
        self._position = position
        if position is not None:
            for slot in self._slots.values():
                slot.told = position.of(slot.index)
        self._ids = EventIds(self._records[0].id, len(self._slots), position)
        self._failure: Problem | None = None
        prefix = "chatcmpl-" if presentation.kind == "chat" else "cmpl-"
        kind = ChatRenderer if presentation.kind == "chat" else CompletionRenderer
        self.id = f"{prefix}{self._records[0].id}"
        self._renderer: Renderer = kind(presentation, self.id, gateway.assets.tokenizer)

    def _make_slots(self, echo_texts: Sequence[str]) -> dict[tuple[int, int], Slot]:
        assets = self._gateway.assets
        slots: dict[tuple[int, int], Slot] = {}
        for place, (record, echo_text) in enumerate(zip(self._records, echo_texts, strict=True)):
            for choice in range(record.n):
                view = ChoiceView(
                    assets.tokenizer.detokenizer(skip_special_tokens=self._presentation.skip_special_tokens),
                    stop=record.stop,
                    include_stop=record.include_stop_str_in_output,
                    min_tokens=record.sampling.min_tokens,
                    own_ends=assets.eos_token_ids,
                    ignore_eos=record.sampling.ignore_eos,
                )
                first = slots.get((record.id.serial, 0))
                slots[record.id.serial, choice] = Slot(
                    record, choice, place * record.n + choice, view, echo_text, first=first
                )
        return slots

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer over ASGI. However it ends, whatever has not ended in the log is aborted."""
        listener = asyncio.create_task(self._listen(receive))
        reason = "disconnect"
        try:
            if self._presentation.stream:
                await self._stream(send)
            else:
                await self._collect(send)
        finally:
            if self._failure is not None:
                reason = "error"
            listener.cancel()
            self._leave(reason)

    async def _listen(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._watcher.disconnect()

    # --- one piece ---

    async def _collect(self, send: Send) -> None:
        while self._open:
            dirty = await self._watcher.wait()
            if self._watcher.is_over:
                self._refuse_handed_over()
                return
            for slot, delta in self._advance(dirty):
                slot.parts.append(delta.text)
            if self._failure is not None:
                raise ApiError(self._failure)
        slots = list(self._slots.values())
        if self._presentation.returned:
            slots = best_slots(slots, self._presentation.returned)
        body = self._renderer.whole(slots, self._usage())
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    # --- stream ---

    async def _stream(self, send: Send) -> None:
        renderer = self._renderer
        while self._open:
            dirty = await self._watcher.wait()
            if self._watcher.is_over:
                if not self._started:
                    self._refuse_handed_over()
                elif self._watcher.handed_over:
                    # No [DONE]: the client knows that more is to come, and from its last event's id where to go on.
                    await self._send(send, [], last=True)
                return
            chunks: list[bytes] = []
            size = 0
            for slot, delta in self._advance(dirty):
                if not slot.began:
                    slot.began = True
                    if opening := renderer.open(slot):
                        self._ids.told(slot.index, 0, ended=False)
                        chunks += (self._ids.line(), opening)
                if chunk := renderer.chunk(slot, delta.text, delta.start, delta.stop):
                    self._ids.told(slot.index, slot.view.tokens, ended=slot.view.finish_reason is not None)
                    chunks += (self._ids.line(), chunk)
                    size += len(chunk)
                if size > MOST_BYTES:
                    # A client that has not read for a while: much has come, and is rendered as it is taken.
                    await self._send(send, chunks)
                    chunks, size = [], 0
            if self._failure is not None:
                if not self._started:
                    raise ApiError(self._failure)
                style = self._gateway.settings.error_code_style
                chunks.append(error_events(error_body(self._failure, style), self._ids.done_line()))
                await self._send(send, chunks, last=True)
                return
            if self._open:
                if self._first_event_s:
                    await self._send(send, chunks)
                continue
            if self._presentation.include_usage and not (self._position and self._position.usage_told):
                chunks += (self._ids.usage_line(), renderer.usage_chunk(self._usage()))
            chunks += (self._ids.done_line(), DONE)
            await self._send(send, chunks, last=True)

    async def _send(self, send: Send, chunks: list[bytes], *, last: bool = False) -> None:
        if not self._started:
            self._started = True
            await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
        body = b"".join(chunks)
        if body or last:
            await send({"type": "http.response.body", "body": body, "more_body": not last})

    # --- both ---

    def _advance(self, dirty: dict[tuple[int, int], ChoiceFold]) -> list[tuple[Slot, Delta]]:
        """Bring the views of changed choices up to date; returns those with something new to say.

        A choice that has failed fails the answer: it shows in ``_failure``.
        """
        now_s = time.monotonic()
        news = []
        for key, choice in dirty.items():
            slot = self._slots[key]
            view = slot.view
            if view.finish_reason is not None:
                continue
            slot.fold = choice
            if slot.told is not None and not self._catch_up(slot, choice, now_s):
                continue
            if view.finish_reason is not None:
                continue
            delta = view.advance(choice)
            count = delta.stop - delta.start
            if not count and view.finish_reason is None:
                continue
            if key[0] not in self._began:
                self._begin(slot, now_s)
            if count and self._watcher.counts:
                self._metrics.tokens_came(view, count, self._arrival_s, now_s)
            elif count:
                view.tokens_came(now_s)
            if view.finish_reason is not None:
                self._end(slot, choice, now_s)
            if view.problem is None:
                news.append((slot, delta))
        return news

    def _catch_up(self, slot: Slot, choice: ChoiceFold, now_s: float) -> bool:
        """Bring a choice to where the client has read it before; False while the fold has not come as far."""
        told, view = slot.told, slot.view
        assert told is not None
        delta = view.catch_up(choice, told)
        if delta is None:
            return False
        slot.told, slot.began = None, told.began
        if told.tokens or told.ended:
            # What has been rendered before is rendered once more: logprobs count their offsets, an echo is sent once.
            self._renderer.chunk(slot, delta.text, delta.start, delta.stop)
            view.first_token_s = view.last_token_s = now_s
        if told.began:
            self._ids.told(slot.index, view.tokens, ended=view.finish_reason is not None)
            if slot.record.id.serial not in self._began:
                self._begin(slot, now_s)
        if view.finish_reason is not None:
            self._end(slot, choice, now_s)
        return True

    def _refuse_handed_over(self) -> None:
        """Before anything has been sent, a status says best that the client is to go on elsewhere."""
        if self._watcher.handed_over:
            raise unavailable("The gateway is shutting down; the answer can be had from another one.")

    def _begin(self, slot: Slot, now_s: float) -> None:
        self._began.add(slot.record.id.serial)
        self._gateway.pressure.began(self._ticket, len(slot.record.prompt), slot.cached_tokens)
        if slot.view.problem is None and self._position is None:
            self._metrics.request_began(slot.record)
        if not self._first_event_s:
            self._first_event_s = now_s
            if self._span is not None:
                self._stream_span = self._gateway.tracing.child("detokenize/stream", self._span)

    def _end(self, slot: Slot, choice: ChoiceFold, now_s: float) -> None:
        self._open -= 1
        record = slot.record
        if self._watcher.counts:
            self._metrics.choice_ended(slot.view, self._arrival_s, now_s)
        if slot.view.stopped_by_string and not choice.end:
            # Whoever reads this comes to the same end: it does not matter who follows it.
            self._gateway.aborts.append(AbortRecord(record.id, slot.choice, ANY_GENERATION, "stop_string"))
        self._open_by_serial[record.id.serial] -= 1
        if not self._open_by_serial[record.id.serial] and self._watcher.counts:
            self._metrics.request_ended(record, self._views(record.id.serial), self._returned(record))
        if slot.view.problem is not None:
            self._failure = slot.view.problem

    def _leave(self, reason: str) -> None:
        """Let go of the log; choices still open are aborted, at once or when nobody has come back in time.

        Unless another client follows the same answer, here or elsewhere: then it is that one's to give up.
        """
        left = [record for record in self._records if self._open_by_serial[record.id.serial]]
        grace_s = 0.0 if reason == "error" else self._records[0].disconnect_grace_ms / 1000
        self._gateway.leave(self._watcher, [record.id for record in left], reason)
        if left and not grace_s and self._watcher.counts:
            now_s = time.monotonic()
            for slot in self._slots.values():
                if slot.view.finish_reason is None:
                    self._metrics.choice_ended(slot.view, self._arrival_s, now_s)
            for record in left:
                self._metrics.request_ended(record, self._views(record.id.serial), self._returned(record))
        self._gateway.pressure.give_back(self._ticket)
        # Who has asked for it pays, whoever else follows it.
        if self._position is None and self._charge.caller.is_rated:
            self._settle({record.id for record in left})
        if self._stream_span is not None:
            self._stream_span.end()
        if self._span is not None:
            describe_answer(self._span, self._description())

    def _settle(self, left: set[RequestId]) -> None:
        """Count the tokens of the prompts and all that are made against the key's rate, those of what is ``left`` in its time."""
        folds = [slot.fold for slot in self._slots.values() if slot.fold is not None and slot.record.id not in left]
        tokens = sum(len(record.prompt) for record in self._records) + sum(len(fold.tokens) for fold in folds)
        settle, charge = self._gateway.rates.settle, self._charge
        if left:
            self._gateway.reader.when_over(left, lambda rest: settle(charge, tokens + rest))
        else:
            settle(charge, tokens)

    def _returned(self, record: RequestRecord) -> int:
        return self._presentation.returned or record.n

    def _views(self, serial: int) -> list[ChoiceView]:
        return [slot.view for (own, _), slot in self._slots.items() if own == serial]

    def _usage(self) -> Usage:
        prompt = sum(len(record.prompt) for record in self._records)
        shown = sum(shown_tokens(self._presentation, slot) for slot in self._slots.values())
        cached = sum(self._slots[record.id.serial, 0].cached_tokens for record in self._records)
        return usage_of(self._presentation, prompt, shown, cached)

    def _description(self) -> dict[str, Any]:
        now_s = time.monotonic()
        slots = list(self._slots.values())
        return {
            "id": self.id,
            "kind": self._presentation.kind,
            "model": self._presentation.model,
            "sampling": self._records[0].sampling,
            "n": self._returned(self._records[0]),
            "usage": self._usage(),
            "finish_reasons": [slot.view.finish_reason or "abort" for slot in slots],
            "first_token_s": max(0.0, self._first_event_s - self._arrival_s) if self._first_event_s else None,
            "e2e_s": now_s - self._arrival_s,
        }
