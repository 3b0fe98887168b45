"""The GPU backend as a whole, by Triton's interpreter: a tiny Llama beside the reference backend and transformers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from sampling_inputs import sample_rows
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from octavo_executor.kv_cache import KvCache
from octavo_executor.model import Transformer
from octavo_executor.spec import read_spec
from octavo_executor.weights import DtypePlan, load_weights
from octavo_kernels import AttentionShape, choose_kernels
from octavo_kernels.interface import Kernels
from octavo_kernels.triton import backend as backend_module
from octavo_kernels.triton.backend import TritonKernels, UnsupportedDeviceError

BLOCK, BLOCKS, VOCAB = 8, 12, 131
F32 = torch.float32


class Driver:
    """A transformer on one backend, with a page table per sequence."""

    def __init__(self, folder: Path, kernels: Kernels, dtype: torch.dtype = F32) -> None:
        spec, dtypes = read_spec(folder), DtypePlan(dtype, dtype, dtype)
        self.kernels, self.cache = kernels, KvCache(spec, BLOCKS, BLOCK, dtype, kernels)
        for pages in (self.cache.k, self.cache.v):
            pages.fill_(float("nan"))
        limits = {"max_model_len": 64, "max_tokens": 32, "max_seqs": 4, "max_logits": 32}
        weights = load_weights(folder, spec, kernels, dtypes)
        self.model = Transformer(spec, weights, kernels, self.cache, dtypes, **limits)
        self._free = [7, 2, 11, 0, 5, 9, 3, 1, 10, 4, 8, 6]
        self._tables: dict[str, list[int]] = {}
        self._tokens: dict[str, list[int]] = {}

    def step(self, rows: list[tuple[str, list[int]]]) -> list[Tensor]:
        """Compute the given next tokens of each sequence in one batch; logits [tokens, V] of each."""
        inputs, at = self.model.inputs, 0
        for s, (name, tokens) in enumerate(rows):
            table, known = self._tables.setdefault(name, []), self._tokens.setdefault(name, [])
            positions = range(len(known), len(known) + len(tokens))
            known += tokens
            while len(table) * BLOCK < len(known):
                table.append(self._free.pop())
            end = at + len(tokens)
            inputs.np_query_start[s : s + 2] = at, end
            inputs.np_seq_lens[s] = len(known)
            inputs.np_block_tables[s] = 2**30
            inputs.np_block_tables[s, : len(table)] = table
            inputs.np_ids[at:end], inputs.np_positions[at:end] = tokens, positions
            inputs.np_slots[at:end] = [table[p // BLOCK] * BLOCK + p % BLOCK for p in positions]
            at = end
        inputs.np_num_seqs[0] = len(rows)
        inputs.np_logits_index[:at] = range(at)
        self.kernels.start_step()
        self.model.forward(at)
        return list(self.model.logits(at).clone().split([len(tokens) for _, tokens in rows]))


def random_tokens(count: int, seed: int) -> list[int]:
    return torch.randint(3, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "attn_implementation": "eager",
}


def saved(folder: Path, kind: Any, config: Any) -> tuple[Path, Any]:
    """The folder with a random model in it, and transformers' own in float32."""
    torch.manual_seed(3)
    model = kind(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms start as ones, biases as zeros: make them count
                parameter += torch.randn_like(parameter) * 0.2
    model.save_pretrained(folder)
    return folder, model


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A folder with the model, and transformers' own in float32."""
    return saved(tmp_path_factory.mktemp("llama"), LlamaForCausalLM, LlamaConfig(**SIZES))


def triton_kernels() -> TritonKernels:
    kernels = choose_kernels("triton", head_dim=16, block_size=BLOCK, max_tokens=32, max_seqs=4)
    assert isinstance(kernels, TritonKernels)
    return kernels


@torch.no_grad()
def test_a_mixed_batch_and_the_tokens_sampled_from_it(llama: tuple[Path, Any], reference: Kernels) -> None:
    """A prefill over two steps beside a short sequence and its decodes; then greedy, plain and filtered draws."""
    folder, theirs = llama
    prompts = {"a": random_tokens(13, 1), "b": random_tokens(9, 2)}
    steps = [[("a", 10), ("b", 8)], [("b", 1), ("a", 3)]]
    drivers = [Driver(folder, triton_kernels()), Driver(folder, reference)]
    got: dict[str, list[Tensor]] = {name: [] for name in prompts}
    done = dict.fromkeys(prompts, 0)
    for rows in steps:
        given = [(name, prompts[name][done[name] : done[name] + count]) for name, count in rows]
        mine, expected = (driver.step(given) for driver in drivers)
        for (name, tokens), logits, other in zip(given, mine, expected, strict=True):
            torch.testing.assert_close(logits, other, rtol=1e-4, atol=1e-4)
            got[name].append(logits)
            done[name] += len(tokens)
    for name, tokens in prompts.items():
        whole = torch.cat(got[name])
        torch.testing.assert_close(whole, theirs(torch.tensor([tokens])).logits[0], rtol=1e-4, atol=1e-4)
    last = torch.stack([got["a"][-1][-1], got["b"][-1][-1]]).repeat(2, 1)
    rows = sample_rows(
        4, temperature=[0.0, 0.0, 1.0, 0.7], top_k=[0, 0, 0, 9], top_p=[1.0, 1.0, 1.0, 0.9], seed=[5, 6, 7, 8]
    )
    mine, status = drivers[0].kernels.sample(last, rows)
    assert status.tolist() == [0] * 4
    assert mine.tolist() == reference.sample(last, rows)[0].tolist()
    assert mine[:2].tolist() == [int(got[name][-1][-1].argmax()) for name in prompts]


@torch.no_grad()
def test_greedy_continuation_is_transformers(llama: tuple[Path, Any]) -> None:
    """Decodes over the border of a page, one sampled token after the other."""
    folder, theirs = llama
    driver, tokens = Driver(folder, triton_kernels()), random_tokens(6, 4)
    given, drawn = tokens, []
    for _ in range(4):
        logits = driver.step([("a", given)])[0]
        given = driver.kernels.sample(logits[-1:].contiguous(), sample_rows(1))[0].tolist()
        drawn += given
    expected = theirs.generate(torch.tensor([tokens]), max_new_tokens=4, min_new_tokens=4, do_sample=False)
    assert drawn == expected[0, 6:].tolist()


@torch.no_grad()
def test_bfloat16_is_close(llama: tuple[Path, Any]) -> None:
    folder, theirs = llama
    tokens = random_tokens(9, 7)
    logits = Driver(folder, triton_kernels(), torch.bfloat16).step([("a", tokens)])[0]
    expected = theirs(torch.tensor([tokens])).logits[0]
    error = float(((logits - expected).abs().amax(-1) / expected.abs().amax(-1)).max())
    assert 1e-5 < error < 0.1


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        (Qwen3ForCausalLM, Qwen3Config(**SIZES, head_dim=32, attention_bias=True)),
        (MistralForCausalLM, MistralConfig(**SIZES, sliding_window=7)),
    ],
)
@torch.no_grad()
def test_norms_of_heads_biases_and_windows(tmp_path: Path, kind: Any, config: Any) -> None:
    folder, theirs = saved(tmp_path, kind, config)
    driver, tokens = Driver(folder, triton_kernels()), random_tokens(14, 5)
    logits = torch.cat([driver.step([("a", tokens[:12])])[0], driver.step([("a", tokens[12:])])[0]])
    torch.testing.assert_close(logits, theirs(torch.tensor([tokens])).logits[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear(reference: Kernels, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    kernels = triton_kernels()
    x, weight, bias = torch.randn(3, 40), torch.randn(24, 40) / 6, torch.randn(24)
    for given, b, out_dtype in ((x.to(dtype), None, dtype), (x.to(dtype), bias.to(dtype), dtype), (x, bias, F32)):
        out, expected = torch.empty(3, 24, dtype=out_dtype), torch.empty(3, 24, dtype=out_dtype)
        kernels.linear(given, kernels.pack(weight, dtype), b, out)
        reference.linear(given, reference.pack(weight, dtype), b, expected)
        torch.testing.assert_close(
            out, expected, rtol=2e-2 if dtype != F32 else 1e-5, atol=2e-2 if dtype != F32 else 1e-5
        )


def test_pages_are_copied_and_moved() -> None:
    kernels = triton_kernels()
    pages = torch.randn(2, 5, 2, 8, 16)
    before = pages.clone()
    source, destination = torch.tensor([0, 3], dtype=torch.int32), torch.tensor([4, 1], dtype=torch.int32)
    kernels.copy_pages(pages, source, destination)
    assert torch.equal(pages[:, [4, 1]], before[:, [0, 3]])
    assert torch.equal(pages[:, [0, 2, 3]], before[:, [0, 2, 3]])
    other = torch.zeros(2, 3, 256)
    kernels.move_pages(pages, source, other, torch.tensor([2, 0], dtype=torch.int32))
    assert torch.equal(other[:, [2, 0]], before[:, [0, 3]].flatten(2))


def test_types_and_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = triton_kernels()
    assert kernels.name == "triton"
    assert kernels.record() is None
    assert kernels.activation_dtype(torch.float16) == torch.float16
    assert kernels.activation_dtype(torch.int8) == torch.bfloat16
    with pytest.raises(ValueError, match=r"no pages of torch\.float64"):
        kernels.page_shapes(AttentionShape(2, 1, 64, 16, 1.0), torch.float64)
    with pytest.raises(ValueError, match="one of CPUs"):
        choose_kernels("cpu", head_dim=64, block_size=16, device="cuda")
    assert choose_kernels("auto", head_dim=64, block_size=16).name == "cpu"
    monkeypatch.setattr(backend_module.triton.knobs.runtime, "interpret", False)
    with pytest.raises(UnsupportedDeviceError, match="TRITON_INTERPRET"):
        choose_kernels("triton", head_dim=64, block_size=16)


def test_without_triton_the_message_says_what_to_install() -> None:
    code = """
import sys
sys.modules["triton"] = None
from octavo_kernels import choose_kernels
try:
    choose_kernels("auto", head_dim=64, block_size=16, device="cuda")
except ValueError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "install octavo[cuda]" in done.stdout
