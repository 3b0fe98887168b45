"""Ids to text: incremental equals whole, for real tokenizers and every split; stop strings; what streams say."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence

import pytest
from gateway_stage import EOS, Reply, Stage, eventually
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from octavo_gateway.choice_view import ChoiceView
from octavo_gateway.stop_strings import StopScanner
from octavo_gateway.tokenizer import ModelTokenizer
from octavo_shared.fold import ChoiceFold, TokenEvent
from octavo_shared.ids import Attempt
from octavo_shared.records import EndReason

MIXED = "naïve café — 🦙🎉👩‍👩‍👧 漢字かな 12345\n\tعربى ẞ𝔘𝔫𝔦"


def streamed(tokenizer: ModelTokenizer, ids: Sequence[int], skip: bool) -> str:
    detokenizer = tokenizer.detokenizer(skip_special_tokens=skip)
    return "".join([detokenizer.feed(token) for token in ids]) + detokenizer.flush()


@pytest.fixture(scope="session")
def multibyte(tokenizer: ModelTokenizer) -> list[int]:
    """Tokens that are not whole characters."""
    return [token for token in range(tokenizer.vocab_size) if b"\xef\xbf\xbd" in tokenizer.token_text(token).encode()]


@given(data=st.data())
@settings(max_examples=400, deadline=None)
def test_random_ids_stream_as_they_decode(tokenizer: ModelTokenizer, multibyte: list[int], data: st.DataObject) -> None:
    # Beyond the vocabulary, too: such ids are nothing to both.
    one = st.one_of(st.sampled_from(multibyte), st.integers(0, tokenizer.vocab_size + 3), st.sampled_from([0, 1, 2]))
    ids = data.draw(st.lists(one, max_size=24))
    for skip in (False, True):
        assert streamed(tokenizer, ids, skip) == tokenizer.decode(ids, skip_special_tokens=skip)


def sentencepiece(strip: bool) -> ModelTokenizer:
    """A tokenizer with the decoder that SentencePiece vocabularies are exported with."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    names += ["\u2581", "\u2581the", "he", "\u2581\u2581", "\u2581a\u2581b", "漢", "<0xZZ>", "x"]
    vocabulary: dict[str, int] = {name: place for place, name in enumerate(names)}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    inner.add_special_tokens([AddedToken(name, special=True) for name in ("<unk>", "<s>", "</s>")])
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    inner.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    return ModelTokenizer(inner)


def word_pieces() -> ModelTokenizer:
    """A tokenizer whose decoder looks at neighbours."""
    vocabulary = {name: place for place, name in enumerate(["[UNK]", "hello", "##ing", "world", "##s", ".", "a"])}
    inner = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.decoder = decoders.WordPiece(cleanup=False)
    return ModelTokenizer(inner)


OTHERS = {"sentencepiece": sentencepiece(False), "stripping": sentencepiece(True), "wordpiece": word_pieces()}


@pytest.mark.parametrize("name", OTHERS)
@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_other_decoders_stream_as_they_decode(name: str, data: st.DataObject) -> None:
    tokenizer = OTHERS[name]
    spaces_and_bytes = st.integers(max(0, tokenizer.vocab_size - 12), tokenizer.vocab_size - 1)
    ids = data.draw(st.lists(st.one_of(st.integers(0, tokenizer.vocab_size - 1), spaces_and_bytes), max_size=60))
    for skip in (False, True):
        assert streamed(tokenizer, ids, skip) == tokenizer.decode(ids, skip_special_tokens=skip)


def test_text_is_given_out_as_soon_as_it_is_certain(tokenizer: ModelTokenizer) -> None:
    ids = tokenizer.encode(["a🦙b"], add_special_tokens=False)[0]
    detokenizer = tokenizer.detokenizer(skip_special_tokens=True)
    pieces = [detokenizer.feed(token) for token in ids]
    assert pieces[0] == "a"
    assert "🦙" in pieces
    assert pieces[-1] == "b"
    assert "\ufffd" not in "".join(pieces)


# --- stop strings -----------------------------------------------------------------------------------------------------


