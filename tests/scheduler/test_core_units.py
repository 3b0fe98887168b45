"""The core's parts on their own, each against a naive twin."""

from __future__ import annotations

import random
from collections import OrderedDict

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from octavo_scheduler.core.block_pool import BlockPool
from octavo_scheduler.core.config import CoreConfig
from octavo_scheduler.core.errors import IntegrityError
from octavo_scheduler.core.free_list import FreeList
from octavo_scheduler.core.hashing import HASH_BYTES, BlockHasher
from octavo_scheduler.core.in_flight import find_fills
from octavo_scheduler.core.sequence import Sequence
from octavo_scheduler.core.slots import SlotTable
from octavo_scheduler.core.stats import HitRateWindow
from octavo_scheduler.core.waiting import POLICIES, WaitingQueue
from octavo_shared.ids import RequestId
from octavo_shared.records import RequestRecord, SamplingParams


def sequence(uid: int, priority: int = 0, tokens: int = 4) -> Sequence:
    record = RequestRecord(
        RequestId("log", uid), 0, np.arange(tokens, dtype=np.int32), SamplingParams(), priority=priority
    )
    made = Sequence(record, 0, 1, 1024)
    made.uid = made.arrival = uid
    return made


# --- free list --------------------------------------------------------------------------------------------------------


@given(
    st.integers(1, 9),
    st.lists(st.tuples(st.sampled_from(["pop", "many", "remove", "front", "back"]), st.integers(0, 8))),
)
def test_free_list_like_a_list(size: int, moves: list[tuple[str, int]]) -> None:
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
        elif move in ("front", "back") and block < size and block not in naive:
            (real.push_front if move == "front" else real.push_back)(block)
            naive.insert(0 if move == "front" else len(naive), block)
        assert list(real) == naive
        assert len(real) == len(naive)
        assert [block in real for block in range(size)] == [block in naive for block in range(size)]


def test_free_list_must_not_be_emptied_further() -> None:
    free = FreeList(1)
    free.pop_front()
    with pytest.raises(AssertionError):
        free.pop_front()


# --- block pool -------------------------------------------------------------------------------------------------------


class NaivePool:
    """What the pool must do, as plainly as it can be said: content by chain of tokens, order by a list."""

    def __init__(self, num_blocks: int) -> None:
        self.free = list(range(num_blocks))
        self.refs = [0] * num_blocks
        self.content: OrderedDict[int, tuple[object, ...]] = OrderedDict()

    def allocate(self, count: int) -> list[int]:
        taken = [self.free.pop(0) for _ in range(count)]
        for block in taken:
            self.content.pop(block, None)
            self.refs[block] = 1
        return taken

    def release(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            self.refs[block] -= 1
            if not self.refs[block]:
                self.free.insert(len(self.free) if block in self.content else 0, block)

    def match(self, salt: str, tokens: list[int], block_size: int) -> list[int]:
        found: list[int] = []
        for end in range(block_size, len(tokens) + 1, block_size):
            holder = [b for b, content in self.content.items() if content == (salt, *tokens[:end])]
            if not holder:
                break
            found += holder
        return found

    def acquire(self, blocks: list[int]) -> None:
        for block in blocks:
            if not self.refs[block]:
                self.free.remove(block)
            self.refs[block] += 1

    def commit(self, block: int, salt: str, tokens: list[int]) -> None:
        content = (salt, *tokens)
        if content not in self.content.values():
            self.content[block] = content
            if not self.refs[block]:
                self.free.remove(block)
                self.free.append(block)


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.integers(2, 12), st.integers(1, 4))
def test_block_pool_like_the_naive_one(seed: int, num_blocks: int, block_size: int) -> None:
    """Sequences come, fill their blocks, go; the order of the free list and every hit agree after each move."""
    rng = random.Random(seed)
    pool, naive, hasher = BlockPool(num_blocks, block_size), NaivePool(num_blocks), BlockHasher(b"k", block_size)
    held: list[list[int]] = []
    for _ in range(40):
        if held and rng.random() < 0.4:
            blocks = held.pop(rng.randrange(len(held)))
            pool.release(blocks)
            naive.release(blocks)
        else:
            salt, wanted = rng.choice("ab"), rng.randrange(1, 5)
            tokens = np.array([rng.randrange(2) for _ in range(wanted * block_size)], np.int32)
            chain: list[bytes] = []
            hasher.extend(chain, hasher.root(salt), tokens, wanted)
            hits = pool.match(chain, hasher.root(salt), tokens).tolist()
            assert hits == naive.match(salt, tokens.tolist(), block_size)
            if wanted - len(hits) > pool.num_free - pool.num_free_among(hits):
                continue
            pool.acquire(hits)
            naive.acquire(hits)
            new = pool.allocate(wanted - len(hits)).tolist()
            assert new == naive.allocate(wanted - len(hits))
            parent: int | bytes | None = pool.as_parent(hits[-1]) if hits else hasher.root(salt)
            released = rng.random() < 0.2
            generations = [int(pool.generation[block]) for block in new]
            if released:
                pool.release(hits + new)
                naive.release(hits + new)
            for index, (block, generation) in enumerate(zip(new, generations, strict=True), len(hits)):
                assert parent is not None
                content = tokens[index * block_size : (index + 1) * block_size].tobytes()
                parent = pool.commit(block, generation, chain[index], parent, content)
                naive.commit(block, salt, tokens[: (index + 1) * block_size].tolist())
            if not released:
                held.append(hits + new)
        assert pool.free_blocks() == naive.free
        assert pool.num_cached == len(naive.content)
        pool.check_integrity(np.array(naive.refs, np.int64))


