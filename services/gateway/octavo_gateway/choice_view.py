"""What a client sees of one choice: a pure function of the request record and the fold (rule L8)."""

from __future__ import annotations

from typing import NamedTuple

from octavo_gateway.detokenizer import Detokenizer
from octavo_gateway.event_ids import Told
from octavo_gateway.stop_strings import StopScanner
from octavo_shared.fold import ChoiceFold
from octavo_shared.records import EndReason, Problem


class Delta(NamedTuple):
    """What is new: text that is certain, and output tokens ``start`` … ``stop - 1``."""

    text: str
    start: int
    stop: int


class ChoiceView:
    """Follows one choice's fold and turns it into text, up to its end or its first stop string.

    ``tokens`` counts the output tokens the client has been told of, up to and including the one that completed a stop
    string. ``stop_reason`` is the stop string or the stop token's id; None for the model's own end.
    """

    __slots__ = (
        "_detokenizer",
        "_ignore_eos",
        "_keep_stop_token",
        "_min_tokens",
        "_own_ends",
        "_scanner",
        "finish_reason",
        "first_token_s",
        "last_token_s",
        "problem",
        "stop_reason",
        "stopped_by_string",
        "tokens",
    )

    def __init__(
        self,
        detokenizer: Detokenizer,
        *,
        stop: tuple[str, ...] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
        own_ends: frozenset[int] = frozenset(),
        ignore_eos: bool = False,
    ) -> None:
        self._detokenizer = detokenizer
        self._scanner = StopScanner(stop, include_stop) if stop else None
        self._keep_stop_token = include_stop
        self._min_tokens = min_tokens
        self._own_ends = own_ends
        self._ignore_eos = ignore_eos
        self.tokens = 0
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.stopped_by_string = False
        self.problem: Problem | None = None
        # Kept here for the metrics; seconds of the monotonic clock, 0 = none yet.
        self.first_token_s = 0.0
        self.last_token_s = 0.0

    def tokens_came(self, now_s: float) -> None:
        """Note when the last tokens came."""
        self.first_token_s = self.first_token_s or now_s
        self.last_token_s = now_s

    def advance(self, choice: ChoiceFold, limit: int | None = None) -> Delta:
        """Take in whatever the fold has that this view has not; nothing is new once ``finish_reason`` is set.

        With ``limit`` only the first so many output tokens, and no end but that by a stop string.
        """
        start = self.tokens
        if self.finish_reason is not None:
            return Delta("", start, start)
        tokens, end = choice.tokens, choice.end
        # A fold may fall behind for a while when Redis has lost its memory.
        stop = max(start, len(tokens))
        if limit is not None:
            stop, end = max(start, min(stop, limit)), EndReason.NONE
        textual = stop
        if end is EndReason.STOP and not self._keep_stop_token and stop > start and tokens[-1] == choice.stop_token:
            # The token that ended it is counted, but it is not part of the text.
            textual -= 1
        feed, scanner = self._detokenizer.feed, self._scanner
        if scanner is None:
            if textual - start == 1:
                text = feed(tokens[start])
            else:
                text = "".join([feed(token) for token in tokens[start:textual]])
            self.tokens = stop
        else:
            text = self._scan(scanner, tokens, start, textual)
            if scanner.found is not None:
                return Delta(text, start, self.tokens)
            self.tokens = stop
        if end:
            text += self._end(choice)
        return Delta(text, start, self.tokens)

    def catch_up(self, choice: ChoiceFold, told: Told) -> Delta | None:
        """Come to where the client has read it before (rule L8); None while the fold has not come as far.

        What follows is then what the client does not know yet: held-back text and half-read stop strings are as they were.
        """
        if len(choice.tokens) < told.tokens and not choice.end:
            return None
        delta = self.advance(choice, None if told.ended else told.tokens)
        return None if told.ended and self.finish_reason is None else delta

    def _scan(self, scanner: StopScanner, tokens: list[int], start: int, stop: int) -> str:
        parts = []
        for index in range(start, stop):
            parts.append(scanner.feed(self._detokenizer.feed(tokens[index]), armed=index >= self._min_tokens))
            if scanner.found is not None:
                self.tokens = index + 1
                self._stop_at(scanner)
                break
        return "".join(parts)

    def _stop_at(self, scanner: StopScanner) -> None:
        self.finish_reason, self.stop_reason, self.stopped_by_string = "stop", scanner.found, True

    def _end(self, choice: ChoiceFold) -> str:
        text = self._detokenizer.flush()
        if self._scanner is not None:
            text = self._scanner.feed(text, armed=self.tokens > self._min_tokens)
            if self._scanner.found is not None:
                self._stop_at(self._scanner)
                return text
            text += self._scanner.flush()
        self.finish_reason = choice.end.finish_reason
        self.problem = choice.problem
        if choice.end is EndReason.ERROR and self.problem is None:
            self.problem = Problem("The request failed.")
        token = choice.stop_token
        if choice.end is EndReason.STOP and token >= 0 and (self._ignore_eos or token not in self._own_ends):
            self.stop_reason = token
        return text