def first_stop(text: str, stops: Sequence[str], include: bool) -> tuple[str, str | None]:
    """The meaning of stop strings: read character by character, the first complete one ends the text."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


@given(
    text=st.text("ab\n🦙", max_size=30),
    stops=st.lists(st.text("ab\n🦙", min_size=1, max_size=4), min_size=1, max_size=3),
    cuts=st.lists(st.integers(0, 30), max_size=10),
    include=st.booleans(),
)
@settings(max_examples=500, deadline=None)
def test_stop_strings_do_not_depend_on_borders(text: str, stops: list[str], cuts: list[int], include: bool) -> None:
    scanner = StopScanner(stops, include)
    expected, stop = first_stop(text, stops, include)
    given_out, seen = "", 0
    borders = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    for start, end in itertools.pairwise(borders):
        given_out += scanner.feed(text[start:end])
        seen = end
        if scanner.found:
            break
        # Nothing is held back that could not become a stop string.
        held = text[len(given_out) : seen]
        assert text[:seen].startswith(given_out)
        assert not held or any(other.startswith(held) and other != held for other in stops)
    if not scanner.found:
        given_out += scanner.flush()
    assert (given_out, scanner.found) == (expected, stop)


def view_of(
    tokenizer: ModelTokenizer, ids: Sequence[int], sizes: Sequence[int], **kwargs: object
) -> tuple[str, ChoiceView]:
    view = ChoiceView(tokenizer.detokenizer(skip_special_tokens=True), **kwargs)  # type: ignore[arg-type]
    fold, text, at = ChoiceFold(), "", 0
    for size in [*sizes, len(ids)]:
        step = tuple(ids[at : at + size])
        if not step:
            continue
        end = EndReason.LENGTH if at + size >= len(ids) else EndReason.NONE
        fold.apply(TokenEvent(1, 0, Attempt(1, 1), at, step, end))
        text += view.advance(fold).text
        at += size
    return text, view


@given(
    sizes=st.lists(st.integers(1, 4), max_size=40),
    stop=st.lists(st.sampled_from(["🎉", "fé —", " 漢", "12345\n", "zzz", "𝔘𝔫", "ï"]), max_size=3, unique=True),
    include=st.booleans(),
    min_tokens=st.integers(0, 20),
)
@settings(max_examples=200, deadline=None)
def test_a_view_does_not_depend_on_how_tokens_arrive(
    tokenizer: ModelTokenizer, sizes: list[int], stop: list[str], include: bool, min_tokens: int
) -> None:
    ids = tokenizer.encode([MIXED], add_special_tokens=False)[0]
    arguments = {"stop": tuple(stop), "include_stop": include, "min_tokens": min_tokens}
    text, view = view_of(tokenizer, ids, sizes, **arguments)
    whole, other = view_of(tokenizer, ids, [], **arguments)
    assert text == whole
    assert (view.tokens, view.finish_reason, view.stop_reason) == (other.tokens, other.finish_reason, other.stop_reason)
    assert MIXED.startswith(text)
    if not view.stopped_by_string:
        assert text == MIXED


def test_min_tokens_postpones_stop_strings(tokenizer: ModelTokenizer) -> None:
    ids = [tokenizer.encode([piece], add_special_tokens=False)[0][0] for piece in ("a", "b", "a", "b")]
    text, view = view_of(tokenizer, ids, [1, 1, 1, 1], stop=("ab",), min_tokens=2)
    assert (text, view.tokens, view.stop_reason) == ("ab", 4, "ab")
    # One that begins in the first tokens and ends after them counts.
    text, view = view_of(tokenizer, ids, [1, 1, 1, 1], stop=("ba",), min_tokens=2)
    assert (text, view.tokens, view.stop_reason) == ("a", 3, "ba")


# --- over HTTP --------------------------------------------------------------------------------------------------------


def both_ways(stage: Stage, **body: object) -> tuple[str, str | None, object, int]:
    """Text, finish_reason, stop_reason and completion tokens; the same streamed and not."""
    whole = stage.post("/v1/completions", **body).json()
    choice = whole["choices"][0]
    chunks = [
        json.loads(event) for event in stage.stream("/v1/completions", stream_options={"include_usage": True}, **body)
    ]
    last = chunks[-2]["choices"][0]
    text = "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1])
    assert text == choice["text"]
    assert (last["finish_reason"], last["stop_reason"]) == (choice["finish_reason"], choice["stop_reason"])
    assert chunks[-1]["usage"] == whole["usage"]
    return text, choice["finish_reason"], choice["stop_reason"], whole["usage"]["completion_tokens"]


@pytest.mark.parametrize("sizes", [(), (1, 2, 3, 1, 4, 2, 5), (100,)])
def test_streams_equal_whole_answers_byte_for_byte(
    stage: Stage, tokenizer: ModelTokenizer, sizes: tuple[int, ...]
) -> None:
    ids = tokenizer.encode([MIXED], add_special_tokens=False)[0]
    stage.engine.reply = lambda record, choice: Reply(ids, sizes=sizes)
    assert both_ways(stage, prompt="x", max_tokens=200)[:2] == (MIXED, "length")
    # Cut in the middle of a character: what is there of it shows as U+FFFD.
    for count in range(1, len(ids)):
        stage.engine.reply = lambda record, choice, count=count: Reply(ids[:count], sizes=sizes)
        expected = tokenizer.decode(ids[:count], skip_special_tokens=True)
        assert both_ways(stage, prompt="x", max_tokens=200)[0] == expected


def test_a_stop_string_ends_and_aborts_its_choice(stage: Stage, tokenizer: ModelTokenizer) -> None:
    ids = tokenizer.encode(["one two three END four five"], add_special_tokens=False)[0]
    stage.engine.reply = lambda record, choice: Reply(ids + [70] * 150)
    stage.engine.step_s = 0.005
    try:
        answer = both_ways(stage, prompt="x", max_tokens=170, stop=["ee E", "never"])
    finally:
        stage.engine.step_s = 0.0
    count = len(tokenizer.encode(["one two three END"], add_special_tokens=False)[0])
    assert answer[:3] == ("one two thr", "stop", "ee E")
    assert answer[3] <= count
    eventually(lambda: len(stage.engine.aborts) == 2, "both requests are aborted")
    assert {(abort.choice, abort.reason) for abort in stage.engine.aborts} == {(0, "stop_string")}
    eventually(lambda: stage.engine.live == 0, "nothing lives on")


def test_a_stop_string_comes_before_a_later_end(stage: Stage, tokenizer: ModelTokenizer) -> None:
    ids = tokenizer.encode(["one two three"], add_special_tokens=False)[0]
    # All of it, with its end, in one step.
    stage.engine.reply = lambda record, choice: Reply([*ids, EOS], EndReason.STOP, EOS, sizes=(99,))
    assert both_ways(stage, prompt="x", stop=" two") == ("one", "stop", " two", 2)
    assert both_ways(stage, prompt="x", stop=" two", include_stop_str_in_output=True) == ("one two", "stop", " two", 2)
    assert both_ways(stage, prompt="x", stop="four") == ("one two three", "stop", None, 4)
    assert not stage.engine.aborts


def test_stop_tokens(stage: Stage, tokenizer: ModelTokenizer) -> None:
    first, second = tokenizer.encode(["one two"], add_special_tokens=False)[0]
    stage.engine.reply = lambda record, choice: Reply([first, second], EndReason.STOP, second)
    assert both_ways(stage, prompt="x", stop_token_ids=[second]) == ("one", "stop", second, 2)
    kept = both_ways(stage, prompt="x", stop_token_ids=[second], include_stop_str_in_output=True)
    assert kept == ("one two", "stop", second, 2)
    stage.engine.reply = lambda record, choice: Reply([first, EOS], EndReason.STOP, EOS)
    assert both_ways(stage, prompt="x") == ("one", "stop", None, 2)
    # The model's own end, asked for by id while ignored as such.
    assert both_ways(stage, prompt="x", ignore_eos=True, stop_token_ids=[EOS])[2] == EOS


def test_special_tokens_show_only_when_asked(stage: Stage) -> None:
    stage.engine.reply = lambda record, choice: Reply([70, 1, 71])
    assert "<|im_start|>" not in both_ways(stage, prompt="x")[0]
    assert "<|im_start|>" in both_ways(stage, prompt="x", skip_special_tokens=False)[0]
