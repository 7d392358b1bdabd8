# SPDX-License-Identifier: AGPL-3.0-only
"""Mutants of NVFP4 experts in two launches: blocks and columns, scales, slices, parts of an activation, shares."""

from __future__ import annotations

from .mutants import Mutant, Patch

_MODULE = "spark_moe_step_nvfp4"
_GATE_UP, _DOWN = f"{_MODULE}::spark_moe_route_gate_up_nvfp4", f"{_MODULE}::spark_moe_down_blend_nvfp4"
_CU, _PY = f"{_MODULE}.cu", f"{_MODULE}.py"


def _cu(check: str, name: str, find: str, replace: str, race: bool = False) -> Mutant:
    return Mutant(check, name, cu=Patch(_CU, find, replace), race=race)


MUTANTS: tuple[Mutant, ...] = (
    _cu(_GATE_UP, "scales of the two blocks swapped", "sums[2u * i] * scales[0] +", "sums[2u * i] * scales[1] +"),
    _cu(_GATE_UP, "a block's x for its neighbour too", "even[i] = first ? words[i] : 0u;", "even[i] = words[i];"),
    _cu(
        _GATE_UP,
        "one slice a warp",
        "slice += FP4_GATE_UP_WARPS;\n                if (slice",
        "slice += slices;\n                if (slice",
    ),
    _cu(
        _GATE_UP, "later slices in place of the first", "*sum = slice == warp ? value : *sum + value;", "*sum = value;"
    ),
    _cu(
        _GATE_UP,
        "x of the first slice for all",
        "                    read_x(slice);",
        "                    read_x(warp);",
    ),
    _cu(
        _GATE_UP, "gate's factor for up", "(up ? up_scale2_vals : gate_scale2_vals)[expert]", "gate_scale2_vals[expert]"
    ),
    _cu(_GATE_UP, "a factor where no weights are", "(up ? ups : gates)[expert].codes != 0u ?", "true ?"),
    _cu(
        _GATE_UP,
        "nobody waits for the slices",
        "        }\n    }\n    __syncthreads();\n\n    const unsigned adders",
        "        }\n    }\n\n    const unsigned adders",
        race=True,
    ),
    Mutant(
        _GATE_UP,
        "gate rounded to BF16",
        py=Patch(_PY, "g = dot(x, gate)\n", "g = to_f32(to_bf16(dot(x, gate)))\n"),
    ),
    _cu(_DOWN, "the rest of an activation left out", "raised[1] - spark_high(upper));", "0.0f);"),
    _cu(
        _DOWN,
        "elements of a block in another order",
        "fp4_split(low.x, high.x, upper.x,",
        "fp4_split(high.x, low.x, upper.x,",
    ),
    _cu(
        _DOWN,
        "the first share for every slot",
        "share, static_cast<int>(turn == 0u ? 0u : slot));",
        "share, 0);",
    ),
    _cu(_DOWN, "the shared expert's factor left out", "* (sh_down_s2 * FP4_LOWERED);", "* FP4_LOWERED;"),
    _cu(
        _DOWN,
        "rows of a tile swapped",
        "routed_sums[warp][to] = lane % 4u == 0u ?",
        "routed_sums[warp][to] = lane % 4u != 0u ?",
    ),
    _cu(_DOWN, "a factor where no weights are", "lane < top_k && table[id].codes != 0u ?", "lane < top_k ?"),
    Mutant(
        _DOWN,
        "the shared expert without its gate",
        py=Patch(_PY, "total + gate * dot(acts[-1], sh_down)", "total + dot(acts[-1], sh_down)"),
    ),
)
