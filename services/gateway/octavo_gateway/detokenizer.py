"""Token ids to text, one token at a time, such that the pieces always add up to the decoding of the whole.

Text leaves a detokenizer as soon as no later token can change it: half a UTF-8 character waits for its other bytes. What
has been given out after some tokens is therefore a pure function of those tokens (rule L8).

Three ways, chosen by the tokenizer's own decoder:

* ``byte-level`` BPE (GPT-2 and most of its descendants): every token is a fixed string of bytes, the text is the lossy
  UTF-8 decoding of their concatenation, and a table lookup per token is enough.
* ``sentencepiece`` as exported to tokenizer.json (Llama 2, Mistral, Gemma): a token is a fixed text or, as ``<0xE2>``, one
  byte; a run of bytes is text only if all of it is valid, so a run waits for its end.
* anything else: a sliding window of tokens is decoded again for every token.
"""

from __future__ import annotations

import json
from codecs import utf_8_decode
from typing import Any, Protocol

from tokenizers import Tokenizer

REPLACEMENT = "\ufffd"


class Detokenizer(Protocol):
    """The text of one token sequence, growing."""

    def feed(self, token: int) -> str:
        """Take the next token in; returns the text that is certain now and was not before (often "")."""
        ...

    def flush(self) -> str:
        """No more tokens follow; returns what was held back."""
        ...


def byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes (Radford et al. 2019, section 2.2), character to byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    return alphabet | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTES = byte_alphabet()


class Pieces(dict[int, str | bytes]):
    """What each token contributes to the text: a str when it is whole characters, else bytes. Filled on first use."""

    def __init__(self, tokenizer: Tokenizer, kind: str, special: frozenset[int]) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._byte_level = kind == "byte-level"
        self._skipped = special

    def __missing__(self, token: int) -> str | bytes:
        name = None if token in self._skipped or not 0 <= token < 1 << 31 else self._tokenizer.id_to_token(token)
        if name is None:
            piece: str | bytes = ""
        elif self._byte_level:
            piece = _byte_level_piece(name)
        else:
            piece = _sentencepiece_piece(name)
        self[token] = piece
        return piece


def _byte_level_piece(name: str) -> str | bytes:
    try:
        data = bytes([_BYTES[character] for character in name])
    except KeyError:
        # An added token that was never written in the alphabet stands for itself.
        return name
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data


def _sentencepiece_piece(name: str) -> str | bytes:
    if len(name.encode()) == 6 and name.startswith("<0x") and name.endswith(">"):
        try:
            return bytes([int(name[3:5], 16)])
        except ValueError:
            pass
    return name.replace("\u2581", " ")


class ByteLevelDetokenizer:
    """Detokenizer of byte-level BPE."""

    __slots__ = ("_pending", "_pieces")

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces
        self._pending = b""

    def feed(self, token: int) -> str:
        piece = self._pieces[token]
        if isinstance(piece, str):
            if not self._pending or not piece:
                return piece
            piece = piece.encode()
        data = self._pending + piece
        text, used = utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        return text

    def flush(self) -> str:
        pending, self._pending = self._pending, b""
        return pending.decode("utf-8", "replace")


class SentencePieceDetokenizer:
    """Detokenizer of SentencePiece vocabularies with byte fallback; ``strip`` leading spaces are not part of the text."""

    __slots__ = ("_pieces", "_run", "_strip")

    def __init__(self, pieces: Pieces, strip: int) -> None:
        self._pieces = pieces
        self._strip = strip
        self._run = b""

    def feed(self, token: int) -> str:
        piece = self._pieces[token]
        if isinstance(piece, bytes):
            self._run += piece
            return ""
        if not piece:
            # Skipped and unknown tokens are not there at all: a run of bytes goes on across them.
            return ""
        return self._stripped(self._end_run() + piece)

    def flush(self) -> str:
        return self._stripped(self._end_run())

    def _end_run(self) -> str:
        run, self._run = self._run, b""
        try:
            return run.decode()
        except UnicodeDecodeError:
            return REPLACEMENT * len(run)

    def _stripped(self, text: str) -> str:
        while self._strip and text:
            if text[0] != " ":
                self._strip = 0
                break
            text, self._strip = text[1:], self._strip - 1
        return text


class WindowDetokenizer:
    """Detokenizer for any decoder: gives out how the decoding of the latest tokens grew.

    The window starts at a token after which the text was whole, so that decoders that look at neighbours see them.
    """

    __slots__ = ("_given", "_ids", "_skip", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids: list[int] = []
        self._given = 0

    def feed(self, token: int) -> str:
        self._ids.append(token)
        text = self._decode(self._ids)
        if text.endswith(REPLACEMENT) or len(text) <= self._given:
            return ""
        fresh, self._given = text[self._given :], len(text)
        self._slide()
        return fresh

    def flush(self) -> str:
        text = self._decode(self._ids)
        fresh, self._given = text[self._given :], len(text)
        return fresh

    def _slide(self) -> None:
        """Forget old tokens if the rest alone reads as a suffix of what has been given out."""
        if len(self._ids) < 32:
            return
        whole, tail = self._decode(self._ids), self._ids[-8:]
        text = self._decode(tail)
        if text and whole.endswith(text):
            self._ids, self._given = tail, len(text)

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=self._skip))


def decoder_kind(tokenizer: Tokenizer) -> tuple[str, int]:
    """Which of the three ways fits, and how many leading spaces the decoder strips."""
    # The library's decoders do not tell what they consist of, other than for pickling: in JSON, as in tokenizer.json.
    decoder: Any = json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder else {}
    parts = decoder.get("decoders", []) if decoder.get("type") == "Sequence" else [decoder]
    kinds = [part.get("type") for part in parts]
    if kinds == ["ByteLevel"]:
        return "byte-level", 0
    if kinds[:3] != ["Replace", "ByteFallback", "Fuse"] or len(kinds) > 4:
        return "other", 0
    replace = parts[0]
    if replace.get("pattern") != {"String": "\u2581"} or replace.get("content") != " ":
        return "other", 0
    if len(kinds) == 3:
        return "sentencepiece", 0
    strip = parts[3]
    if strip.get("type") != "Strip" or strip.get("content") != " " or strip.get("stop") != 0:
        return "other", 0
    return "sentencepiece", int(strip.get("start", 0))
