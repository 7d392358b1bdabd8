# SPDX-License-Identifier: AGPL-3.0-only
"""Module w4a16_gemv: the NVFP4 GEMVs bit for bit against their orders of arithmetic, for one row and for several."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from spark_py import catalog
from spark_py.ops import w4a16_gemv as ops
from spark_py.reference import w4a16_gemv as reference
from spark_py.runtime.errors import ArgumentPointerError, ArgumentRangeError, InvalidArgumentError, NullHandleError
from spark_py.runtime.gpu import GpuBackend, KernelHandle
from spark_py.runtime.launch import KernelLaunch
from spark_py.testing import BF16, F32, Array, Output, assert_same_bits, f64, normal, upload
from spark_py.testing.cases.w4a16_gemv import SCALE2, cancelling, nvfp4, weights

from .nvfp4 import Weight, by_chunk, by_weight, on_device
from .support import checks

Quantised = tuple[Array, Array, Array]
"""Activations, packed codes and scales."""

# Rows and chunks at the edges of blocks, of pairs of chunks and of turns of 128 chunks.
RANDOM = [(n, 48) for n in range(1, 10)] + [(1, 16), (127, 80), (129, 16), (17, 1040), (9, 2064), (5, 4112)]
CANCELLING = [(5, 32), (33, 96), (6, 1056), (8, 2080), (65, 4128)]
EXACT_ROWS = 3
"""As many rows of each cancelling shape are computed in exact arithmetic."""

FIXED = {"w4a16_gemv_batch2": 2, "w4a16_gemv_batch3": 3}
TOLD = {name.partition("::")[2]: rows for name, rows in ops.TIER_ROWS.items()}


def run(gpu: GpuBackend, function: str, x: Array, packed: Array, scales: Array, dtype: np.dtype[Any] = BF16) -> Array:
    """One of the kernels for one row."""
    output, (count, size) = Output(gpu, (len(packed),), dtype), (len(packed), x.size)
    launch: Callable[..., None] = getattr(ops, function)
    weight = on_device(gpu, packed, scales, SCALE2)
    kernel = gpu.kernel("w4a16_gemv", function)
    launch(gpu, kernel, upload(gpu, x), weight, output.ptr, count, size, gpu.default_stream())
    return output.read()


def run_qg(gpu: GpuBackend, x: Array, packed: Array, scales: Array, heads: int) -> Array:
    output, count = Output(gpu, (len(packed),)), len(packed)
    weight, kernel = on_device(gpu, packed, scales, SCALE2), gpu.kernel("w4a16_gemv", "w4a16_gemv_qg")
    ops.w4a16_gemv_qg(
        gpu, kernel, upload(gpu, x), weight, output.ptr, count, x.size, heads, count // 2 // heads, gpu.default_stream()
    )
    return output.read()


def run_batch(gpu: GpuBackend, function: str, x: Array, packed: Array, scales: Array) -> Array:
    """One of the kernels for several rows."""
    (rows, size), count = x.shape, len(packed)
    output, kernel = Output(gpu, (rows, count)), gpu.kernel("w4a16_gemv", function)
    args = gpu, kernel, upload(gpu, x), on_device(gpu, packed, scales, SCALE2), output.ptr
    if function in FIXED:
        launch: Callable[..., None] = getattr(ops, function)
        launch(*args, count, size, gpu.default_stream())
    else:
        ops.w4a16_gemv_batchm(*args, rows, count, size, gpu.default_stream())
    return output.read()


def random(rng: np.random.Generator, rows: tuple[int, ...], count: int, size: int) -> Quantised:
    """Activations of many magnitudes; every scale but NaN."""
    x = (rng.standard_normal((*rows, size)) * 2.0 ** rng.integers(-6, 6, (*rows, size))).astype(BF16)
    return x, *nvfp4(rng, count, size, 0, 0x7F)


def near_the_exact_sum(got: Array, x: Array, packed: Array, scales: Array) -> bool:
    """Within what any order of FP32 sums may lose, and half an ulp of the type."""
    matrix = weights(packed, scales, float(np.float32(SCALE2)))
    half = 2.0**-8 if got.dtype == BF16 else 2.0**-24
    exact, terms = f64(x) @ matrix.T, np.abs(f64(x)) @ np.abs(matrix).T
    bound = (x.shape[-1] / 16 + 24) * 2.0**-24 * terms + half * np.abs(exact)
    return bool((np.abs(f64(got) - exact) <= bound).all())


def check_one_row(
    launch: Callable[..., Array], expected: Callable[..., Array], exact: Any, rng: np.random.Generator
) -> None:
    """`launch(x, packed, scales)` against the reference and FP64, and `exact` where rounding is all there is."""
    for count, size in RANDOM:
        drawn = random(rng, (), count, size)
        got, what = launch(*drawn), f"N={count} K={size}"
        assert near_the_exact_sum(got, *drawn), what
        assert_same_bits(got, expected(*drawn, SCALE2), what)
    x, (packed, scales) = normal(rng, 80), nvfp4(rng, 7, 80, 1, 8)
    assert near_the_exact_sum(launch(x, packed, scales), x, packed, scales), "subnormal scales"
    for count, size in CANCELLING:
        x, packed, scales = cancelling(rng, (), count, size)
        got, what = launch(x, packed, scales), f"sums that cancel, N={count} K={size}"
        assert_same_bits(got, expected(x, packed, scales, SCALE2), what)
        singly = [exact(x, packed[n], scales[n], SCALE2) for n in range(EXACT_ROWS)]
        assert_same_bits(got[:EXACT_ROWS], np.array(singly, np.float32).astype(got.dtype), what)
    x, (packed, scales) = normal(rng, 48), nvfp4(rng, 6, 48)
    scales[2, 1], scales[4, 0] = 0x7F, 0xFF
    assert np.isnan(f64(launch(x, packed, scales))).tolist() == [False, False, True, False, True, False]


@checks("w4a16_gemv::w4a16_gemv")
def check_w4a16_gemv(gpu: GpuBackend, rng: np.random.Generator) -> None:
    spec = catalog.CATALOG["w4a16_gemv", "w4a16_gemv"]
    check_one_row(lambda *drawn: run(gpu, "w4a16_gemv", *drawn), spec.reference, by_chunk, rng)


@checks("w4a16_gemv::w4a16_gemv_sw")
def check_w4a16_gemv_sw(gpu: GpuBackend, rng: np.random.Generator) -> None:
    def launch(*drawn: Array) -> Array:
        got = run(gpu, "w4a16_gemv_sw", *drawn)
        assert_same_bits(got, run(gpu, "w4a16_gemv", *drawn), "against w4a16_gemv")
        return got

    check_one_row(launch, catalog.CATALOG["w4a16_gemv", "w4a16_gemv_sw"].reference, by_chunk, rng)


@checks("w4a16_gemv::w4a16_gemv_logits")
def check_w4a16_gemv_logits(gpu: GpuBackend, rng: np.random.Generator) -> None:
    spec = catalog.CATALOG["w4a16_gemv", "w4a16_gemv_logits"]
    check_one_row(lambda *drawn: run(gpu, "w4a16_gemv_logits", *drawn, F32), spec.reference, by_weight, rng)


@checks("w4a16_gemv::w4a16_gemv_qg")
def check_w4a16_gemv_qg(gpu: GpuBackend, rng: np.random.Generator) -> None:
    spec = catalog.CATALOG["w4a16_gemv", "w4a16_gemv_qg"]
    for heads, size, k in ((1, 1, 32), (3, 5, 96), (2, 16, 1056), (7, 3, 2080)):
        for x, packed, scales in (
            random(rng, (), 2 * heads * size, k),
            cancelling(rng, (), 2 * heads * size, k),
        ):
            got, what = run_qg(gpu, x, packed, scales, heads), f"{heads} heads of {size}, K={k}"
            assert_same_bits(got, spec.reference(x, packed, scales, SCALE2, heads, size), what)
            # Row (head, query or gate, element) of the weights, where the output has (query or gate, head, element).
            rows = np.arange(2 * heads * size).reshape(heads, 2, size).transpose(1, 0, 2).reshape(-1)
            for at in {0, len(rows) - 1, int(rng.integers(len(rows)))}:
                alone = by_weight(x, packed[rows[at]], scales[rows[at]], SCALE2)
                assert_same_bits(got[at : at + 1], np.array([alone], np.float32).astype(BF16), f"{what}, output {at}")


def check_batch(gpu: GpuBackend, rng: np.random.Generator, function: str, rows: set[int]) -> None:
    """Each row has the bits that the GEMV gives it alone."""
    for m in sorted(rows):
        for draw, count, size in (
            (random, 9, 80),
            (random, 3, 16),
            (cancelling, 35, 96),
            (cancelling, 6, 2080),
        ):
            x, packed, scales = draw(rng, (m,), count, size)
            got, what = run_batch(gpu, function, x, packed, scales), f"{function} M={m} N={count} K={size}"
            assert_same_bits(got, np.stack([run(gpu, "w4a16_gemv", row, packed, scales) for row in x]), what)
            alone = [by_chunk(x[-1], packed[n], scales[n], SCALE2) for n in (0, count - 1)]
            assert_same_bits(got[-1, [0, -1]], np.array(alone, np.float32).astype(BF16), what)


@checks("w4a16_gemv::w4a16_gemv_batch8")
def check_batch8(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_batch(gpu, rng, "w4a16_gemv_batch8", {1, 3, 6, 8})


@checks("w4a16_gemv::w4a16_gemv_batch8_rt2")
def check_batch8_rt2(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_batch(gpu, rng, "w4a16_gemv_batch8_rt2", {2, 5, 8})


@checks("w4a16_gemv::w4a16_gemv_batch32")
def check_batch32(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_batch(gpu, rng, "w4a16_gemv_batch32", {7, 32})


@checks("w4a16_gemv::w4a16_gemv_batch3")
def check_batch3(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_batch(gpu, rng, "w4a16_gemv_batch3", {3})


def test_w4a16_gemv(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_w4a16_gemv(gpu, rng)


def test_w4a16_gemv_sw(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_w4a16_gemv_sw(gpu, rng)


def test_w4a16_gemv_logits(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_w4a16_gemv_logits(gpu, rng)


def test_w4a16_gemv_qg(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_w4a16_gemv_qg(gpu, rng)


@pytest.mark.parametrize(("function", "most"), (FIXED | TOLD).items())
def test_each_row_is_the_gemv_of_that_row(gpu: GpuBackend, rng: np.random.Generator, function: str, most: int) -> None:
    check_batch(gpu, rng, function, {most} if function in FIXED else {1, most // 2, most - 1, most})


@pytest.mark.parametrize("function", ["w4a16_gemv", "w4a16_gemv_sw"])
def test_every_number_of_outputs_is_covered(gpu: GpuBackend, rng: np.random.Generator, function: str) -> None:
    x, packed, scales = random(rng, (), 64, 48)
    together = run(gpu, function, x, packed, scales)
    for count in range(1, 64):
        assert_same_bits(run(gpu, function, x, packed[:count], scales[:count]), together[:count], f"N={count}")


def test_infinity_and_nan_stay_in_their_row(gpu: GpuBackend, rng: np.random.Generator) -> None:
    x, (packed, scales) = normal(rng, 5, 64), nvfp4(rng, 6, 64)
    packed |= 0x11  # no zeros, which would make a NaN of infinity
    x[1, 17], x[3, 40] = np.inf, np.nan
    got = f64(run_batch(gpu, "w4a16_gemv_batch8", x, packed, scales))
    assert np.isinf(got[1]).all()
    assert np.isnan(got[3]).all()
    assert np.isfinite(got[[0, 2, 4]]).all()


def test_every_code_and_every_scale_decodes(gpu: GpuBackend) -> None:
    # One weight at a time: 16 codes under each of 256 scales, against the tables of the formats.
    for scale in range(256):
        packed = np.zeros((16, 8), np.uint8)
        packed[:, 3] = np.arange(16) << 4
        x = np.zeros(16, BF16)
        x[7] = 1.0
        if scale % 16 and scale % 127:  # NaN, both zeros, and the steps between binades
            continue
        scales = np.full((16, 1), scale, np.uint8)
        codes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6] * 2) * np.repeat([1.0, -1.0], 8)
        factor = np.float32(scales[0].view(ml_dtypes.float8_e4m3fn)[0]) * np.float32(SCALE2)
        with np.errstate(invalid="ignore"):
            expected = (codes * np.float64(factor)).astype(np.float32)
        got = run(gpu, "w4a16_gemv_logits", x, packed, scales, F32)
        np.testing.assert_array_equal(got, expected, f"scale {scale:#x}")


@pytest.mark.host_only("what the reference rests on does not depend on the backend")
def test_fma_rounds_once(rng: np.random.Generator) -> None:
    from .nvfp4 import Fraction, rounded

    a, b = rng.standard_normal(4000).astype(np.float32), rng.standard_normal(4000).astype(np.float32)
    c = (-a.astype(np.float64) * b).astype(np.float32)
    c[::2] *= (2.0 ** rng.integers(-40, 40, 2000)).astype(np.float32)
    # Sums just beside the middle of two FP32 numbers, where rounding to FP64 first would make a tie of them.
    a[:1000], b[:1000] = 1 + 2.0**-12, 1 + 2.0**-12 + 2.0**-23 * rng.integers(0, 3, 1000)
    c[:1000] = 2.0 ** rng.integers(20, 32, 1000)
    expected = [
        rounded(Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))) for x, y, z in zip(a, b, c, strict=True)
    ]
    assert_same_bits(reference.fma(a, b, c), np.array([float(each) for each in expected], np.float32))


@pytest.mark.parametrize(("change", "name"), [({"n": 0}, "n"), ({"k": 0}, "k"), ({"k": 8}, "k"), ({"k": 40}, "k")])
def test_impossible_numbers_are_refused(
    gpu: GpuBackend, rng: np.random.Generator, change: dict[str, Any], name: str
) -> None:
    ptr = upload(gpu, normal(rng, 64))
    weight, numbers = Weight(ptr, ptr, 1.0), {"n": 4, "k": 32} | change
    for function in ("w4a16_gemv", "w4a16_gemv_sw", "w4a16_gemv_logits", *FIXED):
        launch: Callable[..., None] = getattr(ops, function)
        with pytest.raises(InvalidArgumentError) as error:
            launch(gpu, gpu.kernel("w4a16_gemv", function), ptr, weight, ptr, **numbers, stream=gpu.default_stream())
        assert error.value.name == name


@pytest.mark.parametrize(("function", "most"), TOLD.items())
def test_more_rows_than_a_tier_has_are_refused(
    gpu: GpuBackend, rng: np.random.Generator, function: str, most: int
) -> None:
    ptr = upload(gpu, normal(rng, 64))
    kernel, weight = gpu.kernel("w4a16_gemv", function), Weight(ptr, ptr, 1.0)
    for rows in (0, most + 1):
        with pytest.raises(InvalidArgumentError) as error:
            ops.w4a16_gemv_batchm(gpu, kernel, ptr, weight, ptr, rows, 1, 16, gpu.default_stream())
        assert error.value.name == "m"


def test_heads_that_do_not_make_n_are_refused(gpu: GpuBackend, rng: np.random.Generator) -> None:
    ptr = upload(gpu, normal(rng, 64))
    kernel, weight = gpu.kernel("w4a16_gemv", "w4a16_gemv_qg"), Weight(ptr, ptr, 1.0)
    for (n, heads, size), name in (((8, 2, 3), "n"), ((8, 0, 4), "num_heads"), ((8, 4, 0), "head_dim")):
        with pytest.raises(InvalidArgumentError) as error:
            ops.w4a16_gemv_qg(gpu, kernel, ptr, weight, ptr, n, 16, heads, size, gpu.default_stream())
        assert error.value.name == name


def test_the_kernel_of_another_grid_is_refused(gpu: GpuBackend, rng: np.random.Generator) -> None:
    ptr, stream = upload(gpu, normal(rng, 64)), gpu.default_stream()
    weight = Weight(ptr, ptr, 1.0)
    handles = {name: gpu.kernel("w4a16_gemv", name) for name in ("w4a16_gemv", "w4a16_gemv_sw", "w4a16_gemv_batch2")}
    for launched in handles:
        launch: Callable[..., None] = getattr(ops, launched)
        for name, kernel in handles.items():
            if name != launched:
                with pytest.raises(InvalidArgumentError, match=name):
                    launch(gpu, kernel, ptr, weight, ptr, 1, 16, stream)
    with pytest.raises(InvalidArgumentError, match="w4a16_gemv_sw"):
        ops.w4a16_gemv_batchm(gpu, handles["w4a16_gemv_sw"], ptr, weight, ptr, 1, 1, 16, stream)
    with pytest.raises(NullHandleError):
        ops.w4a16_gemv_sw(gpu, KernelHandle(0), ptr, weight, ptr, 1, 16, stream)


@pytest.mark.host_only("the catalogue's rules are applied where arguments are bound to a reference")
def test_a_launch_that_would_lose_rows_or_chunks_is_refused(gpu: GpuBackend, rng: np.random.Generator) -> None:
    ptr = upload(gpu, normal(rng, 256))
    for function, numbers, message in (
        ("w4a16_gemv", (4, 24), "K is 24"),
        ("w4a16_gemv_batch8", (9, 4, 16), "M is 9"),
        ("w4a16_gemv_batch8_rt2", (0, 4, 16), "M is 0"),
        ("w4a16_gemv_qg", (4, 16, 1, 1), "N is 4"),
    ):
        launch = KernelLaunch(gpu, gpu.kernel("w4a16_gemv", function)).grid((1, 1, 1)).block((256, 1, 1))
        launch.arg_ptr(ptr).arg_ptr(ptr).arg_ptr(ptr).arg_f32(1.0).arg_ptr(ptr)
        for number in numbers:
            launch.arg_u32(number)
        with pytest.raises(ArgumentRangeError, match=message):
            launch.launch(gpu.default_stream())
    kernel = gpu.kernel("w4a16_gemv", "w4a16_gemv")
    for x, codes, align in ((ptr.offset(8), ptr, "16"), (ptr, ptr.offset(4), "8")):
        with pytest.raises(ArgumentPointerError, match=align):
            ops.w4a16_gemv(gpu, kernel, x, Weight(codes, ptr, 1.0), ptr, 1, 16, gpu.default_stream())
