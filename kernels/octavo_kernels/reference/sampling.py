"""Sampling in plain torch, one row at a time."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from octavo_kernels.interface import Candidates, Logprobs, SampleRows, SampleStatus

MASK32 = 0xFFFFFFFF
MASK64 = 0xFFFFFFFFFFFFFFFF


def splitmix64(x: int) -> int:
    """The SplitMix64 step (Steele, Lea and Flood, OOPSLA 2014) of a 64-bit number."""
    x = (x + 0x9E3779B97F4A7C15) & MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK64
    return x ^ (x >> 31)


def fmix32(h: Tensor) -> Tensor:
    """MurmurHash3's 32-bit finaliser, elementwise on int64 tensors that hold 32-bit numbers."""
    h = h ^ (h >> 16)
    h = (h * 0x85EBCA6B) & MASK32
    h = h ^ (h >> 13)
    h = (h * 0xC2B2AE35) & MASK32
    return h ^ (h >> 16)


def gumbel_noise(seed: int, position: int, ids: Tensor) -> Tensor:
    """Gumbel noise float32 of the token ids int64[n]: a pure function of (seed, position, id).

    It is -log(-log1p(-v)) with v uniform in (0, 1): large noise comes from small v, which floats hold precisely.
    """
    key = splitmix64((splitmix64(seed & MASK64) + position) & MASK64)
    h = fmix32((fmix32(ids ^ (key & MASK32)) + (key >> 32)) & MASK32)
    v = (h.to(torch.float32) * 2.0**-32 + 2.0**-33).clamp(max=1 - 2.0**-24)
    return -torch.log(-torch.log1p(-v.double())).float()


def _processed(logits: Tensor, rows: SampleRows, r: int) -> Tensor:
    """Penalties, bias and banned ids of row ``r`` applied to a copy of ``logits`` [V]."""
    z, vocab = logits.clone(), logits.shape[0]
    history = rows.tokens[int(rows.token_row[r]), : int(rows.token_count[r])].long()
    outputs = history[int(rows.output_start[r]) :]
    history, outputs = (x[(x >= 0) & (x < vocab)] for x in (history, outputs))
    seen = torch.tensor(sorted(set(history.tolist())), dtype=torch.int64)
    repetition = float(rows.repetition[r])
    z[seen] = torch.where(z[seen] > 0, z[seen] / repetition, z[seen] * repetition)
    counts = torch.bincount(outputs, minlength=vocab).float()
    z -= rows.frequency[r] * counts + rows.presence[r] * (counts > 0)
    for i in range(int(rows.bias_start[r]), int(rows.bias_start[r + 1])):
        if 0 <= int(rows.bias_ids[i]) < vocab:
            z[int(rows.bias_ids[i])] += rows.bias_values[i]
    for i in range(int(rows.banned_start[r]), int(rows.banned_start[r + 1])):
        if 0 <= int(rows.banned_ids[i]) < vocab:
            z[int(rows.banned_ids[i])] = -math.inf
    return z


def _filtered(z: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor:
    """min-p, top-k and top-p, each over what the one before left; ties to the lower id."""
    if min_p > 0:
        z = torch.where(z < z.max() + math.log(min_p), -math.inf, z)
    values, order = z.sort(descending=True, stable=True)
    keep = torch.ones_like(z, dtype=torch.bool)
    if top_k > 0:
        keep[top_k:] = False
    if top_p < 1.0:
        share = torch.where(keep, values, -math.inf).double().softmax(-1)
        before = share.cumsum(-1) - share
        keep &= before < top_p
        keep[0] = True
    return torch.full_like(z, -math.inf).scatter(0, order, torch.where(keep, values, -math.inf))


def _checked(logits: Tensor, rows: SampleRows, r: int) -> tuple[Tensor, SampleStatus]:
    """Row ``r`` processed, from ``logits`` float32[V], and what became of it."""
    if bool(logits.isnan().any()) or bool((logits == math.inf).any()):
        return logits, SampleStatus.NOT_FINITE
    z = _processed(logits, rows, r)
    return z, SampleStatus.NOTHING_LEFT if float(z.max()) == -math.inf else SampleStatus.FINE


def sample_row(logits: Tensor, rows: SampleRows, r: int) -> tuple[int, SampleStatus]:
    """Draw the token of row ``r`` from ``logits`` float32[V]."""
    z, status = _checked(logits, rows, r)
    if status is not SampleStatus.FINE:
        return -1, status
    temperature = float(rows.temperature[r])
    if temperature > 0:
        z = z / rows.temperature[r]
        z = _filtered(z, int(rows.top_k[r]), float(rows.top_p[r]), float(rows.min_p[r]))
        z = z + gumbel_noise(int(rows.seed[r]), int(rows.position[r]), torch.arange(z.shape[0]))
    return int(z.argmax()), SampleStatus.FINE


def candidates_of(logits: Tensor, rows: SampleRows, wanted: Tensor, width: int) -> Candidates:
    """See ``Kernels.candidates``."""
    count, vocab = logits.shape
    ids = torch.full((count, width), -1, dtype=torch.int32)
    logprobs = torch.full((count, width), -math.inf)
    found = torch.zeros(count, dtype=torch.int32)
    statuses = torch.zeros(count, dtype=torch.uint8)
    for r, most in enumerate(wanted.tolist()):
        z, status = _checked(logits[r], rows, r)
        if status is SampleStatus.FINE and not bool(z.logsumexp(-1).isfinite()):
            status = SampleStatus.NOT_FINITE
        statuses[r] = int(status)
        if status is not SampleStatus.FINE:
            continue
        order = z.sort(descending=True, stable=True).indices
        n = max(0, min(most, width, int((z > -math.inf).sum()), vocab))
        found[r] = n
        ids[r, :n] = order[:n].to(torch.int32)
        logprobs[r, :n] = z.log_softmax(-1)[order[:n]]
    return Candidates(ids, logprobs, found, statuses)


def logprobs_of(logits: Tensor, target: Tensor, top_n: Tensor, width: int) -> Logprobs:
    """See ``Kernels.logprobs``."""
    vocab = logits.shape[1]
    raw = logits.log_softmax(-1)
    known = (target >= 0) & (target < vocab)
    at = torch.where(known, target, 0).long()[:, None]
    logprob = torch.where(known, raw.gather(1, at)[:, 0], -math.inf)
    rank = torch.where(known, (logits > logits.gather(1, at)).sum(-1) + 1, 0).to(torch.int32)
    top_ids = torch.full((logits.shape[0], width), -1, dtype=torch.int32)
    top_logprobs = torch.full((logits.shape[0], width), -math.inf)
    for r, n in enumerate(top_n.tolist()):
        values, ids = raw[r].sort(descending=True, stable=True)
        n = min(n, width, vocab)
        top_ids[r, :n], top_logprobs[r, :n] = ids[:n].to(torch.int32), values[:n]
    return Logprobs(logprob, rank, top_ids, top_logprobs)
