# SPDX-License-Identifier: AGPL-3.0-only
"""PagedKvCache: the pools of K and V, and the blocks of them that sequences hold.

Twin of `kv_cache.rs`. All layers share block indices; block b of a layer starts b strides after its pool, and kernels
take the pool's base. Offsets are exact integers of any size.
"""

from __future__ import annotations

import logging
import weakref
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np

from .errors import (
    InvalidArgumentError,
    ReleasedError,
    SparkError,
    UnsupportedError,
)
from .gpu import Buffer, DevicePtr, GpuBackend, StreamLike
from .kv_blocks import BlockPool
from .kv_config import NVFP4_GROUP_SIZE, KvBlockLayout, KvCacheConfig, KvCacheDtype
from .sizes import count

__all__ = [
    "NVFP4_GROUP_SIZE",
    "BlockPool",
    "KvBlockLayout",
    "KvCacheConfig",
    "KvCacheDtype",
    "KvScales",
    "PagedKvCache",
]

log = logging.getLogger("spark_py.runtime")

POISON = 0xFF
"""Every element is NaN, in BF16 and in E4M3; NVFP4 values get NaN scales."""

_primary: weakref.WeakKeyDictionary[GpuBackend, weakref.ref[PagedKvCache]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class KvScales:
    """What stored FP8 values are multiplied by, K and V; FP32."""

    k: float = 1.0
    v: float = 1.0


class PagedKvCache(BlockPool):
    """`num_blocks` blocks of `config.block_size` tokens: a K and a V pool a layer, uninitialised, one allocation each.

    With `shared_kv` the V pool is the K pool. `release` frees the pools; the cache is also a context manager.
    OutOfDeviceMemoryError leaves nothing allocated. `label` begins the names of the allocations.
    """

    def __init__(self, config: KvCacheConfig, num_blocks: int, gpu: GpuBackend, label: str = "kv") -> None:
        super().__init__(num_blocks)
        self._gpu = gpu
        self._label = label
        self._config = config
        self._layouts = tuple(config.layout_for_layer(layer) for layer in range(config.num_layers))
        self._scales = [KvScales()] * config.num_layers
        self._k_pools: list[DevicePtr] = []
        self._v_pools: list[DevicePtr] = []
        self._released = False
        try:
            for layer, layout in enumerate(self._layouts):
                size = num_blocks * layout.block_bytes
                self._k_pools.append(gpu.alloc(size, f"{label}.k[{layer}]"))
                if not config.shared_kv:
                    self._v_pools.append(gpu.alloc(size, f"{label}.v[{layer}]"))
        except BaseException:
            self.release()
            raise

    @staticmethod
    def compute_num_blocks(config: KvCacheConfig, available: int) -> int:
        """Blocks that `available` bytes hold, over all layers and both sides; rounded down, maybe 0."""
        return count("available", available, 0) // config.block_bytes()

    # ------------------------------------------------------------ shape

    @property
    def config(self) -> KvCacheConfig:
        """What the cache was made for."""
        return self._config

    def block_size(self) -> int:
        """Tokens in a block."""
        return self._config.block_size

    def total_bytes(self) -> int:
        """Device bytes of all pools; 0 after release."""
        return self.num_blocks() * self._config.block_bytes()

    def layout(self, layer: int) -> KvBlockLayout:
        """What a kernel that reads or writes this layer must agree with."""
        return self._layouts[self._layer(layer)]

    def cache_stride(self, layer: int | None = None) -> int:
        """Elements from one block to the next, as BF16 and FP8 kernels take it. Without `layer`, the value that all
        layers share; InvalidArgumentError where they differ. UnsupportedError for packed layers, whose stride is in
        bytes."""
        layouts = self._layouts if layer is None else (self.layout(layer),)
        strides = {layout.elements for layout in layouts}
        if len(strides) > 1:
            raise InvalidArgumentError(
                "layer", layer, f"the strides of the layers differ ({sorted(strides)}): name one"
            )
        if any(layout.dtype is KvCacheDtype.NVFP4 for layout in layouts):
            raise UnsupportedError("an nvfp4 cache has no stride in elements: use block_stride_bytes_for_layer")
        return strides.pop()

    def block_stride_bytes_for_layer(self, layer: int) -> int:
        """Bytes from one block to the next, on either side."""
        return self.layout(layer).block_bytes

    def _layer(self, layer: int) -> int:
        number = count("layer", layer, 0)
        if number >= len(self._layouts):
            raise InvalidArgumentError("layer", number, f"the cache has layers 0 .. {len(self._layouts) - 1}")
        return number

    # ------------------------------------------------------------ addresses

    def k_pool_ptr(self, layer: int) -> DevicePtr:
        """Base of a layer's K pool."""
        return self._pool(self._k_pools, layer)

    def v_pool_ptr(self, layer: int) -> DevicePtr:
        """Base of a layer's V pool."""
        return self._pool(self._k_pools if self._config.shared_kv else self._v_pools, layer)

    def k_cache_ptr(self, layer: int, block: int) -> DevicePtr:
        """Start of a block's K side."""
        return self.k_pool_ptr(layer).offset(self._index(block) * self.block_stride_bytes_for_layer(layer))

    def v_cache_ptr(self, layer: int, block: int) -> DevicePtr:
        """Start of a block's V side."""
        return self.v_pool_ptr(layer).offset(self._index(block) * self.block_stride_bytes_for_layer(layer))

    def _pool(self, pools: list[DevicePtr], layer: int) -> DevicePtr:
        if self._released:
            raise ReleasedError(f"KV cache '{self._label}' was released")
        return pools[self._layer(layer)]

    # ------------------------------------------------------------ FP8 scales

    def fp8_scales(self, layer: int) -> KvScales:
        """Scales of an FP8 layer, for who writes and who reads it; 1.0 until set. UnsupportedError for other dtypes."""
        if self.layout(layer).dtype is not KvCacheDtype.FP8:
            raise UnsupportedError(f"layer {layer} is {self.layout(layer).dtype.value}: only fp8 has tensor scales")
        return self._scales[layer]

    def set_fp8_scales(self, layer: int, k_scale: float, v_scale: float) -> None:
        """Set both scales of an FP8 layer, rounded to FP32. InvalidArgumentError unless they are positive and finite
        in FP32, reciprocals included, since kernels multiply by them. Set them before the first write."""
        self.fp8_scales(layer)
        self._scales[layer] = KvScales(fp8_scale("k_scale", k_scale), fp8_scale("v_scale", v_scale))

    # ------------------------------------------------------------ content

    def zero_block(self, block: int, stream: StreamLike) -> None:
        """Queue zeros for a block, in all layers and on both sides."""
        self._fill(block, 0, stream)

    def poison_block(self, block: int, stream: StreamLike) -> None:
        """Queue NaN for a block, in all layers and on both sides, so that a read before a write shows."""
        self._fill(block, POISON, stream)

    def _fill(self, block: int, value: int, stream: StreamLike) -> None:
        for layer, layout in enumerate(self._layouts):
            self._gpu.memset_async(self.k_cache_ptr(layer, block), value, layout.block_bytes, stream)
            if not self._config.shared_kv:
                self._gpu.memset_async(self.v_cache_ptr(layer, block), value, layout.block_bytes, stream)

    def read_block(self, layer: int, block: int) -> tuple[np.ndarray[Any, np.dtype[np.uint8]], ...]:
        """Bytes of a block's sides, (K, V), or (latent rows,) with `shared_kv`; waits for all queued work."""
        sides = []
        for ptr in self._side_ptrs(layer, block):
            side = np.empty(self.block_stride_bytes_for_layer(layer), np.uint8)
            self._gpu.copy_d2h(ptr, side)
            sides.append(side)
        return tuple(sides)

    def write_block(self, layer: int, block: int, *sides: Buffer) -> None:
        """Replace a block's sides, as `read_block` gives them; done on return. InvalidArgumentError for another number
        of sides or of bytes, before anything is written."""
        ptrs = self._side_ptrs(layer, block)
        stride = self.block_stride_bytes_for_layer(layer)
        if len(sides) != len(ptrs):
            raise InvalidArgumentError("sides", len(sides), f"a block of this cache has {len(ptrs)}")
        for side in sides:
            if (nbytes := _nbytes(side)) != stride:
                raise InvalidArgumentError("bytes of a side", nbytes, f"layer {layer} has {stride}")
        for ptr, side in zip(ptrs, sides, strict=True):
            self._gpu.copy_h2d(side, ptr)

    def _side_ptrs(self, layer: int, block: int) -> tuple[DevicePtr, ...]:
        k = self.k_cache_ptr(layer, block)
        return (k,) if self._config.shared_kv else (k, self.v_cache_ptr(layer, block))

    # ------------------------------------------------------------ occupancy and life

    def mark_primary(self) -> None:
        """Make this the pool whose occupancy its backend publishes, in place of any other. Not for draft pools."""
        self._pool(self._k_pools, 0)
        _primary[self._gpu] = weakref.ref(self)

    @staticmethod
    def primary(gpu: GpuBackend) -> PagedKvCache | None:
        """The backend's primary pool, while it lives."""
        found = _primary.get(gpu)
        cache = found() if found is not None else None
        return None if cache is None or cache._released else cache

    def occupancy(self) -> float:
        """Share of blocks that are held, 0 to 1; 0 after release."""
        return 1 - self.num_free_blocks() / self.num_blocks() if self.num_blocks() else 0.0

    def release(self) -> None:
        """Free the pools and forget all blocks, with a warning for those still held. A second call does nothing. All
        pools are tried, then the first error is raised."""
        if self._released:
            return
        self._released = True
        if held := self.leak_report():
            sites = "; ".join(f"{owner or 'no owner'}: {blocks}" for owner, blocks in held.items())
            log.warning("KV cache '%s' is released while blocks are held: %s", self._label, sites)
        first: SparkError | None = None
        # A backend that was closed before has freed everything itself.
        for ptr in () if self._gpu.closed else (*self._k_pools, *self._v_pools):
            try:
                self._gpu.free(ptr)
            except SparkError as error:
                first = first or error
        self._k_pools, self._v_pools = [], []
        self._clear()
        if first is not None:
            raise first

    def alloc_blocks(self, n: int, owner: str = "") -> list[int]:
        """`n` free blocks, or KvCacheExhausted and none; ReleasedError after release."""
        self._pool(self._k_pools, 0)
        return super().alloc_blocks(n, owner)

    def __enter__(self) -> PagedKvCache:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.release()


def _nbytes(side: Buffer) -> int:
    # Not memoryview for arrays: it knows no BF16.
    return side.nbytes if isinstance(side, np.ndarray) else memoryview(side).nbytes


def fp8_scale(name: str, value: float) -> float:
    """`value` as FP32, for a scale that kernels multiply by, itself or its reciprocal; InvalidArgumentError unless both
    are finite and above 0."""
    limit = "a finite number above 0 is needed, also as FP32 and as its reciprocal"
    if isinstance(value, (bool, np.bool_)):
        raise InvalidArgumentError(name, value, limit)
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise InvalidArgumentError(name, value, limit) from None
    with np.errstate(over="ignore", under="ignore", divide="ignore", invalid="ignore"):
        single = np.float32(number)
        inverse = np.float32(1) / single
    if not (0 < single < np.inf and inverse < np.inf):
        raise InvalidArgumentError(name, value, limit)
    return float(single)
