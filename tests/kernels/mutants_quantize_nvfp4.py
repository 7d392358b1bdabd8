# SPDX-License-Identifier: AGPL-3.0-only
"""Mutants of quantize_nvfp4: each changes one rule of rounding, sign, order or place."""

from __future__ import annotations

from .mutants import Mutant, Patch

_ABSMAX = "quantize_nvfp4::nvfp4_global_absmax"
_QUANTIZE = "quantize_nvfp4::quantize_bf16_to_nvfp4"
_ATOMIC_CU = "atomicMax(reinterpret_cast<unsigned*>(global_max), __float_as_uint(most));"
_LARGEST_PY = "return np.float32(_without_nan(to_f32(x)).max(initial=0))"
_WITHOUT_PY = "return np.where(np.isnan(values), np.float32(0), np.abs(values))"
_NORMAL_CU = "return ((__float_as_uint(a) + (1u << 19)) >> 20) - ((127u - 7u) << 3);"
_NORMAL_PY = "((magnitudes.view(np.uint32) + np.uint32(1 << 19)) >> np.uint32(20))"
_SCALE_CU = "encode_e4m3(most * per_scale2 / E2M1_MAX)"
_SCALE_PY = "encode_e4m3(most * per_factor / np.float32(6))"


def _threshold(limit: str, code: int) -> Mutant:
    """A tie at one threshold goes to the larger magnitude."""
    return Mutant(
        _QUANTIZE,
        f"tie at {limit} upwards",
        cu=Patch("quantize_nvfp4.cu", f"a <= {limit}f ? {code}u", f"a < {limit}f ? {code}u"),
        py=Patch(
            "quantize_nvfp4.py",
            "    return (codes + np.where(values < 0, 8, 0)).astype(np.uint8)",
            f"    codes = codes + (np.abs(values) == _E2M1_UP_TO[{code}])\n"
            "    return (codes + np.where(values < 0, 8, 0)).astype(np.uint8)",
        ),
    )


MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        _ABSMAX,
        "sign kept",
        cu=Patch("absmax.cuh", "const float magnitude = fabsf(x);", "const float magnitude = x;"),
        py=Patch("quantize_nvfp4.py", _LARGEST_PY, "return np.float32(np.nanmax(to_f32(x), initial=0))"),
    ),
    Mutant(
        _ABSMAX,
        "NaN wins",
        cu=Patch(
            "absmax.cuh",
            "return magnitude > most ? magnitude : most;",
            "return magnitude <= most ? most : magnitude;",
        ),
        py=Patch("quantize_nvfp4.py", _WITHOUT_PY, "return np.abs(values)"),
    ),
    Mutant(
        _ABSMAX,
        "what was there is overwritten",
        cu=Patch("quantize_nvfp4.cu", _ATOMIC_CU, "*global_max = most;"),
    ),
    Mutant(
        _ABSMAX,
        "values after the last chunk left out",
        cu=Patch(
            "absmax.cuh",
            "size_t i = chunks * ABSMAX_CHUNK + first; i < count;",
            "size_t i = chunks * ABSMAX_CHUNK + first; i + 1u < count;",
        ),
        py=Patch("quantize_nvfp4.py", _LARGEST_PY, _LARGEST_PY.replace("to_f32(x)", "to_f32(x[: x.size // 8 * 8])")),
    ),
    Mutant(
        _ABSMAX,
        "last warp of a block left out",
        cu=Patch("absmax.cuh", "w < ABSMAX_BLOCK / SPARK_WARP; ++w", "w + 1u < ABSMAX_BLOCK / SPARK_WARP; ++w"),
    ),
    Mutant(
        _QUANTIZE,
        "scale rounded to nearest even",
        cu=Patch(
            "quantize_nvfp4.cu",
            _NORMAL_CU,
            _NORMAL_CU.replace("(1u << 19)", "0x7ffffu + (__float_as_uint(a) >> 20 & 1u)"),
        ),
        py=Patch(
            "quantize_nvfp4.py",
            _NORMAL_PY,
            "((magnitudes.view(np.uint32) + np.uint32(0x7FFFF)"
            " + (magnitudes.view(np.uint32) >> np.uint32(20) & np.uint32(1))) >> np.uint32(20))",
        ),
    ),
    Mutant(
        _QUANTIZE,
        "scale truncated",
        cu=Patch("quantize_nvfp4.cu", _NORMAL_CU, _NORMAL_CU.replace("(1u << 19)", "0u")),
        py=Patch("quantize_nvfp4.py", _NORMAL_PY, "(magnitudes.view(np.uint32) >> np.uint32(20))"),
    ),
    Mutant(
        _QUANTIZE,
        "largest subnormal scale promoted to a normal",
        cu=Patch("quantize_nvfp4.cu", "return steps < 7u ? steps : 7u;", "return steps;"),
        py=Patch("quantize_nvfp4.py", "np.minimum(subnormal.astype(np.uint32), 7)", "subnormal.astype(np.uint32)"),
    ),
    Mutant(
        _QUANTIZE,
        "scales below the least subnormal rounded up to it",
        cu=Patch("quantize_nvfp4.cu", "if (a >= E4M3_LEAST_SUBNORMAL) {", "if (a >= 0.5f * E4M3_LEAST_SUBNORMAL) {"),
        py=Patch(
            "quantize_nvfp4.py",
            "np.where(magnitudes < _LEAST_SUBNORMAL, 0, codes)",
            "np.where(magnitudes < 0, 0, codes)",
        ),
    ),
    Mutant(
        _QUANTIZE,
        "NaN scale is zero",
        cu=Patch(
            "quantize_nvfp4.cu",
            "if (!(a <= E4M3_MAX)) {\n        return E4M3_MAX_CODE;",
            "if (!(a <= E4M3_MAX)) {\n        return a > E4M3_MAX ? E4M3_MAX_CODE : 0u;",
        ),
        py=Patch(
            "quantize_nvfp4.py",
            "return np.where(magnitudes <= _E4M3_MAX, codes, E4M3_MAX_CODE).astype(np.uint8)",
            "codes = np.where(np.isnan(magnitudes), 0, codes)\n"
            "    return np.where(magnitudes > _E4M3_MAX, E4M3_MAX_CODE, codes).astype(np.uint8)",
        ),
    ),
    Mutant(
        _QUANTIZE,
        "one division for two operations",
        cu=Patch("quantize_nvfp4.cu", _SCALE_CU, "encode_e4m3(most / (scale2 * E2M1_MAX))"),
        py=Patch("quantize_nvfp4.py", _SCALE_PY, "encode_e4m3(most / (factor * np.float32(6)))"),
    ),
    Mutant(
        _QUANTIZE,
        "values scaled by the scale before its rounding",
        cu=Patch(
            "quantize_nvfp4.cu",
            "const float step = decode_e4m3(scale) * scale2;",
            "const float step = scale > 0u ? most * per_scale2 / E2M1_MAX * scale2 : 0.0f;",
        ),
        py=Patch(
            "quantize_nvfp4.py",
            "step = decode_e4m3(scales) * factor",
            "step = np.where(scales > 0, most * per_factor / np.float32(6) * factor, np.float32(0))",
        ),
    ),
    Mutant(
        _QUANTIZE,
        "odd values in the low nibbles",
        cu=Patch("quantize_nvfp4.cu", "(4u * (i % 8u))", "(4u * (i % 8u ^ 1u))"),
        py=Patch(
            "quantize_nvfp4.py",
            "codes[..., 0] | (codes[..., 1] << np.uint8(4))",
            "codes[..., 1] | (codes[..., 0] << np.uint8(4))",
        ),
    ),
    Mutant(
        _QUANTIZE,
        "sign of -0.0 kept",
        cu=Patch("quantize_nvfp4.cu", "y < 0.0f ? 8u : 0u", "__float_as_uint(y) >> 31 ? 8u : 0u"),
        py=Patch("quantize_nvfp4.py", "np.where(values < 0, 8, 0)", "np.where(np.signbit(values), 8, 0)"),
    ),
    Mutant(
        _QUANTIZE,
        "no sign on what rounds to zero",
        cu=Patch("quantize_nvfp4.cu", "return sign | code;", "return code == 0u ? 0u : sign | code;"),
        py=Patch("quantize_nvfp4.py", "np.where(values < 0, 8, 0)", "np.where((values < 0) & (codes > 0), 8, 0)"),
    ),
    Mutant(
        _QUANTIZE,
        "groups past the first turn of the block left out",
        cu=Patch("quantize_nvfp4.cu", "g < groups; g += blockDim.x", "g < groups; g += groups"),
    ),
    *(_threshold(limit, code) for code, limit in enumerate(("0.25", "0.75", "1.25", "1.75", "2.5", "3.5", "5.0"))),
)
