"""The core's parts on their own, each against a naive twin where it has one"""

from __future__ import annotations

import random

import hypothesis.strategies as st
import numpy as np
import pytest
from core_bench import sequence
from hypothesis import given

from octavo_scheduler.core.block_pool import Content
from octavo_scheduler.core.config import CoreConfig
from octavo_scheduler.core.errors import IntegrityError
from octavo_scheduler.core.forecast import GUESS, GUESSES, MOMENTS, WINDOW, LengthForecast, peak_blocks
from octavo_scheduler.core.free_list import FreeList
from octavo_scheduler.core.in_flight import find_fills
from octavo_scheduler.core.sequence import NO_SLOT, Sequence
from octavo_scheduler.core.slots import SlotTable
from octavo_scheduler.core.stats import HitRateWindow


def content(digest: bytes, number: int = 1, parent: int = 0, tokens: tuple[int, ...] = (1, 2)) -> Content:
    """A block's content as the cache would name it."""
    return Content(digest, number, parent, 1, np.array(tokens, np.int32).tobytes())


# --- free list --------------------------------------------------------------------------------------------------------


@given(
    st.integers(1, 9),
    st.lists(
        st.tuples(st.sampled_from(["pop", "many", "remove", "without", "front", "back"]), st.integers(0, 8)),
    ),
    st.randoms(use_true_random=False),
)
def test_free_list_like_a_list(size: int, moves: list[tuple[str, int]], rng: random.Random) -> None:
    real, naive = FreeList(size), list(range(size))
    for move, block in moves:
        if move == "pop" and naive:
            assert real.pop_front() == naive.pop(0)
        elif move == "many" and block <= len(naive):
            assert real.pop_many(block) == naive[:block]
            del naive[:block]
        elif move == "remove" and block in naive:
            real.remove(block)
            naive.remove(block)
        elif move == "without":
            # Neighbours, the last of them first, as chains lie; or anything.
            gone = (
                naive[block : block + rng.randrange(4)][::-1]
                if rng.random() < 0.5
                else rng.sample(naive, len(naive) // 2)
            )
            real.remove_many(np.array(gone, np.int32))
            naive = [one for one in naive if one not in gone]
        elif move in ("front", "back") and block < size and block not in naive:
            (real.push_front if move == "front" else real.push_back)(block)
            naive.insert(0 if move == "front" else len(naive), block)
        assert list(real) == naive
        assert len(real) == len(naive)
        assert real.first(block) == naive[:block]
        assert [block in real for block in range(size)] == [block in naive for block in range(size)]


def test_free_list_must_not_be_emptied_further() -> None:
    free = FreeList(1)
    free.pop_front()
    with pytest.raises(AssertionError):
        free.pop_front()


# --- fills ------------------------------------------------------------------------------------------------------------


@given(
    st.integers(1, 9),
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 40)), min_size=1, max_size=6),
    st.randoms(use_true_random=False),
)
def test_find_fills_like_the_naive_one(block_size: int, rows: list[tuple[int, int]], rng: random.Random) -> None:
    slots = rng.sample(range(8), len(rows))
    table = np.array([[rng.randrange(50) for _ in range(81)] for _ in range(8)], np.int32)
    generation = np.array([rng.randrange(1 << 32) for _ in range(50)], np.uint32)
    starts = np.array([start for start, _ in rows], np.int32)
    ends = np.array([start + count for start, count in rows], np.int32)
    expected = []
    for row, (start, count) in enumerate(rows):
        for position in range(start, start + count):
            if position % block_size == block_size - 1:
                block = int(table[slots[row], position // block_size])
                expected.append((row, position // block_size, block, int(generation[block])))
    fills = find_fills(np.arange(len(rows)), starts, ends, np.array(slots, np.int32), table, generation, block_size)
    found = (
        []
        if fills is None
        else list(
            zip(
                fills.row.tolist(),
                fills.index.tolist(),
                fills.block.tolist(),
                fills.generation.tolist(),
                strict=True,
            )
        )
    )
    assert found == expected
    assert (fills is None) == (not expected)


# --- slots, counts ----------------------------------------------------------------------------------------------------

SLOTS = CoreConfig(num_blocks=99, block_size=2, max_num_seqs=4, max_num_batched_tokens=8, max_model_len=12)


def test_a_slot_is_taken_and_left() -> None:
    table = SlotTable(SLOTS)
    one, two = sequence(1, tokens=5), sequence(2, tokens=3)
    table.take(one, np.array([4, 5], np.int32), 4)
    table.take(two, np.array([4, 7], np.int32), 2, tenant=3)
    assert (table.num_free, len(table)) == (2, 2)
    assert table.uid[:2].tolist() == [1, 2]
    assert table.tenant[:2].tolist() == [0, 3]
    assert table.references(9).tolist() == [0, 0, 0, 0, 2, 1, 0, 1, 0]
    # One block for the fifth token of the first; the second has all it needs.
    assert table.blocks_still_needed() == 1
    rows = np.array([table.row(one), table.row(two)])
    table.append(rows, np.array([70, 80], np.int32))
    table.last_step[:2] = [8, 9]
    version = table.version
    assert table.leave(one).tolist() == [4, 5]
    assert table.version != version
    assert one.tokens.tolist() == [0, 1, 2, 3, 4, 70]
    assert (one.slot, one.last_step) == (NO_SLOT, 8)
    assert (table.running, table.row(two), int(table.last_step[0])) == ([two], 0, 9)
    table.take(one, np.array([1], np.int32), 0)
    assert table.uid[:2].tolist() == [2, 1]
    assert table.last_step[:2].tolist() == [9, 0]


@given(st.lists(st.tuples(st.sampled_from("tlga"), st.integers(0, 30)), max_size=30))
def test_slot_table_like_a_list(moves: list[tuple[str, int]]) -> None:
    """Rows stay in the order of admission, slots with their sequences, whatever comes and goes."""
    table = SlotTable(SLOTS)
    naive: list[tuple[Sequence, list[int], list[int]]] = []
    for uid, (move, number) in enumerate(moves, 1):
        if move == "t" and table.num_free:
            one = sequence(uid, tokens=1 + number % 5)
            blocks = [number + i for i in range(-(-len(one.tokens) // 2))]
            table.take(one, np.array(blocks, np.int32), 0)
            naive.append((one, blocks, one.tokens.tolist()))
        elif move == "l" and naive:
            one, blocks, tokens = naive.pop(number % len(naive))
            assert table.leave(one).tolist() == blocks
            assert one.tokens.tolist() == tokens
        elif move == "g" and naive:
            growing = [at for at, (_, blocks, _) in enumerate(naive) if len(blocks) + 2 <= 6][: 1 + number % 3]
            need = [1 + (number + at) % 2 for at in growing]
            fresh = list(range(40, 40 + sum(need)))
            rows = np.array(growing, np.intp)
            slots = table.grow(rows, np.array(need, np.int32), np.array(fresh, np.int32))
            assert slots.tolist() == [
                naive[at][0].slot for at, count in zip(growing, need, strict=True) for _ in range(count)
            ]
            for at, count in zip(growing, need, strict=True):
                naive[at][1].extend(fresh[:count])
                del fresh[:count]
        elif move == "a" and naive:
            one, _, tokens = naive[number % len(naive)]
            if len(tokens) < 12:
                row = np.array([table.row(one)])
                table.append(row, np.array([number], np.int32))
                table.expected[row] += 1
                tokens.append(number)
        assert table.running == [one for one, _, _ in naive]
        assert [table.row(one) for one in table.running] == list(range(len(naive)))
        for one, blocks, tokens in naive:
            assert table.blocks(one).tolist() == blocks
            assert table.tokens[one.slot, : len(tokens)].tolist() == tokens
            assert table.known[table.row(one)] == len(tokens)
        wanted = [max(0, -(-len(tokens) // 2) - len(blocks)) for _, blocks, tokens in naive]
        assert table.blocks_still_needed() == sum(wanted)
        table.check_integrity()


@pytest.mark.parametrize(
    "breach", ["ahead of blocks", "ahead of tokens", "past the end", "knows too much", "slot", "row"]
)
def test_slot_integrity_check_sees_breaches(breach: str) -> None:
    table = SlotTable(SLOTS)
    one = sequence(1, tokens=4)
    table.take(one, np.array([1, 2], np.int32), 4)
    table.take(sequence(2, tokens=4), np.array([3, 4], np.int32), 4)
    table.check_integrity()
    if breach == "ahead of blocks":
        table.planned[0], table.expected[0] = 5, 6
    elif breach == "ahead of tokens":
        table.expected[0] = 3
    elif breach == "past the end":
        table.expected[0] = one.max_total_tokens + 1
    elif breach == "knows too much":
        table.known[0] = 5
    elif breach == "slot":
        table._free.append(one.slot)
    else:
        table.row_of_slot[one.slot] = 1
    with pytest.raises(IntegrityError):
        table.check_integrity()


@given(st.integers(1, 8), st.lists(st.tuples(st.integers(1, 4), st.integers(1, 50)), max_size=20), st.data())
def test_hit_rate_window_like_the_naive_one(
    limit: int, observations: list[tuple[int, int]], data: st.DataObject
) -> None:
    window, seen = HitRateWindow(limit), []
    for requests, queries in observations:
        hits = data.draw(st.integers(0, queries))
        window.observe(requests, queries, hits)
        seen.append((requests, queries, hits))
        while len(seen) > 1 and sum(r for r, _, _ in seen) > limit:
            seen.pop(0)
        assert window.rate == sum(h for _, _, h in seen) / sum(q for _, q, _ in seen)


# --- forecast ---------------------------------------------------------------------------------------------------------


@given(
    st.lists(st.integers(1, 30), max_size=20),
    st.lists(st.tuples(st.integers(0, 35), st.integers(0, 40)), max_size=6),
    st.integers(1, 9000),
    st.sampled_from([0, 10, 15, 17, 20, 90]),
)
def test_forecast_like_the_naive_one(
    lengths: list[int], running: list[tuple[int, int]], pool_tokens: int, toll: int
) -> None:
    forecast = LengthForecast(pool_tokens)
    for length in lengths:
        forecast.observe(length)
    forecast.count(100 + toll, toll)
    caution = {0: 0.0, 10: 0.0, 15: 0.5, 17: 0.7, 20: 1.0, 90: 1.0}[toll]
    assert forecast.caution == pytest.approx(caution)
    lengths = [*lengths, *[min(GUESS, pool_tokens // 2)] * GUESSES]
    expected = []
    for generated, limit in running:
        longer = [length for length in lengths if length > generated]
        mean = sum(longer) / len(longer) if longer else 2 * generated
        most = mean + caution * (max(longer, default=mean) - mean)
        expected.append(min(most - generated, limit))
    generated, limits = (np.array([pair[i] for pair in running], np.int32) for i in (0, 1))
    found = forecast.remaining(generated, limits).tolist()
    assert all(want <= have < want + 1.001 for want, have in zip(expected, found, strict=True))


def test_the_forecast_forgets() -> None:
    forecast = LengthForecast()
    none, limit = np.zeros(1, np.int32), np.full(1, 5000, np.int32)
    for length in (900, 10):
        for _ in range(WINDOW):
            forecast.observe(length)
        assert forecast.remaining(none, limit).tolist() == [length]


def test_what_was_recomputed_long_ago_is_forgiven_and_what_went_well_too() -> None:
    forecast = LengthForecast(1000)
    forecast.count(1000, 300)
    assert forecast.caution == 1.0
    for _ in range(100):
        forecast.count(1000, 0)
    assert forecast.caution == 0.0
    forecast.count(4000, 2500)
    assert forecast.caution > 0.3


def naive_peak(sequences: list[tuple[int, int, int]], block_size: int) -> int:
    """All grow by a token at a time; who has grown as far as it will ends, once the others have made that step too."""
    return max(
        (
            sum(-(-(tokens + grown) // block_size) - shared for tokens, growth, shared in sequences if growth >= grown)
            for grown in range(max((growth for _, growth, _ in sequences), default=0) + 1)
        ),
        default=0,
    )


LENGTHS = st.tuples(st.integers(6, 30), st.integers(0, 20), st.integers(0, 1))


@given(st.lists(LENGTHS, max_size=MOMENTS), st.sampled_from([1, 2, 3, 6]))
def test_peak_blocks_like_a_simulation(sequences: list[tuple[int, int, int]], block_size: int) -> None:
    columns = [np.array([one[i] for one in sequences], np.int32) for i in range(3)]
    assert peak_blocks(columns[0], columns[1], columns[2], block_size) == naive_peak(sequences, block_size)


@given(st.lists(LENGTHS, min_size=MOMENTS + 1, max_size=40), st.sampled_from([1, 4, 16]))
def test_peak_blocks_of_many_is_at_most_a_block_each_too_low(
    sequences: list[tuple[int, int, int]], block_size: int
) -> None:
    columns = [np.array([one[i] for one in sequences], np.int32) for i in range(3)]
    found, true = peak_blocks(columns[0], columns[1], columns[2], block_size), naive_peak(sequences, block_size)
    assert true - len(sequences) * (block_size > 1) <= found <= true
