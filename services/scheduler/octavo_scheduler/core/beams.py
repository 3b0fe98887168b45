"""Which hypotheses of a beam search go on, which end, and when the search is over: pure decisions on candidates' scores.

The rules are those of Hugging Face transformers' ``GenerationMixin._beam_search`` (transformers/generation/utils.py,
version 5.24), for one prompt:

* A hypothesis' score is the sum of its tokens' log-probabilities, in float32. A step looks at every live hypothesis
  extended by each of its candidates, best total first.
* Of those, the first ``width`` are the ones that may end: by a stop token, or because the output has its greatest length. A
  stop token further down is not an end, it just does not go on.
* The best ``width`` that have not ended live on.
* Ended hypotheses are ranked by score / tokens ** ``length_penalty``, the stop token counted; the best ``width`` are kept.
* Once ``width`` are kept, the search is over as ``EarlyStopping`` says: at once (FIRST); or when the best live hypothesis,
  were its score divided by its present length (HEURISTIC) or by the greatest length there is (NEVER, if the penalty is
  above 0), would not beat the worst one kept. At the greatest length it is over in any case.

Totals that are equal are decided by the lower parent, then the lower token id (transformers leaves it to ``torch.topk``);
among ended ones the earlier stays ahead. Where transformers would go on with copies of the prompt that have a score of
-1e9, because there are fewer candidates than beams, there are simply fewer beams here. What a minimum length, a penalty or a
bias does to log-probabilities happens before they come here: executors normalise them after it, transformers does not.

One request's walk::

    rules = BeamRules.of(record, eos_token_ids, max_model_len)
    search = BeamSearch(rules, record.id.serial, attempt)       # or resumed: BeamSearch(..., state=resumption.beams)
    while not search.is_over:
        # Place search.live: one row each of prompt + hypothesis.tokens, sampled with beam_width > 0.
        event = search.advance(candidates)                       # one Candidates per live hypothesis, in their order
        # Log encode_beams([event]). Only when it is in the log may the next rows be planned (rule L12). Live hypothesis j
        # is now that of row event.parents[j] and one token more: a row that is named once keeps its blocks and writes in
        # place, one that is named again is forked, one that is not named is let go.
    # The last event has closed every choice for every reader of the log: no fences, nothing else to write.

``close`` ends a search early where it stands, with the best of all hypotheses so far. The state (``search.state``) is the
very ``BeamFold`` that readers of the log come to, so there is nothing else to restore.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from octavo_shared.fold_beams import NO_TOKEN, BeamEnd, BeamEvent, BeamFold, Hypothesis
from octavo_shared.ids import Attempt
from octavo_shared.records import EarlyStopping, EndReason, Float32Array, Int32Array, RequestRecord, TokenLogprobs


class Candidates(NamedTuple):
    """The likeliest next tokens of one live hypothesis, likeliest first: int32[k] ids, float32[k] log-probabilities."""

    tokens: Int32Array
    logprobs: Float32Array


class _Extension(NamedTuple):
    """Live hypothesis number ``parent`` and one token more, with their cumulative log-probability."""

    parent: int
    token: int
    total: float
    logprobs: TokenLogprobs | None

    def ended(self, reason: EndReason) -> BeamEnd:
        return BeamEnd(self.parent, self.token, self.total, reason, self.logprobs)


@dataclass(frozen=True, slots=True)
class BeamRules:
    """What a request asks of its search. ``stop_ids`` end a hypothesis; lengths are in output tokens.

    ``logprobs`` k: each token comes with its own log-probability and those of the k likeliest candidates (no more than
    there are), as scored, i.e. after penalties; None: with nothing.
    """

    width: int
    n: int
    max_output_tokens: int
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = EarlyStopping.HEURISTIC
    stop_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    logprobs: int | None = None

    @classmethod
    def of(cls, record: RequestRecord, eos_token_ids: Iterable[int], max_model_len: int) -> BeamRules:
        """The rules of a request for a model that ends its outputs by ``eos_token_ids``."""
        sampling = record.sampling
        own_ends = () if sampling.ignore_eos else eos_token_ids
        return cls(
            width=sampling.beam_width,
            n=record.n,
            max_output_tokens=min(sampling.max_tokens, max_model_len - len(record.prompt)),
            length_penalty=sampling.length_penalty,
            early_stopping=sampling.early_stopping,
            stop_ids=frozenset(sampling.stop_token_ids).union(own_ends),
            min_tokens=sampling.min_tokens,
            logprobs=sampling.logprobs,
        )

    @property
    def candidates_needed(self) -> int:
        """Candidates per live hypothesis that the decisions are exact with: all stop tokens may be among the likeliest.

        With fewer, fewer hypotheses than ``width`` may live on.
        """
        return self.width + max(self.width, len(self.stop_ids))

    def rank(self, score: float, tokens: int) -> float:
        """What an ended hypothesis is ranked by: score / tokens ** length_penalty, in float32. More is better."""
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            divisor = np.float32(np.float64(max(1, tokens)) ** self.length_penalty)
            rank = float(np.float32(score) / divisor)
        # 0 / 0: a penalty beyond all measure. Whatever it is, it must have a place in an order.
        return rank if rank == rank else -math.inf


class BeamSearch:
    """One request's search under one attempt. ``advance`` takes a step's candidates and decides."""

    def __init__(self, rules: BeamRules, serial: int, attempt: Attempt, state: BeamFold | None = None) -> None:
        self.rules = rules
        self.state = state or BeamFold(rules.n, attempt)
        assert self.state.attempt == attempt, "another attempt may speak for this search"
        self._serial = serial

    @property
    def live(self) -> tuple[Hypothesis, ...]:
        """What the next step computes: at first one hypothesis without tokens, later up to ``width``, best first."""
        return self.state.live

    @property
    def is_over(self) -> bool:
        """No further step; the event that said so has closed every choice."""
        return not self.state.live

    @property
    def is_at_limit(self) -> bool:
        """No token more may be computed: ``close`` it. Only a search resumed under a lower limit is ever there."""
        return self.state.position >= self.rules.max_output_tokens

    def advance(self, candidates: Sequence[Candidates], cached_tokens: int = 0) -> BeamEvent:
        """One step: what lives on, what has ended, whether it is over. ``candidates`` are per live hypothesis.

        ``cached_tokens`` says, with the first step, how many prompt tokens the prefix cache had. Candidates of probability
        0 are ignored, and stop tokens before ``min_tokens``. If nothing can live on, the search is over.
        """
        assert len(candidates) == len(self.live), "candidates are of other hypotheses"
        position, width = self.state.position, self.rules.width
        is_last = position + 1 >= self.rules.max_output_tokens
        going_on: list[_Extension] = []
        finished: list[BeamEnd] = []
        for place, one in enumerate(self._by_total(candidates)):
            is_stop = one.token in self.rules.stop_ids
            if is_stop or is_last:
                if place < width:
                    finished.append(one.ended(EndReason.STOP if is_stop else EndReason.LENGTH))
            elif len(going_on) < width:
                going_on.append(one)
            if place >= width - 1 and len(going_on) == width:
                break
        ranking = self._ranking(finished, position + 1)
        end = EndReason.NONE
        if is_last:
            end = EndReason.LENGTH
        elif not going_on or self._is_decided(ranking, going_on[0]):
            end = EndReason.STOP
        return self._take([] if end else going_on, finished, ranking, end, cached_tokens if position == 0 else 0)

    def close(self, reason: EndReason) -> BeamEvent:
        """End the search where it stands: live hypotheses end for ``reason`` as they are, and are ranked with the others."""
        finished = [BeamEnd(parent, NO_TOKEN, one.score, reason) for parent, one in enumerate(self.live)]
        return self._take([], finished, self._ranking(finished, self.state.position), reason, 0)

    def _by_total(self, candidates: Sequence[Candidates]) -> Iterator[_Extension]:
        """Every live hypothesis with every candidate, best total first."""
        parents = np.repeat(np.arange(len(candidates)), [len(one.tokens) for one in candidates])
        ranks = np.concatenate([np.arange(1, len(one.tokens) + 1) for one in candidates])
        tokens = np.concatenate([one.tokens for one in candidates])
        logprobs = np.concatenate([one.logprobs for one in candidates]).astype(np.float32, copy=False)
        totals = np.array([one.score for one in self.live], np.float32)[parents] + logprobs
        order = np.lexsort((tokens, parents, -totals))
        order = order[np.isfinite(totals[order])]
        if self.state.position < self.rules.min_tokens:
            order = order[~np.isin(tokens[order], list(self.rules.stop_ids))]
        columns = (column[order].tolist() for column in (parents, tokens, totals, logprobs, ranks))
        for parent, token, total, logprob, rank in zip(*columns, strict=True):
            yield _Extension(parent, token, total, self._logprobs(logprob, rank, candidates[parent]))

    def _logprobs(self, logprob: float, rank: int, among: Candidates) -> TokenLogprobs | None:
        if self.rules.logprobs is None:
            return None
        k = self.rules.logprobs
        top = tuple(zip(among.tokens[:k].tolist(), among.logprobs[:k].tolist(), strict=True))
        return TokenLogprobs(logprob, rank, top)

    def _ranking(self, finished: list[BeamEnd], length: int) -> list[tuple[int, float]]:
        """Which ended hypotheses to keep, best first: (index into those kept before and those of this step, rank)."""
        ranks = [self.rules.rank(one.score, len(one.tokens)) for one in self.state.kept]
        ranks += [self.rules.rank(one.score, length) for one in finished]
        return sorted(enumerate(ranks), key=lambda pair: -pair[1])[: self.rules.width]

    def _is_decided(self, ranking: list[tuple[int, float]], best: _Extension) -> bool:
        """Whether what is kept would not get better by going on, ``best`` being the best that lives on."""
        rules = self.rules
        if len(ranking) < rules.width:
            return False
        if rules.early_stopping is EarlyStopping.FIRST:
            return True
        at_best = rules.early_stopping is EarlyStopping.NEVER and rules.length_penalty > 0
        length = rules.max_output_tokens if at_best else self.state.position + 1
        return not rules.rank(best.total, length) > ranking[-1][1]

    def _take(
        self,
        going_on: list[_Extension],
        finished: list[BeamEnd],
        ranking: list[tuple[int, float]],
        end: EndReason,
        cached_tokens: int,
    ) -> BeamEvent:
        known = [one.logprobs for one in going_on if one.logprobs is not None]
        event = BeamEvent(
            serial=self._serial,
            attempt=self.state.attempt,
            position=self.state.position,
            n=self.rules.n,
            parents=tuple(one.parent for one in going_on),
            tokens=tuple(one.token for one in going_on),
            scores=tuple(one.total for one in going_on),
            finished=tuple(finished),
            ranking=tuple(index for index, _ in ranking) if finished else (),
            logprobs=tuple(known) if self.rules.logprobs is not None else None,
            end=end,
            cached_tokens=cached_tokens,
        )
        after = self.state.after(event)
        assert after is not None, "a step that does not follow its own state"
        self.state = after
        return event
