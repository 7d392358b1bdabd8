# SPDX-License-Identifier: AGPL-3.0-only
"""The arena: one labelled allocation a buffer, accessors, zeroing, checksums, release."""

from __future__ import annotations

import inspect
import logging
from dataclasses import fields

import numpy as np
import pytest

from spark_py.runtime import buffers
from spark_py.runtime.buffer_accessors import BufferAccessors
from spark_py.runtime.buffers import KEPT_BY_ZERO_ALL, PREFILL_ESSENTIALS, BufferArena, BufferSizes
from spark_py.runtime.errors import (
    CapacityError,
    InvalidArgumentError,
    OutOfBoundsError,
    OutOfDeviceMemoryError,
    ReleasedError,
)
from spark_py.runtime.gpu import DevicePtr, GpuBackend
from spark_py.runtime.scratch import ScratchRegion
from tests.runtime.buffer_shapes import Limits, Shape


def arena_of(gpu: GpuBackend, shape: Shape | None = None, limits: Limits = (4, 256, 16, 2)) -> BufferArena:
    return BufferArena(shape or Shape(), *limits, gpu)


def test_each_buffer_is_one_labelled_allocation(gpu: GpuBackend) -> None:
    before = gpu.live_bytes()
    shape = Shape(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, moe_input=64, hc_mult=2)
    with arena_of(gpu, shape) as arena:
        assert gpu.live_bytes() - before == arena.total_bytes() == arena.sizes().total_bytes()
        for name, nbytes in arena.sizes().items():
            ptr = arena.pointer(name)
            if nbytes == 0:
                assert ptr == DevicePtr.NULL
                continue
            gpu.memset(ptr, 0x5A, nbytes)
            with pytest.raises(OutOfBoundsError, match=name):
                gpu.memset(ptr, 0x5A, nbytes + 1)
    assert gpu.live_bytes() == before


def test_total_bytes_counts_what_the_engine_forgets(gpu: GpuBackend) -> None:
    shape = Shape(o_groups=2, o_lora_rank=1024)
    with arena_of(gpu, shape) as arena:
        sizes = dict(arena.sizes().items())
        assert sizes["o_latent"] == 16_384
        assert sizes["norm_unit_w"] == 128
        rest = sum(nbytes for name, nbytes in sizes.items() if name not in ("o_latent", "norm_unit_w"))
        assert arena.total_bytes() == rest + 16_512


def test_every_buffer_has_an_accessor_of_its_name(gpu: GpuBackend) -> None:
    accessors = {name for name, _ in inspect.getmembers(BufferAccessors, inspect.isfunction)} - {"pointer"}
    assert accessors == {field.name for field in fields(BufferSizes)}
    with arena_of(gpu) as arena:
        seen = set()
        for name in accessors:
            ptr = getattr(arena, name)()
            assert ptr == arena.pointer(name)
            seen.add(ptr)
        assert len(seen - {DevicePtr.NULL}) == sum(nbytes > 0 for _, nbytes in arena.sizes().items())
        with pytest.raises(InvalidArgumentError, match="moe_worklist"):
            arena.pointer("moe_worklist")


def test_limits_and_byte_counts(gpu: GpuBackend) -> None:
    shape = Shape(adapter_max_rank=4)
    with BufferArena(shape, 4, 256, 16, 40, gpu, sm_count=7) as arena:
        assert arena.max_batch_tokens() == 4
        assert arena.max_seq_len() == 256
        assert arena.decode_meta().rows == 48
        assert arena.scratch_bytes() == 65_536
        assert arena.fp8_act_bytes() == 256
        assert (arena.lora_xa_bytes(), arena.lora_delta_bytes(), arena.lora_hact_bytes()) == (32, 1024, 1024)
        assert arena.sizes().splitk_workspace == 7 * 18 * 4
    with arena_of(gpu) as arena:
        assert arena.sizes().splitk_workspace == gpu.sm_count() * 18 * 4


def test_rows_and_lengths_beyond_the_arena_raise(gpu: GpuBackend) -> None:
    with arena_of(gpu) as arena:
        assert [arena.check_rows(n) for n in (1, 4)] == [1, 4]
        assert [arena.check_seq_len(n) for n in (0, 256)] == [0, 256]
        for check, value, name, capacity in (
            (arena.check_rows, 5, "rows", 4),
            (arena.check_seq_len, 257, "sequence length", 256),
        ):
            with pytest.raises(CapacityError) as error:
                check(value)
            assert (error.value.name, error.value.value, error.value.capacity) == (name, value, capacity)
            assert f"{value}" in str(error.value)
            assert f"{capacity}" in str(error.value)
        for check, value in ((arena.check_rows, 0), (arena.check_rows, True), (arena.check_seq_len, -1)):
            with pytest.raises(InvalidArgumentError):
                check(value)


def contents(gpu: GpuBackend, arena: BufferArena) -> dict[str, set[int]]:
    """Which byte values each buffer holds."""
    found = {}
    for name, nbytes in arena.sizes().items():
        host = np.full(nbytes, 0xEE, np.uint8)
        if nbytes:
            gpu.copy_d2h(arena.pointer(name), host)
        found[name] = set(np.unique(host).tolist())
    return found


