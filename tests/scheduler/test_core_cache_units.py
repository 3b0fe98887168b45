"""Block pool, prefix cache and hashing on their own."""

from __future__ import annotations

import random
from collections import OrderedDict

import hypothesis.strategies as st
import numpy as np
import pytest
from core_bench import sequence
from hypothesis import given, settings

from octavo_scheduler.core import prefix_cache as prefix_cache_module
from octavo_scheduler.core.block_pool import BlockPool, Content
from octavo_scheduler.core.config import CoreConfig
from octavo_scheduler.core.errors import IntegrityError
from octavo_scheduler.core.hashing import HASH_BYTES, BlockHasher
from octavo_scheduler.core.prefix_cache import PrefixCache
from octavo_scheduler.core.sequence import Sequence
from octavo_shared.records import Int32Array


def content(digest: bytes, number: int = 1, parent: int = 0, tokens: tuple[int, ...] = (1, 2)) -> Content:
    """A block's content as the cache would name it."""
    return Content(digest, number, parent, 1, np.array(tokens, np.int32).tobytes())


# --- block pool and prefix cache --------------------------------------------------------------------------------------


class NaivePool:
    """What they must do, as plainly as it can be said: content by chain of tokens, order by a list."""

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
        for end in range(block_size, len(tokens), block_size):
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


def cache_of(num_blocks: int, block_size: int, num_host_blocks: int = 0) -> tuple[PrefixCache, BlockPool, BlockPool]:
    """A prefix cache over two pools that nobody else uses."""
    config = CoreConfig(num_blocks, block_size, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64)
    device, host = BlockPool(num_blocks, block_size), BlockPool(num_host_blocks, block_size)
    return PrefixCache(config, device, host, b"k"), device, host


def asking(cache: PrefixCache, uid: int, tokens: list[int], **more: object) -> Sequence:
    """A sequence that knows where its chain begins."""
    made = sequence(uid, tokens, **more)
    made.root = cache.root_of(made.record)
    return made


def compute(
    cache: PrefixCache, pool: BlockPool, uid: int, tokens: list[int], **more: object
) -> tuple[Sequence, list[int]]:
    """A sequence finds what it can, computes the rest and publishes it: the sequence and the blocks it holds."""
    one, size = asking(cache, uid, tokens, **more), pool.block_size
    hit = cache.find(one).device
    pool.acquire(hit)
    cache.adopt(one, hit)
    full = len(tokens) // size
    new = pool.allocate(full - len(hit)).tolist()
    for index, block in enumerate(new, len(hit)):
        data = one.tokens[index * size : (index + 1) * size].tobytes()
        cache.publish(one, index, block, int(pool.generation[block]), data)
    return one, hit.tolist() + new


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.integers(2, 12), st.integers(1, 4))
def test_block_pool_and_prefix_cache_like_the_naive_one(seed: int, num_blocks: int, block_size: int) -> None:
    """Sequences come, fill their blocks, go; the order of the free list and every hit agree after each move."""
    rng = random.Random(seed)
    naive = NaivePool(num_blocks)
    cache, pool, _ = cache_of(num_blocks, block_size)
    held: list[list[int]] = []
    for uid in range(40):
        if held and rng.random() < 0.4:
            blocks = held.pop(rng.randrange(len(held)))
            pool.release(blocks)
            naive.release(blocks)
        else:
            salt, wanted = rng.choice("ab"), rng.randrange(1, 5)
            # One token more than the blocks hold: the last one is never looked for.
            one = asking(cache, uid, [rng.randrange(2) for _ in range(wanted * block_size + 1)], cache_salt=salt)
            tokens = one.tokens
            hit = cache.find(one)
            hits = hit.device.tolist()
            assert hits == naive.match(salt, tokens.tolist(), block_size)
            assert not len(hit.beyond)
            if wanted - len(hits) > pool.num_free - pool.num_free_among(hit.device):
                continue
            pool.acquire(hit.device)
            naive.acquire(hits)
            cache.adopt(one, hit.device)
            expected = pool.next_free(wanted - len(hits))
            new = pool.allocate(wanted - len(hits)).tolist()
            assert new == naive.allocate(wanted - len(hits)) == expected
            released = rng.random() < 0.2
            generations = [int(pool.generation[block]) for block in new]
            if released:
                pool.release(hits + new)
                naive.release(hits + new)
            for index, (block, generation) in enumerate(zip(new, generations, strict=True), len(hits)):
                data = tokens[index * block_size : (index + 1) * block_size].tobytes()
                cache.publish(one, index, block, generation, data)
                naive.commit(block, salt, tokens[: (index + 1) * block_size].tolist())
            if not released:
                held.append(hits + new)
        assert pool.free_blocks() == naive.free
        assert pool.num_cached == len(naive.content)
        assert [pool.is_named(block) for block in range(num_blocks)] == [b in naive.content for b in range(num_blocks)]
        pool.check_integrity(np.array(naive.refs, np.int64))


