# SPDX-License-Identifier: AGPL-3.0-only
"""The KV pool: formats, sizes, addresses, FP8 scales, owners and release. Blocks are in test_kv_blocks.py.

Every number in a table was worked out by hand; none comes from the code under test.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from spark_py.runtime import open_backend
from spark_py.runtime.errors import (
    InvalidArgumentError,
    KvBlockRangeError,
    OutOfBoundsError,
    OutOfDeviceMemoryError,
    ReleasedError,
    UnsupportedError,
)
from spark_py.runtime.gpu import DevicePtr, GpuBackend
from spark_py.runtime.kv_cache import BlockPool, KvBlockLayout, KvCacheConfig, KvCacheDtype, KvScales, PagedKvCache

BF16, FP8, NVFP4 = KvCacheDtype.BF16, KvCacheDtype.FP8, KvCacheDtype.NVFP4
SMALL = KvCacheConfig(block_size=4, num_kv_heads=2, head_dim=16, num_layers=2)


def cache_of(gpu: GpuBackend, config: KvCacheConfig = SMALL, blocks: int = 5) -> PagedKvCache:
    return PagedKvCache(config, blocks, gpu)


# ---------------------------------------------------------------- formats and sizes


@pytest.mark.parametrize(
    ("dtype", "n", "data", "scales"),
    [
        (BF16, 16_384, 32_768, 0),
        (FP8, 16_384, 16_384, 0),
        (NVFP4, 16_384, 8192, 1024),
        (NVFP4, 16, 8, 1),
        (BF16, 1, 2, 0),
        (FP8, 0, 0, 0),
    ],
)
def test_bytes_of_a_side(dtype: KvCacheDtype, n: int, data: int, scales: int) -> None:
    assert (dtype.data_bytes(n), dtype.scale_bytes(n), dtype.side_bytes(n)) == (data, scales, data + scales)


def test_nvfp4_has_no_parts_of_a_group() -> None:
    with pytest.raises(InvalidArgumentError, match="16"):
        NVFP4.side_bytes(24)
    with pytest.raises(InvalidArgumentError, match="head_dim of layer 0"):
        KvCacheConfig(16, 2, 24, 1, NVFP4)
    KvCacheConfig(16, 2, 24, 1, FP8)


@pytest.mark.parametrize(("text", "dtype"), [("bf16", BF16), ("fp8", FP8), ("nvfp4", NVFP4)])
def test_names(text: str, dtype: KvCacheDtype) -> None:
    assert KvCacheDtype.parse(text) is dtype
    assert dtype.value == text


@pytest.mark.parametrize(
    "text",
    [
        "turbo2", "turbo3", "turbo4", "turbo8", "turbo4k_turbo3v", "turbo4k_turbo8v", "turbo3k_turbo8v",
        "bf16k_turbo4v", "bf16k_turbo3v", "bf16k_turbo2v", "fp8k_turbo4v", "fp8k_turbo3v", "fp8k_turbo2v",
        "turbo4k3v", "bf16k4v", "fp8k2v",
    ],
)  # fmt: skip
def test_formats_that_are_known_and_not_offered(text: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"{text} .*bf16, fp8, nvfp4"):
        KvCacheDtype.parse(text)


@pytest.mark.parametrize("text", ["", "fp16", "BF16", " bf16", "turbo5", "fp8 ", "turbo"])
def test_unknown_names(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match="unsupported --kv-cache-dtype") as error:
        KvCacheDtype.parse(text)
    assert error.value.value == text


# Drafter pools: 16 tokens a block, one layer, K and V.
@pytest.mark.parametrize(
    ("heads", "dtype", "blocks", "block_bytes", "total"),
    [
        (4, BF16, 15_203, 65_536, 996_343_808),
        (4, BF16, 8200, 65_536, 537_395_200),
        (4, BF16, 8000, 65_536, 524_288_000),
        (2, BF16, 20_000, 32_768, 655_360_000),
        (2, FP8, 8193, 16_384, 134_234_112),
        (2, BF16, 8193, 32_768, 268_468_224),
    ],
)
def test_drafter_pools(heads: int, dtype: KvCacheDtype, blocks: int, block_bytes: int, total: int) -> None:
    config = KvCacheConfig(16, heads, 256, 1, dtype)
    assert config.block_bytes() == block_bytes
    assert blocks * config.block_bytes() == total
    assert PagedKvCache.compute_num_blocks(config, total) == blocks
    assert PagedKvCache.compute_num_blocks(config, total - 1) == blocks - 1
    assert PagedKvCache.compute_num_blocks(config, total + block_bytes - 1) == blocks


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        # The V4 drafter as the engine sizes it: 44 slots of K and V, latent rows of 576.
        (KvCacheConfig(16, 1, 576, 44), 1_622_016),
        # One slot whose K and V are one pool.
        (KvCacheConfig(16, 1, 576, 1, shared_kv=True), 18_432),
        (KvCacheConfig(16, 8, 128, 2, NVFP4), 36_864),
        # Layers 0 and 1 named, layer 2 uniform: 2 * (2048 + 1024 + 4096).
        (KvCacheConfig(4, 4, 128, 3, BF16, [FP8, FP8], [(4, 128), (2, 128)]), 14_336),
        (KvCacheConfig(4, 4, 128, 2, BF16, [NVFP4]), 10_496),  # 2 * (1024 + 128 + 4096)
    ],
)
def test_block_bytes(config: KvCacheConfig, expected: int) -> None:
    assert config.block_bytes() == expected
    assert PagedKvCache.compute_num_blocks(config, 0) == 0
    assert PagedKvCache.compute_num_blocks(config, expected - 1) == 0
    assert PagedKvCache.compute_num_blocks(config, 3 * expected) == 3


def test_layers_fall_back_to_the_uniform_value() -> None:
    config = KvCacheConfig(4, 4, 128, 3, BF16, [FP8], [(8, 64), (2, 32)])
    assert [config.dtype_for_layer(layer) for layer in range(3)] == [FP8, BF16, BF16]
    assert [config.dims_for_layer(layer) for layer in range(3)] == [(8, 64), (2, 32), (4, 128)]
    assert [config.block_bytes_for_layer(layer) for layer in range(3)] == [2048, 512, 4096]
    for layer in (-1, 3, 2.0, True):
        with pytest.raises(InvalidArgumentError, match="layer"):
            config.dtype_for_layer(layer)  # type: ignore[arg-type]


def test_a_configuration_is_not_moved_by_its_lists() -> None:
    dims = [(4, 128)]
    config = KvCacheConfig(4, 4, 128, 1, layer_dims=dims)
    dims[0] = (8, 256)
    assert config.dims_for_layer(0) == (4, 128)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"block_size": 0}, "block_size"),
        ({"num_kv_heads": -1}, "num_kv_heads"),
        ({"head_dim": 2.5}, "head_dim"),
        ({"num_layers": 0}, "num_layers"),
        ({"layer_dtypes": [BF16] * 3}, "len(layer_dtypes)"),
        ({"layer_dims": [(1, 1)] * 3}, "len(layer_dims)"),
        ({"layer_dims": [(0, 16)]}, "num_kv_heads of layer 0"),
        ({"layer_dims": [(2, 16), (2, 0)]}, "head_dim of layer 1"),
        ({"dtype": "bf16"}, "dtype"),
        ({"layer_dtypes": ["fp8"]}, "dtype"),
        ({"cache_blocks_per_seq": 0}, "cache_blocks_per_seq"),
    ],
)
def test_bad_configurations(changes: dict[str, Any], name: str) -> None:
    fields: dict[str, Any] = {"block_size": 4, "num_kv_heads": 2, "head_dim": 16, "num_layers": 2, **changes}
    with pytest.raises(InvalidArgumentError) as error:
        KvCacheConfig(**fields)
    assert error.value.name == name


# ---------------------------------------------------------------- layout


def test_layout_is_a_property_of_the_cache(gpu: GpuBackend) -> None:
    """Token-major values, then linear scales, K and V alike, whatever the device."""
    with cache_of(gpu, KvCacheConfig(4, 2, 32, 1, NVFP4)) as cache:
        layout = cache.layout(0)
        assert layout == KvBlockLayout(NVFP4, 4, 2, 32, "token_major", "linear")
        assert layout != KvBlockLayout(FP8, 4, 2, 32)
        assert (layout.data_bytes, layout.scale_bytes, layout.block_bytes) == (128, 16, 144)
        assert layout.element(0, 0, 31) == 31
        assert layout.element(0, 1, 0) == 32
        assert layout.element(3, 1, 31) == 255
        assert layout.byte_of(0, 0, 4) == layout.byte_of(0, 0, 5) == 2
        assert layout.byte_of(3, 1, 31) == 127
        assert layout.scale_byte_of(0, 0, 0) == layout.scale_byte_of(0, 0, 15) == 128
        assert layout.scale_byte_of(0, 0, 16) == 129
        assert layout.scale_byte_of(1, 0, 0) == 132
        assert layout.scale_byte_of(3, 1, 31) == 143
    bf16 = KvBlockLayout(BF16, 4, 2, 32)
    assert bf16.byte_of(1, 1, 3) == 2 * (64 + 32 + 3)
    assert KvBlockLayout(FP8, 4, 2, 32).byte_of(1, 1, 3) == 99
    with pytest.raises(UnsupportedError, match="bf16"):
        bf16.scale_byte_of(0, 0, 0)
    for place in ((4, 0, 0), (0, 2, 0), (0, 0, 32), (-1, 0, 0)):
        with pytest.raises(InvalidArgumentError):
            bf16.element(*place)


def test_k_and_v_scale_patterns_stay_apart(gpu: GpuBackend, rng: np.random.Generator) -> None:
    with cache_of(gpu, KvCacheConfig(4, 2, 32, 2, NVFP4)) as cache:
        written = {}
        for layer in range(2):
            for block in range(5):
                k, v = rng.integers(0, 256, (2, 144), np.uint8)
                cache.write_block(layer, block, k, v)
                written[layer, block] = (k, v)
        layout = cache.layout(0)
        for (layer, block), (k, v) in written.items():
            read_k, read_v = cache.read_block(layer, block)
            np.testing.assert_array_equal(read_k, k)
            np.testing.assert_array_equal(read_v, v)
            at = layout.scale_byte_of(2, 1, 16)
            one = np.empty(1, np.uint8)
            gpu.copy_d2h(cache.v_cache_ptr(layer, block).offset(at), one)
            assert one[0] == v[at]


# ---------------------------------------------------------------- addresses


def test_pools_and_strides(gpu: GpuBackend) -> None:
    before = gpu.live_bytes()
    config = KvCacheConfig(4, 2, 16, 3, BF16, [FP8, NVFP4])
    with cache_of(gpu, config, 7) as cache:
        assert [cache.block_stride_bytes_for_layer(layer) for layer in range(3)] == [128, 72, 256]
        assert cache.total_bytes() == 7 * 2 * (128 + 72 + 256) == gpu.live_bytes() - before
        assert cache.block_size() == 4
        for layer, stride in enumerate((128, 72, 256)):
            assert cache.k_cache_ptr(layer, 0) == cache.k_pool_ptr(layer)
            assert cache.v_cache_ptr(layer, 6) == cache.v_pool_ptr(layer).offset(6 * stride)
            # The pools are what they claim to be, named, and nothing more.
            for ptr, name in ((cache.k_pool_ptr(layer), f"kv.k[{layer}]"), (cache.v_pool_ptr(layer), f"kv.v[{layer}]")):
                gpu.memset(ptr, 0, 7 * stride)
                with pytest.raises(OutOfBoundsError) as error:
                    gpu.memset(ptr, 0, 7 * stride + 1)
                assert name in str(error.value)
        bases = {p for layer in range(3) for p in (cache.k_pool_ptr(layer), cache.v_pool_ptr(layer))}
        assert len(bases) == 6
        for block in (-1, 7):
            with pytest.raises(KvBlockRangeError) as out:
                cache.k_cache_ptr(0, block)
            assert (out.value.block, out.value.num_blocks) == (block, 7)
        with pytest.raises(InvalidArgumentError, match=r"layer is 3: the cache has layers 0 \.\. 2"):
            cache.k_pool_ptr(3)
    assert gpu.live_bytes() == before


def test_stride_in_elements(gpu: GpuBackend) -> None:
    with cache_of(gpu, KvCacheConfig(16, 2, 256, 1, FP8), 1) as cache:
        assert cache.cache_stride() == cache.cache_stride(0) == 8192
    with cache_of(gpu, KvCacheConfig(16, 2, 256, 2, BF16), 1) as cache:
        assert cache.cache_stride() == 8192
    with cache_of(gpu, KvCacheConfig(4, 2, 16, 2, BF16, layer_dims=[(4, 16)]), 1) as cache:
        assert [cache.cache_stride(layer) for layer in range(2)] == [256, 128]
        with pytest.raises(InvalidArgumentError, match=r"\[128, 256\]"):
            cache.cache_stride()
    with cache_of(gpu, KvCacheConfig(4, 2, 16, 2, BF16, [NVFP4]), 1) as cache:
        assert cache.cache_stride(1) == 128
        with pytest.raises(UnsupportedError, match="block_stride_bytes_for_layer"):
            cache.cache_stride(0)


def test_shared_pool_has_one_side(gpu: GpuBackend, rng: np.random.Generator) -> None:
    before = gpu.live_bytes()
    with cache_of(gpu, KvCacheConfig(16, 1, 576, 1, BF16, shared_kv=True), 3) as cache:
        assert cache.v_pool_ptr(0) == cache.k_pool_ptr(0)
        assert cache.v_cache_ptr(0, 2) == cache.k_cache_ptr(0, 2)
        assert gpu.live_bytes() - before == cache.total_bytes() == 3 * 18_432
        rows = rng.standard_normal((16, 576)).astype(ml_dtypes.bfloat16)
        cache.write_block(0, 1, rows)
        (read,) = cache.read_block(0, 1)
        np.testing.assert_array_equal(read.view(np.uint16), rows.view(np.uint16).ravel())
        with pytest.raises(InvalidArgumentError, match="sides"):
            cache.write_block(0, 1, rows, rows)
    assert gpu.live_bytes() == before


def test_blocks_are_filled_in_every_layer_and_nowhere_else(gpu: GpuBackend) -> None:
    config = KvCacheConfig(4, 2, 16, 3, BF16, [FP8, NVFP4])
    with cache_of(gpu, config, 3) as cache:
        for layer, stride in enumerate((128, 72, 256)):
            for block in range(3):
                cache.write_block(layer, block, bytes([0x11]) * stride, bytes([0x22]) * stride)
        stream = gpu.default_stream()
        cache.zero_block(1, stream)
        cache.poison_block(2, stream)
        gpu.synchronize(stream)
        for layer in range(3):
            for block, (k, v) in enumerate([(0x11, 0x22), (0, 0), (0xFF, 0xFF)]):
                sides = cache.read_block(layer, block)
                assert [set(side.tolist()) for side in sides] == [{k}, {v}], (layer, block)
        poisoned = cache.read_block(2, 2)[0]
        assert np.isnan(poisoned.view(ml_dtypes.bfloat16).astype(np.float32)).all()
        assert np.isnan(poisoned.view(ml_dtypes.float8_e4m3fn).astype(np.float32)).all()


def test_a_write_of_the_wrong_size_writes_nothing(gpu: GpuBackend) -> None:
    with cache_of(gpu) as cache:
        cache.write_block(0, 0, bytes(256), bytes(256))
        for sides in ((b"\1" * 256,), (b"\1" * 256, b"\1" * 255), (b"\1" * 256, b"\1" * 257), (b"\1" * 256,) * 3):
            with pytest.raises(InvalidArgumentError):
                cache.write_block(0, 0, *sides)
        assert all(not side.any() for side in cache.read_block(0, 0))


@pytest.fixture
def sparse_gpu(backend_name: str, gpu: GpuBackend) -> Iterator[GpuBackend]:
    """Memory that costs nothing until it is touched: the host's without poison; a GPU has enough of it."""
    if backend_name != "host":
        yield gpu
        return
    with open_backend("host", poison=False) as backend:
        yield backend


