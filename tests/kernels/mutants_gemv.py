# SPDX-License-Identifier: AGPL-3.0-only
"""Mutants of gemv: the order of the sum is what other kernels rely on."""

from __future__ import annotations

from .mutants import Mutant, Patch

_HALVES_CU = "spark_store(C + row, warp_sums[2u * group] + warp_sums[2u * group + 1u]);"
_HALVES_PY = "result[m, start : start + rows] = halves[0] + halves[1]"
_PRODUCTS_PY = "products = part * factor[:, m : m + 1]"
_APART_PY = "reshape(count, turns, lanes, CHUNK).transpose(1, 3, 0, 2)"

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
            "gemv.py", _PRODUCTS_PY, _PRODUCTS_PY + "\n                    products = products[::2] + products[1::2]"
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
        py=Patch("gemv.py", ".transpose(1, 3, 0, 2)", "[..., ::-1].transpose(1, 3, 0, 2)"),
    ),
    Mutant(
        "gemv::dense_gemv_bf16",
        "another lane to chunk mapping",
        cu=Patch(
            "gemv.cu",
            "chunks, lane + EARLY * SPARK_DOT_THREADS, sum);",
            "chunks, lane * 2u % SPARK_DOT_THREADS + lane / 32u + EARLY * SPARK_DOT_THREADS, sum);",
        ),
        py=Patch("gemv.py", _APART_PY, "reshape(count, turns, CHUNK, lanes).transpose(1, 2, 0, 3)"),
    ),
    Mutant(
        "gemv::dense_gemv_bf16",
        "second half of the lanes left out",
        cu=Patch("gemv.cu", _HALVES_CU, "spark_store(C + row, warp_sums[2u * group]);"),
        py=Patch("gemv.py", _HALVES_PY, "result[m, start : start + rows] = halves[0]"),
    ),
    Mutant(
        "gemv::dense_gemv_bf16",
        "halves rounded to BF16 before they are added",
        cu=Patch(
            "gemv.cu",
            "sum = spark_warp_sum(sum, SPARK_WARP);",
            "sum = __bfloat162float(__float2bfloat16_rn(spark_warp_sum(sum, SPARK_WARP)));",
        ),
        py=Patch(
            "gemv.py",
            _HALVES_PY,
            "halves = [to_bf16(half).astype(np.float32) for half in halves]\n                " + _HALVES_PY,
        ),
    ),
    Mutant(
        "gemv::dense_gemv_bf16",
        "one chunk a lane after the unrolled part",
        cu=Patch("dense_gemv.cuh", "for (; c < chunks; c += SPARK_DOT_THREADS) {", "if (c < chunks) {"),
        py=Patch("gemv.py", "if piece.start < piece.stop", "if piece.start + _STRIPE // 2 < piece.stop"),
    ),
    Mutant(
        "gemv::dense_gemv_bf16",
        "outputs past N written",
        cu=Patch("gemv.cu", "if (lane == 0u && row < N) {", "if (lane == 0u) {"),
    ),
    Mutant(
        "gemv::dense_gemv_bf16@far",
        "32-bit row offset",
        cu=Patch("gemv.cu", "B + row * K);", "B + static_cast<unsigned>(row) * K);"),
    ),
)
