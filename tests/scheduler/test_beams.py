"""Beam search's decisions, one rule at a time, and that a search taken up from the log goes on as if nothing had been."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from octavo_scheduler.core.beams import BeamRules, BeamSearch, Candidates
from octavo_shared.entries import decode_entry, encode_beams, encode_snapshot
from octavo_shared.fold import LogFold
from octavo_shared.fold_beams import BeamEvent, BeamFold
from octavo_shared.ids import Attempt, RequestId
from octavo_shared.records import EarlyStopping, EndReason, RequestRecord, SamplingParams, TokenLogprobs

EOS = 9
FIRST = Attempt(1, 1)
HEURISTIC, FIRST_ENDS, NEVER = EarlyStopping.HEURISTIC, EarlyStopping.FIRST, EarlyStopping.NEVER


def rules(width: int = 2, **more: object) -> BeamRules:
    defaults: dict[str, object] = {"n": 1, "max_output_tokens": 8, "stop_ids": frozenset({EOS})}
    return BeamRules(width, **(defaults | more))  # type: ignore[arg-type]


def search(width: int = 2, **more: object) -> BeamSearch:
    return BeamSearch(rules(width, **more), 1, FIRST)


def row(*candidates: tuple[int, float]) -> Candidates:
    """Candidates as (token, log-probability)."""
    tokens, logprobs = zip(*candidates, strict=True)
    return Candidates(np.array(tokens, np.int32), np.array(logprobs, np.float32))


def live(event: BeamEvent) -> list[tuple[int, int]]:
    return list(zip(event.parents, event.tokens, strict=True))


def test_the_best_totals_live_on() -> None:
    beams = search()
    assert [one.tokens for one in beams.live] == [()]
    event = beams.advance([row((1, -1.0), (2, -2.0), (3, -3.0), (4, -4.0))])
    assert (live(event), event.scores) == ([(0, 1), (0, 2)], (-1.0, -2.0))
    event = beams.advance([row((5, -4.0), (6, -5.0)), row((7, -1.0), (8, -2.5))])
    assert (live(event), event.scores) == ([(1, 7), (1, 8)], (-3.0, -4.5))
    assert [one.tokens for one in beams.live] == [(2, 7), (2, 8)]


def test_equal_totals_go_by_parent_then_by_token() -> None:
    beams = search(3)
    beams.advance([row((3, -1.0), (1, -1.0), (2, -1.0))])
    assert [one.tokens for one in beams.live] == [(1,), (2,), (3,)]
    event = beams.advance([row((8, -1.0)), row((7, -1.0), (6, -1.0)), row((1, -0.5))])
    assert live(event) == [(2, 1), (0, 8), (1, 6)]


def test_a_stop_token_ends_only_among_the_first() -> None:
    beams = search()
    event = beams.advance([row((1, -1.0), (EOS, -2.0), (2, -3.0), (3, -4.0))])
    assert [(end.parent, end.token, end.score, end.end) for end in event.finished] == [(0, EOS, -2.0, EndReason.STOP)]
    assert live(event) == [(0, 1), (0, 2)]
    # The third place is too late, and is no way to go on either.
    event = beams.advance([row((4, -0.1), (EOS, -2.5)), row((5, -0.2), (6, -5.0))])
    assert event.finished == ()
    assert live(event) == [(0, 4), (1, 5)]


def test_ended_ones_are_ranked_by_penalised_score_and_the_best_are_kept() -> None:
    beams = search(length_penalty=1.0, early_stopping=NEVER)
    beams.advance([row((EOS, -1.0), (1, -1.5), (2, -2.0))])
    beams.advance([row((EOS, -0.1), (3, -0.2)), row((4, -3.0))])
    assert [one.tokens for one in beams.state.kept] == [(1, EOS), (EOS,)]
    event = beams.advance([row((EOS, -0.2), (5, -0.3)), row((6, -4.0))])
    assert event.ranking == (2, 0)
    assert [one.tokens for one in beams.state.kept] == [(1, 3, EOS), (1, EOS)]


@pytest.mark.parametrize(
    ("early_stopping", "penalty", "over"),
    [
        # Kept: -1.0 / 1 and -1.1 / 2; the best that lives has -1.2 in 2 tokens, and could have 8 of them.
        (FIRST_ENDS, 1.0, True),
        (HEURISTIC, 1.0, False),
        (NEVER, 1.0, False),
        # Without a penalty -1.2 is less than -1.1, however long.
        (HEURISTIC, 0.0, True),
        (NEVER, 0.0, True),
        # -1.0 and -1.1 * 2, against -1.2 * 2.
        (HEURISTIC, -1.0, True),
        (NEVER, -1.0, True),
    ],
)
def test_when_it_is_over(early_stopping: EarlyStopping, penalty: float, over: bool) -> None:
    beams = search(early_stopping=early_stopping, length_penalty=penalty)
    beams.advance([row((EOS, -1.0), (1, -1.0), (2, -2.0))])
    event = beams.advance([row((EOS, -0.1), (3, -0.2)), row((4, -3.0))])
    assert beams.is_over == over == bool(event.end)
    if over:
        assert event.end is EndReason.STOP
        assert event.tokens == ()


def test_a_penalty_on_length_counts_the_present_one() -> None:
    """Kept: -4 and -1.1 * 2; what lives has -1.2 * 2 now, and would have -1.2 * 8 at the greatest length."""
    beams = search(early_stopping=NEVER, length_penalty=-1.0)
    beams.advance([row((1, -1.0), (EOS, -4.0), (2, -5.0))])
    beams.advance([row((EOS, -0.1), (3, -0.2)), row((4, -3.0))])
    assert not beams.is_over


def test_among_equals_the_earlier_stays_ahead_and_nothing_is_waited_for() -> None:
    beams = search(length_penalty=0.0, early_stopping=NEVER)
    beams.advance([row((1, -0.5), (EOS, -1.0), (2, -2.0))])
    event = beams.advance([row((3, -0.25), (EOS, -0.5)), row((4, -3.0))])
    assert (event.ranking, beams.is_over) == ((0, 1), False)
    beams = search(length_penalty=0.0, early_stopping=NEVER)
    beams.advance([row((1, -0.5), (EOS, -1.0), (2, -2.0))])
    event = beams.advance([row((EOS, -1.0), (3, -1.0)), row((4, -3.0))])
    assert (event.ranking, beams.is_over) == ((0, 1), True)


def test_the_longest_output_ends_everything_in_the_first_places() -> None:
    beams = search(max_output_tokens=2, n=2)
    beams.advance([row((1, -1.0), (2, -1.5))])
    event = beams.advance([row((EOS, -0.1), (3, -0.7)), row((4, -0.1), (5, -0.3))])
    assert [(end.token, end.end) for end in event.finished] == [(EOS, EndReason.STOP), (4, EndReason.LENGTH)]
    assert (event.end, event.ranking, beams.is_over) == (EndReason.LENGTH, (0, 1), True)


def test_stop_tokens_before_min_tokens_are_no_candidates() -> None:
    beams = search(min_tokens=1)
    event = beams.advance([row((EOS, -0.1), (1, -1.0), (2, -2.0))])
    assert (event.finished, live(event)) == ((), [(0, 1), (0, 2)])
    assert len(beams.advance([row((EOS, -0.1), (1, -1.0)), row((1, -2.0))]).finished) == 1


def test_impossible_candidates_are_none() -> None:
    beams = search(3)
    event = beams.advance([row((1, -1.0), (2, -math.inf), (3, -math.inf))])
    assert live(event) == [(0, 1)]
    # Everything that is possible stops: there is nothing to go on with, and one choice has no hypothesis of its own.
    beams = BeamSearch(rules(n=2), 1, FIRST)
    event = beams.advance([row((EOS, -1.0), (2, -math.inf))])
    log = LogFold().apply_all([event])
    assert beams.is_over
    assert [(log.get(1, i).tokens, log.get(1, i).end) for i in (0, 1)] == [
        ([EOS], EndReason.STOP),
        ([], EndReason.STOP),
    ]


def test_closing_ranks_what_lives_with_what_has_ended() -> None:
    beams = search(3, n=3)
    assert not beams.is_at_limit
    beams.advance([row((1, -1.0), (EOS, -1.5), (2, -2.0), (3, -3.0))])
    event = beams.close(EndReason.TIMEOUT)
    log = LogFold().apply_all(decode_entry(encode_beams([event])))
    assert log.get(1, 0).end is EndReason.NONE, "an event alone has no past"
    assert beams.is_over
    assert [(one.tokens, one.end) for one in beams.state.kept] == [
        ((1,), EndReason.TIMEOUT),
        ((EOS,), EndReason.STOP),
        ((2,), EndReason.TIMEOUT),
    ]


def test_closing_before_the_first_step_ends_every_choice() -> None:
    beams = search(3, n=3, length_penalty=-2.0)
    log = LogFold().apply_all([beams.close(EndReason.TIMEOUT)])
    assert [(log.get(1, i).tokens, log.get(1, i).end) for i in range(3)] == [([], EndReason.TIMEOUT)] * 3


def test_a_search_resumed_under_a_lower_limit_is_at_it() -> None:
    beams = search()
    beams.advance([row((1, -1.0), (2, -2.0))])
    resumed = BeamSearch(rules(max_output_tokens=1), 1, FIRST, beams.state)
    assert resumed.is_at_limit
    assert [end.token for end in resumed.close(EndReason.LENGTH).finished] == [-1, -1]


def test_log_probabilities_are_those_of_the_parents_candidates() -> None:
    beams = search(logprobs=2)
    top = ((1, -1.0), (EOS, -2.0))
    event = beams.advance([row((1, -1.0), (EOS, -2.0), (2, -3.0), (3, -4.0))], cached_tokens=16)
    assert event.logprobs == (TokenLogprobs(-1.0, 1, top), TokenLogprobs(-3.0, 3, top))
    assert event.finished[0].logprobs == TokenLogprobs(-2.0, 2, top)
    assert event.cached_tokens == 16
    assert beams.advance([row((4, -1.0)), row((5, -1.0))], cached_tokens=32).cached_tokens == 0


@pytest.mark.parametrize("penalty", [1000.0, -1000.0])
@pytest.mark.parametrize("mode", list(EarlyStopping))
def test_penalties_beyond_measure_break_nothing(penalty: float, mode: EarlyStopping) -> None:
    beams = search(length_penalty=penalty, early_stopping=mode, n=2)
    steps = 0
    while not beams.is_over:
        beams.advance([row((EOS, -0.0), (steps + 10, -0.5), (3, -1.0))] * len(beams.live))
        steps += 1
    assert steps <= 8
    assert rules(length_penalty=penalty).rank(-0.0, 5) in (-math.inf, 0.0)


def test_rules_of_a_request() -> None:
    sampling = SamplingParams(
        beam_width=4,
        max_tokens=50,
        min_tokens=3,
        length_penalty=2.0,
        early_stopping=NEVER,
        stop_token_ids=(5,),
        logprobs=1,
    )
    record = RequestRecord(RequestId("g", 1), 0, np.arange(10, dtype=np.int32), sampling, n=2)
    assert BeamRules.of(record, (2, 3), 40) == BeamRules(
        width=4,
        n=2,
        max_output_tokens=30,
        length_penalty=2.0,
        early_stopping=NEVER,
        stop_ids=frozenset({2, 3, 5}),
        min_tokens=3,
        logprobs=1,
    )
    free = RequestRecord(RequestId("g", 1), 0, record.prompt, SamplingParams(beam_width=1, ignore_eos=True))
    assert BeamRules.of(free, (2, 3), 40).stop_ids == frozenset()
    assert [rules(4, stop_ids=frozenset(range(count))).candidates_needed for count in (0, 1, 4, 7)] == [8, 8, 8, 11]


# --- properties -------------------------------------------------------------------------------------------------------


def candidates_of(seed: int, tokens: tuple[int, ...], count: int) -> Candidates:
    """A model of ten tokens: what comes after ``tokens`` is a function of them."""
    rng = np.random.default_rng([seed, *tokens])
    logits = rng.normal(0, 2, 10)
    logprobs = (logits - np.logaddexp.reduce(logits)).astype(np.float32)
    order = np.argsort(-logprobs, kind="stable")[:count]
    return Candidates(order.astype(np.int32), logprobs[order])


SEARCHES = st.builds(
    rules,
    width=st.integers(1, 5),
    max_output_tokens=st.integers(1, 7),
    length_penalty=st.sampled_from([-1.0, 0.0, 0.5, 1.0, 2.0]),
    early_stopping=st.sampled_from(EarlyStopping),
    stop_ids=st.sets(st.integers(0, 9), max_size=3).map(frozenset),
    min_tokens=st.integers(0, 3),
    logprobs=st.sampled_from([None, 0, 3]),
)


@settings(max_examples=150)
@given(SEARCHES, st.integers(0, 2**32), st.data())
def test_a_search_taken_up_from_the_log_goes_on_as_before(wanted: BeamRules, seed: int, data: st.DataObject) -> None:
    """Through bytes, snapshots and schedulers that die at any step: the same choices, and no state but the log's."""
    wanted = BeamRules(**{**as_dict(wanted), "n": data.draw(st.integers(1, wanted.width))})

    def steps(beams: BeamSearch) -> list[Candidates]:
        return [candidates_of(seed, one.tokens, wanted.candidates_needed) for one in beams.live]

    whole = BeamSearch(wanted, 1, FIRST)
    while not whole.is_over:
        whole.advance(steps(whole))

    log, attempt, beams = LogFold(), FIRST, BeamSearch(wanted, 1, FIRST)
    while not beams.is_over:
        event = beams.advance(steps(beams))
        assert decode_entry(encode_beams([event])) == [event]
        before = [list(log.get(1, choice).tokens) for choice in range(wanted.n)]
        log.apply(event)
        for choice, known in enumerate(before):
            assert log.get(1, choice).tokens[: len(known)] == known
        if not beams.is_over:
            assert log.beams[1] == beams.state
            if data.draw(st.booleans()):
                log = LogFold().apply_all(decode_entry(encode_snapshot(log.snapshots())))
                beams = BeamSearch(wanted, 1, attempt, log.beams[1])
    assert beams.state == whole.state == BeamFold(wanted.n, FIRST, (), whole.state.kept)
    for choice in range(wanted.n):
        fold = log.get(1, choice)
        assert fold.end, "every choice has its end"
        if choice < len(whole.state.kept):
            own = whole.state.kept[choice]
            assert (tuple(fold.tokens), fold.end, fold.stop_token) == (own.tokens, own.end, own.stop_token)
            assert tuple(fold.logprobs) == own.logprobs
            assert len(own.logprobs) == (0 if wanted.logprobs is None else len(own.tokens))
            score = math.fsum(score_of(seed, own.tokens))
            assert own.score == pytest.approx(score, abs=1e-4)


def as_dict(wanted: BeamRules) -> dict[str, object]:
    return {name: getattr(wanted, name) for name in BeamRules.__slots__}


def score_of(seed: int, tokens: tuple[int, ...]) -> list[float]:
    scores = []
    for at, token in enumerate(tokens):
        every = candidates_of(seed, tokens[:at], 10)
        scores.append(float(every.logprobs[every.tokens.tolist().index(token)]))
    return scores