class Colliding(BlockHasher):
    """Every content has the same hash as the others at its depth."""

    def follow(self, parent: bytes, content: bytes) -> bytes:
        return bytes([parent[0] + 1])

    def start(self, root: bytes) -> bytes:
        return b"\x00"

    def extend(self, chain: list[bytes], root: bytes, tokens: Int32Array, num_blocks: int) -> None:
        while len(chain) < num_blocks:
            chain.append(self.follow(chain[-1] if chain else self.start(root), b""))


def test_a_chain_is_extended_as_it_is_followed() -> None:
    hasher, tokens = BlockHasher(b"k", 4), np.arange(15, dtype=np.int32)
    chain = [hasher.follow(hasher.start(b"r"), tokens[:4].tobytes())]
    hasher.extend(chain, b"r", tokens, 3)
    expected = [hasher.start(b"r")]
    for start in (0, 4, 8):
        expected.append(hasher.follow(expected[-1], tokens[start : start + 4].tobytes()))
    assert chain == expected[1:]
    afresh: list[bytes] = []
    hasher.extend(afresh, b"r", tokens, 3)
    assert afresh == chain


def test_a_collision_never_matches() -> None:
    """Contents forced to the same digest: at the block itself, below it, and under another root."""
    cache, pool, _ = cache_of(9, 2)
    cache.hasher = Colliding(b"", 2)
    _, (first, second) = compute(cache, pool, 1, [1, 2, 3, 4])
    assert cache.find(asking(cache, 2, [1, 2, 3, 4, 9])).device.tolist() == [first, second]
    # Other tokens at once, or after equal ones.
    assert cache.find(asking(cache, 3, [5, 6, 9])).device.tolist() == []
    assert cache.find(asking(cache, 4, [1, 2, 5, 6, 9])).device.tolist() == [first]
    # The same tokens under another root (salt, adapter, tenant).
    for name in ("cache_salt", "lora", "tenant"):
        assert cache.find(asking(cache, 5, [1, 2, 3, 4, 9], **{name: "x"})).device.tolist() == []
    # The second block is the same, the one before it is not.
    assert cache.find(asking(cache, 6, [5, 6, 3, 4, 9])).device.tolist() == []
    # Who computes what collides leaves nothing to find, at once or further on.
    one, held = compute(cache, pool, 7, [5, 6, 3, 4, 7, 8])
    assert (one.num_findable, pool.num_cached) == (0, 2)
    pool.release(held)
    other, _ = compute(cache, pool, 8, [1, 2, 5, 6, 7, 8])
    assert (other.num_findable, pool.num_cached) == (1, 2)


def test_a_collision_with_the_host_never_matches() -> None:
    cache, device, host = cache_of(4, 2, 2)
    (block,) = host.allocate(1).tolist()
    one = asking(cache, 1, [1, 2, 9])
    cache.hasher.extend(one.chain, one.root, one.tokens, 1)
    # The host's block has the hash this content would have, and other tokens.
    assert host.name(block, 1, content(one.chain[0], number=50, parent=cache._root_number(one.root), tokens=(7, 7)))
    hit = cache.find(one)
    assert (len(hit.device), len(hit.beyond)) == (0, 0)
    (own,) = device.allocate(1).tolist()
    cache.publish(one, 0, own, 1, one.tokens[:2].tobytes())
    assert (one.num_findable, device.num_cached) == (0, 0)


def test_equal_content_computed_twice_is_found_once_and_continued() -> None:
    cache, pool, _ = cache_of(9, 2)
    (first,) = pool.allocate(1).tolist()
    (second,) = pool.allocate(1).tolist()
    one, other = asking(cache, 1, [1, 2, 3, 4]), asking(cache, 2, [1, 2, 3, 4])
    cache.publish(one, 0, first, 1, one.tokens[:2].tobytes())
    cache.publish(other, 0, second, 1, other.tokens[:2].tobytes())
    assert one.parent == other.parent
    (third,) = pool.allocate(1).tolist()
    cache.publish(other, 1, third, 1, other.tokens[2:4].tobytes())
    assert cache.find(asking(cache, 3, [1, 2, 3, 4, 5])).device.tolist() == [first, third]
    pool.release([second])
    assert pool.free_blocks()[0] == second


def test_equal_content_on_both_tiers_has_one_number() -> None:
    """So that what continues it is found, whichever tier holds which part."""
    cache, device, host = cache_of(4, 2, 2)
    _one, (first, second) = compute(cache, device, 1, [1, 2, 3, 4])
    number = int(device.number[first])
    (copy,) = host.allocate(1).tolist()
    assert host.name(copy, 1, device.content(first))
    device.release([first, second])
    device.allocate(3)
    assert device.is_named(first), "the head of a chain is kept longest"
    device.allocate(1)
    assert not device.num_cached
    device.release(list(range(4)))
    again, (new, *_) = compute(cache, device, 2, [1, 2, 3, 4])
    assert int(device.number[new]) == int(host.number[copy]) == number
    assert int(device.parent[device.find(again.chain[1])]) == number  # type: ignore[index]


