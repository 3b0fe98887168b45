"""Who is suspected, tried and given up."""

from __future__ import annotations

import math

import hypothesis.strategies as st
from hypothesis import given

from octavo_scheduler.blame import Blame, halves
from octavo_shared.ids import RequestId

A, B, C = RequestId("g", 1), RequestId("g", 2), RequestId("g", 3)


def test_the_first_failure_is_nobodys_fault() -> None:
    blame = Blame()
    assert not blame.failed({A: 5, B: 5})
    assert not blame.is_suspect(A)
    assert not blame.next_trial()


def test_suspects_are_tried_in_halves_and_given_up_alone() -> None:
    blame = Blame()
    for _ in range(2):
        assert not blame.failed({A: 5, B: 5})
    assert blame.next_trial()
    assert blame.on_trial == {A}
    assert blame.is_suspect(B)
    assert not blame.is_suspect(C)
    assert blame.failed({A: 5}) == {A}
    assert blame.next_trial()
    assert blame.on_trial == {B}
    assert not blame.got_further(B, 6), "who has failed twice has to get two tokens further"
    assert blame.got_further(B, 7)
    assert not blame.next_trial()
    assert not blame.is_suspect(B)


def test_failures_in_company_never_give_up() -> None:
    blame = Blame()
    assert not any(blame.failed({A: 5, B: 5}) for _ in range(3))
    blame.next_trial()
    # Something ran beside it after all.
    assert not any(blame.failed({A: 5, C: 9}) for _ in range(10))


def test_progress_wipes_the_slate() -> None:
    blame = Blame()
    tokens = 5
    for failure in range(1, 12):
        assert not blame.failed({A: tokens})
        assert not blame.is_suspect(A)
        tokens += 1 << failure


def test_a_culprit_that_gets_a_little_further_each_time_is_caught() -> None:
    blame = Blame()
    failures = 0
    while not blame.failed({A: 5 + failures}):
        failures += 1
        assert failures < 10
        blame.next_trial()
        blame.got_further(A, 5 + failures)


def test_a_request_that_ends_on_trial_ends_the_trial() -> None:
    blame = Blame()
    blame.failed({A: 5})
    blame.failed({A: 5})
    assert blame.next_trial()
    assert blame.forget(A)
    assert not blame.is_suspect(A)
    assert not blame.next_trial()


def test_whoever_ends_before_its_trial_is_not_called() -> None:
    blame = Blame()
    for _ in range(2):
        blame.failed({A: 5, B: 5})
    blame.forget(A)
    assert blame.next_trial()
    assert blame.on_trial == {B}


@given(st.integers(1, 70), st.data())
def test_culprits_are_found_with_few_failures_and_nobody_else_suffers(size: int, data: st.DataObject) -> None:
    """Requests fail whenever a culprit is among those that run; everybody else gets as far as it must."""
    everyone = [RequestId("g", serial) for serial in range(size)]
    culprits = set(data.draw(st.lists(st.sampled_from(everyone), max_size=3, unique=True)))
    blame, tokens, failures = Blame(), dict.fromkeys(everyone, 9), 0
    given_up: set[RequestId] = set()

    def run(group: list[RequestId]) -> None:
        nonlocal failures
        if culprits & set(group):
            failures += 1
            found = blame.failed({request_id: tokens[request_id] for request_id in group})
            assert not found or found == set(group), "only who was alone is given up"
            given_up.update(found)
            return
        for request_id in group:
            tokens[request_id] += 2048
            blame.got_further(request_id, tokens[request_id])

    while True:
        if blame.next_trial():
            run(sorted(blame.on_trial))
            continue
        rest = [request_id for request_id in everyone if request_id not in given_up and tokens[request_id] == 9]
        if not rest:
            break
        run(rest)
    assert given_up == culprits
    assert failures <= 2 + (len(culprits) * (math.ceil(math.log2(size)) + 2) if culprits else 0)


@given(st.lists(st.integers(0, 99), min_size=1, unique=True))
def test_halves_are_all_of_it(serials: list[int]) -> None:
    group = [RequestId("g", serial) for serial in serials]
    parts = halves(group)
    assert [request_id for part in parts for request_id in part] == group
    assert max(map(len, parts)) - min(map(len, parts)) <= 1 or len(group) == 1
