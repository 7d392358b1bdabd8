# SPDX-License-Identifier: AGPL-3.0-only
"""Mutants of gemm: the order of the scalar sum, edges of tiles, and both load paths of the tensor-core kernel."""

from __future__ import annotations

from .mutants import Mutant, Patch

_SCALAR, _PIPELINED = "gemm::dense_gemm_bf16", "gemm::dense_gemm_bf16_pipelined"
_SUM_CU = "sum = sum + a_tile[threadIdx.y][i] * b_tile[threadIdx.x][i];"
_LOOP_PY = "for k in range(depth):"
_STORE_PY = "result[:, start : start + width] = to_bf16(sums)"
_INSIDE_CU = "const bool inside = at_row < rows && at_k < depth;"
_STORE_CU = "*reinterpret_cast<unsigned*>(to) = spark_pack(sums(i), sums(i + 1));"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        _SCALAR,
        "descending k",
        cu=Patch(
            "gemm.cu",
            _SUM_CU,
            "sum = sum + a_tile[threadIdx.y][count - 1u - i] * b_tile[threadIdx.x][count - 1u - i];",
        ),
        py=Patch("gemm.py", _LOOP_PY, "for k in reversed(range(depth)):"),
    ),
    Mutant(
        _SCALAR,
        "rounded to BF16 after each 16",
        cu=Patch(
            "gemm.cu",
            "for (unsigned i = 0u; i < count; ++i) {",
            "sum = __bfloat162float(__float2bfloat16_rn(sum));\n        for (unsigned i = 0u; i < count; ++i) {",
        ),
        py=Patch(
            "gemm.py",
            "sums += products\n",
            "sums += products\n                if k % 16 == 15:\n                    sums = to_f32(to_bf16(sums))\n",
        ),
    ),
    Mutant(
        _SCALAR,
        "the last k of a ragged tile left out",
        cu=Patch(
            "gemm.cu",
            "static_cast<unsigned>(K - first) : GEMM_TILE;",
            "static_cast<unsigned>(K - first - 1u) : GEMM_TILE;",
        ),
        py=Patch("gemm.py", _LOOP_PY, "for k in range(depth - (depth % 16 > 0)):"),
    ),
    Mutant(
        _SCALAR,
        "rows past M written",
        cu=Patch("gemm.cu", "if (m < M && n < N) {\n", "if (m <= M && n < N) {\n"),
    ),
    Mutant(
        _SCALAR + "@far",
        "32-bit offset of a row of A",
        cu=Patch("gemm.cu", "spark_load(A + m * K + k)", "spark_load(A + static_cast<unsigned>(m * K + k))"),
    ),
    Mutant(
        _PIPELINED,
        "truncated at the store",
        cu=Patch(
            "gemm_pipelined.cu",
            _STORE_CU,
            "to[0] = __float2bfloat16_rz(sums(i)), to[1] = __float2bfloat16_rz(sums(i + 1));",
        ),
        py=Patch(
            "gemm.py",
            _STORE_PY,
            "result[:, start : start + width] = (sums.view(np.uint32) >> 16).astype(np.uint16).view(a.dtype)",
        ),
    ),
    Mutant(
        _PIPELINED,
        "BF16 sums",
        py=Patch("gemm.py", "sums += products\n", "sums = to_f32(to_bf16(sums + products))\n"),
    ),
    Mutant(
        _PIPELINED,
        "the row after the last chunk of k read",
        cu=Patch(
            "gemm_pipelined.cu",
            _INSIDE_CU,
            "const bool inside = at_row < rows && at_row * depth + at_k < rows * depth;",
        ),
    ),
    Mutant(
        _PIPELINED,
        "elements read singly up to the chunk's end",
        cu=Patch(
            "gemm_pipelined.cu", "inside && at_k + i < depth ?", "inside && at_row * depth + at_k + i < rows * depth ?"
        ),
    ),
    Mutant(
        _PIPELINED,
        "the stage before the one that is ready",
        cu=Patch("gemm_pipelined.cu", "int reading = 0;", "int reading = STAGES - 1;"),
    ),
    Mutant(
        _PIPELINED,
        "columns of a ragged tile past N stored in the next row",
        cu=Patch(
            "gemm_pipelined.cu", "} else if (m < M && n < N) {", "} else if (m < M && m * N + n < int64_t(M) * N) {"
        ),
    ),
)
