"""Low-rank adapters by Triton's interpreter against the reference: many in one batch, several ranks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from octavo_kernels.reference import lora as plain
from octavo_kernels.triton import lora

BOUNDS = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.float16: {"rtol": 4e-3, "atol": 4e-3},
    torch.bfloat16: {"rtol": 3e-2, "atol": 3e-2},
}


def tiles_of(adapter: list[int], tiles: int | None = None) -> lora.LoraTiles:
    tokens, adapters = lora.group_tokens(np.array(adapter, np.int32), tiles)
    return lora.LoraTiles(torch.from_numpy(tokens), torch.from_numpy(adapters))


def weights(adapters: int, rank: int, k: int, n: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    down, up = torch.randn(adapters, rank, k) / k**0.5, torch.randn(adapters, n, rank) / rank**0.5
    return down.to(dtype), up.to(dtype), torch.rand(adapters) + 0.5


@pytest.mark.parametrize("dtype", list(BOUNDS))
@pytest.mark.parametrize(("rank", "k", "n"), [(8, 48, 40), (64, 700, 130), (100, 130, 64)])
def test_many_adapters_in_one_batch(dtype: torch.dtype, rank: int, k: int, n: int) -> None:
    torch.manual_seed(rank)
    adapter = [2, -1, 0, 2, 2, 3, -1, *[0] * 17, 2]
    x = torch.randn(len(adapter), k).to(dtype)
    down, up, scale = weights(4, rank, k, n, dtype)
    out = torch.randn(len(adapter), n).to(dtype)
    expected, before = out.clone(), out.clone()
    plain.add_lora(x, down, up, scale, torch.tensor(adapter), expected)
    lora.add_lora(x, down, up, scale, tiles_of(adapter, 9), out)
    torch.testing.assert_close(out, expected, **BOUNDS[dtype])
    none = [i for i, a in enumerate(adapter) if a < 0]
    assert torch.equal(out[none], before[none])
    assert not torch.equal(out[0], before[0])


def test_some_columns_of_a_fused_output() -> None:
    """As for q, k and v, whose adapters shrink together and expand apart."""
    torch.manual_seed(0)
    adapter, k, rank = [0, 1, 1], 32, 8
    x, out = torch.randn(3, k), torch.zeros(3, 24 + 16)
    down, up_q, scale = weights(2, 2 * rank, k, 24, torch.float32)
    up_q, up_k = up_q[..., :rank].contiguous(), torch.randn(2, 16, rank)
    tiles = tiles_of(adapter)
    low = lora.shrink(x, down, tiles)
    lora.expand(low[..., :rank], up_q, scale, tiles, out[:, :24])
    lora.expand(low[..., rank:], up_k, scale, tiles, out[:, 24:])
    expected = torch.zeros_like(out)
    plain.add_lora(x, down[:, :rank], up_q, scale, torch.tensor(adapter), expected[:, :24])
    plain.add_lora(x, down[:, rank:], up_k, scale, torch.tensor(adapter), expected[:, 24:])
    torch.testing.assert_close(out, expected, **BOUNDS[torch.float32])


def test_a_token_does_not_depend_on_its_batch_mates() -> None:
    torch.manual_seed(1)
    adapter = [1, 0, 1, 1, 0]
    x, down = torch.randn(5, 600), torch.randn(2, 16, 600)
    up, scale = torch.randn(2, 48, 16), torch.rand(2)
    together, alone = torch.zeros(5, 48), torch.zeros(5, 48)
    lora.add_lora(x, down, up, scale, tiles_of(adapter), together)
    for t in range(5):
        lora.add_lora(x[t : t + 1], down, up, scale, tiles_of([adapter[t]]), alone[t : t + 1])
    assert torch.equal(together, alone)


@pytest.mark.parametrize("adapter", [[], [-1, -1], [0] * 33, [5, 3, 5, -1, 3, 0] * 7, [7]])
def test_grouping(adapter: list[int]) -> None:
    groups, owners = plain.grouped(torch.tensor(adapter, dtype=torch.int32), lora.TOKENS)
    tokens, adapters = lora.group_tokens(np.array(adapter, np.int32), len(groups) + 2)
    assert adapters.tolist() == [*owners, -1, -1]
    assert [[t for t in row if t >= 0] for row in tokens.tolist()] == [*groups, [], []]
    assert len(lora.group_tokens(np.array(adapter, np.int32))[1]) == len(groups)
    if groups:
        with pytest.raises(ValueError, match="places"):
            lora.group_tokens(np.array(adapter, np.int32), len(groups) - 1)


def test_what_does_not_fit_is_refused() -> None:
    tiles = tiles_of([0])
    with pytest.raises(ValueError, match="do not fit"):
        lora.shrink(torch.zeros(1, 8), torch.zeros(1, 4, 9), tiles)
    with pytest.raises(ValueError, match="do not fit"):
        lora.expand(torch.zeros(1, 1, 4), torch.zeros(1, 8, 5), torch.ones(1), tiles, torch.zeros(1, 8))
    with pytest.raises(ValueError, match="a rank of 300"):
        lora.expand(torch.zeros(1, 1, 300), torch.zeros(1, 8, 300), torch.ones(1), tiles, torch.zeros(1, 8))
