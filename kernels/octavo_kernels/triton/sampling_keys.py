"""What the sampling kernels compute per token: a number that orders tokens, Gumbel noise, and weights that add exactly.

Sums and choices here do not depend on the order of evaluation. Tokens are compared by integers no two of which are
equal, and probabilities are added as integers: how a row is cut into tiles, what shares its batch and which device computes
it change nothing.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

# Below and above the key of any token.
LOWEST = tl.constexpr(-(2**63))
HIGHEST = tl.constexpr(2**63 - 1)
# Weights exp(y - best) are counted in units of 2^-38. Whatever is more than 38 ln 2 = 26.3 below the best weighs nothing,
# and can never be drawn: noise lies between -2.81 and 22.88, so a token 25.7 below the best loses to it.
UNITS = tl.constexpr(float(2**38))
# A row is first surveyed at so many depths below its best value.
LEVELS = tl.constexpr(8)


@triton.jit
def pack_key(value, ids):
    """int64 that orders tokens by value float32, of equals the lower id (int32 >= 0) above.

    The high half is the value's bits, turned so that they order as an integer; the low half counts ids downwards. The two
    zeros are one value.
    """
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - ids)


@triton.jit
def key_value(key):
    """The value float32 in a key."""
    ordered = (key >> 32).to(tl.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def key_id(key):
    """The token id int32 in a key."""
    return (0x7FFFFFFF - (key & 0x7FFFFFFF)).to(tl.int32)


@triton.jit
def depth_limit(level):
    """How far below the best value a level reaches, in nats: closer where real rows have their tokens.

    The last but one holds all that weighs anything, the last everything.
    """
    near = tl.where(level == 0, 1.0, tl.where(level == 1, 2.0, tl.where(level == 2, 4.0, 6.0)))
    far = tl.where(level == 4, 9.0, tl.where(level == 5, 13.0, tl.where(level == 6, 27.0, float("inf"))))
    return tl.where(level < 4, near, far)


@triton.jit
def weight_units(depth):
    """exp(-depth) in units, int64; ``depth`` float32 >= 0. The product is exact, a fraction of a unit is dropped."""
    return (tl.exp(-depth) * UNITS).to(tl.int64)


@triton.jit
def _log1p_polynomial(r):
    """log(1 + r) for r in [sqrt(1/2) - 1, sqrt(2) - 1]: the Cephes library's coefficients, within 2 ulp."""
    z = r * r
    p = tl.fma(r, 7.0376836292e-2, -1.1514610310e-1)
    p = tl.fma(p, r, 1.1676998740e-1)
    p = tl.fma(p, r, -1.2420140846e-1)
    p = tl.fma(p, r, 1.4249322787e-1)
    p = tl.fma(p, r, -1.6668057665e-1)
    p = tl.fma(p, r, 2.0000714765e-1)
    p = tl.fma(p, r, -2.4999993993e-1)
    p = tl.fma(p, r, 3.3333331174e-1)
    return r + tl.fma(r * z, p, -0.5 * z)


@triton.jit
def precise_log(x):
    """Natural logarithm of normal numbers > 0, within 2 ulp also near 1, where the hardware's own has no relative precision."""
    bits = x.to(tl.int32, bitcast=True)
    mantissa = ((bits & 0x007FFFFF) | 0x3F000000).to(tl.float32, bitcast=True)  # [0.5, 1)
    small = mantissa < 0.70710678118
    exponent = ((bits >> 23) - 126 - small.to(tl.int32)).to(tl.float32)
    y = _log1p_polynomial(tl.where(small, mantissa + mantissa, mantissa) - 1.0)
    return tl.fma(exponent, 0.693359375, tl.fma(exponent, -2.12194440e-4, y))


@triton.jit
def _splitmix64(x):
    """The SplitMix64 step (Steele, Lea and Flood, OOPSLA 2014), uint64."""
    x = x + 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _fmix32(h):
    """MurmurHash3's 32-bit finaliser, uint32."""
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    return h ^ (h >> 16)


@triton.jit
def noise_key(seed, position):
    """uint64 from which a row's noise is drawn: of its seed int64 and position int32, and of nothing else."""
    start = _splitmix64(seed.to(tl.uint64, bitcast=True))
    return _splitmix64(start + position.to(tl.int64).to(tl.uint64, bitcast=True))


@triton.jit
def gumbel(ids, key):
    """Gumbel noise float32 of token ids int32: the function of (seed, position, id) that every backend shares.

    -log(-log1p(-v)) with v uniform in (0, 1). Large noise comes from small v, which a float holds with full relative
    precision; log1p keeps it. Backends agree but for the last bits of the logarithms.
    """
    low, high = key.to(tl.uint32), (key >> 32).to(tl.uint32)
    h = _fmix32(_fmix32(ids.to(tl.uint32, bitcast=True) ^ low) + high)
    v = tl.minimum(tl.fma(h.to(tl.float32), 2.3283064365386963e-10, 1.1641532182693481e-10), 0.99999994039535522)
    inner = tl.where(v < 0.25, _log1p_polynomial(-v), precise_log(1.0 - v))
    return -precise_log(-inner)