def test_device_blocks_behind_a_host_block_are_part_of_a_hit() -> None:
    cache, device, host = cache_of(8, 2, 2)
    _one, blocks = compute(cache, device, 1, [1, 2, 3, 4, 5, 6])
    (copy,) = host.allocate(1).tolist()
    assert host.name(copy, 1, device.content(blocks[1]))
    device._forget(blocks[1])
    hit = cache.find(asking(cache, 2, [1, 2, 3, 4, 5, 6, 7]))
    assert hit.device.tolist() == blocks[:1]
    assert hit.beyond.tolist() == [copy, blocks[2]]
    assert hit.on_host.tolist() == [True, False]


def test_a_root_that_was_not_used_for_longest_starts_afresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_cache_module, "MAX_ROOTS", 2)
    cache, pool, _ = cache_of(9, 2)
    for uid, salt in enumerate("aba"):
        compute(cache, pool, uid, [1, 2], cache_salt=salt)
    compute(cache, pool, 9, [1, 2], cache_salt="c")
    assert len(cache._roots) == 2
    assert [len(cache.find(asking(cache, 9, [1, 2, 3], cache_salt=salt)).device) for salt in "acb"] == [1, 1, 0]


def test_a_reused_block_is_not_named_for_its_old_life() -> None:
    pool = BlockPool(1, 2)
    (block,) = pool.allocate(1).tolist()
    generation = int(pool.generation[block])
    pool.release([block])
    pool.allocate(1)
    assert not pool.name(block, generation, content(b"D"))
    assert pool.num_cached == 0
    assert pool.name(block, generation + 1, content(b"D"))
    assert not pool.name(block, generation + 1, content(b"E")), "one block, one name"


def test_a_name_is_given_once() -> None:
    pool = BlockPool(2, 2)
    pool.allocate(2)
    assert pool.name(0, 1, content(b"D"))
    assert not pool.name(1, 1, content(b"D"))
    assert pool.find(b"D") == 0


def test_forgetting_reaches_what_is_held_and_what_is_in_flight() -> None:
    pool = BlockPool(3, 2)
    pool.allocate(2)
    assert pool.name(0, 1, content(b"D"))
    assert pool.forget_all() == 1
    assert (pool.find(b"D"), pool.num_cached, pool.num_used) == (None, 0, 2)
    assert not pool.name(1, 1, content(b"E")), "it was handed out before"
    (block,) = pool.allocate(1).tolist()
    assert pool.name(block, int(pool.generation[block]), content(b"E"))


def test_a_block_is_told_of_before_it_loses_its_content() -> None:
    pool = BlockPool(3, 2)
    told: list[tuple[int, Content]] = []
    pool.evicting = lambda block: told.append((block, pool.content(block)))
    pool.allocate(3)
    first = content(b"D", number=7, parent=3, tokens=(5, 6))
    assert pool.name(1, 1, first)
    assert pool.content(1) == first
    assert pool.holds(1, first)
    assert not pool.holds(1, content(b"D", parent=4, tokens=(5, 6)))
    assert not pool.holds(1, content(b"D", parent=3, tokens=(5, 7)))
    pool.release([0, 1, 2])
    assert pool.next_free(2) == [0, 2]
    pool.allocate(2)
    assert not told
    pool.allocate(1)
    assert told == [(1, first)]
    assert pool.take_handed_out() == 6
    assert pool.take_handed_out() == 0


def test_hits_and_use_are_noted() -> None:
    pool = BlockPool(2, 2)
    pool.now = 5
    pool.allocate(1)
    pool.name(0, 1, content(b"D"))
    assert (pool.hits[0], pool.used_at[0]) == (0, 5)
    pool.now = 9
    pool.touch(np.array([0], np.int32))
    assert (pool.hits[0], pool.used_at[0]) == (1, 9)
    assert (pool.hits[1], pool.used_at[1]) == (0, 0)


def test_released_more_often_than_held() -> None:
    pool = BlockPool(2, 2)
    blocks = pool.allocate(1).tolist()
    pool.release(blocks)
    with pytest.raises(AssertionError):
        pool.release(blocks)


@pytest.mark.parametrize("breach", ["refcount", "free twice", "lost", "other name", "no name"])
def test_integrity_check_sees_breaches(breach: str) -> None:
    pool = BlockPool(4, 2)
    (held,) = pool.allocate(1).tolist()
    pool.name(held, 1, content(b"D"))
    references = np.bincount([held], minlength=4)
    pool.check_integrity(references)
    if breach == "refcount":
        pool._refcount[held] = 2
    elif breach == "free twice":
        pool._free.push_back(held)
    elif breach == "lost":
        pool._free.pop_front()
    elif breach == "other name":
        pool._digest[held] = b"E"
    else:
        pool._digest[held + 1] = b"E"
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
