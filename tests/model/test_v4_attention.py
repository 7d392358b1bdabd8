# SPDX-License-Identifier: AGPL-3.0-only
"""V4Attention, fed token by token, against the model's attention in FP64 over the same inputs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from spark_py.model.layers.deepseek_v4 import V4Attention, V4AttentionShape
from spark_py.model.weight_map import DenseWeight
from spark_py.ops.dense_gemv_bf16_batchm import MAX_ROWS
from spark_py.runtime.errors import CapacityError, InvalidArgumentError, KernelSetError, ReleasedError, UnsupportedError
from spark_py.runtime.gpu import DevicePtr, GpuBackend
from spark_py.runtime.kv_cache import KvCacheConfig, KvCacheDtype, PagedKvCache
from spark_py.testing import Array, Output, assert_same_bits, normal, relative_l2, upload
from tests.model.mtp_forms import hide
from tests.model.v4_support import BLOCK, SHAPE, Pages, attention_of, draw_weights, make_cache, to_device

WINDOW = SHAPE.window
LENGTHS = [3 * WINDOW, 1, WINDOW + 1, WINDOW - 1, WINDOW]
"""The longest first: sequences end in rows other than the first of those that are decoded together."""


def last_outputs(
    gpu: GpuBackend,
    rng: np.random.Generator,
    host: dict[str, Array],
    inputs: list[Array],
    *,
    together: bool,
    dtype: KvCacheDtype = KvCacheDtype.BF16,
    first_position: int = 0,
) -> list[Array]:
    """Each sequence's last output: all sequences that have a token are decoded together, or each alone."""
    pages = Pages.scatter(rng, [len(rows) for rows in inputs])
    last: list[Array] = [np.empty(0)] * len(inputs)
    with (
        make_cache(gpu, pages.blocks, dtype) as cache,
        V4Attention(to_device(gpu, host), SHAPE, cache, gpu, max_rows=len(inputs)) as attention,
    ):
        for token in range(max(map(len, inputs))):
            active = [s for s, rows in enumerate(inputs) if token < len(rows)]
            for group in [active] if together else [[s] for s in active]:
                x = upload(gpu, np.stack([inputs[s][token] for s in group]))
                out = Output(gpu, (len(group), SHAPE.hidden_size))
                meta = pages.meta(gpu, group, token, first_position)
                attention.decode(x, meta, out.ptr, gpu.default_stream())
                got = out.read()
                for row, s in enumerate(group):
                    last[s] = got[row]
    return last


def draw(rng: np.random.Generator) -> tuple[dict[str, Array], list[Array]]:
    return draw_weights(rng), [normal(rng, length, SHAPE.hidden_size) for length in LENGTHS]


# Nine roundings to BF16 (2^-9 of an element at most) lie between x and y, those before the scores enlarged by them;
# E4M3 rows lose up to 2^-4 of an element, in values and in scores.
@pytest.mark.parametrize(("dtype", "most"), [(KvCacheDtype.BF16, 2.0**-6), (KvCacheDtype.FP8, 0.08)])
def test_decode_gives_the_models_attention(
    gpu: GpuBackend, rng: np.random.Generator, dtype: KvCacheDtype, most: float
) -> None:
    host, inputs = draw(rng)
    got = last_outputs(gpu, rng, host, inputs, together=True, dtype=dtype)
    for rows, output in zip(inputs, got, strict=True):
        assert relative_l2(output, attention_of(rows, host)) < most, f"length {len(rows)}"


def test_rows_have_the_same_bits_alone_and_together(gpu: GpuBackend, rng: np.random.Generator) -> None:
    """Also over other block tables: `last_outputs` scatters anew."""
    host, inputs = draw(rng)
    together = last_outputs(gpu, rng, host, inputs[1:], together=True)
    alone = last_outputs(gpu, rng, host, inputs[1:], together=False)
    for a, b in zip(together, alone, strict=True):
        assert_same_bits(a, b)


def test_more_rows_than_a_gemv_takes_are_decoded_together(gpu: GpuBackend, rng: np.random.Generator) -> None:
    host, inputs = draw_weights(rng), [normal(rng, 2, SHAPE.hidden_size) for _ in range(MAX_ROWS + 2)]
    for rows, output in zip(inputs, last_outputs(gpu, rng, host, inputs, together=True), strict=True):
        assert relative_l2(output, attention_of(rows, host)) < 2.0**-6


