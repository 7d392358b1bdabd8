# SPDX-License-Identifier: AGPL-3.0-only
"""Launcher of module `moe_hash_route`, and the check of a table that only the host can make."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..runtime.errors import InvalidArgumentError
from ..runtime.gpu import DevicePtr, GpuBackend, KernelHandle, StreamLike
from ..runtime.launch import KernelLaunch
from ._args import Weight, count, finite, weight_ptr
from .moe_topk import BLOCK, MAX_TOP_K


def check_hash_table(table: np.ndarray[Any, Any], num_experts: int) -> None:
    """InvalidArgumentError unless `table` is i64 [V, k] and each entry an expert, 0 to num_experts - 1.

    For a loader, before it uploads tid2eid: on the device a bad entry gives expert 0 with a weight of NaN.
    """
    if table.ndim != 2 or table.dtype != np.int64:
        raise InvalidArgumentError("tid2eid", (table.dtype.name, table.shape), "int64 of two axes, [V, k], is needed")
    bad = np.argwhere((table < 0) | (table >= count("num_experts", num_experts)))
    if len(bad):
        token, slot = (int(at) for at in bad[0])
        limit = f"there are {num_experts} experts, 0 to {num_experts - 1}"
        raise InvalidArgumentError(f"tid2eid[{token}, {slot}]", int(table[token, slot]), limit)


def moe_hash_route(
    gpu: GpuBackend,
    kernel: KernelHandle,
    gate_logits: DevicePtr,
    tid2eid: Weight,
    token_id: DevicePtr,
    expert_indices: DevicePtr,
    expert_weights: DevicePtr,
    num_experts: int,
    top_k: int,
    normalize: bool,
    scaling_factor: float,
    stream: StreamLike,
) -> None:
    """expert_indices u32 [k]: row token_id[0] (u32) of tid2eid i64 [V, k]; expert_weights FP32 [k] of gate_logits BF16
    [E] as in `moe_topk_sqrtsoftplus`.

    token_id[0] must be below V: the kernel does not know V; where memory is checked, an id beyond the table is refused.
    An entry of the table that is no expert gives index 0 and a weight of NaN.
    """
    if count("top_k", top_k) > MAX_TOP_K:
        raise InvalidArgumentError("top_k", top_k, f"the kernel takes {MAX_TOP_K} at most")
    launch = KernelLaunch(gpu, kernel).grid((1, 1, 1)).block((BLOCK, 1, 1))
    launch.arg_ptr(gate_logits).arg_ptr(weight_ptr(tid2eid)).arg_ptr(token_id)
    launch.arg_ptr(expert_indices).arg_ptr(expert_weights)
    launch.arg_u32(count("num_experts", num_experts)).arg_u32(top_k).arg_u32(int(normalize))
    launch.arg_f32(finite("scaling_factor", scaling_factor)).launch(stream)
