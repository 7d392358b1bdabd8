# SPDX-License-Identifier: AGPL-3.0-only
"""The structs that weights are handed over in. Twin of `weight_map.rs`.

Pointers belong to whoever loaded them, as a rule a WeightStore; a head that takes a struct never frees what is in it.
A projection is y = x . W transposed, with W row-major [N, K].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

from ..runtime.errors import InvalidArgumentError
from ..runtime.gpu import DevicePtr
from ..runtime.sizes import count

__all__ = [
    "FP8_BLOCK",
    "AnyExpertWeight",
    "DenseExpertWeight",
    "DenseWeight",
    "ExpertWeight",
    "F32Weight",
    "Fp8DenseExpertWeight",
    "Fp8DenseWeight",
    "Fp8ExpertWeight",
    "Fp8Weight",
    "MoeWeights",
    "MtpWeights",
    "Mxfp4Weight",
    "QuantizedWeight",
]

FP8_BLOCK = 128
"""Rows and columns that share a scale of an `Fp8Weight`."""


@dataclass(frozen=True, slots=True)
class DenseWeight:
    """A BF16 tensor on the device.

    `shape` is what the file says, () where the caller did not tell. Rust's struct has the pointer alone; the shape is
    here so that a head can refuse a tensor that does not fit, and see how many rows a padded table or LM head has.
    """

    weight: DevicePtr
    shape: tuple[int, ...] = ()

    @classmethod
    def null(cls) -> DenseWeight:
        """A place where no tensor is."""
        return cls(DevicePtr.NULL)

    def check_shape(self, name: str, *shape: int) -> None:
        """InvalidArgumentError, under `name`, where the tensor is NULL or its shape is known and is another one."""
        if self.weight.is_null:
            raise InvalidArgumentError(name, self.weight, "a tensor on the device is needed")
        if self.shape and self.shape != shape:
            raise InvalidArgumentError(f"shape of {name}", self.shape, f"{shape} is needed")

    def rows_of(self, name: str, rows: int, columns: int) -> int:
        """Rows of a table [V, columns]: its own where the shape is known, else `rows`, on trust."""
        if self.weight.is_null:
            raise InvalidArgumentError(name, self.weight, "a tensor on the device is needed")
        if not self.shape:
            return count(f"rows of {name}", rows)
        if len(self.shape) != 2 or self.shape[1] != columns or self.shape[0] < 1:
            raise InvalidArgumentError(f"shape of {name}", self.shape, f"[rows, {columns}] is needed")
        return self.shape[0]


@dataclass(frozen=True, slots=True)
class F32Weight:
    """An FP32 tensor on the device; `shape` as that of `DenseWeight`. Rust's struct has no FP32 twin."""

    weight: DevicePtr
    shape: tuple[int, ...] = ()

    def check_shape(self, name: str, *shape: int) -> None:
        """As `DenseWeight.check_shape`."""
        DenseWeight(self.weight, self.shape).check_shape(name, *shape)


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """An NVFP4 tensor: packed E2M1 [N, K / 2], E4M3 group scales [N, K / 16], one FP32 factor for all of it.

    w = value * scale * weight_scale_2; the even k is the low nibble of its byte. `shape` is (N, K), () where the caller
    did not tell; Rust's struct does not have it. A transposed twin has the packed codes [K / 2, N] and scales
    [K / 16, N], and its shape is () too. All pointers NULL (`null`): the tensor is elsewhere.
    """

    weight: DevicePtr
    weight_scale: DevicePtr
    weight_scale_2: float
    input_scale: DevicePtr = DevicePtr.NULL
    shape: tuple[int, ...] = ()

    @classmethod
    def null(cls) -> QuantizedWeight:
        """A place where no tensor is."""
        return cls(DevicePtr.NULL, DevicePtr.NULL, 1.0)

    def check_shape(self, name: str, *shape: int) -> None:
        """As `DenseWeight.check_shape`, for the codes and the scales."""
        DenseWeight(self.weight_scale).check_shape(f"weight_scale of {name}", *shape)
        DenseWeight(self.weight, self.shape).check_shape(name, *shape)

    def rows_of(self, name: str, rows: int, columns: int) -> int:
        """As `DenseWeight.rows_of`."""
        return DenseWeight(self.weight, self.shape).rows_of(name, rows, columns)


