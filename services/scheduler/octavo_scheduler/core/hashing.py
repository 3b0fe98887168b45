"""The hash chain that names the content of blocks.

A block's hash is H(parent's hash, its token ids); the root of a chain holds everything that must match for reuse, so one
lookup answers for a whole prefix. After vLLM's prefix cache (docs: "Automatic Prefix Caching"); keyed BLAKE2b-128 here, so
that nobody outside can search for collisions.
"""

from __future__ import annotations

from hashlib import blake2b

from octavo_shared.records import Int32Array

HASH_BYTES = 16


class BlockHasher:
    """Chain hashes under one key, for blocks of ``block_size`` tokens."""

    def __init__(self, key: bytes, block_size: int) -> None:
        self._key = key
        # Copying a keyed state is cheaper than keying one anew.
        self._keyed = blake2b(digest_size=HASH_BYTES, key=key)
        self.block_size = block_size

    def root(self, *parts: str) -> bytes:
        """The start of a chain: model fingerprint, adapter, tenant, salt, … Each part counts with its length.

        It is the parts themselves, so that roots can be compared and not merely their hashes.
        """
        return b"".join(len(part.encode()).to_bytes(4, "little") + part.encode() for part in parts)

    def start(self, root: bytes) -> bytes:
        """What the first block of a chain has in its parent's hash's place."""
        return blake2b(root, digest_size=HASH_BYTES, key=self._key, person=b"root").digest()

    def follow(self, parent: bytes, content: bytes) -> bytes:
        """The hash of a block with ``content`` (its token ids, int32) after one with hash ``parent``."""
        state = self._keyed.copy()
        state.update(parent + content)
        return state.digest()

    def extend(self, chain: list[bytes], root: bytes, tokens: Int32Array, num_blocks: int) -> None:
        """Make ``chain`` cover the first ``num_blocks`` full blocks of ``tokens`` int32[at least num_blocks * block_size]."""
        known = len(chain)
        if known >= num_blocks:
            return
        size = self.block_size * 4
        data = tokens[known * self.block_size : num_blocks * self.block_size].tobytes()
        parent = chain[-1] if chain else self.start(root)
        keyed = self._keyed.copy
        for start in range(0, len(data), size):
            # As ``follow`` does, without the call: a long prompt has hundreds of blocks.
            state = keyed()
            state.update(parent + data[start : start + size])
            parent = state.digest()
            chain.append(parent)