_CONTENT = np.array([1, 2], np.int32).tobytes()


def _filled(pool: BlockPool, digest: bytes, parent: int | bytes, tokens: list[int]) -> tuple[int, int | bytes | None]:
    (block,) = pool.allocate(1).tolist()
    return block, pool.commit(block, int(pool.generation[block]), digest, parent, np.array(tokens, np.int32).tobytes())


def test_a_collision_never_matches() -> None:
    """Two contents forced to the same digest: at the block itself, below it, and under another root."""
    pool = BlockPool(8, 2)
    ours, tip = _filled(pool, b"D", b"root", [1, 2])
    assert tip is not None
    assert pool.match([b"D"], b"root", np.array([1, 2], np.int32)).tolist() == [ours]
    # Other tokens, the same digest.
    assert pool.match([b"D"], b"root", np.array([3, 4], np.int32)).tolist() == []
    assert _filled(pool, b"D", b"root", [3, 4])[1] is None
    # The same tokens, the same digest, another root (salt, adapter, tenant).
    assert pool.match([b"D"], b"other", np.array([1, 2], np.int32)).tolist() == []
    assert _filled(pool, b"D", b"other", [1, 2])[1] is None
    # A block of the same tokens and digest that continues another first block.
    other, other_tip = _filled(pool, b"E", b"root", [5, 6])
    assert other_tip is not None
    below, _ = _filled(pool, b"F", other_tip, [7, 8])
    assert pool.match([b"E", b"F"], b"root", np.array([5, 6, 7, 8], np.int32)).tolist() == [other, below]
    assert pool.match([b"D", b"F"], b"root", np.array([1, 2, 7, 8], np.int32)).tolist() == [ours]
    assert _filled(pool, b"F", tip, [7, 8])[1] is None


def test_equal_content_computed_twice_is_found_once_and_continued() -> None:
    pool = BlockPool(8, 2)
    first, tip = _filled(pool, b"D", b"root", [1, 2])
    second, same_tip = _filled(pool, b"D", b"root", [1, 2])
    assert same_tip == tip
    assert tip is not None
    third, _ = _filled(pool, b"E", tip, [3, 4])
    assert pool.match([b"D", b"E"], b"root", np.array([1, 2, 3, 4], np.int32)).tolist() == [first, third]
    pool.release([second])
    assert pool.free_blocks()[0] == second


def test_a_reused_block_is_not_committed_for_its_old_life() -> None:
    pool = BlockPool(1, 2)
    (block,) = pool.allocate(1).tolist()
    generation = int(pool.generation[block])
    pool.release([block])
    pool.allocate(1)
    assert pool.commit(block, generation, b"D", b"root", _CONTENT) is None
    assert pool.num_cached == 0


def test_reset_forgets_blocks_still_in_flight() -> None:
    pool = BlockPool(2, 2)
    (block,) = pool.allocate(1).tolist()
    generation = int(pool.generation[block])
    assert not pool.reset_cache()
    pool.release([block])
    assert pool.reset_cache()
    assert pool.commit(block, generation, b"D", b"root", _CONTENT) is None


def test_released_more_often_than_held() -> None:
    pool = BlockPool(2, 2)
    blocks = pool.allocate(1).tolist()
    pool.release(blocks)
    with pytest.raises(AssertionError):
        pool.release(blocks)


@pytest.mark.parametrize("breach", ["refcount", "free twice", "lost", "hash"])
def test_integrity_check_sees_breaches(breach: str) -> None:
    pool = BlockPool(4, 2)
    held, _ = _filled(pool, b"D", b"root", [1, 2])
    references = np.bincount([held], minlength=4)
    pool.check_integrity(references)
    if breach == "refcount":
        pool._refcount[held] = 2
    elif breach == "free twice":
        pool._free.push_back(held)
    elif breach == "lost":
        pool._free.pop_front()
    else:
        pool._hash[held] = b"E"
    with pytest.raises(IntegrityError):
        pool.check_integrity(references)


# --- hashing ----------------------------------------------------------------------------------------------------------

_PARTS = st.lists(st.text(max_size=4), max_size=4)


@given(_PARTS, _PARTS)
def test_root_parts_are_not_confusable(one: list[str], other: list[str]) -> None:
    hasher = BlockHasher(b"key", 4)
    assert (hasher.root(*one) == hasher.root(*other)) == (one == other)


@pytest.mark.parametrize(
    ("one", "other"),
    [(("a", "bc"), ("ab", "c")), (("a", ""), ("", "a")), (("a",), ("a", "")), (("\x01\x00\x00\x00a",), ("a",))],
)
def test_root_parts_that_look_alike(one: tuple[str, ...], other: tuple[str, ...]) -> None:
    hasher = BlockHasher(b"key", 4)
    assert hasher.root(*one) != hasher.root(*other)