@pytest.mark.no_sanitizer("4 GiB of shadow memory")
def test_offsets_beyond_two_to_the_31_elements(sparse_gpu: GpuBackend, rng: np.random.Generator) -> None:
    # 2**15 elements of 2 bytes a block: block 65536 starts at element 2**31 and byte 2**32.
    config = KvCacheConfig(16, 8, 256, 1, BF16, shared_kv=True)
    with PagedKvCache(config, 65_540, sparse_gpu) as cache:
        base = cache.k_pool_ptr(0).address
        assert cache.cache_stride() == 32_768
        assert cache.k_cache_ptr(0, 65_536).address - base == 4_294_967_296
        assert cache.k_cache_ptr(0, np.int32(65_539)).address - base == 4_295_163_904
        for alias in (0, 3, 32_771):  # where offsets cut to 32 bits, or to 31 with a sign, would land
            sparse_gpu.memset(cache.k_cache_ptr(0, alias), 0, 65_536)
        row = rng.integers(1, 256, 65_536, np.uint8)
        cache.write_block(0, 65_539, row)
        np.testing.assert_array_equal(cache.read_block(0, 65_539)[0], row)
        for alias in (0, 3, 32_771):
            assert not cache.read_block(0, alias)[0].any()


# ---------------------------------------------------------------- FP8 scales


