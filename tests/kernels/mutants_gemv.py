# SPDX-License-Identifier: AGPL-3.0-only
"""Mutants of gemv: the order of the sum is what other kernels rely on."""

from __future__ import annotations

from .mutants import Mutant, Patch

_HALVES_CU = "spark_store(C + row, warp_sums[2u * group] + warp_sums[2u * group + 1u]);"
_HALVES_PY = "result[start : start + height] = warps[:, 0] + warps[:, 1]"
_STRIPE_PY = "lanes += stripes[:, stripe, :, k]"
_STRIPES_PY = "stripes = products[:, : whole * _STRIPE].reshape(height, whole, LANES, CHUNK)"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "gemv::dense_gemv_bf16",
        "pair added first",
        cu=Patch(
            "dense_gemv.cuh",
            "sum = sum + spark_low(a) * spark_low(b);\n    return sum + spark_high(a) * spark_high(b);",
            "return sum + (spark_low(a) * spark_low(b) + spark_high(a) * spark_high(b));",
        ),
        py=Patch(
            "gemv.py",
            _STRIPE_PY,
            "lanes += stripes[:, stripe, :, k] + stripes[:, stripe, :, k + 1] if k % 2 == 0 else np.float32(0)",
        ),
    ),
    Mutant(
        "gemv::dense_gemv_bf16",
        "descending k in a chunk",
        cu=Patch(
            "dense_gemv.cuh",
            "sum = spark_dot_word(sum, a.x, b.x);\n    sum = spark_dot_word(sum, a.y, b.y);",
            "sum = spark_dot_word(sum, a.y, b.y);\n    sum = spark_dot_word(sum, a.x, b.x);",
        ),
        py=Patch("gemv.py", _STRIPE_PY, "lanes += stripes[:, stripe, :, CHUNK - 1 - k]"),
    ),
    Mutant(
        "gemv::dense_gemv_bf16",
        "another lane to chunk mapping",
        cu=Patch(
            "gemv.cu",
            "K / SPARK_DOT_CHUNK, lane);",
            "K / SPARK_DOT_CHUNK, lane * 2u % SPARK_DOT_THREADS + lane / 32u);",
        ),
        py=Patch(
            "gemv.py",
            _STRIPES_PY,
            "stripes = products[:, : whole * _STRIPE].reshape(height, whole, CHUNK, LANES).swapaxes(2, 3)",
        ),
    ),
    Mutant(
        "gemv::dense_gemv_bf16",
        "second half of the lanes left out",
        cu=Patch("gemv.cu", _HALVES_CU, "spark_store(C + row, warp_sums[2u * group]);"),
        py=Patch("gemv.py", _HALVES_PY, "result[start : start + height] = warps[:, 0]"),
    ),
    Mutant(
        "gemv::dense_gemv_bf16",
        "halves rounded to BF16 before they are added",
        cu=Patch(
            "gemv.cu",
            "sum = spark_warp_sum(sum, SPARK_WARP);",
            "sum = __bfloat162float(__float2bfloat16_rn(spark_warp_sum(sum, SPARK_WARP)));",
        ),
        py=Patch("gemv.py", _HALVES_PY, "warps = to_f32(to_bf16(warps))\n            " + _HALVES_PY),
    ),
    Mutant(
        "gemv::dense_gemv_bf16",
        "one chunk a lane after the unrolled part",
        cu=Patch("dense_gemv.cuh", "for (; c < chunks; c += SPARK_DOT_THREADS) {", "if (c < chunks) {"),
        py=Patch("gemv.py", "if rest:", "if rest > _STRIPE // 2:"),
    ),
    Mutant(
        "gemv::dense_gemv_bf16",
        "outputs past N written",
        cu=Patch("gemv.cu", "if (lane == 0u && row < N) {", "if (lane == 0u) {"),
    ),
    Mutant(
        "gemv::dense_gemv_bf16@far",
        "32-bit row offset",
        cu=Patch("gemv.cu", "B + row * K;", "B + static_cast<unsigned>(row) * K;"),
    ),
)
