# SPDX-License-Identifier: AGPL-3.0-only
"""Mutants of spark_mxfp4_experts: which element a code meets, scales of all sizes, slots, and the activation."""

from __future__ import annotations

from .mutants import Mutant, Patch

_UP, _DOWN = "spark_mxfp4_experts::spark_mxfp4_experts_gate_up", "spark_mxfp4_experts::spark_mxfp4_experts_silu_down"
_CU, _PY = "spark_mxfp4_experts.cu", "spark_mxfp4_experts.py"
_THIRD = "pairs[2] = ((later & 0x000f000fu) * 0x1040u) & 0x81c081c0u;"
_REST = "values[i] = fabsf(low) <= 0x1.fep127f ? values[i] - low : 0.0f;"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(_UP, "codes without a sign", cu=Patch(_CU, _THIRD, _THIRD.replace("0x81c081c0u", "0x01c001c0u"))),
    Mutant(_DOWN, "third pair is the first", cu=Patch(_CU, _THIRD, "pairs[2] = pairs[0];")),
    Mutant(
        _UP,
        "large scales in one factor",
        cu=Patch(_CU, "__any_sync(SPARK_FULL_MASK, most > ONE_FACTOR)", "__any_sync(SPARK_FULL_MASK, most > 256u)"),
    ),
    Mutant(
        f"{_UP}@whole",
        "the next turn's weights one round late",
        cu=Patch(_CU, "codes += AHEAD * OUTPUTS * CHUNKS;", "codes += turn == 0u ? 0u : AHEAD * OUTPUTS * CHUNKS;"),
    ),
    Mutant(
        f"{_DOWN}@whole",
        "scales of the first turn",
        cu=Patch(_CU, "scales += AHEAD * OUTPUTS * CHUNKS;", "scales += 0u * turn;"),
    ),
    Mutant(
        f"{_UP}@scales",
        "scale 0 is 2^-128",
        cu=Patch(
            _CU, "scale * 0x00800080u + 0x3f003f00u;", "scale == 0u ? 0x3e803e80u : scale * 0x00800080u + 0x3f003f00u;"
        ),
    ),
    Mutant(_UP, "up is gate", cu=Patch(_CU, "const bool up = blockIdx.z % 2u != 0u;", "const bool up = false;")),
    Mutant(
        f"{_DOWN}@unrounded",
        "activation of two BF16 numbers",
        cu=Patch(
            _CU,
            "for (unsigned p = 0u; p < PLANES; ++p) {\n                spark_mma(",
            "for (unsigned p = 0u; p < (PLANES + 1u) / 2u; ++p) {\n                spark_mma(",
        ),
        py=Patch(_PY, "(sums[0] + sums[1]) + sums[2]", "sums[0]"),
    ),
    Mutant(
        _DOWN,
        "activation rounded to BF16",
        cu=Patch(_CU, _REST, "values[i] = 0.0f;"),
        py=Patch(_PY, "(sums[0] + sums[1]) + sums[2]", "sums[0] + 0 * sums[1]"),
    ),
    Mutant(
        _DOWN,
        "the last turn's outputs once more",
        cu=Patch(_CU, "(ahead_turn * OUTPUTS + o < own ? o : 0u)", "0u"),
    ),
    Mutant(
        _DOWN,
        "activations of the first slot",
        cu=Patch(
            _CU, "reinterpret_cast<const uint4*>(up_out) + at * (K / 8u);", "reinterpret_cast<const uint4*>(up_out);"
        ),
        py=Patch(_PY, "gated_within(gate, up, limit)", "gated_within(gate, up[:1] + 0 * up, limit)"),
    ),
)