@given(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=24), st.integers(1, 5), st.data())
def test_a_chain_grows_in_any_pieces(tokens: list[int], block_size: int, data: st.DataObject) -> None:
    hasher = BlockHasher(b"key", block_size)
    array = np.array(tokens, np.int32)
    full = len(tokens) // block_size
    whole: list[bytes] = []
    hasher.extend(whole, hasher.root("r"), array, full)
    pieces: list[bytes] = []
    for end in [*sorted(data.draw(st.lists(st.integers(0, full)))), full]:
        hasher.extend(pieces, hasher.root("r"), array, end)
    assert pieces == whole
    assert len(whole) == full
    assert all(len(digest) == HASH_BYTES for digest in whole)


def test_hashes_depend_on_key_root_parent_and_tokens() -> None:
    tokens = np.array([1, 2, 1, 2], np.int32)

    def chain(key: bytes = b"k", root: str = "r", content: np.ndarray = tokens) -> list[bytes]:
        made: list[bytes] = []
        hasher = BlockHasher(key, 2)
        hasher.extend(made, hasher.root(root), content, 2)
        return made

    base = chain()
    assert base[0] != base[1], "equal tokens after different parents are different blocks"
    assert not set(base) & set(chain(key=b"l"))
    assert not set(base) & set(chain(root="s"))
    assert not set(base) & set(chain(content=np.array([1, 3, 1, 2], np.int32)))
    # A slice of a wider table is hashed by value, not by layout.
    wide = np.zeros((2, 9), np.int32)
    wide[1, :4] = tokens
    assert chain(content=wide[1]) == base


# --- waiting queue ----------------------------------------------------------------------------------------------------


@given(st.sampled_from(["fcfs", "priority"]), st.lists(st.tuples(st.sampled_from("padr"), st.integers(0, 3))))
def test_waiting_queue_like_a_sorted_list(policy: str, moves: list[tuple[str, int]]) -> None:
    queue = WaitingQueue(POLICIES[policy])  # type: ignore[index]
    key = POLICIES[policy]  # type: ignore[index]
    naive: list[Sequence] = []
    popped: list[Sequence] = []
    for uid, (move, number) in enumerate(moves):
        if move in "pa":
            naive.append(sequence(uid, priority=number))
            queue.push(naive[-1])
        elif move == "d" and naive:
            naive.sort(key=key)
            popped.append(queue.pop())
            assert popped[-1] is naive.pop(0)
        elif move == "r" and naive:
            gone = naive.pop(number % len(naive))
            queue.remove(gone)
            if number % 2:
                # A removed sequence may come back.
                queue.push(gone)
                naive.append(gone)
        naive.sort(key=key)
        assert queue.ordered() == naive
        assert queue.peek() is (naive[0] if naive else None)
        assert len(queue) == len(naive)
        assert set(queue) == set(naive)


def test_lazy_removal_of_a_hundred_thousand() -> None:
    queue = WaitingQueue(POLICIES["fcfs"])
    everyone = [sequence(uid) for uid in range(100_000)]
    for one in everyone:
        queue.push(one)
    order = everyone.copy()
    random.Random(0).shuffle(order)
    for gone in order[:99_000]:
        queue.remove(gone)
        assert len(queue._heap) <= 2 * len(queue) + 64, "what was removed piles up"
    left = sorted(order[99_000:], key=lambda s: s.uid)
    assert [queue.pop() for _ in range(1000)] == left
    assert queue.peek() is None
    assert len(queue) == 0


def test_nobody_waits() -> None:
    queue = WaitingQueue(POLICIES["fcfs"])
    assert queue.peek() is None
    with pytest.raises(AssertionError):
        queue.pop()
    queue.remove(sequence(1))
    assert len(queue) == 0


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
    fills = find_fills(starts, ends, np.array(slots, np.int32), table, generation, block_size)
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


def test_a_slot_is_taken_and_left() -> None:
    config = CoreConfig(num_blocks=9, block_size=2, max_num_seqs=2, max_num_batched_tokens=8, max_model_len=12)
    table = SlotTable(config)
    one, two = sequence(1, tokens=5), sequence(2, tokens=3)
    table.take(one, np.array([4, 5], np.int32), 4)
    assert not table.full
    table.take(two, np.array([4, 7], np.int32), 2)
    assert table.full
    assert [table.uid[slot] for slot in table.order] == [1, 2]
    assert table.references(9).tolist() == [0, 0, 0, 0, 2, 1, 0, 1, 0]
    # One block for the fifth token of the first; the second has all it needs.
    assert table.blocks_still_needed(2) == 1
    table.append(np.array([one.slot, two.slot], np.int32), np.array([70, 80], np.int32))
    assert table.leave(one).tolist() == [4, 5]
    assert one.tokens.tolist() == [0, 1, 2, 3, 4, 70]
    assert table.sequences() == [two]
    table.take(one, np.array([1], np.int32), 0)
    assert [table.uid[slot] for slot in table.order] == [2, 1]


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
