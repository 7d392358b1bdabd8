# SPDX-License-Identifier: AGPL-3.0-only
"""The structs that weights are handed over in. Twin of `weight_map.rs`.

Pointers belong to whoever loaded them, as a rule a WeightStore; a head that takes a struct never frees what is in it.
A projection is y = x . W transposed, with W row-major [N, K].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..runtime.errors import InvalidArgumentError
from ..runtime.gpu import DevicePtr
from ..runtime.sizes import count

__all__ = ["DenseExpertWeight", "DenseWeight", "MtpWeights", "QuantizedWeight"]


@dataclass(frozen=True, slots=True)
class DenseWeight:
    """A BF16 tensor on the device.

    `shape` is what the file says, () where the caller did not tell. Rust's struct has the pointer alone; the shape is
    here so that a head can refuse a tensor that does not fit, and see how many rows a padded table or LM head has.
    """

    weight: DevicePtr
    shape: tuple[int, ...] = ()

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
class QuantizedWeight:
    """An NVFP4 tensor: packed E2M1 [N, K / 2], E4M3 group scales [N, K / 16], one FP32 factor for all of it."""

    weight: DevicePtr
    weight_scale: DevicePtr
    weight_scale_2: float
    input_scale: DevicePtr = DevicePtr.NULL


@dataclass(frozen=True, slots=True)
class DenseExpertWeight:
    """The three projections of a SwiGLU FFN in BF16: [I, h], [I, h], [h, I]."""

    gate_proj: DenseWeight
    up_proj: DenseWeight
    down_proj: DenseWeight


@dataclass(frozen=True, slots=True)
class MtpWeights:
    """A Qwen3-Next style MTP module in BF16; h hidden_size, nq and nkv heads of hd, I FFN width, E experts.

    Norms are [h], `q_norm` and `k_norm` [hd]; `fc` is [h, 2h], its first h columns for the embedding; `q_proj` is
    [2 * nq * hd, h], each head's query and then its gate; `k_proj`, `v_proj` [nkv * hd, h]; `o_proj` [h, nq * hd].

    The FFN is `dense_ffn`, or a mixture of experts: `moe_gate` [E, h], `shared_expert`, `shared_expert_gate` [1, h] and
    `experts`, one each. Which of the two decides `dense_ffn is None`.
    """

    pre_fc_norm_embedding: DenseWeight
    pre_fc_norm_hidden: DenseWeight
    fc: DenseWeight
    input_layernorm: DenseWeight
    q_proj: DenseWeight
    k_proj: DenseWeight
    v_proj: DenseWeight
    o_proj: DenseWeight
    q_norm: DenseWeight
    k_norm: DenseWeight
    post_attn_layernorm: DenseWeight
    norm: DenseWeight
    dense_ffn: DenseExpertWeight | None = None
    moe_gate: DenseWeight | None = None
    shared_expert: DenseExpertWeight | None = None
    shared_expert_gate: DenseWeight | None = None
    experts: Sequence[DenseExpertWeight] = ()