@dataclass(frozen=True, slots=True)
class Fp8DenseWeight:
    """A BF16 tensor made E4M3 at load: codes [n, k], an FP32 scale a row [n]. w = code * row_scale.

    `n` and `k` are not in Rust's struct.
    """

    weight: DevicePtr
    row_scale: DevicePtr
    n: int
    k: int

    @classmethod
    def null(cls) -> Fp8DenseWeight:
        """A place where no tensor is."""
        return cls(DevicePtr.NULL, DevicePtr.NULL, 0, 0)


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """A checkpoint's own E4M3 tensor: codes [n, k], an FP32 scale a block of 128 x 128.

    The scales are [ceil(n / 128), ceil(k / 128)] and w = code * scale, in spite of the name `row_scale`, which is
    Rust's.
    """

    weight: DevicePtr
    row_scale: DevicePtr
    n: int
    k: int

    def check_shape(self, name: str, *shape: int) -> None:
        """As `DenseWeight.check_shape`, for the codes and the scales."""
        DenseWeight(self.row_scale).check_shape(f"row_scale of {name}", *shape)
        DenseWeight(self.weight, (self.n, self.k)).check_shape(name, *shape)


@dataclass(frozen=True, slots=True)
class Mxfp4Weight:
    """A checkpoint's own MXFP4 tensor: packed E2M1 [n, k / 2], E8M0 block scales [n, k / 32]; Rust's tag Mxfp4E8m0.

    w = value * 2^(scale - 127), without a factor of the tensor; the even k is the low nibble of its byte, and a scale
    of 0xFF is NaN.

    It stays as it is on the device. Quantised anew to NVFP4 by the engine's kernel it is not the same tensor: with
    normal weights [2048, 4096] the relative error is 5.4 % (RMS, and as much in a product's outputs), and 64 % of the
    weights that are not 0 change, since a block's scale becomes a sixth of its maximum where MXFP4 has a power of two.
    Only where the codes are kept and E8M0 becomes E4M3 for every 16 values, with a power of two as the tensor's
    factor, is nothing lost, and that needs scales that span at most the 18 powers of two of E4M3, which a file does not
    promise (normal weights span 3); it would also take 6 % more memory.
    """

    weight: DevicePtr
    weight_scale: DevicePtr
    n: int
    k: int

    def check_shape(self, name: str, *shape: int) -> None:
        """As `DenseWeight.check_shape`, for the codes and the scales."""
        DenseWeight(self.weight_scale).check_shape(f"weight_scale of {name}", *shape)
        DenseWeight(self.weight, (self.n, self.k)).check_shape(name, *shape)


@dataclass(frozen=True, slots=True)
class DenseExpertWeight:
    """The three projections of a SwiGLU FFN in BF16: [I, h], [I, h], [h, I]."""

    gate_proj: DenseWeight
    up_proj: DenseWeight
    down_proj: DenseWeight

    @classmethod
    def null(cls) -> DenseExpertWeight:
        """An expert that is elsewhere."""
        return cls(DenseWeight.null(), DenseWeight.null(), DenseWeight.null())


@dataclass(frozen=True, slots=True)
class ExpertWeight:
    """As `DenseExpertWeight`, in NVFP4. An expert that is elsewhere has NULL projections (`null`)."""

    gate_proj: QuantizedWeight
    up_proj: QuantizedWeight
    down_proj: QuantizedWeight

    @classmethod
    def null(cls) -> ExpertWeight:
        """An expert that is elsewhere."""
        return cls(QuantizedWeight.null(), QuantizedWeight.null(), QuantizedWeight.null())


