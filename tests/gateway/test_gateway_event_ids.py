"""Ids of events: what is written is read as what was meant, and nothing else is read at all."""

from __future__ import annotations

import contextlib

import hypothesis.strategies as st
import pytest
from hypothesis import given

from octavo_gateway.event_ids import MOST_CHOICES, UNTOLD, EventIds, Position, Told, parse_event_id
from octavo_shared.ids import RequestId

STREAM = RequestId("5f1c8d2ab903", 0x1F)
KNOWN = st.one_of(st.just(UNTOLD), st.builds(Told, st.integers(0, 10**9), st.booleans(), st.just(True)))


@given(st.lists(KNOWN, min_size=1, max_size=40))
def test_an_id_says_how_far_every_choice_has_come(choices: list[Told]) -> None:
    ids = EventIds(STREAM, len(choices))
    for index, told in enumerate(choices):
        if told.began:
            ids.told(index, told.tokens, ended=told.ended)
    line = ids.line().decode()
    assert line.startswith("id: 5f1c8d2ab903-1f/")
    assert line.endswith("\n")
    position = parse_event_id(line.removeprefix("id: ").strip())
    assert position.stream == STREAM
    assert [position.of(index) for index in range(len(choices))] == choices
    assert position.of(len(choices)) == UNTOLD
    assert not position.usage_told
    assert not position.done
    # Who goes on from there says no less, whatever it has said itself.
    assert EventIds(STREAM, len(choices), position).line().decode() == line


def test_choices_in_step_make_short_ids() -> None:
    ids = EventIds(STREAM, 128)
    for index in range(128):
        ids.told(index, 40 if index < 70 else 39, ended=False)
    assert ids.line() == b"id: 5f1c8d2ab903-1f/40x70.39x58\n"
    assert EventIds(STREAM, 3).line() == b"id: 5f1c8d2ab903-1f/-x3\n"
    assert EventIds(STREAM, MOST_CHOICES + 1).line() == b""


def test_the_last_ids() -> None:
    ids = EventIds(STREAM, 2)
    usage = parse_event_id(ids.usage_line().decode().removeprefix("id: ").strip())
    assert usage == Position(STREAM, (), usage_told=True)
    assert usage.of(7) == Told(ended=True, began=True)
    assert parse_event_id(ids.done_line().decode().removeprefix("id: ").strip()).done


@pytest.mark.parametrize(
    "text",
    [
        "", "1", "abc/1", "abc-1/", "abc-1", "abc-1/x", "abc-1/1.", "abc-1/1e2", "abc-1/-e", "abc-1/5x0", "abc-1/5x257",
        "abc-1/1/2", "abc-1/1/", "abc-1/1/done/", "abc-01/1", "abc-1/1e/DONE", "abc-1/12345678901", "abc-1/" + "1." * 5000 + "1",
        "abc-1/\u0661",
    ],
)  # fmt: skip
def test_what_is_no_id_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_event_id(text)


@given(st.text(max_size=30))
def test_any_text_is_an_id_or_refused(text: str) -> None:
    with contextlib.suppress(ValueError):
        parse_event_id("a-1/" + text)
