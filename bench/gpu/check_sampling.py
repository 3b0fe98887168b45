"""Sampling, candidates and log-probabilities against the reference on the host, and what a draw may depend on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, replace

import numpy as np
import torch
from sampling_inputs import filter_columns, sample_rows
from stage import Finding, Stage
from torch import Tensor

from octavo_kernels import SampleRows
from octavo_kernels.reference.sampling import candidates_of, logprobs_of, sample_row

INF = math.inf
Check = tuple[str, Callable[[Stage], Iterable[Finding]]]


def on_device(stage: Stage, rows: SampleRows) -> SampleRows:
    """The same rows there."""
    return SampleRows(*(getattr(rows, field.name).to(stage.device) for field in fields(rows)))


def logits_of(stage: Stage, rows: int, vocab: int) -> Tensor:
    """float32[rows, vocab] on the host: flat ones, peaked ones, and ones with many ties."""
    rng = np.random.RandomState(vocab)
    values = rng.standard_normal((rows, vocab)).astype(np.float32)
    values[1::4] *= 4
    values[2::4] *= 12
    values[3::4] = np.round(values[3::4] * 4) / 4
    return torch.from_numpy(values)


def _compare(stage: Stage, case: str, logits: Tensor, rows: SampleRows, got: tuple[Tensor, Tensor]) -> Finding:
    """The share of rows whose token or status is not the reference's."""

    def error() -> float:
        token, status = (x.cpu().tolist() for x in got)
        wrong = []
        for r in range(logits.shape[0]):
            expected = sample_row(logits[r], rows, r)
            if (token[r], status[r]) != (expected[0], int(expected[1])):
                wrong.append(r)
        if wrong:
            print(f"{case}: rows {wrong} differ: {[(token[r], sample_row(logits[r], rows, r)) for r in wrong[:4]]}")
        return len(wrong) / logits.shape[0]

    return stage.measured("sampling", case, error, 0.0)