def test_fp8_scales(gpu: GpuBackend) -> None:
    with cache_of(gpu, KvCacheConfig(4, 2, 16, 3, FP8, [BF16])) as cache:
        assert cache.fp8_scales(1) == KvScales(1.0, 1.0)
        cache.set_fp8_scales(1, 0.003, np.float32(2.5))
        # Both sides, writer and reader, get the FP32 value.
        assert cache.fp8_scales(1) == KvScales(float(np.float32(0.003)), 2.5)
        assert cache.fp8_scales(2) == KvScales(1.0, 1.0)
        for operation in (lambda: cache.fp8_scales(0), lambda: cache.set_fp8_scales(0, 1.0, 1.0)):
            with pytest.raises(UnsupportedError, match="bf16"):
                operation()


@pytest.mark.parametrize(
    "bad", [0, 0.0, -0.0, -1.0, float("nan"), float("inf"), -float("inf"), 1e39, 1e-46, 1e-45, True, "1.0x", None]
)
def test_bad_fp8_scales_are_refused(gpu: GpuBackend, bad: Any) -> None:
    with cache_of(gpu, KvCacheConfig(4, 2, 16, 1, FP8)) as cache:
        cache.set_fp8_scales(0, 0.5, 0.25)
        for name, k, v in (("k_scale", bad, 1.0), ("v_scale", 1.0, bad)):
            with pytest.raises(InvalidArgumentError) as error:
                cache.set_fp8_scales(0, k, v)
            assert error.value.name == name
            assert cache.fp8_scales(0) == KvScales(0.5, 0.25)


