"""Logits against Hugging Face transformers on tiny random models of every family."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import FAMILIES, Driver, expected_logits, random_tokens, relative_error, save_tiny_model

TOLERANCE = 1e-4


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_every_family_in_a_mixed_batch(tmp_path: Path, family: str, backend: str) -> None:
    """Three sequences, prefills in chunks beside decodes, every position's logits compared."""
    theirs = save_tiny_model(family, tmp_path)
    prompts = {"a": random_tokens(70, 1), "b": random_tokens(33, 2), "c": random_tokens(9, 3)}
    steps = [
        [("a", 16), ("b", 33)],
        [("a", 1), ("c", 8)],
        [("c", 1), ("a", 30)],
        [("a", 23)],
    ]
    for block_size in (8, 16, 32):
        ours = Driver(tmp_path, backend, block_size)
        got: dict[str, list[torch.Tensor]] = {name: [] for name in prompts}
        for rows in steps:
            given = []
            for name, count in rows:
                done = ours.lengths.get(name, 0)
                given.append((name, prompts[name][done : done + count]))
            for (name, _), logits in zip(rows, ours.step(given), strict=True):
                got[name].append(logits)
        for name, tokens in prompts.items():
            whole = torch.cat(got[name])
            assert len(whole) == len(tokens)
            assert relative_error(whole, expected_logits(theirs, tokens)) < TOLERANCE, (block_size, name)


@pytest.mark.parametrize("family", ["llama", "mistral-window", "qwen3"])
def test_chunks_change_nothing(tmp_path: Path, family: str) -> None:
    """The compiled kernels give the same bits however a prompt is cut and whatever runs beside it."""
    save_tiny_model(family, tmp_path)
    tokens, other = random_tokens(100, 5), random_tokens(60, 6)
    whole = Driver(tmp_path, "cpu", 16).step([("a", tokens)])[0]
    for size in (1, 16, 31, 64):
        ours = Driver(tmp_path, "cpu", 16)
        parts = []
        for start in range(0, 100, size):
            beside = [("b", other[start % 50 : start % 50 + 1 + start % 3])] if start % 2 == 0 and start < 50 else []
            parts.append(ours.step([*beside, ("a", tokens[start : start + size])])[-1])
        assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_bfloat16_is_close(tmp_path: Path, backend: str) -> None:
    theirs = save_tiny_model("llama", tmp_path)
    tokens = random_tokens(40, 7)
    got = Driver(tmp_path, backend, 16, "bfloat16").step([("a", tokens)])[0]
    error = relative_error(got, expected_logits(theirs, tokens))
    assert 1e-5 < error < 0.1


def test_auto_keeps_bfloat16_weights_exact(tmp_path: Path) -> None:
    theirs = save_tiny_model("qwen2", tmp_path).to(torch.bfloat16)
    theirs.save_pretrained(tmp_path)
    theirs = type(theirs).from_pretrained(tmp_path, dtype=torch.float32)
    tokens = random_tokens(40, 8)
    ours = Driver(tmp_path, "cpu", 16, "auto")
    assert ours.model._weights.head.data.dtype == torch.bfloat16
    assert ours.cache.k.dtype == torch.float32
    got = ours.step([("a", tokens)])[0]
    assert relative_error(got, expected_logits(theirs, tokens)) < TOLERANCE


def test_sharded_weights(tmp_path: Path) -> None:
    theirs = save_tiny_model("qwen3", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    theirs.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    tokens = random_tokens(20, 9)
    got = Driver(tmp_path, "cpu", 8).step([("a", tokens)])[0]
    assert relative_error(got, expected_logits(theirs, tokens)) < TOLERANCE


def test_more_than_the_buffers_hold_is_refused(tmp_path: Path) -> None:
    save_tiny_model("llama", tmp_path)
    model = Driver(tmp_path, "cpu", 16).model
    with pytest.raises(ValueError, match="at most 256"):
        model.forward(257)
    with pytest.raises(ValueError, match="at most 256"):
        model.logits(257)