def test_a_set_without_the_kernels_for_several_gives_the_same_bits(
    gpu: GpuBackend, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, inputs = draw(rng)
    fast = last_outputs(gpu, rng, host, inputs[1:], together=True)
    hide(monkeypatch, gpu, "dense_gemv_bf16_batchm", function="spark_v4_qkv::spark_v4_q_and_kv")
    for a, b in zip(fast, last_outputs(gpu, rng, host, inputs[1:], together=True), strict=True):
        assert_same_bits(a, b)


@pytest.mark.parametrize("module", ["gemv", "rms_norm_vanilla", "spark_v4_qkv", "spark_v4_paged_decode"])
def test_a_missing_kernel_is_an_error_and_nothing_stays(
    gpu: GpuBackend, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    weights = to_device(gpu, draw_weights(rng))
    with make_cache(gpu, 2) as cache:
        before = gpu.live_bytes()
        hide(monkeypatch, gpu, module)
        with pytest.raises(KernelSetError, match=module):
            V4Attention(weights, SHAPE, cache, gpu)
        assert gpu.live_bytes() == before


def test_only_differences_of_positions_count(gpu: GpuBackend, rng: np.random.Generator) -> None:
    """A cache may begin at any position: the output is turned back by the row's own."""
    host, inputs = draw(rng)
    got = last_outputs(gpu, rng, host, inputs[2:3], together=True, first_position=1000)[0]
    assert relative_l2(got, attention_of(inputs[2], host)) < 2.0**-6


def test_misreadings_of_the_model_are_far_off(gpu: GpuBackend, rng: np.random.Generator) -> None:
    host, inputs = draw(rng)
    got, rows = last_outputs(gpu, rng, host, inputs[2:3], together=True)[0], inputs[2]
    near = relative_l2(got, attention_of(rows, host))
    plus_one = {name: host[name] + np.ones_like(host[name]) for name in ("q_norm", "kv_norm")}
    wrong = {
        "heads not normalised": attention_of(rows, host, head_norm=False),
        "no sinks": attention_of(rows, host, sinks=False),
        "no rotation back": attention_of(rows, host, back=False),
        "heads dealt to groups in turn": attention_of(rows, host, mixed_groups=True),
        "q_norm as 1 + w": attention_of(rows, host | {"q_norm": plus_one["q_norm"]}),
        "kv_norm as 1 + w": attention_of(rows, host | {"kv_norm": plus_one["kv_norm"]}),
        "window one wider": attention_of(rows, host, replace(SHAPE, window=WINDOW + 1)),
        "window one narrower": attention_of(rows, host, replace(SHAPE, window=WINDOW - 1)),
        "another base": attention_of(rows, host, replace(SHAPE, rope_theta=160000.0)),
    }
    for name, output in wrong.items():
        assert relative_l2(got, output) > 4 * near, name


def test_a_tensor_that_does_not_fit_is_named_and_nothing_stays(gpu: GpuBackend, rng: np.random.Generator) -> None:
    weights = to_device(gpu, draw_weights(rng))
    with make_cache(gpu, 2) as cache:
        before = gpu.live_bytes()
        for name in ("wq_a", "q_norm", "wq_b", "wkv", "kv_norm", "wo_a", "wo_b"):
            other: Any = {name: DenseWeight(getattr(weights, name).weight, (3, 5))}
            with pytest.raises(InvalidArgumentError, match=f"mtp.attn.{name}"):
                V4Attention(replace(weights, **other), SHAPE, cache, gpu, name="mtp.attn")
        with pytest.raises(InvalidArgumentError, match="attn_sink"):
            V4Attention(replace(weights, attn_sink=DevicePtr.NULL), SHAPE, cache, gpu)
        with pytest.raises(InvalidArgumentError, match="max_rows"):
            V4Attention(weights, SHAPE, cache, gpu, max_rows=0)
        assert gpu.live_bytes() == before


def test_a_cache_that_does_not_fit_is_refused(gpu: GpuBackend, rng: np.random.Generator) -> None:
    weights, dim = to_device(gpu, draw_weights(rng)), SHAPE.head_dim
    for config, error in (
        (KvCacheConfig(BLOCK, 1, dim, 1), InvalidArgumentError),
        (KvCacheConfig(BLOCK, 1, 2 * dim, 1, shared_kv=True), InvalidArgumentError),
        (KvCacheConfig(BLOCK, 2, dim, 1, shared_kv=True), InvalidArgumentError),
        (KvCacheConfig(BLOCK, 1, dim, 1, KvCacheDtype.NVFP4, shared_kv=True), UnsupportedError),
    ):
        with PagedKvCache(config, 1, gpu) as cache, pytest.raises(error):
            V4Attention(weights, SHAPE, cache, gpu)


def test_scales_of_an_fp8_cache_are_refused_also_later(gpu: GpuBackend, rng: np.random.Generator) -> None:
    pages = Pages.scatter(rng, [1])
    with (
        make_cache(gpu, pages.blocks, KvCacheDtype.FP8) as cache,
        V4Attention(to_device(gpu, draw_weights(rng)), SHAPE, cache, gpu) as attention,
    ):
        cache.set_fp8_scales(0, 0.5, 0.5)
        x = upload(gpu, normal(rng, 1, SHAPE.hidden_size))
        with pytest.raises(InvalidArgumentError, match="fp8 scales"):
            attention.decode(x, pages.meta(gpu, [0], 0, 0), x, gpu.default_stream())


def test_rows_beyond_the_scratch_and_use_after_release_raise(gpu: GpuBackend, rng: np.random.Generator) -> None:
    pages = Pages.scatter(rng, [1, 1])
    x, stream = upload(gpu, normal(rng, 2, SHAPE.hidden_size)), gpu.default_stream()
    with make_cache(gpu, pages.blocks) as cache:
        attention = V4Attention(to_device(gpu, draw_weights(rng)), SHAPE, cache, gpu)
        with pytest.raises(CapacityError, match="rows is 2"):
            attention.decode(x, pages.meta(gpu, [0, 1], 0, 0), x, stream)
        attention.release()
        attention.release()
        with pytest.raises(ReleasedError):
            attention.decode(x, pages.meta(gpu, [0], 0, 0), x, stream)


@pytest.mark.parametrize(
    "wrong",
    [{"hidden_size": 36}, {"head_dim": 520}, {"o_groups": 3}, {"window": 0}, {"rope_dim": 15}, {"norm_eps": 0.0}],
)
def test_sizes_that_the_kernels_do_not_take_raise(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError):
        V4AttentionShape(**wrong)
