# SPDX-License-Identifier: AGPL-3.0-only
"""Handles know their backend; kernels are looked up, counted and audited."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest

from spark_py.runtime import GpuBackend, KernelHandle, open_backend
from spark_py.runtime.errors import (
    ArgumentPointerError,
    BackendClosedError,
    ForeignHandleError,
    FunctionNotFoundError,
    HeaderNotFoundError,
    InvalidArgumentError,
    ModuleNotFoundInSetError,
    NullHandleError,
)

from .support import Concat, refused, second_backend

Opener = Callable[[GpuBackend], GpuBackend]


def another_device(gpu: GpuBackend) -> GpuBackend:
    """A backend on the next device."""
    if gpu.name == "cuda":
        try:
            return open_backend("cuda", gpu.ordinal + 1)
        except InvalidArgumentError:
            pytest.skip("this machine has one CUDA device")
    return open_backend("host", gpu.ordinal + 1)


OTHERS = pytest.mark.parametrize("opener", [second_backend, another_device], ids=["same device", "next device"])


@OTHERS
def test_two_backends_interleaved(gpu: GpuBackend, rng: np.random.Generator, opener: Opener) -> None:
    with opener(gpu) as other:
        works = [Concat(gpu, rng), Concat(other, rng)]
        for _ in range(3):
            for work in works:
                work.reset()
                work.launch()
            for work in reversed(works):
                assert work.result == work.expected
        # The same name gives each backend a handle of its own, and only its own memory.
        assert works[0].kernel != works[1].kernel
        for mine, theirs in (works, reversed(works)):
            with refused(ForeignHandleError, "residual_add::bf16_concat"):
                mine.launch(func=theirs.kernel)
            with refused(ArgumentPointerError, "'a'"):
                mine.launch(args=[theirs.a, mine.b, mine.out, mine.n])
            with refused(ForeignHandleError, "stream"):
                mine.launch(stream=theirs.gpu.default_stream())
            for call in (mine.gpu.signature, mine.gpu.function_attributes):
                with refused(ForeignHandleError, "another backend"):
                    call(theirs.kernel)
            with refused(ForeignHandleError, "another backend"):
                mine.gpu.set_kernel_max_dynamic_smem(theirs.kernel, 1024)
        for ptr in (works[1].a, works[1].b, works[1].out):
            other.free(ptr)


@OTHERS
def test_two_backends_from_a_second_thread(gpu: GpuBackend, rng: np.random.Generator, opener: Opener) -> None:
    """Each entry point makes its device current, whatever the thread last did."""
    with opener(gpu) as other:
        works = [Concat(gpu, rng), Concat(other, rng)]
        errors: list[BaseException] = []

        def run() -> None:
            try:
                for work in (*works, *reversed(works)):
                    work.reset()
                    work.launch()
                    assert work.result == work.expected
                    ptr = work.gpu.alloc(64)
                    work.gpu.memset(ptr, 1, 64)
                    work.gpu.free(ptr)
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        for _ in range(20):
            gpu.memset(works[0].b, 0, 0)
            other.synchronize(other.default_stream())
        thread.join()
        assert not errors
        for ptr in (works[1].a, works[1].b, works[1].out):
            other.free(ptr)


def test_a_first_launch_on_a_new_thread(gpu: GpuBackend, rng: np.random.Generator) -> None:
    work = Concat(gpu, rng)
    errors: list[BaseException] = []

    def run() -> None:
        try:
            gpu.launch_cooperative(work.kernel, work.grid, work.BLOCK, 0, gpu.default_stream(), work.args)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert not errors
    assert work.result == work.expected


def test_closing_one_backend_leaves_the_other(gpu: GpuBackend, rng: np.random.Generator) -> None:
    work = Concat(gpu, rng)
    other = second_backend(gpu)
    kernel = other.kernel("residual_add", "bf16_concat")
    other.close()
    with pytest.raises(BackendClosedError):
        other.signature(kernel)
    with pytest.raises(ForeignHandleError):
        gpu.signature(kernel)
    work.launch()
    assert work.result == work.expected


@pytest.mark.parametrize("kernel", [None, 1, "norm"], ids=repr)
def test_what_is_no_kernel(gpu: GpuBackend, kernel: KernelHandle) -> None:
    for call in (gpu.signature, gpu.function_attributes):
        with refused(InvalidArgumentError, "KernelHandle"):
            call(kernel)
        with pytest.raises(NullHandleError):
            call(KernelHandle(0))


# ---------------------------------------------------------------- lookup


def test_lookup(gpu: GpuBackend) -> None:
    kernel = gpu.kernel("residual_add", "bf16_concat")
    assert kernel.name == "residual_add::bf16_concat"
    assert kernel
    assert not kernel.is_null
    assert gpu.kernel("residual_add", "bf16_concat") == gpu.try_kernel("residual_add", "bf16_concat") == kernel
    signature = gpu.signature(kernel)
    assert [p.name for p in signature.params] == ["a", "b", "out", "N"]
    assert [p.ctype for p in signature.params] == ["const bf16*", "const bf16*", "bf16*", "u32"]
    assert gpu.has_module("residual_add")
    assert not gpu.has_module("no_such_module")
    attributes = gpu.function_attributes(kernel)
    assert attributes.max_threads_per_block >= 256
    assert attributes.shared_dynamic_max <= gpu.limits.max_shared_default


def test_missing(gpu: GpuBackend) -> None:
    with refused(ModuleNotFoundInSetError, "'no_such_module'", "residual_add") as module:
        gpu.kernel("no_such_module", "x")
    assert "residual_add" in module.value.present
    with refused(FunctionNotFoundError, "'no_such_kernel'", "bf16_concat") as function:
        gpu.kernel("residual_add", "no_such_kernel")
    assert "bf16_concat" in function.value.present
    for key in (("no_such_module", "x"), ("residual_add", "no_such_kernel")):
        handle = gpu.try_kernel(*key)
        assert handle.is_null
        assert not handle
        assert handle.name == "::".join(key)


@pytest.mark.parametrize("package", ["nvidia-cutlass", ""])
def test_a_header_that_nobody_installed(
    gpu: GpuBackend, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, package: str
) -> None:
    """An optional kernel whose headers are an optional package's counts as missing, with one warning; a required one,
    and one that lacks any other header, is an error."""

    def load(module: str, function: str) -> None:
        raise HeaderNotFoundError(
            "gemm.cu", "sm_90a", "the log", 3, "cute/tensor.hpp", (), "how to install it", package
        )

    with second_backend(gpu) as other:
        monkeypatch.setattr(other._device, "load", load)  # type: ignore[attr-defined]
        with refused(HeaderNotFoundError, "cute/tensor.hpp", "how to install it"):
            other.kernel("gemm", "dense_gemm_bf16_pipelined")
        if not package:
            with refused(HeaderNotFoundError, "cute/tensor.hpp"):
                other.try_kernel("gemm", "dense_gemm_bf16_pipelined")
            return
        for function in ("dense_gemm_bf16_pipelined", "dense_gemm_bf16"):
            assert other.try_kernel("gemm", function).is_null
    warnings = [record.message for record in caplog.records if "optional kernels" in record.message]
    assert len(warnings) == 1
    assert "optional kernels of gemm are left out: gemm.cu:3:" in warnings[0]
    assert "how to install it" in warnings[0]
    assert "the log" not in warnings[0]


def test_audit(gpu: GpuBackend) -> None:
    with second_backend(gpu) as other:
        other.kernel("residual_add", "bf16_concat")
        other.try_kernel("residual_add", "no_such_kernel")
        rows = {(row.module, row.function): row for row in other.kernel_audit()}
        assert rows["residual_add", "bf16_concat"].status == "used"
        assert rows["residual_add", "no_such_kernel"].status == "missing"
        assert rows["norm", "rms_norm"].status == "unused"
        assert all("test_handles.py:" in site for site in rows["residual_add", "bf16_concat"].sites)
        assert rows["norm", "rms_norm"].sites == ()


def test_one_load_a_module_and_device(
    gpu: GpuBackend, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousand lookups and launches load nothing again; a second backend takes the module that is there."""
    from spark_py.runtime.cuda_images import module_load_count

    device = gpu._device  # type: ignore[attr-defined]
    loads: list[tuple[str, str]] = []
    load = device.load
    monkeypatch.setattr(device, "load", lambda *key: loads.append(key) or load(*key))
    work = Concat(gpu, rng)
    before = module_load_count(gpu.ordinal)
    for _ in range(1000):
        gpu.launch_typed(
            gpu.kernel("residual_add", "bf16_concat"), work.grid, work.BLOCK, 0, gpu.default_stream(), work.args
        )
    assert work.result == work.expected
    assert len(loads) <= 1  # none where an earlier test of this backend has looked it up
    with second_backend(gpu) as other:
        theirs = Concat(other, rng)
        theirs.launch()
        assert theirs.result == theirs.expected
        assert module_load_count(gpu.ordinal) == before
        for ptr in (theirs.a, theirs.b, theirs.out):
            other.free(ptr)
    work.launch()
    assert work.result == work.expected
    assert module_load_count(gpu.ordinal) == before
