"""The model's tokenizer: text to ids, ids to text, and the text of single tokens. Safe to use from several threads."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

# Several prompts are encoded in one thread: the cores belong to the forward pass.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from tokenizers import Tokenizer

from octavo_gateway.detokenizer import (
    ByteLevelDetokenizer,
    Detokenizer,
    Pieces,
    SentencePieceDetokenizer,
    WindowDetokenizer,
    decoder_kind,
)


class ModelTokenizer:
    """A ``tokenizer.json`` with what the gateway needs to know about it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._kind, self._strip = decoder_kind(tokenizer)
        added = tokenizer.get_added_tokens_decoder()
        names = {token.content for token in added.values() if token.special}
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        special = frozenset(vocabulary[name] for name in names if name in vocabulary)
        self._special_ids = special
        self._pieces = Pieces(tokenizer, self._kind, frozenset())
        self._plain_pieces = Pieces(tokenizer, self._kind, special)
        self.vocab_size = max(vocabulary.values()) + 1
        # No token stands for more bytes than this, so that hopelessly long prompts are refused without tokenising them.
        self.max_token_bytes = max(len(name.encode()) for name in vocabulary)

    @classmethod
    def load(cls, path: Path) -> ModelTokenizer:
        """Read a ``tokenizer.json``."""
        return cls(Tokenizer.from_file(str(path)))

    def encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        """Ids of each text. Releases the interpreter lock while it works."""
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of a whole sequence."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def detokenizer(self, *, skip_special_tokens: bool) -> Detokenizer:
        """A fresh incremental detokenizer."""
        pieces = self._plain_pieces if skip_special_tokens else self._pieces
        if self._kind == "byte-level":
            return ByteLevelDetokenizer(pieces)
        if self._kind == "sentencepiece":
            return SentencePieceDetokenizer(pieces, self._strip)
        return WindowDetokenizer(self._tokenizer, skip_special_tokens)

    def id_of(self, token: str) -> int | None:
        """Id of a token by its name."""
        found: int | None = self._tokenizer.token_to_id(token)
        return found

    def token_name(self, token: int) -> str:
        """The vocabulary's own spelling of a token."""
        return self._tokenizer.id_to_token(token) or ""

    def token_bytes(self, token: int) -> bytes:
        """The bytes a token stands for (special tokens: their name)."""
        if self._kind == "other":
            return self.decode([token], skip_special_tokens=False).encode()
        piece = self._pieces[token]
        return piece if isinstance(piece, bytes) else piece.encode()

    def token_text(self, token: int) -> str:
        """The text of a token by itself; bytes that are no text show as U+FFFD."""
        if self._kind == "other":
            return self.decode([token], skip_special_tokens=False)
        piece = self._pieces[token]
        return piece.decode("utf-8", "replace") if isinstance(piece, bytes) else piece
