# SPDX-License-Identifier: AGPL-3.0-only
"""Twin of `layers/mtp_head/mod.rs`: the types of the head, without its methods."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import TypeAlias

from ....runtime.errors import InvalidArgumentError
from ....runtime.gpu import DevicePtr
from ....runtime.kv_cache import KvCacheDtype
from ...weight_map import DenseWeight, Fp8DenseWeight, Fp8Weight, QuantizedWeight

__all__ = [
    "FfnProjections",
    "MtpPrefillScratch",
    "MtpProposerState",
    "MtpQuantization",
    "MtpSnapshot",
    "NormConvention",
    "ProjectionWeight",
]

ProjectionWeight: TypeAlias = DenseWeight | QuantizedWeight | Fp8DenseWeight | Fp8Weight
"""A projection as the head runs it: Rust's variants Bf16, Nvfp4, Fp8 and Fp8BlockScaled, in this order."""
FfnProjections: TypeAlias = tuple[ProjectionWeight, ProjectionWeight, ProjectionWeight]
"""gate_proj, up_proj, down_proj of a dense FFN or of an expert."""
MtpSnapshot: TypeAlias = tuple[int, int, int, int | None, int | None]
"""What `MtpProposerState.restore` goes back to."""


class MtpQuantization(Enum):
    """How the head's projections are stored; the value is the command line's word."""

    NVFP4 = "nvfp4"
    FP8 = "fp8"
    BF16 = "bf16"

    @classmethod
    def parse(cls, text: str) -> MtpQuantization:
        """The quantisation called `text`, in any case; fp4 is nvfp4. InvalidArgumentError for every other word."""
        word = {"fp4": "nvfp4"}.get(text.lower(), text.lower())
        for quant in cls:
            if quant.value == word:
                return quant
        raise InvalidArgumentError("mtp_quantization", text, "one of nvfp4, fp4, fp8, bf16")

    def supports_drafter_prefill(self) -> bool:
        """Whether rows can be fed without a propose: BF16 alone."""
        return self is MtpQuantization.BF16

    def kv_dtype(self) -> KvCacheDtype:
        """What the drafter's KV pool stores: FP8 with unit scales for NVFP4, else BF16.

        Where a deep layer's K and V are large, FP8 with unit scales saturates, attention gives a constant and every
        draft is the same token; one layer in BF16 costs little.
        """
        return KvCacheDtype.FP8 if self is MtpQuantization.NVFP4 else KvCacheDtype.BF16

    def k_step(self) -> int:
        """What the length of a projection's rows must be a multiple of: a group or chunk of 16, or 8 in BF16."""
        return 8 if self is MtpQuantization.BF16 else 16


class NormConvention(Enum):
    """What an RMS norm multiplies with: 1 + w (Qwen3-Next, 3.5, 3.6) or w. Weights are stored as they are either
    way."""

    ONE_PLUS_W = "1+w"
    PLAIN = "w"


@dataclass(slots=True, eq=False, weakref_slot=True)
class MtpProposerState:
    """The drafter's rows of one sequence. Rows are dense (slot = index), their pair keys need not be.

    seq_len: rows. last_num_drafted: rows of the last propose while its verdict is outstanding, else 0. last_pair_key:
    of the last row, None without rows. base_pair_key: what last_pair_key was before the last propose, so that a trim
    gives the key of a row that exists even across gaps; Rust subtracts the trim and is off by the gap.
    """

    block_table: list[int] = field(default_factory=list)
    seq_len: int = 0
    last_num_drafted: int = 0
    last_pair_key: int | None = None
    base_pair_key: int | None = None

    def reset(self) -> None:
        """Make the state fresh. The table is emptied, not replaced: who watches over its blocks holds it too."""
        self.block_table.clear()
        self.seq_len = self.last_num_drafted = 0
        self.last_pair_key = self.base_pair_key = None

    def snapshot(self) -> MtpSnapshot:
        """What `restore` needs, blocks counted and not copied: they are only ever appended."""
        return len(self.block_table), self.seq_len, self.last_num_drafted, self.last_pair_key, self.base_pair_key

    def restore(self, taken: MtpSnapshot) -> list[int]:
        """Go back to a snapshot and give the blocks that came after it."""
        entries, self.seq_len, self.last_num_drafted, self.last_pair_key, self.base_pair_key = taken
        extra = self.block_table[entries:]
        del self.block_table[entries:]
        return extra

    def watch(self, reclaim: Callable[[list[int]], None]) -> None:
        """Have `reclaim` called with the block table when the state is dropped without `free_state`."""
        weakref.finalize(self, reclaim, self.block_table).atexit = False


@dataclass(frozen=True, slots=True)
class MtpPrefillScratch:
    """Buffers of a prefill chunk of c rows, apart from the arena, which the pass therefore leaves alone.

    BF16: embed, normed_embed, normed_hidden, fc_out, normed2 [c, h]; concat [c, 2h]; k_out, v_out [c, nkv * hd];
    q_scratch [c, nq * hd], rotated and thrown away. pos_dev u32 [c], slot_dev i64 [c].
    """

    embed: DevicePtr
    normed_embed: DevicePtr
    normed_hidden: DevicePtr
    concat: DevicePtr
    fc_out: DevicePtr
    normed2: DevicePtr
    k_out: DevicePtr
    v_out: DevicePtr
    q_scratch: DevicePtr
    pos_dev: DevicePtr
    slot_dev: DevicePtr

    @staticmethod
    def sizes(chunk: int, h: int, nq: int, nkv: int, hd: int) -> dict[str, int]:
        """Bytes of each buffer."""
        row, bf16 = chunk * h * 2, 2
        return {
            "embed": row,
            "normed_embed": row,
            "normed_hidden": row,
            "concat": 2 * row,
            "fc_out": row,
            "normed2": row,
            "k_out": chunk * nkv * hd * bf16,
            "v_out": chunk * nkv * hd * bf16,
            "q_scratch": chunk * nq * hd * bf16,
            "pos_dev": chunk * 4,
            "slot_dev": chunk * 8,
        }

    def pointers(self) -> tuple[DevicePtr, ...]:
        """The addresses, in order."""
        return tuple(getattr(self, f.name) for f in fields(self))
