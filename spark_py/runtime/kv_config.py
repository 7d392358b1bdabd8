# SPDX-License-Identifier: AGPL-3.0-only
"""KvCacheDtype, KvCacheConfig, KvBlockLayout: what a KV pool stores and how a block of it is laid out.

Twin of the configuration half of `kv_cache.rs`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from .errors import InvalidArgumentError, UnsupportedError
from .sizes import count

__all__ = ["NVFP4_GROUP_SIZE", "KvBlockLayout", "KvCacheConfig", "KvCacheDtype"]

NVFP4_GROUP_SIZE = 16
"""Elements that share one E4M3 scale."""

_ROTATED = ("turbo2", "turbo3", "turbo4", "turbo8")
_ASYMMETRIC = (
    "turbo4k_turbo3v", "turbo4k_turbo8v", "turbo3k_turbo8v", "bf16k_turbo4v", "bf16k_turbo3v", "bf16k_turbo2v",
    "fp8k_turbo4v", "fp8k_turbo3v", "fp8k_turbo2v",
)  # fmt: skip
# turbo4k_turbo3v is also turbo4k3v, and so on.
_ALIASES = tuple(name.replace("_turbo", "") for name in _ASYMMETRIC)


class KvCacheDtype(Enum):
    """Element format of a pool; the value is its name on the command line."""

    BF16 = "bf16"
    FP8 = "fp8"  # E4M3, one FP32 scale a layer and side, kept outside the blocks
    NVFP4 = "nvfp4"  # E2M1, two a byte, one E4M3 scale per 16

    @classmethod
    def parse(cls, text: str) -> KvCacheDtype:
        """The dtype called `text`, exactly. UnsupportedError for the engine's rotated and asymmetric formats, which
        are not offered here; InvalidArgumentError for every other name."""
        for dtype in cls:
            if text == dtype.value:
                return dtype
        offered = ", ".join(dtype.value for dtype in cls)
        if text in _ROTATED or text in _ASYMMETRIC or text in _ALIASES:
            raise UnsupportedError(f"KV cache dtype {text} is not offered here: take one of {offered}")
        raise InvalidArgumentError("kv_cache_dtype", text, f"unsupported --kv-cache-dtype: take one of {offered}")

    def data_bytes(self, elements: int) -> int:
        """Bytes of `elements` values without their scales. InvalidArgumentError where a value would be split."""
        self._check(elements)
        return {KvCacheDtype.BF16: 2 * elements, KvCacheDtype.FP8: elements, KvCacheDtype.NVFP4: elements // 2}[self]

    def scale_bytes(self, elements: int) -> int:
        """Bytes of the scales that are stored with `elements` values."""
        self._check(elements)
        return elements // NVFP4_GROUP_SIZE if self is KvCacheDtype.NVFP4 else 0

    def side_bytes(self, elements: int) -> int:
        """Bytes of `elements` values and their scales: one side (K or V) of a block."""
        return self.data_bytes(elements) + self.scale_bytes(elements)

    def _check(self, elements: int) -> None:
        number = count("elements", elements, 0)
        if self is KvCacheDtype.NVFP4 and number % NVFP4_GROUP_SIZE:
            raise InvalidArgumentError("elements", number, f"a multiple of {NVFP4_GROUP_SIZE} is needed for nvfp4")


@dataclass(frozen=True, slots=True)
class KvBlockLayout:
    """Where a value and its scale lie inside one side of a block; the same on every architecture.

    Values are token-major, [block_size, num_kv_heads, head_dim], from byte 0. NVFP4 scales follow them in the same
    order, [block_size, num_kv_heads, head_dim / 16], linear and never swizzled, for K and V alike; the even element of
    a byte is its low half. A kernel that needs something else compares and refuses.
    """

    dtype: KvCacheDtype
    block_size: int
    num_kv_heads: int
    head_dim: int
    order: Literal["token_major"] = "token_major"
    scale_order: Literal["linear"] = "linear"

    @property
    def elements(self) -> int:
        """Values in one side of a block."""
        return self.block_size * self.num_kv_heads * self.head_dim

    @property
    def data_bytes(self) -> int:
        """Bytes of the values; the scales start here."""
        return self.dtype.data_bytes(self.elements)

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales."""
        return self.dtype.scale_bytes(self.elements)

    @property
    def block_bytes(self) -> int:
        """Bytes of one side of a block."""
        return self.data_bytes + self.scale_bytes

    def element(self, token: int, head: int, lane: int) -> int:
        """Index of a value within the block, in elements."""
        for name, value, limit in (
            ("token", token, self.block_size),
            ("head", head, self.num_kv_heads),
            ("lane", lane, self.head_dim),
        ):
            if count(name, value, 0) >= limit:
                raise InvalidArgumentError(name, value, f"the block has {limit}")
        return (token * self.num_kv_heads + head) * self.head_dim + lane

    def byte_of(self, token: int, head: int, lane: int) -> int:
        """Byte of a value within the block; for NVFP4 the byte that it shares with its neighbour."""
        element = self.element(token, head, lane)
        return element // 2 if self.dtype is KvCacheDtype.NVFP4 else element * self.dtype.data_bytes(1)

    def scale_byte_of(self, token: int, head: int, lane: int) -> int:
        """Byte of a value's scale within the block. UnsupportedError for formats that store none."""
        if self.dtype is not KvCacheDtype.NVFP4:
            raise UnsupportedError(f"a {self.dtype.value} block stores no scales")
        return self.data_bytes + self.element(token, head, lane) // NVFP4_GROUP_SIZE


