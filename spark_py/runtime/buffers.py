# SPDX-License-Identifier: AGPL-3.0-only
"""BufferArena: every buffer that a step of the model writes, allocated once for given limits.

Twin of `buffers.rs`. Draft heads share the arena with the target: they destroy its `hidden_states` and `logits`, and
`hc_streams` in DeepSeek-V4's multi-stream mode, so the target must be done with those first.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from types import TracebackType

import numpy as np

from .buffer_accessors import BufferAccessors
from .buffer_config import BufferConfig
from .buffer_sizes import BufferSizes
from .decode_meta import DecodeMetaLayout
from .errors import CapacityError, InvalidArgumentError, ReleasedError, SparkError
from .gpu import DevicePtr, GpuBackend, StreamLike
from .scratch import ScratchLease, ScratchMap, ScratchRegion
from .sizes import count

__all__ = ["BufferArena", "BufferChecksum", "BufferConfig", "BufferSizes", "DecodeMetaLayout"]

log = logging.getLogger("spark_py.runtime")

PREFILL_ESSENTIALS = (
    "hidden_states", "residual", "gate_logits", "expert_gate_out", "expert_up_out", "expert_down_out", "moe_output",
)  # fmt: skip
"""Buffers whose stale content a prefill could take for expert ids or rows."""
KEPT_BY_ZERO_ALL = (
    "norm_unit_w", "gate_logits_f32", "moe_router_in_f32", "hc_streams", "hc_post", "hc_comb", "hc_lowrank_scratch",
    "token_ids", "fp8_act", "fp8_act_scale", "lora_xa", "lora_delta", "lora_hact", "lora_seq_slot",
)  # fmt: skip
"""What `zero_all` leaves, as the engine does; `norm_unit_w` is zeros anyway."""
_CHECKSUM_CHUNK = 16 << 20


@dataclass(frozen=True, slots=True)
class BufferChecksum:
    """Sums over a buffer read as FP32 lanes, whatever its dtype; a tail below 4 bytes is filled with zeros.

    Lanes that are not finite are counted in `nonfinite` and are no part of the sums, which are FP64.
    """

    name: str
    sum: float
    sum_sq: float
    sum_abs: float
    nonfinite: int


class BufferArena(BufferAccessors):
    """Buffers for at most `max_batch_tokens` rows, `max_seq_len` tokens a sequence and `max_batch_size` sequences.

    One device allocation a buffer, labelled with its name and never resized. Memory is not zeroed, but for
    `norm_unit_w`. `sm_count` sizes the split-K workspace and is the device's own unless given. `release` frees all; the
    arena is also a context manager. OutOfDeviceMemoryError leaves nothing allocated.
    """

    def __init__(
        self,
        config: BufferConfig,
        max_batch_tokens: int,
        max_seq_len: int,
        kv_block_size: int,
        max_batch_size: int,
        gpu: GpuBackend,
        sm_count: int | None = None,
    ) -> None:
        self._gpu = gpu
        self._sizes = BufferSizes.from_config(
            config,
            max_batch_tokens,
            max_seq_len,
            kv_block_size,
            max_batch_size,
            gpu.sm_count() if sm_count is None else sm_count,
        )
        self._decode_meta = DecodeMetaLayout.for_batch(max_batch_size)
        self._max_batch_tokens, self._max_seq_len = int(max_batch_tokens), int(max_seq_len)
        self._pointers: dict[str, DevicePtr] = {}
        self._released = False
        try:
            for name, nbytes in self._sizes.items():
                self._pointers[name] = gpu.alloc(nbytes, name)
            gpu.memset(self.norm_unit_w(), 0, self._sizes.norm_unit_w)
        except BaseException:
            self.release()
            raise
        self.scratch_map = ScratchMap(self.scratch(), self._sizes.scratch)

    # ------------------------------------------------------------ what it was built for

    def pointer(self, name: str) -> DevicePtr:
        """The buffer called `name`; ReleasedError after release."""
        if self._released:
            raise ReleasedError(f"buffer '{name}' of an arena that was released")
        try:
            return self._pointers[name]
        except KeyError:
            raise InvalidArgumentError("buffer", name, f"one of {', '.join(self._pointers)}") from None

    def sizes(self) -> BufferSizes:
        """Bytes of each buffer."""
        return self._sizes

    def total_bytes(self) -> int:
        """Bytes of all buffers; the engine's figure leaves out `o_latent` and `norm_unit_w`."""
        return self._sizes.total_bytes()

    def scratch_bytes(self) -> int:
        """Bytes of `scratch`."""
        return self._sizes.scratch

    def fp8_act_bytes(self) -> int:
        """Bytes of `fp8_act`."""
        return self._sizes.fp8_act

    def lora_xa_bytes(self) -> int:
        """Bytes of `lora_xa`; 0 without adapters."""
        return self._sizes.lora_xa

    def lora_delta_bytes(self) -> int:
        """Bytes of `lora_delta`; 0 without adapters."""
        return self._sizes.lora_delta

    def lora_hact_bytes(self) -> int:
        """Bytes of `lora_hact`; 0 without adapters."""
        return self._sizes.lora_hact

    def decode_meta(self) -> DecodeMetaLayout:
        """Layout of the decode metadata at scratch byte 32768."""
        return self._decode_meta

    def max_batch_tokens(self) -> int:
        """Most rows of one step."""
        return self._max_batch_tokens

    def max_seq_len(self) -> int:
        """Most tokens of one sequence."""
        return self._max_seq_len

    def check_rows(self, rows: int) -> int:
        """`rows` if a step of so many fits; CapacityError names it and the limit."""
        number = count("rows", rows)
        if number > self._max_batch_tokens:
            raise CapacityError("rows", number, self._max_batch_tokens, "the max_batch_tokens of the buffer arena")
        return number

    def check_seq_len(self, tokens: int) -> int:
        """`tokens` if a sequence of that length fits; CapacityError names it and the limit."""
        number = count("sequence length", tokens, 0)
        if number > self._max_seq_len:
            raise CapacityError("sequence length", number, self._max_seq_len, "the max_seq_len of the buffer arena")
        return number

    def lease(self, region: ScratchRegion) -> ScratchLease:
        """Hold a region of `scratch` against other users; see ScratchMap."""
        self.pointer("scratch")
        return self.scratch_map.lease(region)

    # ------------------------------------------------------------ content

    def zero_prefill_essentials(self, stream: StreamLike) -> None:
        """Queue zeros for what a prefill reads before it writes: hidden rows, router logits, expert outputs."""
        for name in PREFILL_ESSENTIALS:
            self._zero(name, stream)

    def zero_all(self, stream: StreamLike) -> None:
        """Queue zeros for all buffers but those of KEPT_BY_ZERO_ALL."""
        for name, _ in self._sizes.items():
            if name not in KEPT_BY_ZERO_ALL:
                self._zero(name, stream)

    def _zero(self, name: str, stream: StreamLike) -> None:
        ptr = self.pointer(name)
        if ptr:
            self._gpu.memset_async(ptr, 0, getattr(self._sizes, name), stream)

    def debug_buffer_checksum(self, stream: StreamLike, tag: str) -> tuple[BufferChecksum, ...]:
        """Read every buffer back after the work on `stream`, log one line each under `tag`, and give the sums."""
        sums = tuple(self._checksum(name, nbytes, stream) for name, nbytes in self._sizes.items() if self.pointer(name))
        for s in sums:
            log.info(
                "%s %s: sum %.9g sum_sq %.9g sum_abs %.9g nonfinite %d",
                tag,
                s.name,
                s.sum,
                s.sum_sq,
                s.sum_abs,
                s.nonfinite,
            )
        return sums

    def _checksum(self, name: str, nbytes: int, stream: StreamLike) -> BufferChecksum:
        total, squares, absolute, nonfinite = 0.0, 0.0, 0.0, 0
        for start in range(0, nbytes, _CHECKSUM_CHUNK):
            size = min(_CHECKSUM_CHUNK, nbytes - start)
            host = np.zeros(-(-size // 4) * 4, np.uint8)
            self._gpu.copy_d2h_on_stream(self.pointer(name).offset(start), host[:size], stream)
            lanes = host.view(np.float32)
            finite = lanes[np.isfinite(lanes)].astype(np.float64)
            total += float(finite.sum())
            squares += float(np.square(finite).sum())
            absolute += float(np.abs(finite).sum())
            nonfinite += lanes.size - finite.size
        return BufferChecksum(name, total, squares, absolute, nonfinite)

    # ------------------------------------------------------------ life

    def release(self) -> None:
        """Free every buffer; a second call does nothing. All are tried, then the first error is raised."""
        if self._released:
            return
        self._released = True
        first: SparkError | None = None
        # A backend that was closed before has freed everything itself.
        for ptr in () if self._gpu.closed else self._pointers.values():
            try:
                self._gpu.free(ptr)
            except SparkError as error:
                first = first or error
        self._pointers.clear()
        if first is not None:
            raise first

    def __enter__(self) -> BufferArena:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.release()
