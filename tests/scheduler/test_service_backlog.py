"""What is queued, how fast it goes, how long outputs become; and what of it gateways are told."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from service_stage import LOG, Stage, play

from octavo_scheduler.backlog import PRIOR_MEAN, Backlog, OutputLengths, Progress, Rate
from octavo_scheduler.core.forecast import GUESSES
from octavo_scheduler.limits import LEAST_QUEUED_TOKENS
from octavo_shared.ids import RequestId
from octavo_shared.plan import MeasuredStep
from octavo_shared.records import AbortRecord, EarlyStopping, ModelLimits, RequestRecord, SamplingParams

# --- output lengths ---------------------------------------------------------------------------------------------------


def test_nothing_seen_gives_the_prior() -> None:
    lengths = OutputLengths()
    assert lengths.expected(1) == 1.0
    assert lengths.expected(16) == pytest.approx(16, rel=0.05)
    assert lengths.expected(1 << 20) == pytest.approx(PRIOR_MEAN, rel=0.01)


@pytest.mark.parametrize("mean", [5, 40, 300, 3000])
def test_the_mean_of_random_lengths_is_found(mean: int) -> None:
    rng = random.Random(mean)
    lengths = OutputLengths()
    for _ in range(5000):
        lengths.observe(max(1, round(rng.expovariate(1 / mean))), complete=True)
    assert lengths.expected(1 << 20) == pytest.approx(mean, rel=0.2)
    # Cut where half of them end, an exponential's mean is half.
    assert lengths.expected(round(mean * 0.693)) == pytest.approx(mean / 2, rel=0.2)


def test_equal_lengths_are_found_within_their_range() -> None:
    lengths = OutputLengths()
    for _ in range(2000):
        lengths.observe(100, complete=True)
    assert lengths.expected(50) == pytest.approx(50, rel=0.1)
    assert 80 < lengths.expected(4096) < 130


def test_cut_outputs_say_that_outputs_are_longer() -> None:
    rng = random.Random(0)
    lengths, naive = OutputLengths(), []
    for _ in range(5000):
        length = max(1, round(rng.expovariate(1 / 400)))
        # Half of the clients allow 64 tokens, the others 4096.
        cut = rng.choice((64, 4096))
        lengths.observe(min(length, cut), complete=length <= cut)
        naive.append(min(length, cut))
    assert sum(naive) / len(naive) < 250, "their mean alone would be far off"
    assert lengths.expected(4096) == pytest.approx(400, rel=0.2)
    # Where nothing ever ends by itself, everything is expected to use what it may.
    lengths = OutputLengths()
    for _ in range(3000):
        lengths.observe(128, complete=False)
    assert lengths.expected(1024) > 900


def test_what_changes_is_learned_anew() -> None:
    lengths = OutputLengths()
    for _ in range(5000):
        lengths.observe(20, complete=True)
    assert lengths.expected(4096) < 30
    for _ in range(5000):
        lengths.observe(900, complete=True)
    assert 600 < lengths.expected(4096) < 1200


def test_expectations_rise_with_what_is_allowed_and_travel_as_a_curve() -> None:
    rng = random.Random(1)
    lengths = OutputLengths()
    for _ in range(500):
        lengths.observe(rng.randint(0, 2000), complete=rng.random() < 0.7)
    limits = ModelLimits("m", 1, 1, 1, True, expected_outputs=lengths.curve())
    before = 0.0
    for max_tokens in (1, 2, 3, 10, 100, 1000, 1500, 10_000, 1 << 23, 1 << 30):
        expected = lengths.expected(max_tokens)
        assert before <= expected <= max_tokens
        # Between powers of two gateways interpolate.
        assert limits.expected_output(max_tokens) == pytest.approx(expected, rel=0.1)
        before = expected
    assert ModelLimits("m", 1, 1, 1, True).expected_output(77) == 77.0


# --- rate and backlog -------------------------------------------------------------------------------------------------


def test_the_rate_is_of_recent_work_and_not_of_idle_time() -> None:
    rate = Rate()
    assert rate.tokens_per_s == 0.0
    for _ in range(100):
        rate.observe(200, 0.1)
    assert rate.tokens_per_s == pytest.approx(2000)
    for _ in range(300):
        rate.observe(50, 0.1)
    assert rate.tokens_per_s == pytest.approx(500, rel=0.2)
    assert (Rate().beside(0, 0.0), Rate().beside(30, 2.0)) == (0.0, 15.0)
    rate = Rate()
    rate.observe(10, 2.0)
    assert rate.beside(20, 1.0) == pytest.approx(10)


def request(serial: int, prompt_tokens: int = 100, n: int = 1, **sampling: int) -> RequestRecord:
    return RequestRecord(RequestId(LOG, serial), 0, np.zeros(prompt_tokens, np.int32), SamplingParams(**sampling), n=n)


def test_work_is_owed_until_it_is_done() -> None:
    backlog = Backlog()
    per_choice = backlog.lengths.expected(10)
    backlog.add(request(1, max_tokens=10))
    backlog.add(request(2, n=3, max_tokens=10))
    backlog.add(request(3, n=1, max_tokens=10, beam_width=4))
    assert backlog.standing([]).queued_tokens == round(300 + 8 * per_choice)
    # A prompt that choices share is computed once; outputs beyond what was expected owe nothing.
    running = [
        Progress(RequestId(LOG, 1), 100, 60),
        Progress(RequestId(LOG, 2), 100, 100),
        Progress(RequestId(LOG, 2), 100, 103),
        Progress(RequestId(LOG, 2), 100, 300),
        Progress(RequestId(LOG, 9), 100, 300),
    ]
    done = 60 + 100 + 3 + per_choice
    assert backlog.standing(running).queued_tokens == round(300 + 8 * per_choice - done)
    for serial, choices in ((1, 1), (2, 3), (3, 1)):
        for _ in range(choices):
            backlog.choice_ended(RequestId(LOG, serial))
    backlog.choice_ended(RequestId(LOG, 3))
    assert backlog.standing(running).queued_tokens == 0


def test_prompts_ahead_are_those_not_computed_yet_by_log() -> None:
    backlog = Backlog()
    for serial in (1, 2):
        backlog.add(request(serial, n=serial, max_tokens=10))
    other = RequestRecord(RequestId("other", 1), 0, np.zeros(30, np.int32), SamplingParams(max_tokens=4))
    backlog.add(other)
    assert backlog.standing([]).prompts_ahead == {LOG: 200, "other": 30}
    running = [
        Progress(RequestId(LOG, 1), 100, 60),
        Progress(RequestId(LOG, 2), 100, 80),
        Progress(RequestId(LOG, 2), 100, 70),
        Progress(other.id, 30, 32),
    ]
    assert backlog.standing(running).prompts_ahead == {LOG: 60}
    for serial in (1, 2):
        backlog.choice_ended(RequestId(LOG, serial))
    assert backlog.standing([]).prompts_ahead == {"other": 30}
    backlog.choice_ended(other.id)
    assert backlog.standing([]).prompts_ahead == {}


def test_the_mean_output_is_of_choices_that_are_owed() -> None:
    backlog = Backlog()
    assert backlog.mean_output == 0.0
    backlog.add(request(1, max_tokens=10))
    backlog.add(request(2, n=3, max_tokens=100))
    ten, hundred = map(backlog.lengths.expected, (10, 100))
    assert backlog.mean_output == pytest.approx((ten + 3 * hundred) / 4)
    backlog.choice_ended(RequestId(LOG, 1))
    backlog.choice_ended(RequestId(LOG, 2))
    assert backlog.mean_output == pytest.approx(hundred)
    for _ in range(3):
        backlog.choice_ended(RequestId(LOG, 2))
    assert backlog.mean_output == 0.0


# --- what gateways are told -------------------------------------------------------------------------------------------


def test_limits_tell_what_is_queued(valkey: str, tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        def limits() -> ModelLimits:
            return stage.service.limits()

        await stage.admit(1, prompt_tokens=50, max_tokens=8)
        await stage.admit(2, prompt_tokens=50, max_tokens=8)

        async def both_read() -> bool:
            return stage.process.service is not None and limits().queued_tokens > 100

        await stage.until(both_read)
        assert limits().queued_tokens == round(100 + 2 * limits().expected_output(8))
        assert (limits().tokens_per_s, limits().max_num_seqs) == (0.0, 0)
        async with stage.executor() as executor:
            await executor.work(2)
            assert limits().queued_tokens < 60, "both prompts are in the first two steps of 64 tokens"
            await stage.finish(executor)
            assert limits().queued_tokens == 0
            assert limits().tokens_per_s > 0
            assert limits().max_num_seqs == 8
            assert limits().max_queued_tokens == LEAST_QUEUED_TOKENS
            # Learned: outputs are cut at 8, so they are expected to be as long as they may.
            assert limits().expected_output(8) == pytest.approx(8, rel=0.05)
        published = await stage.streams.read_limits()
        assert published is not None
        assert published.expected_outputs

    play(scene, valkey, tmp_path)


def test_the_wait_for_a_slot_is_known_while_all_that_run_have_just_begun(valkey: str, tmp_path: Path) -> None:
    """Of many that began together hardly any has ended: how fast they end at first says nothing of how long slots are kept."""

    async def scene(stage: Stage) -> None:
        async with stage.executor(max_num_seqs=2) as executor:
            for serial in range(1, 6):
                await stage.admit(serial, max_tokens=40)
            await executor.work(2)
            (engine,) = stage.service.engines

            async def full() -> bool:
                return (engine.core.num_running, engine.core.num_waiting) == (2, 3)

            await stage.until(full)
            engine.times.begin([MeasuredStep(0, 1, 0.05), MeasuredStep(0, 2, 0.05), MeasuredStep(16, 1, 0.06)])
            engine._ends = Rate()
            # Two slots, each kept for twenty steps of 0.05 s.
            assert engine.slot_wait_s(20.0) == pytest.approx(1.5, rel=0.01)
            engine._ends.observe(1, 4.0)
            assert engine.slot_wait_s(20.0) == pytest.approx(3 / (3 / 5), rel=0.01), (
                "a first end is not the pace of all"
            )
            # Once many have ended, they are.
            for _ in range(1000):
                engine._ends.observe(1, 0.1)
            assert engine.slot_wait_s(20.0) == pytest.approx(0.3, rel=0.1)
            mean = stage.service.backlog.mean_output
            assert mean == pytest.approx(stage.service.limits().expected_output(40), rel=0.1)
            assert stage.service.limits().slot_wait_s == pytest.approx(engine.slot_wait_s(mean), rel=0.01)

    play(scene, valkey, tmp_path)


def test_aborted_work_is_owed_no_longer(valkey: str, tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        async with stage.executor() as executor:
            await stage.admit(1, max_tokens=100)
            await executor.work(2)
            await stage.admit(2, max_tokens=100)
            await stage.streams.append_abort(AbortRecord(RequestId(LOG, 1)))
            await stage.streams.append_abort(AbortRecord(RequestId(LOG, 2)))
            await stage.until(stage.all_acknowledged)
            assert stage.service.limits().queued_tokens == 0
            assert b'octavo:queued_tokens{engine="0",model_name="tiny"} 0.0' in stage.service.exposition()

    play(scene, valkey, tmp_path)


@pytest.mark.parametrize(("reason", "ends"), [("stop_string", 1), ("disconnect", 0)])
def test_a_stop_string_is_as_good_as_an_end(valkey: str, tmp_path: Path, reason: str, ends: int) -> None:
    """Gateways find stop strings and abort: those outputs are complete, others that are aborted are cut."""

    async def scene(stage: Stage) -> None:
        async with stage.executor() as executor:
            await stage.admit(1, max_tokens=100)
            await executor.work(5)
            await stage.streams.append_abort(AbortRecord(RequestId(LOG, 1), reason=reason))
            await stage.until(stage.all_acknowledged)
            lengths = stage.service.backlog.lengths
            assert sum(count > 0 for count in lengths._ends) == ends
            assert sum(lengths._tokens) > 0

    play(scene, valkey, tmp_path)


@pytest.mark.parametrize(
    ("stops", "words", "complete", "known"),
    [((), (), 0, 6), ((210, 211), (), 1, 2), ((), ("disconnect",), 0, 3), ((), ("stop_string",), 1, 3)],
    ids=["at its limit", "of itself", "given up", "by a stop string"],
)
def test_a_beam_search_is_as_long_as_its_hypotheses(
    valkey: str, tmp_path: Path, stops: tuple[int, ...], words: tuple[str, ...], complete: int, known: int
) -> None:
    """However many there are, it is one length that is learned, and cut where nobody wanted more."""

    async def scene(stage: Stage) -> None:
        sampling = SamplingParams(
            max_tokens=6, beam_width=2, stop_token_ids=stops, early_stopping=EarlyStopping.FIRST, ignore_eos=True
        )
        request_id = RequestId(LOG, 1)
        await stage.streams.take_lease(stage.streams.keys.gateway(LOG), LOG, 600)
        await stage.streams.admit(RequestRecord(request_id, 0, np.arange(10, dtype=np.int32), sampling))
        async with stage.executor() as executor:
            if words:
                await executor.work(3)
                await stage.until(lambda: has_decided(stage, 3))
            for reason in words:
                await stage.streams.append_abort(AbortRecord(request_id, reason=reason))
            await stage.finish(executor)
            lengths = stage.service.backlog.lengths
            assert sum(count > 0 for count in lengths._ends) == complete
            assert sum(lengths._tokens) == pytest.approx(known, rel=0.01)
            (engine,) = stage.service.engines
            assert list(engine.core.forecast._lengths)[GUESSES:] == ([] if words else [known])

    async def has_decided(stage: Stage, steps: int) -> bool:
        live = stage.service.live.get(RequestId(LOG, 1))
        return live is not None and live.beams is not None and live.beams.search.state.position == steps

    play(scene, valkey, tmp_path)


@pytest.mark.parametrize(("flag", "bound"), [(0, 0), (1000, 1000), (None, LEAST_QUEUED_TOKENS)])
def test_the_bound_is_the_operators(valkey: str, tmp_path: Path, flag: int | None, bound: int) -> None:
    async def scene(stage: Stage) -> None:
        async with stage.executor():

            async def published() -> bool:
                limits = await stage.streams.read_limits()
                return limits is not None and limits.ready and limits.max_queued_tokens == bound

            await stage.until(published)

    play(scene, valkey, tmp_path, max_queued_tokens=flag)