# ---------------------------------------------------------------- owners, occupancy, release


def test_owners() -> None:
    pool = BlockPool(4)
    pool.alloc_blocks(2, "seq 7")
    pool.alloc_block()
    assert [pool.owner_of(block) for block in range(4)] == ["seq 7", "seq 7", "", ""]
    assert pool.leak_report() == {"seq 7": [0, 1], "": [2]}
    pool.inc_ref(0)
    pool.free_block(0)
    assert pool.owner_of(0) == "seq 7"
    pool.free_block(0)
    assert pool.owner_of(0) == ""
    assert pool.alloc_block("seq 8") == 0
    assert pool.leak_report() == {"seq 8": [0], "seq 7": [1], "": [2]}


def test_the_primary_pool_is_the_one_that_was_marked(gpu: GpuBackend) -> None:
    draft, target = cache_of(gpu), cache_of(gpu)
    target.mark_primary()
    assert PagedKvCache.primary(gpu) is target
    draft.alloc_blocks(5)
    target.alloc_blocks(2)
    assert (draft.occupancy(), target.occupancy()) == (1.0, pytest.approx(0.4))
    assert PagedKvCache.primary(gpu) is target
    draft.mark_primary()
    assert PagedKvCache.primary(gpu) is draft
    draft.free_blocks(range(5))
    draft.release()
    assert PagedKvCache.primary(gpu) is None
    target.free_blocks([0, 1])
    target.mark_primary()
    target.release()
    del target
    gc.collect()
    assert PagedKvCache.primary(gpu) is None