FULL = Shape(
    num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, moe_input=64, hc_mult=2, adapter_max_rank=4,
    linear_num_value_heads=1, linear_key_head_dim=128, linear_value_head_dim=128, mamba_num_heads=1, ssm_state_size=4,
    o_groups=2, o_lora_rank=32,
)  # fmt: skip


def test_norm_unit_w_is_zeros(gpu: GpuBackend) -> None:
    """The kernel scales by 1 + w: ones would double."""
    with arena_of(gpu, FULL) as arena:
        host = np.full(arena.sizes().norm_unit_w, 0xEE, np.uint8)
        gpu.copy_d2h(arena.norm_unit_w(), host)
        assert host.size == 128
        assert not host.any()


@pytest.mark.parametrize("which", ["prefill", "all"])
def test_zeroing(gpu: GpuBackend, which: str) -> None:
    with arena_of(gpu, FULL) as arena:
        for name, nbytes in arena.sizes().items():
            gpu.memset(arena.pointer(name), 0xFF, nbytes)
        if which == "prefill":
            arena.zero_prefill_essentials(gpu.default_stream())
            zeroed = set(PREFILL_ESSENTIALS)
        else:
            arena.zero_all(gpu.default_stream())
            zeroed = {field.name for field in fields(BufferSizes)} - set(KEPT_BY_ZERO_ALL)
        gpu.synchronize(gpu.default_stream())
        for name, values in contents(gpu, arena).items():
            if getattr(arena.sizes(), name):
                assert values == ({0} if name in zeroed else {0xFF}), name


def test_what_zeroing_covers() -> None:
    assert set(PREFILL_ESSENTIALS) == {
        "hidden_states", "residual", "gate_logits", "expert_gate_out", "expert_up_out", "expert_down_out", "moe_output",
    }  # fmt: skip
    assert {"token_ids", "hc_streams", "fp8_act", "gate_logits_f32", "lora_seq_slot"} <= set(KEPT_BY_ZERO_ALL)
    assert not {"scratch", "logits", "ssm_ba", *PREFILL_ESSENTIALS} & set(KEPT_BY_ZERO_ALL)
    assert set(KEPT_BY_ZERO_ALL) <= {field.name for field in fields(BufferSizes)}


@pytest.mark.parametrize("chunk", [64, 16 << 20])
def test_checksums(
    gpu: GpuBackend,
    rng: np.random.Generator,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    chunk: int,
) -> None:
    monkeypatch.setattr(buffers, "_CHECKSUM_CHUNK", chunk)
    # An odd vocabulary: 606 bytes are 151 lanes and half of one.
    with arena_of(gpu, Shape(vocab_size=101, intermediate_size=64), (3, 64, 16, 1)) as arena:
        for name, nbytes in arena.sizes().items():
            gpu.memset(arena.pointer(name), 0, nbytes)
        assert arena.sizes().logits == 606
        lanes = rng.standard_normal(151).astype(np.float32)
        lanes[7], lanes[8] = np.nan, np.inf
        gpu.copy_h2d(lanes, arena.logits())
        with caplog.at_level(logging.INFO, "spark_py.runtime"):
            sums = {s.name: s for s in arena.debug_buffer_checksum(gpu.default_stream(), "after verify")}
        finite = np.delete(lanes, [7, 8]).astype(np.float64)
        found = sums["logits"]
        # FP64 sums of 149 terms, in two orders.
        assert found.sum == pytest.approx(finite.sum(), rel=1e-12)
        assert found.sum_sq == pytest.approx((finite**2).sum(), rel=1e-12)
        assert found.sum_abs == pytest.approx(np.abs(finite).sum(), rel=1e-12)
        assert found.nonfinite == 2
        assert (sums["residual"].sum_abs, sums["residual"].nonfinite) == (0.0, 0)
        assert "lora_xa" not in sums  # NULL
        assert "after verify logits: sum" in caplog.text


def test_release(gpu: GpuBackend) -> None:
    before = gpu.live_bytes()
    arena = arena_of(gpu)
    lease = arena.lease(ScratchRegion.mtp_meta(4))
    assert lease.ptr == arena.scratch().offset(49_152)
    assert arena.scratch_map.live() == (lease.region,)
    arena.release()
    arena.release()
    assert gpu.live_bytes() == before
    with pytest.raises(ReleasedError):
        arena.lease(ScratchRegion.argmax())
    with pytest.raises(ReleasedError, match="hidden_states"):
        arena.hidden_states()
    with pytest.raises(ReleasedError):
        arena.zero_all(gpu.default_stream())


def test_a_failed_construction_leaves_nothing(gpu: GpuBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    before = gpu.live_bytes()
    alloc = gpu.alloc

    def failing(nbytes: int, label: str = "") -> DevicePtr:
        if label == "scratch":
            raise OutOfDeviceMemoryError(nbytes, 0, 0, "test")
        return alloc(nbytes, label)

    monkeypatch.setattr(gpu, "alloc", failing)
    with pytest.raises(OutOfDeviceMemoryError):
        arena_of(gpu)
    assert gpu.live_bytes() == before
