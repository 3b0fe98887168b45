"""Who is suspected, tried and given up."""

from octavo_scheduler.blame import Blame
from octavo_shared.ids import RequestId

A, B = RequestId("g", 1), RequestId("g", 2)


def test_the_first_failure_is_nobodys_fault() -> None:
    blame = Blame()
    assert not blame.failed(A, 5)
    assert not blame.is_suspect(A)
    assert blame.may_start(A)
    assert blame.may_start(B)


def test_a_suspect_is_tried_alone_and_given_up_only_then() -> None:
    blame = Blame()
    for _ in range(2):
        assert not blame.failed(A, 5)
        assert not blame.failed(B, 5)
    assert blame.may_start(A)
    assert not blame.may_start(B)
    assert not blame.may_start(RequestId("g", 3)), "nobody starts beside a trial"
    assert blame.failed(A, 5)
    assert blame.may_start(B)
    assert blame.got_further(B, 6)
    assert not blame.is_suspect(B)
    assert blame.on_trial is None


def test_company_failures_never_give_up() -> None:
    blame = Blame()
    assert not any(blame.failed(A, 5) for _ in range(10))


def test_progress_wipes_the_slate() -> None:
    blame = Blame()
    assert not any(blame.failed(A, tokens) for tokens in range(5, 50))
    assert not blame.is_suspect(A)


def test_a_request_that_ends_on_trial_ends_the_trial() -> None:
    blame = Blame()
    blame.failed(A, 5)
    blame.failed(A, 5)
    assert blame.may_start(A)
    assert not blame.may_start(B)
    blame.forget(A)
    assert blame.may_start(B)