def test_release(gpu: GpuBackend, caplog: pytest.LogCaptureFixture) -> None:
    before = gpu.live_bytes()
    cache = cache_of(gpu)
    cache.alloc_blocks(2, "seq 1")
    cache.alloc_block("seq 2")
    with caplog.at_level(logging.WARNING, "spark_py.runtime"):
        cache.release()
        cache.release()
    assert gpu.live_bytes() == before
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "seq 1: [0, 1]; seq 2: [2]" in caplog.text
    assert (cache.num_blocks(), cache.num_free_blocks(), cache.occupancy(), cache.total_bytes()) == (0, 0, 0.0, 0)
    uses: list[Callable[[], object]] = [
        cache.alloc_block,
        cache.try_alloc_block,
        lambda: cache.k_pool_ptr(0),
        lambda: cache.v_cache_ptr(0, 0),
        cache.mark_primary,
    ]
    for use in uses:
        with pytest.raises(ReleasedError, match="kv"):
            use()
    with pytest.raises(KvBlockRangeError, match="released"):
        cache.free_block(0)
    assert cache.free_blocks([]) == 0


def test_release_without_held_blocks_is_silent(gpu: GpuBackend, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "spark_py.runtime"), cache_of(gpu) as cache:
        cache.free_blocks(cache.alloc_blocks(5))
    assert not caplog.records


def test_a_failed_construction_leaves_nothing(gpu: GpuBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    before = gpu.live_bytes()
    alloc = gpu.alloc

    def failing(nbytes: int, label: str = "") -> DevicePtr:
        if label == "mtp.v[1]":
            raise OutOfDeviceMemoryError(nbytes, 0, 0, "test")
        return alloc(nbytes, label)

    monkeypatch.setattr(gpu, "alloc", failing)
    with pytest.raises(OutOfDeviceMemoryError):
        PagedKvCache(SMALL, 5, gpu, "mtp")
    assert gpu.live_bytes() == before


def test_release_after_the_backend(backend_name: str) -> None:
    """A backend that closes first frees the pools; the cache must not fail on that."""
    with open_backend(backend_name) as backend:  # type: ignore[arg-type]
        cache = cache_of(backend)
    cache.release()