@dataclass(frozen=True, slots=True)
class KvCacheConfig:
    """A pool's shape. `num_layers` counts layers with full attention only.

    `layer_dtypes` and `layer_dims`, (num_kv_heads, head_dim), name the first layers; those past their end have the
    uniform value. `cache_blocks_per_seq` caps the blocks of a sequence that stay on the device. `shared_kv`: K and V
    are one pool of latent rows, and each layer has one side.
    """

    block_size: int
    num_kv_heads: int
    head_dim: int
    num_layers: int
    dtype: KvCacheDtype = KvCacheDtype.BF16
    layer_dtypes: Sequence[KvCacheDtype] = ()
    layer_dims: Sequence[tuple[int, int]] = ()
    cache_blocks_per_seq: int | None = None
    shared_kv: bool = False

    def __post_init__(self) -> None:
        for name in ("block_size", "num_kv_heads", "head_dim", "num_layers"):
            count(name, getattr(self, name))
        if self.cache_blocks_per_seq is not None:
            count("cache_blocks_per_seq", self.cache_blocks_per_seq)
        # Frozen copies: a list that is changed later would move strides under live pools.
        object.__setattr__(self, "layer_dtypes", tuple(self.layer_dtypes))
        object.__setattr__(self, "layer_dims", tuple(self.layer_dims))
        for name in ("layer_dtypes", "layer_dims"):
            if len(getattr(self, name)) > self.num_layers:
                raise InvalidArgumentError(f"len({name})", len(getattr(self, name)), f"{self.num_layers} layers")
        for dtype in (self.dtype, *self.layer_dtypes):
            if not isinstance(dtype, KvCacheDtype):
                raise InvalidArgumentError("dtype", dtype, "a KvCacheDtype; KvCacheDtype.parse reads names")
        for layer in range(self.num_layers):
            heads, dim = self.dims_for_layer(layer)
            count(f"num_kv_heads of layer {layer}", heads)
            count(f"head_dim of layer {layer}", dim)
            if self.dtype_for_layer(layer) is KvCacheDtype.NVFP4 and dim % NVFP4_GROUP_SIZE:
                limit = f"a multiple of {NVFP4_GROUP_SIZE}, since a scale never spans two heads"
                raise InvalidArgumentError(f"head_dim of layer {layer}", dim, limit)

    def _layer(self, layer: int) -> int:
        number = count("layer", layer, 0)
        if number >= self.num_layers:
            raise InvalidArgumentError("layer", number, f"the cache has layers 0 .. {self.num_layers - 1}")
        return number

    def dtype_for_layer(self, layer: int) -> KvCacheDtype:
        """Element format of a layer."""
        return self.layer_dtypes[layer] if self._layer(layer) < len(self.layer_dtypes) else self.dtype

    def dims_for_layer(self, layer: int) -> tuple[int, int]:
        """(num_kv_heads, head_dim) of a layer."""
        uniform = (self.num_kv_heads, self.head_dim)
        return self.layer_dims[layer] if self._layer(layer) < len(self.layer_dims) else uniform

    def layout_for_layer(self, layer: int) -> KvBlockLayout:
        """Layout of one side of a layer's block."""
        return KvBlockLayout(self.dtype_for_layer(layer), self.block_size, *self.dims_for_layer(layer))

    def block_bytes_for_layer(self, layer: int) -> int:
        """Bytes of one side of a layer's block; K and V are the same size in every format offered."""
        return self.layout_for_layer(layer).block_bytes

    @property
    def sides(self) -> int:
        """Pools a layer: K and V, or one of latent rows."""
        return 1 if self.shared_kv else 2

    def block_bytes(self) -> int:
        """Bytes that one block takes over all layers and sides."""
        return self.sides * sum(self.block_bytes_for_layer(layer) for layer in range(self.num_layers))