def check_draws(stage: Stage) -> Iterator[Finding]:
    """Every setting, on vocabularies of several sizes; then penalties, biases, bans and rows that cannot be drawn."""
    kernels = stage.kernels()
    for vocab in stage.pick((151936, 128256, 32000, 1000), (300,)):
        columns = {name: stage.pick(column * 3, column[3:5]) for name, column in filter_columns().items()}
        count = len(columns["top_k"])
        logits = logits_of(stage, count, vocab)
        rows = sample_rows(
            count, **columns,
            seed=[2**62 // (r + 1) - r for r in range(count)], position=[17 * r for r in range(count)],
        )  # fmt: skip
        got = kernels.sample(logits.to(stage.device), on_device(stage, rows))
        yield _compare(stage, f"{count} rows of {vocab}", logits, rows, got)
    yield from _penalised(stage)
    vocab = 300
    logits = logits_of(stage, 5, vocab)
    logits[0, 7], logits[1, 8], logits[2], logits[3, :-1] = math.nan, INF, -INF, -INF
    rows = sample_rows(5, temperature=1.0)
    got = kernels.sample(logits.to(stage.device), on_device(stage, rows))
    yield _compare(stage, "NaN, infinite, nothing left, one left", logits, rows, got)


def _penalised(stage: Stage) -> Iterator[Finding]:
    vocab, count = stage.pick(151936, 200), stage.pick(12, 3)
    rng = np.random.RandomState(3)
    history = [rng.randint(-2, vocab + 2, stage.pick(3000, 40) // (r + 1)).tolist() for r in range(count)]
    for row in history:
        row[::3] = [row[0]] * len(row[::3])
    each = stage.pick(300, 2)
    rows = sample_rows(
        count, history, temperature=[0.0, 1.0, 0.7] * (count // 3), top_p=[1.0, 1.0, 0.9] * (count // 3),
        presence=[0.5, 0.0, 1.5] * (count // 3), frequency=[0.0, 0.25, 0.1] * (count // 3),
        repetition=[1.2, 1.0, 0.8] * (count // 3), output_start=[len(h) // 2 for h in history], seed=list(range(count)),
        bias_start=[each * r for r in range(count + 1)], bias_ids=rng.randint(-1, vocab + 1, each * count).tolist(),
        bias_values=rng.standard_normal(each * count).tolist(), banned_start=[2 * r for r in range(count + 1)],
        banned_ids=rng.randint(-1, vocab + 1, 2 * count).tolist(),
    )  # fmt: skip
    logits = logits_of(stage, count, vocab)
    got = stage.kernels().sample(logits.to(stage.device), on_device(stage, rows))
    yield _compare(stage, f"penalties, biases, bans, {count} rows of {vocab}", logits, rows, got)


def check_dependence(stage: Stage) -> Iterator[Finding]:
    """A draw is a function of its own row: of its place, its batch and the day it depends on nothing."""
    kernels, vocab, count = stage.kernels(), stage.pick(151936, 300), stage.pick(256, 2)
    logits = stage.randn(count, vocab) * 2
    columns = {
        "temperature": [0.6, 1.0] * (count // 2), "top_p": [1.0, 0.9] * (count // 2), "seed": list(range(count)),
    }  # fmt: skip
    rows = sample_rows(count, **columns)
    token, _ = kernels.sample(logits, on_device(stage, rows))
    again, _ = kernels.sample(logits, on_device(stage, rows))
    yield stage.equal("sampling repeats", f"{count} rows of {vocab}", again, lambda: token)
    order = torch.from_numpy(np.random.RandomState(0).permutation(count)[: count // 2])
    some = replace(
        rows, **{name: getattr(rows, name)[order].contiguous() for name in ("temperature", "top_p", "seed", "position")}
    )
    some = sample_rows(
        len(order), **{name: getattr(some, name) for name in ("temperature", "top_p", "seed", "position")}
    )
    index = order.to(stage.device)
    fewer, _ = kernels.sample(logits[index].contiguous(), on_device(stage, some))
    yield stage.equal("sampling in another batch", f"{len(order)} of {count} rows", fewer, lambda: token[index])


def check_distribution(stage: Stage) -> Iterator[Finding]:
    """Draws follow the softmax: chi-square over tokens, in standard deviations from its mean."""
    vocab, count = stage.pick((512, 65536), (4, 24))
    row = torch.from_numpy(np.random.RandomState(5).standard_normal(vocab).astype(np.float32)) * 1.5
    rows = sample_rows(count, temperature=0.8, seed=list(range(count)), position=7)
    token, _ = stage.kernels().sample(row.expand(count, vocab).contiguous().to(stage.device), on_device(stage, rows))

    def error() -> float:
        expected = (row.double() / 0.8).softmax(-1) * count
        seen = torch.bincount(token.cpu().long(), minlength=vocab).double()
        chi = float(((seen - expected).square() / expected).sum())
        return (chi - (vocab - 1)) / math.sqrt(2 * (vocab - 1))

    yield stage.measured("sampling's distribution", f"{count} draws from {vocab} tokens", error, 5.0)


def check_lists(stage: Stage) -> Iterator[Finding]:
    """Log-probabilities of targets and of the best tokens, and the candidates of beams."""
    kernels, vocab, count = stage.kernels(), stage.pick(151936, 300), stage.pick(24, 3)
    logits = logits_of(stage, count, vocab)
    wanted = torch.tensor([r % 21 for r in range(count)], dtype=torch.int32)
    target = torch.tensor([(7919 * r) % vocab if r != 2 else -1 for r in range(count)], dtype=torch.int32)
    there = logits.to(stage.device)
    got = kernels.logprobs(there, target.to(stage.device), wanted.to(stage.device), 20)
    listed = kernels.candidates(there, on_device(stage, sample_rows(count)), wanted.to(stage.device), 20)

    def distance(mine: Tensor, theirs: Tensor, ids: tuple[Tensor, Tensor] | None) -> float:
        used = torch.arange(20)[None] < wanted[:, None] if mine.dim() == 2 else torch.ones(count, dtype=torch.bool)
        if ids is not None and not torch.equal(ids[0].cpu()[used], ids[1][used]):
            return INF
        a, b = mine.cpu()[used].double(), theirs[used].double()
        finite = b.isfinite()
        same = torch.equal(a[~finite], b[~finite])
        return float((a[finite] - b[finite]).abs().max()) if same else INF

    case, limit = f"{count} rows of {vocab}", 2e-5
    if stage.mode == "compile":
        return
    want = logprobs_of(logits.double(), target, wanted, 20)
    yield stage.measured("log-probabilities", case, lambda: distance(got.logprob, want.logprob, None), limit)
    yield stage.equal("ranks", case, got.rank.cpu(), lambda: want.rank)
    tops = (got.top_ids, want.top_ids)
    yield stage.measured(
        "best log-probabilities", case, lambda: distance(got.top_logprobs, want.top_logprobs, tops), limit
    )
    best = candidates_of(logits, sample_rows(count), wanted, 20)
    ids = (listed.ids, best.ids)
    yield stage.measured("candidates", case, lambda: distance(listed.logprobs, best.logprobs, ids), limit)


def checks(stage: Stage) -> list[Check]:
    """All of this file."""
    return [
        ("draws", check_draws),
        ("what draws depend on", check_dependence),
        ("distribution", check_distribution),
        ("log-probabilities", check_lists),
    ]