@dataclass(frozen=True, slots=True)
class Fp8DenseExpertWeight:
    """As `DenseExpertWeight`, in E4M3 with row scales."""

    gate_proj: Fp8DenseWeight
    up_proj: Fp8DenseWeight
    down_proj: Fp8DenseWeight

    @classmethod
    def null(cls) -> Fp8DenseExpertWeight:
        """An expert that is elsewhere."""
        return cls(Fp8DenseWeight.null(), Fp8DenseWeight.null(), Fp8DenseWeight.null())


@dataclass(frozen=True, slots=True)
class Fp8ExpertWeight:
    """As `DenseExpertWeight`, in E4M3 with block scales."""

    gate_proj: Fp8Weight
    up_proj: Fp8Weight
    down_proj: Fp8Weight


AnyExpertWeight: TypeAlias = ExpertWeight | DenseExpertWeight | Fp8DenseExpertWeight | Fp8ExpertWeight
"""The formats that an expert may have."""
_Expert = TypeVar("_Expert", bound=AnyExpertWeight)


@dataclass(frozen=True, slots=True)
class MoeWeights(Generic[_Expert]):
    """A mixture of experts: routed ones, and a shared one that sees every token.

    gate: the router, BF16 [E, h]. shared_expert_gate: BF16 [1, h], whose sigmoid weighs the shared expert. experts: E
    of them, in the format of the shared one; Rust has NVFP4 here alone. router_pre_norm [h] and correction_bias FP32
    [E] belong to models that have them.
    """

    gate: DenseWeight
    shared_expert: _Expert
    shared_expert_gate: DenseWeight
    experts: Sequence[_Expert]
    router_pre_norm: DenseWeight | None = None
    correction_bias: F32Weight | None = None


@dataclass(frozen=True, slots=True)
class MtpWeights:
    """A Qwen3-Next style MTP module; h hidden_size, nq and nkv heads of hd, I FFN width, E experts.

    Norms are [h], `q_norm` and `k_norm` [hd]; `fc` is [h, 2h], its first h columns for the embedding; `q_proj` is
    [2 * nq * hd, h], each head's query and then its gate; `k_proj`, `v_proj` [nkv * hd, h]; `o_proj` [h, nq * hd].

    The FFN is `dense_ffn`, or a mixture of experts: `moe_gate` [E, h], `shared_expert`, `shared_expert_gate` [1, h] and
    `experts`, one each. Which of the two decides `dense_ffn is None`.

    Other families, as HeadBody says: `q_proj` [nq * hd, h] without gates; `q_norm` [nq * hd] and `k_norm` [nkv * hd],
    or none; biases of the three projections, as wide as their outputs; `correction_bias` FP32 [E]; no `shared_expert`,
    or one without its gate. `embed_tokens` and `lm_head` [V, h] are the module's own; None where they are the target's.

    All is BF16, but for `correction_bias`, and for projections that a checkpoint has in block-scaled E4M3 and that stay
    so in an FP8 head. Norms, biases, router and shared gate are always BF16.
    """

    pre_fc_norm_embedding: DenseWeight
    pre_fc_norm_hidden: DenseWeight
    fc: DenseWeight | Fp8Weight
    input_layernorm: DenseWeight
    q_proj: DenseWeight | Fp8Weight
    k_proj: DenseWeight | Fp8Weight
    v_proj: DenseWeight | Fp8Weight
    o_proj: DenseWeight | Fp8Weight
    q_norm: DenseWeight | None
    k_norm: DenseWeight | None
    post_attn_layernorm: DenseWeight
    norm: DenseWeight
    dense_ffn: DenseExpertWeight | Fp8ExpertWeight | None = None
    moe_gate: DenseWeight | None = None
    shared_expert: DenseExpertWeight | Fp8ExpertWeight | None = None
    shared_expert_gate: DenseWeight | None = None
    experts: Sequence[DenseExpertWeight | Fp8ExpertWeight] = ()
    correction_bias: F32Weight | None = None
    q_bias: DenseWeight | None = None
    k_bias: DenseWeight | None = None
    v_bias: DenseWeight | None = None
    embed_tokens: DenseWeight | None = None
    lm_head: DenseWeight | None = None
