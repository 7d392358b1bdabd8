# SPDX-License-Identifier: AGPL-3.0-only
"""Numbers: the toolkit's own conversions against ml_dtypes over every bit pattern, and uncontracted arithmetic."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np

from .support import Array, emulate, launch

CONVERSIONS = """
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_fp4.h>
#define EACH const unsigned i = blockIdx.x * blockDim.x + threadIdx.x; if (i < n)
extern "C" __global__ void to_bf16(const float* x, unsigned short* y, unsigned n) {
    EACH y[i] = __bfloat16_as_ushort(__float2bfloat16_rn(x[i]));
}
extern "C" __global__ void to_f16(const float* x, unsigned short* y, unsigned n) {
    EACH y[i] = __half_as_ushort(__float2half_rn(x[i]));
}
extern "C" __global__ void to_e4m3(const float* x, unsigned char* y, unsigned n) {
    EACH y[i] = __nv_cvt_float_to_fp8(x[i], __NV_SATFINITE, __NV_E4M3);
}
extern "C" __global__ void to_e2m1(const float* x, unsigned char* y, unsigned n) {
    EACH y[i] = __nv_cvt_float_to_fp4(x[i], __NV_E2M1, cudaRoundNearest);
}
extern "C" __global__ void from_bf16(const unsigned short* x, float* y, unsigned n) {
    EACH y[i] = __bfloat162float(__ushort_as_bfloat16(x[i]));
}
extern "C" __global__ void from_f16(const unsigned short* x, float* y, unsigned n) {
    EACH y[i] = __half2float(__ushort_as_half(x[i]));
}
extern "C" __global__ void from_e4m3(const unsigned char* x, float* y, unsigned n) {
    EACH y[i] = __half2float(__half(__nv_cvt_fp8_to_halfraw(x[i], __NV_E4M3)));
}
extern "C" __global__ void fused_bf16(const unsigned short* x, unsigned short* y, unsigned n) {
    EACH y[i] = __bfloat16_as_ushort(__hfma(__ushort_as_bfloat16(x[3 * i]), __ushort_as_bfloat16(x[3 * i + 1]),
                                            __ushort_as_bfloat16(x[3 * i + 2])));
}
"""


def test_conversions(tmp_path: Path, rng: np.random.Generator) -> None:
    count = 1 << 20
    patterns = rng.integers(0, 2**32, count, np.uint32)
    patterns[::2] = patterns[::2] & 0xFFFF0000 | 0x8000  # ties of BF16
    floats = patterns.view(np.float32)
    small = np.concatenate([rng.uniform(-500, 500, count // 2), rng.integers(-64, 65, count // 2) / 8]).astype(
        np.float32
    )
    with emulate(tmp_path, CONVERSIONS) as gpu:

        def convert(function: str, values: Array, dtype: type) -> Array:
            n = values.size
            return launch(gpu, function, -(-n // 256), 256, [values, np.zeros(n, dtype), n])[1]

        with np.errstate(all="ignore"):
            bf16 = floats.astype(ml_dtypes.bfloat16).view(np.uint16)
            f16 = floats.astype(np.float16).view(np.uint16)
        nan = np.isnan(floats)
        assert (convert("to_bf16", floats, np.uint16)[~nan] == bf16[~nan]).all()
        assert (convert("to_bf16", floats, np.uint16)[nan] == 0x7FFF).all()
        assert (convert("to_f16", floats, np.uint16)[~nan] == f16[~nan]).all()
        e4m3 = np.clip(small, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        assert (convert("to_e4m3", small, np.uint8) == e4m3).all()
        e2m1 = np.clip(small, -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 15
        assert (convert("to_e2m1", small, np.uint8) == e2m1).all()

        every = np.arange(1 << 16, dtype=np.uint16)
        for function, dtype in (("from_bf16", ml_dtypes.bfloat16), ("from_f16", np.float16)):
            np.testing.assert_array_equal(convert(function, every, np.float32), every.view(dtype).astype(np.float32))
        bytes_ = np.arange(256, dtype=np.uint8)
        expected = bytes_.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        np.testing.assert_array_equal(convert("from_e4m3", bytes_, np.float32), expected)


def test_bf16_fma_rounds_once(tmp_path: Path, rng: np.random.Generator) -> None:
    """Against exact integer arithmetic: a * b + c is a multiple of 2**-40 here, and held exactly."""
    n = 4096
    x = (rng.integers(-255, 256, (n, 3)) * 2.0 ** rng.integers(-20, 1, (n, 3))).astype(ml_dtypes.bfloat16)
    x[:, 2] = (rng.integers(-255, 256, n) * 2.0 ** rng.integers(-40, 1, n)).astype(ml_dtypes.bfloat16)
    with emulate(tmp_path, CONVERSIONS) as gpu:
        _, got = launch(gpu, "fused_bf16", n // 256, 256, [x.view(np.uint16), np.zeros(n, np.uint16), n])
    for row, word in zip(x.astype(np.float64), got, strict=True):
        exact = int(row[0] * 2**20) * int(row[1] * 2**20) + int(row[2] * 2**40)
        assert word.view(ml_dtypes.bfloat16) == rounded_to_8_bits(exact) * 2.0**-40, row


def rounded_to_8_bits(value: int) -> float:
    """An integer to eight significant bits, ties to even."""
    shift = max(abs(value).bit_length() - 8, 0)
    whole, rest = divmod(abs(value), 1 << shift)
    half = (1 << shift) // 2
    whole += rest > half or (rest == half and shift > 0 and whole % 2 == 1)
    return float((whole << shift) * (1 if value >= 0 else -1))


def test_no_contraction(tmp_path: Path, rng: np.random.Generator) -> None:
    """a * b + c in FP32 rounds twice, as with --fmad=false: bit-equal to NumPy step by step."""
    text = """
    extern "C" __global__ void k(const float* a, const float* b, float* out, unsigned n) {
        float sum = 0.0f;
        for (unsigned i = 0u; i < n; ++i) {
            sum = sum + a[i * blockDim.x + threadIdx.x] * b[i];
        }
        out[threadIdx.x] = sum;
    }
    """
    a, b = rng.standard_normal((1024, 64)).astype(np.float32), rng.standard_normal(1024).astype(np.float32)
    expected = np.zeros(64, np.float32)
    for row, weight in zip(a, b, strict=True):
        expected = expected + row * weight
    with emulate(tmp_path, text) as gpu:
        *_, got = launch(gpu, "k", 1, 64, [a, b, np.zeros(64, np.float32), 1024])
    assert (got.view(np.uint32) == expected.view(np.uint32)).all()


def test_integer_intrinsics(tmp_path: Path, rng: np.random.Generator) -> None:
    text = """
    extern "C" __global__ void k(const unsigned* x, unsigned* y) {
        const unsigned a = x[2 * threadIdx.x], b = x[2 * threadIdx.x + 1];
        unsigned* to = y + 8 * threadIdx.x;
        to[0] = __popc(a);
        to[1] = __clz(a);
        to[2] = __ffs(a);
        to[3] = __brev(a);
        to[4] = __byte_perm(a, b, 0x6420);
        to[5] = __umulhi(a, b);
        to[6] = __funnelshift_l(a, b, 9);
        to[7] = __float2int_rz(__uint_as_float(a));
    }
    """
    x = rng.integers(0, 2**32, (64, 2), np.uint32)
    x[0] = 0, 1
    with emulate(tmp_path, text, checked=True) as gpu:
        _, got = launch(gpu, "k", 1, 64, [x, np.zeros((64, 8), np.uint32)])
    for (a, b), row in zip(x.tolist(), got.tolist(), strict=True):
        value = float(np.uint32(a).view(np.float32))
        whole = 0 if np.isnan(value) else int(np.clip(value, -(2.0**31), 2.0**31 - 1))
        pool = (b << 32 | a).to_bytes(8, "little")
        assert row == [
            a.bit_count(),
            32 - a.bit_length(),
            (a & -a).bit_length(),
            int(f"{a:032b}"[::-1], 2),
            int.from_bytes(bytes([pool[0], pool[2], pool[4], pool[6]]), "little"),
            a * b >> 32,
            (b << 9 | a >> 23) & 0xFFFFFFFF,
            whole % 2**32,
        ]
