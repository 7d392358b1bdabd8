# SPDX-License-Identifier: AGPL-3.0-only
"""DeepSeek-V4's attention from raw projections to the grouped output: the kernels one after the other against the
model's steps in FP64, which misreadings of the model miss by far."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import pytest

from spark_py.ops import spark_v4_grouped_gemv, spark_v4_paged_decode, spark_v4_qkv
from spark_py.runtime.gpu import GpuBackend
from spark_py.testing import BF16, Array, Output, f64, normal, relative_l2, upload

from . import v4_oracle

HEADS, SIZE, ROPE, WINDOW, GROUPS, LORA, BLOCK = 8, 64, 16, 16, 4, 24, 16
LENGTHS = [1, 15, 16, 17, 49]
THETA, EPS = 1e4, 1e-6
U8, E4M3 = np.dtype(np.uint8), np.dtype(ml_dtypes.float8_e4m3fn)


@dataclass(frozen=True)
class Layer:
    """Raw queries [S, heads, d] of the last token of each sequence, raw rows [L, d] of all its tokens, and weights."""

    query: Array
    rows: list[Array]
    kv_norm: Array
    sinks: Array
    wo_a: Array


def draw(rng: np.random.Generator) -> Layer:
    sinks = rng.standard_normal(HEADS).astype(np.float32)
    sinks[:2] = 8.0, -30.0
    rows = [normal(rng, length, SIZE) for length in LENGTHS]
    kv_norm = (1 + 0.3 * rng.standard_normal(SIZE)).astype(BF16)
    wo_a = normal(rng, GROUPS, LORA, HEADS // GROUPS * SIZE, scale=0.1)
    return Layer(normal(rng, len(LENGTHS), HEADS, SIZE), rows, kv_norm, sinks, wo_a)


def run(gpu: GpuBackend, rng: np.random.Generator, layer: Layer, narrow: bool) -> Array:
    """The output [S, groups * lora] by the kernels, over scattered blocks of a pool that is NaN elsewhere."""
    stream, count = gpu.default_stream(), len(LENGTHS)
    counts = [-(-length // BLOCK) for length in LENGTHS]
    blocks, most = sum(counts) + 2, max(counts)
    pages = np.split(rng.permutation(blocks)[: sum(counts)], np.cumsum(counts)[:-1])
    tables = np.zeros((count, most), np.int32)
    for table, mine in zip(tables, pages, strict=True):
        table[: len(mine)] = mine
    places = [np.arange(length) for length in LENGTHS]
    slots = np.concatenate([mine[p // BLOCK] * BLOCK + p % BLOCK for mine, p in zip(pages, places, strict=True)])
    empty = np.full((blocks * BLOCK, SIZE), 0x7F, U8) if narrow else np.full((blocks * BLOCK, SIZE), np.nan, BF16)
    pool, query = Output(gpu, empty.shape, empty.dtype, empty), Output(gpu, layer.query.shape, content=layer.query)
    last = upload(gpu, np.array(LENGTHS, np.uint32) - 1)
    suffix = "_fp8" if narrow else ""
    assemble: Callable[..., None] = getattr(spark_v4_qkv, "spark_v4_kv_assemble" + suffix)
    decode: Callable[..., None] = getattr(spark_v4_paged_decode, "spark_v4_paged_decode" + suffix)
    assemble(
        gpu, gpu.kernel("spark_v4_qkv", "spark_v4_kv_assemble" + suffix), upload(gpu, np.concatenate(layer.rows)),
        upload(gpu, layer.kv_norm), upload(gpu, np.concatenate(places).astype(np.uint32)), pool.ptr,
        upload(gpu, slots.astype(np.int64)), sum(LENGTHS), SIZE, ROPE, EPS, THETA, stream,
    )  # fmt: skip
    spark_v4_qkv.spark_v4_q_norm_rope(
        gpu, gpu.kernel("spark_v4_qkv", "spark_v4_q_norm_rope"), query.ptr, last, count, HEADS, SIZE, ROPE, EPS, THETA,
        stream,
    )  # fmt: skip
    mixed, output = Output(gpu, layer.query.shape), Output(gpu, (count, GROUPS * LORA))
    decode(
        gpu, gpu.kernel("spark_v4_paged_decode", "spark_v4_paged_decode" + suffix), query.ptr, pool.ptr, mixed.ptr,
        upload(gpu, tables), upload(gpu, np.array(LENGTHS, np.int32)), last, upload(gpu, layer.sinks), most, count,
        HEADS, SIZE, ROPE, BLOCK, float(SIZE**-0.5), THETA, WINDOW, stream,
    )  # fmt: skip
    spark_v4_grouped_gemv.spark_v4_grouped_gemv(
        gpu, gpu.kernel("spark_v4_grouped_gemv", "spark_v4_grouped_gemv"), mixed.ptr, upload(gpu, layer.wo_a),
        output.ptr, count, GROUPS, LORA, HEADS // GROUPS * SIZE, stream,
    )  # fmt: skip
    return output.read()


def halves(x: Array, positions: Array, theta: float, rope_dim: int, inverse: bool = False) -> Array:
    """A misreading: the pairs (i, i + rope_dim / 2) of the tail turned."""
    start = x.shape[-1] - rope_dim
    order = np.arange(rope_dim).reshape(2, -1).T.reshape(-1) + start
    paired = x.copy()
    paired[..., start:] = x[..., order]
    result = x.copy()
    result[..., order] = v4_oracle.rope(paired, positions, theta, rope_dim, inverse)[..., start:]
    return result


def model(
    layer: Layer,
    turn: Callable[..., Array] = v4_oracle.rope,
    theta: float = THETA,
    window: int = WINDOW,
    scale: float | None = None,
    back: bool = True,
    plain_values: bool = False,
    sink_value: bool = False,
    sinks: Array | None = None,
) -> Array:
    """The output [S, groups * lora] in FP64; without arguments as the model has it, else one of the misreadings."""
    outputs = []
    for raw, rows in zip(layer.query, layer.rows, strict=True):
        last = np.array([len(rows) - 1])
        query = turn(v4_oracle.rms(f64(raw), EPS)[None], last, theta, ROPE)[0]
        latent = v4_oracle.rms(f64(rows), EPS, f64(layer.kv_norm))
        keys = turn(latent, np.arange(len(rows)), theta, ROPE)
        mixed = weights_of(query, keys, layer.sinks if sinks is None else sinks, window, scale)
        seen = list(v4_oracle.visible(len(rows), window))
        values = (latent if plain_values else keys)[seen]
        output = mixed[:, :-1] @ values + (mixed[:, -1:] if sink_value else 0.0)
        if back:
            output = turn(output[None], last, theta, ROPE, True)[0]
        outputs.append(v4_oracle.grouped(output, f64(layer.wo_a).reshape(GROUPS * LORA, -1), GROUPS))
    return np.stack(outputs)


def weights_of(query: Array, keys: Array, sinks: Array, window: int, scale: float | None) -> Array:
    """The weights [heads, n + 1] of the visible rows and, last, of the sink."""
    seen = keys[list(v4_oracle.visible(len(keys), window))]
    scores = query @ seen.T * (SIZE**-0.5 if scale is None else scale)
    scores = np.concatenate([scores, f64(sinks)[:, None]], axis=1)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True)


# Queries, rows and outputs are rounded to BF16 (2^-9 of an element each, and in scores of about 3 that of the weights);
# E4M3 rows to 2^-4 of an element, in values and in scores.
@pytest.mark.parametrize(("narrow", "most"), [(False, 2.0**-7), (True, 0.08)])
def test_the_kernels_give_the_models_attention(
    gpu: GpuBackend, rng: np.random.Generator, narrow: bool, most: float
) -> None:
    layer = draw(rng)
    got, exact = run(gpu, rng, layer, narrow), model(layer)
    for sequence, length in enumerate(LENGTHS):
        assert relative_l2(got[sequence], exact[sequence]) < most, f"length {length}"


def test_misreadings_of_the_model_are_far_off(gpu: GpuBackend, rng: np.random.Generator) -> None:
    layer = draw(rng)
    got = run(gpu, rng, layer, narrow=False)
    as_bf16 = np.frombuffer(layer.sinks.tobytes(), BF16)[:HEADS].astype(np.float32)
    wrong = {
        "halves turned": model(layer, turn=halves),
        "another base": model(layer, theta=160000.0),
        "window one narrower": model(layer, window=WINDOW - 1),
        "window one wider": model(layer, window=WINDOW + 1),
        "sink in the numerator": model(layer, sink_value=True),
        "no rotation back": model(layer, back=False),
        "values not rotated": model(layer, plain_values=True),
        "scale of a longer row": model(layer, scale=(SIZE * 576 / 512) ** -0.5),
        "sinks read as BF16": model(layer, sinks=as_bf16),
    }
    exact = model(layer)
    for name, output in wrong.items():
        sequences = range(len(LENGTHS))
        far = max(relative_l2(got[s], output[s]) / relative_l2(got[s], exact[s]) for s in sequences)
        assert far > 5.0, f"{name}: {far:.2f} times as far off as the model"


def test_the_two_oracles_agree(rng: np.random.Generator) -> None:
    """Attention with its weights spelt out here, and as `v4_oracle.attention` has it."""
    layer = draw(rng)
    query, keys = f64(layer.query[4]), f64(layer.rows[4])
    weights = weights_of(query, keys, layer.sinks, WINDOW, None)
    expected = v4_oracle.attention(layer.query[4], layer.rows[4], layer.sinks, WINDOW)
    assert np.abs(weights[:, :-1] @ keys[-WINDOW:] - expected).max() < 1e-12
