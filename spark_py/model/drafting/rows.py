# SPDX-License-Identifier: AGPL-3.0-only
"""Rows of a batched propose: how many fit, where their metadata lies, and which kernel projects them.

Twin of `mtp_head/batch_caps.rs` and `row_dispatch`. Byte sizes are those of the arena's buffers.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum

from ...runtime.buffers import BufferSizes
from ...runtime.errors import InvalidArgumentError
from ...runtime.scratch import MTP_META_HEADER_BYTES, PROPOSE_MAX_ROWS
from ...runtime.sizes import align_up, count

__all__ = [
    "BATCHM_DECODE_ROWS",
    "EXACT_M_WIDTHS",
    "LM_HEAD_WIDTHS",
    "META_STRIDE_MAX",
    "META_STRIDE_MIN",
    "PROPOSE_META_SEQS",
    "RowKernel",
    "drafter_row_kernel",
    "lm_head_batch_width",
    "propose_batch_cap",
    "propose_meta_stride",
    "propose_meta_stride_override",
]

PROPOSE_META_SEQS = 32
"""Slabs of `propose_meta`, one a sequence."""
META_STRIDE_MIN, META_STRIDE_MAX = 2048, 1 << 24
_STRIDE_STEP = 8

LM_HEAD_WIDTHS = (4, 5, 6, 7, 8, 16, 32)
"""Rows that the batched W4A16 GEMVs take at most, one kernel each."""
EXACT_M_WIDTHS = frozenset((5, 6, 7))
"""Those that `gemv_exact_m_tiers` off hides."""

BATCHM_DECODE_ROWS = 8
"""Rows up to which drafts go through the batched BF16 GEMV, also where the kernel takes more."""
_SMALL_N = 4096
_K_STEP = 8
_BF16 = 2


def propose_meta_stride_override(requested: int) -> int:
    """The stride that the engine makes of ATLAS_PROPOSE_META_STRIDE: the next multiple of 8, held within 2048 and
    2^24."""
    return min(max(align_up(count("requested", requested, 0), _STRIDE_STEP), META_STRIDE_MIN), META_STRIDE_MAX)


def propose_meta_stride(max_seq_len: int, block_size: int, override: int | None = None) -> int:
    """Bytes between two sequences' metadata: header and a block table for `max_seq_len` tokens and one more row.

    At least 2048 and at most 2^24, a multiple of 8. `override` is a stride of that kind and is taken as it is, whatever
    the table needs; what does not fit then is found when a slab is packed.
    """
    entries = count("max_seq_len", max_seq_len) // count("block_size", block_size) + 1
    if override is None:
        return propose_meta_stride_override(MTP_META_HEADER_BYTES + 4 * entries)
    stride = count("propose_meta_stride", override)
    if stride != propose_meta_stride_override(stride):
        raise InvalidArgumentError(
            "propose_meta_stride", stride, f"a multiple of 8 from {META_STRIDE_MIN} to {META_STRIDE_MAX}"
        )
    return stride


def lm_head_batch_width(rows: int, resolved: Collection[int], exact_m_tiers: bool = True) -> int | None:
    """The narrowest width among `resolved` (widths whose kernel the set has) that holds `rows`; None where none does.
    Every width gives a row the same bits."""
    n = count("rows", rows)
    offered = (width for width in LM_HEAD_WIDTHS if exact_m_tiers or width not in EXACT_M_WIDTHS)
    return next((width for width in offered if width in resolved and width >= n), None)


def propose_batch_cap(
    sizes: BufferSizes,
    hidden_size: int,
    max_batch_tokens: int,
    lm_head_widths: Collection[int] | None = None,
    exact_m_tiers: bool = True,
) -> int:
    """Most sequences of one batched propose, at least 1 (which means one at a time), at most 32.

    What the buffers hold: [n, 2h] in `ssm_ba`, [n, h] in each of the others, BF16. `lm_head_widths`: the widths of
    `lm_head_batch_width` that the set has; None where the LM head takes any number of rows.
    """
    row = _BF16 * count("hidden_size", hidden_size)
    cap = min(
        PROPOSE_MAX_ROWS,
        sizes.ssm_ba // (2 * row),
        sizes.ssm_gates // row,
        sizes.ssm_qkvz // row,
        sizes.ssm_deinterleaved // row,
        sizes.hidden_states // row,
        sizes.residual // row,
        sizes.norm_output // row,
        count("max_batch_tokens", max_batch_tokens),
    )
    if lm_head_widths is not None:
        while cap > 1 and lm_head_batch_width(cap, lm_head_widths, exact_m_tiers) is None:
            cap -= 1
    return max(cap, 1)


class RowKernel(Enum):
    """What projects a few drafter rows. BATCHM and GEMV_LOOP give each row the bits of a single GEMV; PIPELINED, a
    tensor-core GEMM, does not."""

    BATCHM = "dense_gemv_bf16_batchm"
    PIPELINED = "dense_gemm_bf16_pipelined"
    GEMV_LOOP = "dense_gemv_bf16"


def drafter_row_kernel(
    rows: int, n: int, k: int, batchm_ready: bool, kv_gemv_pinned: bool, small_m_tier: bool = True
) -> RowKernel:
    """The kernel of y [rows, n] = x [rows, k] . W [n, k] transposed.

    batchm_ready: the set has the batched GEMV. kv_gemv_pinned: projections with n < 4096 (K and V) keep to the GEMV,
    so that their bits never depend on the number of rows. small_m_tier off: as older versions, without BATCHM.
    """
    m, outputs = count("rows", rows), count("n", n)
    aligned, small_n = count("k", k) % _K_STEP == 0, outputs < _SMALL_N
    pinned = small_n and kv_gemv_pinned
    if batchm_ready and small_m_tier and aligned and 2 <= m <= BATCHM_DECODE_ROWS and not pinned:
        return RowKernel.BATCHM
    if aligned and (not small_n or (m >= BATCHM_DECODE_ROWS and not kv_gemv_pinned)):
        return RowKernel.PIPELINED
    return RowKernel.GEMV_LOOP
