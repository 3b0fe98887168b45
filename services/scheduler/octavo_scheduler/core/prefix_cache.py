"""The prefix cache: what a sequence finds when it is admitted, and what it leaves for others as it computes.

Content is named by a chain of hashes (``hashing``) and held by blocks (``block_pool``); this class ties the two to sequences.
"""

from __future__ import annotations

import numpy as np

from octavo_scheduler.core.block_pool import BlockPool
from octavo_scheduler.core.config import CoreConfig
from octavo_scheduler.core.hashing import BlockHasher
from octavo_scheduler.core.sequence import Sequence
from octavo_shared.records import Int32Array, RequestRecord

_NOTHING: Int32Array = np.empty(0, np.int32)


class PrefixCache:
    """Finds and publishes the content of full blocks. Switched off it finds nothing and publishes nothing."""

    def __init__(self, config: CoreConfig, pool: BlockPool, hash_key: bytes) -> None:
        self.enabled = config.enable_prefix_caching
        self.hasher = BlockHasher(hash_key, config.block_size)
        self._pool = pool
        self._block_size = config.block_size
        self._fingerprint = config.fingerprint

    def root_of(self, record: RequestRecord) -> bytes:
        """The start of a request's chain: everything that must match for reuse besides the tokens."""
        return self.hasher.root(self._fingerprint, record.lora, record.tenant, record.cache_salt)

    def find(self, sequence: Sequence) -> Int32Array:
        """Blocks that hold its leading tokens already. The last token is always computed: its logits are needed."""
        if not self.enabled or not sequence.reads_cache:
            return _NOTHING
        usable = (len(sequence.tokens) - 1) // self._block_size
        self.hasher.extend(sequence.chain, sequence.root, sequence.tokens, usable)
        return self._pool.match(sequence.chain[:usable], sequence.root, sequence.tokens)

    def adopt(self, sequence: Sequence, cached: Int32Array) -> None:
        """A sequence starts on the blocks it found; what it computes continues them."""
        sequence.num_findable = len(cached)
        sequence.parent = self._pool.as_parent(int(cached[-1])) if len(cached) else sequence.root

    def publish(self, sequence: Sequence, index: int, block: int, generation: int, content: bytes) -> None:
        """Block ``index`` of a sequence is full and computed: others may find it, under the identity it had when planned.

        ``content`` are its token ids, int32[block_size]. Nothing happens when what it continues cannot be found.
        """
        if sequence.num_findable != index:
            return
        chain = sequence.chain
        if len(chain) == index:
            chain.append(self.hasher.follow(chain[-1] if chain else self.hasher.start(sequence.root), content))
        parent = self._pool.commit(block, generation, chain[index], sequence.parent, content)
        if parent is not None:
            sequence.num_findable, sequence.parent = index + 1, parent
