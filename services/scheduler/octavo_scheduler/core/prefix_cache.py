"""The prefix cache: what a sequence finds when it is admitted, and what it leaves for others as it computes.

Content is named by a chain of hashes (``hashing``) and held by blocks of the device and the host (``block_pool``); this
class ties the three to sequences. The same content has one number on both tiers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from octavo_scheduler.core.adoption import in_chains, read_offers
from octavo_scheduler.core.block_pool import BlockPool, Content
from octavo_scheduler.core.config import CoreConfig
from octavo_scheduler.core.hashing import BlockHasher
from octavo_scheduler.core.sequence import Sequence
from octavo_shared.plan import NO_NAMES, NO_OFFER, CacheOffer
from octavo_shared.records import Int32Array, RequestRecord

_NOTHING: Int32Array = np.empty(0, np.int32)
# Chains that begin differently (tenants, salts, adapters) whose content can be found. One more makes the one that was not
# used for longest start afresh.
MAX_ROOTS = 1 << 16


@dataclass(frozen=True, slots=True)
class Hit:
    """Where the leading blocks of a sequence lie: ``device`` int32[hits] can be used at once.

    ``beyond`` int32[b] follow them: host blocks where ``on_host`` bool[b] is set, else device blocks again.
    """

    device: Int32Array
    beyond: Int32Array
    on_host: npt.NDArray[np.bool_]


_MISS = Hit(_NOTHING, _NOTHING, np.empty(0, np.bool_))


class PrefixCache:
    """Finds and publishes the content of full blocks. Switched off it finds nothing and publishes nothing."""

    def __init__(self, config: CoreConfig, device: BlockPool, host: BlockPool, hash_key: bytes) -> None:
        self.enabled = config.enable_prefix_caching
        self.hasher = BlockHasher(hash_key, config.block_size)
        self._device = device
        self._host = host
        self._block_size = config.block_size
        self._fingerprint = config.fingerprint
        self._scope = config.prefix_cache_scope
        self._numbers = 0
        self._roots: OrderedDict[bytes, int] = OrderedDict()
        # Roots that the executor has not been told of yet.
        self._new_roots: list[tuple[int, bytes]] = []

    def root_of(self, record: RequestRecord) -> bytes:
        """The start of a request's chain: everything that must match for reuse besides the tokens."""
        owner = {"global": "", "tenant": record.tenant, "request": str(record.id)}[self._scope]
        return self.hasher.root(self._fingerprint, record.lora, owner, record.cache_salt)

    def find(self, sequence: Sequence) -> Hit:
        """Blocks that hold its leading tokens already. The last token is always computed: its logits are needed."""
        if not self.enabled or not sequence.reads_cache:
            return _MISS
        usable = (len(sequence.tokens) - 1) // self._block_size
        self.hasher.extend(sequence.chain, sequence.root, sequence.tokens, usable)
        blocks, on_host = self._look_up(sequence.chain[:usable])
        if not len(blocks):
            return _MISS
        sound = self._verify(sequence, blocks, on_host)
        blocks, on_host = blocks[:sound], on_host[:sound]
        ready = int(on_host.argmax()) if on_host.any() else sound
        return Hit(blocks[:ready], blocks[ready:], on_host[ready:])

    def count_cached(self, record: RequestRecord) -> int:
        """Prompt tokens of a request that could be read instead of computed, as of now."""
        if not self.enabled or record.sampling.prompt_logprobs is not None:
            return 0
        chain: list[bytes] = []
        usable = (len(record.prompt) - 1) // self._block_size
        self.hasher.extend(chain, self.root_of(record), record.prompt, usable)
        return len(self._look_up(chain)[0]) * self._block_size

    def _look_up(self, chain: list[bytes]) -> tuple[Int32Array, npt.NDArray[np.bool_]]:
        """Blocks that answer to the hashes of a chain, up to the first that none answers to, and which are on the host."""
        on_device, on_host = self._device.find, self._host.find
        found = list(map(on_device, chain))
        if None not in found:
            return np.array(found, np.int32), np.zeros(len(found), np.bool_)
        blocks: list[int] = []
        hosted: list[int] = []
        for digest, block in zip(chain, found, strict=True):
            if block is None:
                block = on_host(digest)
                if block is None:
                    break
                hosted.append(len(blocks))
            blocks.append(block)
        mask = np.zeros(len(blocks), np.bool_)
        mask[hosted] = True
        return np.array(blocks, np.int32), mask

    def _verify(self, sequence: Sequence, blocks: Int32Array, on_host: npt.NDArray[np.bool_]) -> int:
        """How many of the blocks really hold the sequence's tokens, each continuing the one before it."""
        count, size = len(blocks), self._block_size
        device, host = self._device, self._host
        at = np.where(on_host, 0, blocks)
        parents, numbers, tokens = device.parent[at], device.number[at], device.tokens[at]
        if np.count_nonzero(on_host):
            at = blocks[on_host]
            parents[on_host], numbers[on_host], tokens[on_host] = host.parent[at], host.number[at], host.tokens[at]
        expected = np.empty(count, np.int64)
        expected[0] = self._root_number(sequence.root)
        expected[1:] = numbers[:-1]
        own = sequence.tokens[: count * size].reshape(count, size)
        if np.array_equal(parents, expected) and np.array_equal(tokens, own):
            return count
        good = (parents == expected) & (tokens == own).all(1)
        return int(good.argmin())

    def _root_number(self, root: bytes) -> int:
        number = self._roots.get(root)
        if number is not None:
            self._roots.move_to_end(root)
            return number
        if len(self._roots) >= MAX_ROOTS:
            self._roots.popitem(last=False)
        self._numbers += 1
        self._roots[root] = self._numbers
        self._new_roots.append((self._numbers, root))
        return self._numbers

    def adopt(self, sequence: Sequence, cached: Int32Array) -> None:
        """A sequence starts on the device blocks it found; what it computes continues them."""
        sequence.num_findable = len(cached)
        sequence.parent = int(self._device.number[cached[-1]]) if len(cached) else 0
        self._device.touch(cached)

    def inherit(self, sequence: Sequence, source: Sequence) -> None:
        """A fork continues what the sequence it was forked from has left."""
        sequence.num_findable, sequence.parent = source.num_findable, source.parent
        sequence.chain = source.chain[: max(source.num_findable, 0)]

    def publish(self, sequence: Sequence, index: int, block: int, generation: int, tokens: bytes) -> None:
        """Block ``index`` of a sequence is full and computed: others may find it, under the identity it had when planned.

        ``tokens`` are its token ids, int32[block_size]. Nothing happens when what it continues cannot be found.
        """
        if sequence.num_findable != index:
            return
        chain = sequence.chain
        if len(chain) == index:
            chain.append(self.hasher.follow(chain[-1] if chain else self.hasher.start(sequence.root), tokens))
        digest = chain[index]
        parent = sequence.parent if index else self._root_number(sequence.root)
        number = self._number_of(digest, parent, index + 1, tokens, block, generation)
        if number:
            sequence.num_findable, sequence.parent = index + 1, number

    def _number_of(self, digest: bytes, parent: int, depth: int, tokens: bytes, block: int, generation: int) -> int:
        """Name a block's content, unless it is known already; its number, or 0 when it cannot be found."""
        content = Content(digest, self._numbers + 1, parent, depth, tokens)
        for pool in (self._device, self._host):
            holder = pool.find(digest)
            if holder is None:
                continue
            if not pool.holds(holder, content):
                # Other content has the same hash, and was first.
                return 0
            number = int(pool.number[holder])
            if pool is self._device:
                return number
            content = Content(digest, number, parent, depth, tokens)
        if not self._device.name(block, generation, content):
            return 0
        self._numbers = max(self._numbers, content.number)
        return content.number

    def prepare_names(self) -> None:
        """Make ready what ``take_names`` is going to say, while there is time."""
        self._device.prepare_names()
        self._host.prepare_names()

    def take_names(self) -> CacheOffer:
        """What the executor is to know of its pages' content, as a difference to the last call."""
        device, host = self._device.take_names(), self._host.take_names()
        if device is NO_NAMES and host is NO_NAMES:
            return NO_OFFER
        roots, self._new_roots = tuple(self._new_roots), []
        return CacheOffer(device, host, roots)

    def take_over(self, offers: Items[CacheOffer]) -> int:
        """Name what an executor's pages hold already, before anything else is named; returns how many pages are.

        Raises:
            DoubtfulError: the offers contradict themselves; nothing is taken over.
        """
        if not self.enabled:
            return 0
        own = self.hasher.root(self._fingerprint)
        roots = {number: root for offer in offers for number, root in offer.roots if root.startswith(own)}
        pools = (self._device, self._host)
        links = read_offers(offers, (self._device.num_blocks, self._host.num_blocks), self._block_size)
        contents: dict[int, Content] = {}
        for number, depth in in_chains(links, roots):
            link = links[number]
            if depth == 1:
                parent, before = self._root_number(roots[link.parent]), self.hasher.start(roots[link.parent])
            else:
                parent, before = contents[link.parent].number, contents[link.parent].digest
            self._numbers += 1
            digest = self.hasher.follow(before, link.tokens)
            contents[number] = Content(digest, self._numbers, parent, depth, link.tokens)
        named = 0
        # The heads of chains last: free blocks are reused in the order in which they were named.
        for number, content in reversed(contents.items()):
            for tier, page in links[number].pages:
                named += pools[tier].name(page, int(pools[tier].generation[page]), content)
        return named

    def reset(self) -> int:
        """Nothing computed until now is found any more; returns how many blocks could be."""
        self._roots.clear()
        return self._device.forget_all() + self._host.forget_all()
