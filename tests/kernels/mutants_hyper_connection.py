# SPDX-License-Identifier: AGPL-3.0-only
"""Mutants of hyper_connection and spark_hyper_connection: revisions of the maths that go by the same names, epsilons,
iterations, aliases, and the edges of what a block does."""

from __future__ import annotations

from .mutants import Mutant, Patch

_EXPAND, _PRE = "hyper_connection::hc_expand", "hyper_connection::hc_pre"
_POST, _HEAD = "hyper_connection::hc_post", "hyper_connection::hc_head"
_MIX, _PRE_FINISH = "spark_hyper_connection::spark_hc_mix", "spark_hyper_connection::spark_hc_pre_finish"
_HEAD_FINISH = "spark_hyper_connection::spark_hc_head_finish"
_SPREAD_POST = "spark_hyper_connection::spark_hc_post"
_CUH, _CU, _SPARK = "hyper_connection.cuh", "hyper_connection.cu", "spark_hyper_connection.cu"
_PY, _SPARK_PY = "hyper_connection.py", "spark_hyper_connection.py"

_SOFTMAX_CU = "c = live ? c / whole + hc_eps : 0.0f;"
_FIRST_COLUMN_CU = "float column = hc_sum_of_four<4u>(c);"
_EXP_CU = "float c = live ? expf(logit - top) : 0.0f;"
_POST_CU = "post[lane] = 2.0f * hc_sigmoid("
_LOOP_CU = "for (unsigned turn = 1u; turn < iters; ++turn) {"
_ROW_CU = "c = live ? c / (row + hc_eps) : 0.0f;"
_SOFTMAX_PY = "comb = comb / _sums(comb, 2) + eps\n"
_LOOP_PY = "for _ in range(1, iters):"
_POST_PY = "post = np.float32(2.0) * sigmoid("
_SUM_CU = "sum.x += c[i * HC + j] * values[i].x;"
_NARROW_SUM_CU = "sum += c[i * HC + j] * values[i];"
_OUT_PY = "total = total + comb[:, i, :, None] * residual[:, i, None]"
_RMS_CU = "return rsqrtf(hc_total(shares, rows) / static_cast<float>(n) + norm_eps);"
_MEAN_PY = "mean = totals[:, -1:] / np.float32(size) + np.float32(norm_eps)"
_WEIGHT_CU = "hc_sigmoid(hc_total(shares, lane) * r * scale + base[lane]) + hc_eps;"
_WEIGHT_PY = "return sigmoid(mixes * scale + base) + np.float32(hc_eps)"
_TAIL_CU = "for (size_t quad = thread + MIX_DEEP * HC_BLOCK; quad < quads; quad += HC_BLOCK) {"
_HEAD_WEIGHTS_CU = "hc_inverse_rms(shares, HC, n, norm_eps), scale[0], base, hc_eps,"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        _EXPAND,
        "elements of the streams interleaved",
        cu=Patch(_CU, "x[s * size + d] = spark_load(h + d);", "x[d * hc_mult + s] = spark_load(h + d);"),
        py=Patch(
            _PY,
            "np.repeat(to_f32(hidden)[:, None], hc, axis=1)",
            "np.repeat(to_f32(hidden), hc, axis=1).reshape(len(hidden), hc, -1)",
        ),
    ),
    Mutant(
        _EXPAND,
        "tokens one stream apart",
        cu=Patch(_CU, "streams + blockIdx.x * (hc_mult * size);", "streams + blockIdx.x * size;"),
    ),
    Mutant(
        _EXPAND,
        "first stream alone",
        cu=Patch(_CU, "float4*>(x + s * size)[quad] = values;", "float4*>(x + 0u * s)[quad] = values;"),
        py=Patch(
            _PY,
            "return np.repeat(to_f32(hidden)[:, None], hc, axis=1)",
            "return np.where(np.arange(hc)[:, None] > 0, np.float32(0.0), to_f32(hidden)[:, None])",
        ),
    ),
    Mutant(
        _PRE,
        "comb transposed",
        cu=Patch(_CUH, "comb[at] = c;", "comb[j * HC + i] = c;"),
        py=Patch(
            _PY,
            "        comb = comb / (_sums(comb, 1) + eps)\n    return comb",
            "        comb = comb / (_sums(comb, 1) + eps)\n    return comb.swapaxes(1, 2)",
        ),
    ),
    Mutant(
        _PRE,
        "sigmoid for softmax",
        cu=Patch(_CUH, _SOFTMAX_CU, "c = live ? hc_sigmoid(logit) + hc_eps + 0.0f * whole : 0.0f;"),
        py=Patch(_PY, _SOFTMAX_PY, "comb = sigmoid(logits) + eps\n"),
    ),
    Mutant(
        _PRE,
        "post without its factor 2",
        cu=Patch(_CUH, _POST_CU, "post[lane] = hc_sigmoid("),
        py=Patch(_PY, _POST_PY, "post = sigmoid("),
    ),
    Mutant(
        _PRE,
        "post with epsilon",
        cu=Patch(_CUH, _POST_CU, "post[lane] = hc_eps + 2.0f * hc_sigmoid("),
        py=Patch(_PY, _POST_PY, "post = np.float32(hc_eps) + np.float32(2.0) * sigmoid("),
    ),
    Mutant(
        _PRE,
        "a row step first",
        cu=Patch(
            _CUH,
            _FIRST_COLUMN_CU,
            "const float before = hc_sum_of_four<1u>(c);\n    c = live ? c / (before + hc_eps) : 0.0f;\n    "
            "float column = hc_sum_of_four<4u>(c);",
        ),
        py=Patch(_PY, _SOFTMAX_PY, _SOFTMAX_PY + "    comb = comb / (_sums(comb, 2) + eps)\n"),
    ),
    Mutant(
        _PRE,
        "one iteration fewer",
        cu=Patch(_CUH, _LOOP_CU, _LOOP_CU.replace("turn = 1u", "turn = 2u")),
        py=Patch(_PY, _LOOP_PY, "for _ in range(2, iters):"),
    ),
    Mutant(
        _PRE,
        "one iteration more",
        cu=Patch(_CUH, _LOOP_CU, _LOOP_CU.replace("turn = 1u", "turn = 0u")),
        py=Patch(_PY, _LOOP_PY, "for _ in range(iters):"),
    ),
    Mutant(
        _PRE,
        "rows divided without epsilon",
        cu=Patch(_CUH, _ROW_CU, "c = live ? c / row : 0.0f;"),
        py=Patch(
            _PY,
            _LOOP_PY + "\n        comb = comb / (_sums(comb, 2) + eps)",
            _LOOP_PY + "\n        comb = comb / _sums(comb, 2)",
        ),
    ),
    Mutant(
        _PRE,
        "softmax without epsilon",
        cu=Patch(_CUH, _SOFTMAX_CU, "c = live ? c / whole : 0.0f;"),
        py=Patch(_PY, _SOFTMAX_PY, "comb = comb / _sums(comb, 2)\n"),
    ),
    Mutant(
        _PRE,
        "mean over one stream's elements",
        cu=Patch(_CU, "hc_inverse_rms(shares, ROWS, n, norm_eps)", "hc_inverse_rms(shares, ROWS, size, norm_eps)"),
        py=Patch(
            _PY,
            "        mixes = mixes_of(shares, hc * size, norm_eps)\n        pre",
            "        mixes = mixes_of(shares, size, norm_eps)\n        pre",
        ),
    ),
    Mutant(
        _PRE,
        "scale of post for comb",
        cu=Patch(_CUH, "r * scale[2] + base[2u * HC + at]", "r * scale[1] + base[2u * HC + at]"),
        py=Patch(_PY, "mixes[:, 2 * hc :] * scale[2]", "mixes[:, 2 * hc :] * scale[1]"),
    ),
    Mutant(
        _POST,
        "second index of comb summed over",
        cu=Patch(_CUH, _NARROW_SUM_CU, "sum += c[j * HC + i] * values[i];"),
        py=Patch(_PY, _OUT_PY, "total = total + comb[:, :, i, None] * residual[:, i, None]"),
    ),
    Mutant(
        _POST,
        "streams read again after one was written",
        cu=Patch(_CUH, _SUM_CU, "sum.x += c[i * HC + j] * x[i * size + 4u * quad];"),
    ),
    Mutant(
        _POST,
        "the last stream left out",
        cu=Patch(_CUH, _SUM_CU, "sum.x += (i + 1u < HC ? c[i * HC + j] : 0.0f) * values[i].x;"),
        py=Patch(_PY, "for i in range(residual.shape[1]):", "for i in range(residual.shape[1] - 1):"),
    ),
    Mutant(
        _POST,
        "post of the first token for all",
        cu=Patch(_CU, "residual + start, post + token * HC,", "residual + start, post,"),
        py=Patch(_PY, "total = post[:, :, None] * to_f32", "total = post[:1, :, None] * to_f32"),
    ),
    Mutant(
        _HEAD,
        "weights without epsilon",
        cu=Patch(_CUH, _WEIGHT_CU, _WEIGHT_CU.replace(" + hc_eps", "")),
        py=Patch(_PY, _WEIGHT_PY, _WEIGHT_PY.replace(" + np.float32(hc_eps)", "")),
    ),
    Mutant(
        _HEAD,
        "norm without epsilon",
        cu=Patch(_CUH, _RMS_CU, _RMS_CU.replace(" + norm_eps", "")),
        py=Patch(_PY, _MEAN_PY, _MEAN_PY.replace(" + np.float32(norm_eps)", "")),
    ),
    Mutant(
        _HEAD,
        "no base",
        cu=Patch(_CUH, _WEIGHT_CU, _WEIGHT_CU.replace(" + base[lane]", "")),
        py=Patch(_PY, _WEIGHT_PY, _WEIGHT_PY.replace(" + base", "")),
    ),
    Mutant(
        _HEAD,
        "streams rounded to BF16 where they are mixed by element",
        cu=Patch(
            _CUH,
            "sum += weights[i] * x[i * size + d];",
            "sum += weights[i] * __bfloat162float(__float2bfloat16_rn(x[i * size + d]));",
        ),
        py=Patch(
            _PY,
            "total = total + weights[:, s : s + 1] * streams[:, s]",
            "total = total + weights[:, s : s + 1] * to_f32(to_bf16(streams[:, s]))",
        ),
    ),
    Mutant(
        _MIX,
        "elements past whole turns left out",
        cu=Patch(_SPARK, _TAIL_CU, _TAIL_CU.replace("; quad <", "; quad + HC_BLOCK <")),
    ),
    Mutant(
        _MIX,
        "every token with the first one's streams",
        cu=Patch(
            _SPARK,
            "const float* x = streams + token * n;\n    const float* f",
            "const float* x = streams;\n    const float* f",
        ),
        py=Patch(_SPARK_PY, "return shares_of(streams, fn)", "return shares_of(streams[[0] * len(streams)], fn)"),
    ),
    Mutant(
        _MIX,
        "rows one share apart",
        cu=Patch(_SPARK, "% MIX_SPLIT * MIX_BLOCK + threadIdx.x", "% 2u * MIX_BLOCK + threadIdx.x"),
        py=Patch(_SPARK_PY, "return shares_of(streams, fn)", "return np.roll(shares_of(streams, fn), 1, axis=1)"),
    ),
    Mutant(
        _PRE_FINISH,
        "elements past the first 1024 left out",
        cu=Patch(
            _SPARK,
            "    const size_t first = static_cast<size_t>(blockIdx.x) * HC_BLOCK + threadIdx.x;\n"
            "    hc_mixed<HC>(streams + token * n, weights, y + token * size, size, first,\n"
            "                 static_cast<size_t>(gridDim.x - 1u) * HC_BLOCK);",
            "    const size_t first = static_cast<size_t>(threadIdx.x);\n"
            "    hc_mixed<HC>(streams + token * n, weights, y + token * size, size < 1024u ? size : 1024u, first,\n"
            "                 static_cast<size_t>(gridDim.x - 1u) * HC_BLOCK);",
        ),
    ),
    Mutant(
        _PRE_FINISH,
        "shares of the tokens one row too near",
        cu=Patch(_SPARK, "token * ((ROWS + 1u) * HC_SHARES)", "token * (ROWS * HC_SHARES)"),
    ),
    Mutant(
        _PRE_FINISH,
        "comb of the first token for all",
        cu=Patch(
            _SPARK, "post + token * HC, comb + token * (HC * HC));\n        }", "post + token * HC, comb);\n        }"
        ),
        py=Patch(
            _SPARK_PY,
            "return hc_pre_finish(streams, shares, scale, base, iters, norm_eps, hc_eps)",
            "return hc_pre_finish(streams, shares[[0] * len(shares)], scale, base, iters, norm_eps, hc_eps)",
        ),
    ),
    Mutant(
        _HEAD_FINISH,
        "shares of the tokens one row too near",
        cu=Patch(_SPARK, "token * ((HC + 1u) * HC_SHARES)", "token * (HC * HC_SHARES)"),
        py=Patch(
            _SPARK_PY,
            "return hc_head_finish(streams, shares,",
            "return hc_head_finish(streams, np.roll(shares, 1, axis=1),",
        ),
    ),
    Mutant(
        _HEAD_FINISH,
        "squares of the wrong row",
        cu=Patch(_SPARK, "hc_inverse_rms(shares, HC, n, norm_eps)", "hc_inverse_rms(shares, HC - 1u, n, norm_eps)"),
    ),
    Mutant(
        _HEAD_FINISH,
        "half of epsilon",
        cu=Patch(_SPARK, _HEAD_WEIGHTS_CU, _HEAD_WEIGHTS_CU.replace("hc_eps,", "0.5f * hc_eps,")),
        py=Patch(
            _SPARK_PY,
            "base, norm_eps, hc_eps)\n\n\ndef spark_hc_post",
            "base, norm_eps, hc_eps / 2)\n\n\ndef spark_hc_post",
        ),
    ),
    Mutant(
        _SPREAD_POST,
        "second index of comb summed over",
        cu=Patch(_CUH, _SUM_CU, "sum.x += c[j * HC + i] * values[i].x;"),
        py=Patch(
            _SPARK_PY,
            "return hc_post(block_out, residual, post, comb)",
            "return hc_post(block_out, residual, post, comb.swapaxes(1, 2))",
        ),
    ),
    Mutant(
        _SPREAD_POST,
        "residual of the first token for all",
        cu=Patch(_SPARK, "residual + start, post + token * HC", "residual, post + token * HC"),
        py=Patch(
            _SPARK_PY,
            "return hc_post(block_out, residual,",
            "return hc_post(block_out, residual[[0] * len(residual)],",
        ),
    ),
    Mutant(
        _SPREAD_POST,
        "every block does the first elements",
        cu=Patch(
            _SPARK,
            "    const size_t first = static_cast<size_t>(blockIdx.x) * HC_BLOCK + threadIdx.x;\n    hc_spread",
            "    const size_t first = threadIdx.x;\n    hc_spread",
        ),
    ),
)
