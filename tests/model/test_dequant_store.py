# SPDX-License-Identifier: AGPL-3.0-only
"""A weight of a checkpoint with its scales: found by name, decided by dtype, refused by name where it does not fit."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_py.model.weight_loader import dequant, dequant_codes, dequant_plan, ignore_modules
from spark_py.model.weight_loader.dequant_plan import (
    HostWeight,
    WeightFormat,
    WeightPlan,
    check_scales_applied,
    plan_weight,
    read_factor,
    read_weight,
)
from spark_py.model.weight_loader.ignore_modules import covering
from spark_py.runtime.errors import (
    AmbiguousScaleError,
    IgnoredModuleError,
    InvalidArgumentError,
    MissingScaleError,
    MissingWeightError,
    ScaleDtypeError,
    ScaleShapeError,
    ScaleValueError,
    UnreadScaleError,
    WeightError,
    WeightFormatError,
    WeightScaleError,
)
from spark_py.runtime.weights import WeightDtype, WeightStore
from tests.model.dequant_support import (
    BF16,
    E4M3,
    E8M0,
    F32,
    Array,
    Package,
    assert_same,
    check_store,
    oracle_bf16,
    oracle_fp4,
    oracle_fp8,
    random_e4m3,
    random_packed,
    random_scale,
)
from tests.runtime.weights_support import random_tensor, write

D = WeightDtype
Tensors = dict[str, tuple[Array, WeightDtype]]
Open = Callable[[Tensors], WeightStore]
FP8, BYTES = np.zeros((130, 300), np.uint8), np.zeros((4, 32), np.uint8)


@pytest.fixture
def opened(tmp_path: Path) -> Open:
    return lambda tensors: WeightStore.open(write(tmp_path / "model.safetensors", dict(tensors)))


def ones(dtype: WeightDtype, *shape: int) -> tuple[Array, WeightDtype]:
    return np.ones(shape, np.uint8 if dtype is D.U8 else dtype.numpy), dtype


def test_check_of_the_mutants(tmp_path: Path) -> None:
    check_store(Package(dequant_codes, dequant, ignore_modules, dequant_plan), tmp_path)


# What is read.


def test_plain_tensors_pass_through(opened: Open, rng: np.random.Generator) -> None:
    """BF16 comes back bit for bit and F32 as it is, whatever lies beside them and whatever the rank."""
    bf16 = rng.standard_normal((3, 4, 5)).astype(BF16)
    f32 = rng.standard_normal(7).astype(np.float32)
    store = opened({"a.weight": (bf16, D.BF16), "b.weight": (f32, D.F32), "a.weight_scale": ones(D.F32)})
    a, b = read_weight(store, "a.weight"), read_weight(store, "b.weight", ["b"])
    assert a.plan == WeightPlan("a.weight", WeightFormat.BF16, (3, 4, 5))
    assert b.plan == WeightPlan("b.weight", WeightFormat.F32, (7,), ignored_by="b")
    assert_same(a.values, bf16.astype(np.float32))
    assert_same(b.values, f32)
    np.testing.assert_array_equal(a.bf16().view(np.uint16), bf16.view(np.uint16))
    np.testing.assert_array_equal(b.bf16().view(np.uint16), oracle_bf16(f32))
    assert a.plan.scales == ()
    with pytest.raises(UnreadScaleError) as caught:  # it was made for a quantised `a.weight`
        check_scales_applied(store, a.plan.accounted)
    assert caught.value.tensors == ("a.weight_scale",)


@pytest.mark.parametrize("scale_name", ["x.weight_scale_inv", "x.weight_scale", "x.scale"])
@pytest.mark.parametrize(
    ("shape", "dtype", "kind"),
    [
        ((2, 3), D.BF16, WeightFormat.FP8_BLOCK),
        ((2, 3), D.F32, WeightFormat.FP8_BLOCK),
        ((2, 3), D.F8_E8M0, WeightFormat.FP8_BLOCK),
        ((130,), D.F32, WeightFormat.FP8_ROW),
        ((130, 1), D.BF16, WeightFormat.FP8_ROW),
        ((), D.F32, WeightFormat.FP8_TENSOR),
        ((1,), D.F8_E8M0, WeightFormat.FP8_TENSOR),
    ],
)
def test_fp8(
    opened: Open,
    rng: np.random.Generator,
    scale_name: str,
    shape: tuple[int, ...],
    dtype: WeightDtype,
    kind: WeightFormat,
) -> None:
    weight, scale = random_e4m3(rng, 130, 300), random_scale(rng, dtype.numpy, *shape)
    store = opened({"x.weight": (weight, D.F8_E4M3), scale_name: (scale, dtype), "x.input_scale": ones(D.F32)})
    got = read_weight(store, "x.weight")
    assert got.plan == WeightPlan("x.weight", kind, (130, 300), scale_name, activation_scales=("x.input_scale",))
    expected = oracle_fp8(weight, scale)
    assert_same(got.values, expected)
    np.testing.assert_array_equal(got.bf16().view(np.uint16), oracle_bf16(expected))
    assert got.plan.scales == (scale_name,)
    check_scales_applied(store, got.plan.accounted)
    assert store.unread() == ("x.input_scale",)


@pytest.mark.parametrize("dtype", [D.U8, D.I8, D.F4])
@pytest.mark.parametrize("weight_name", ["x.weight", "x.weight_packed"])
@pytest.mark.parametrize(("factor_name", "value"), [("x.weight_scale_2", 2.8e-4), ("x.weight_global_scale", 3584.7)])
def test_nvfp4(
    opened: Open, rng: np.random.Generator, dtype: WeightDtype, weight_name: str, factor_name: str, value: float
) -> None:
    """The factor's name alone says the convention; the packed form is found under the weight's name."""
    packed, scale = random_packed(rng, 20, 48), random_scale(rng, E4M3, 20, 3)
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(20, 48).view(ml_dtypes.float4_e2m1fn)
    stored = codes if dtype is D.F4 else packed.view(dtype.numpy)
    number = np.array([value], np.float32)
    store = opened(
        {
            weight_name: (stored, dtype),
            "x.weight_scale": (scale, D.F8_E4M3),
            factor_name: (number, D.F32),
            "x.input_global_scale": ones(D.F32, 1),
        }
    )
    got = read_weight(store, "x.weight")
    assert got.plan == WeightPlan(
        weight_name, WeightFormat.NVFP4, (20, 48), "x.weight_scale", factor_name, ("x.input_global_scale",)
    )
    multiplier = float(number[0]) if factor_name.endswith("_2") else float(np.float32(1 / float(number[0])))
    assert_same(got.values, oracle_fp4(packed, scale, 16, multiplier))
    assert read_factor(store, got.plan) == np.float32(multiplier)
    check_scales_applied(store, got.plan.accounted)
    assert read_weight(store, weight_name).plan == got.plan


@pytest.mark.parametrize("dtype", [D.U8, D.I8, D.F4])
@pytest.mark.parametrize("scale_dtype", [D.F8_E8M0, D.U8])
@pytest.mark.parametrize(("name", "scale_name"), [("w1.weight", "w1.scale"), ("w1.weight_packed", "w1.weight_scale")])
def test_mxfp4(
    opened: Open, rng: np.random.Generator, dtype: WeightDtype, scale_dtype: WeightDtype, name: str, scale_name: str
) -> None:
    packed, scale = random_packed(rng, 20, 96), random_scale(rng, E8M0, 20, 3, spread=120)
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(20, 96).view(ml_dtypes.float4_e2m1fn)
    stored = codes if dtype is D.F4 else packed.view(dtype.numpy)
    store = opened({name: (stored, dtype), scale_name: (scale.view(scale_dtype.numpy), scale_dtype)})
    got = read_weight(store, "w1.weight")
    assert got.plan == WeightPlan(name, WeightFormat.MXFP4, (20, 96), scale_name)
    assert_same(got.values, oracle_fp4(packed, scale, 32))


def test_a_parameter_without_weight_in_its_name(opened: Open, rng: np.random.Generator) -> None:
    weight, scale = random_e4m3(rng, 5, 6), random_scale(rng, F32, 5)
    store = opened({"m.down_proj": (weight, D.F8_E4M3), "m.down_proj_scale": (scale, D.F32)})
    assert_same(read_weight(store, "m.down_proj").values, oracle_fp8(weight, scale))


def test_every_bf16_pattern_passes_through(opened: Open, recwarn: pytest.WarningsRecorder) -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    got = read_weight(opened({"x.weight": (bits.view(BF16), D.BF16)}), "x.weight").bf16().view(np.uint16)
    nan = bits & 0x7FFF > 0x7F80
    np.testing.assert_array_equal(got[~nan], bits[~nan])
    np.testing.assert_array_equal(got[nan], bits[nan] & 0x8000 | 0x7FC0)
    assert not recwarn.list


def test_plans_read_no_tensor(opened: Open) -> None:
    store = opened({"x.weight": (FP8, D.F8_E4M3), "x.weight_scale": ones(D.F32)})
    plan_weight(store, "x.weight")
    assert store.unread() == ("x.weight", "x.weight_scale")


# What is refused.

WRONG: dict[str, tuple[Tensors, type[WeightError], tuple[str, ...]]] = {
    "FP8 without a scale": (
        {"x.weight": (FP8, D.F8_E4M3), "x.input_scale": ones(D.F32), "y.weight_scale": ones(D.F32)},
        MissingScaleError,
        ("'x.weight'", "F8_E4M3", "'x.weight_scale_inv'", "'x.weight_scale'", "'x.scale'"),
    ),
    "bytes without a scale": ({"x.weight": (BYTES, D.U8)}, MissingScaleError, ("'x.weight'", "U8")),
    "NVFP4 without a factor": (
        {"x.weight": (BYTES, D.U8), "x.weight_scale": ones(D.F8_E4M3, 4, 4)},
        MissingScaleError,
        ("'x.weight'", "'x.weight_scale_2'", "'x.weight_global_scale'"),
    ),
    "block grid transposed": (
        {"x.weight": (FP8, D.F8_E4M3), "x.weight_scale_inv": ones(D.BF16, 3, 2)},
        ScaleShapeError,
        ("'x.weight'", "'x.weight_scale_inv'", "[3, 2]", "[2, 3]", "[130, 300]"),
    ),
    "edge blocks left out": (
        {"x.weight": (FP8, D.F8_E4M3), "x.weight_scale_inv": ones(D.BF16, 1, 2)},
        ScaleShapeError,
        ("'x.weight'", "[1, 2]"),
    ),
    "a scale a column": (
        {"x.weight": (FP8, D.F8_E4M3), "x.weight_scale": ones(D.F32, 300)},
        ScaleShapeError,
        ("'x.weight'", "[300]", "[130]"),
    ),
    "NVFP4 scales in groups of 32": (
        {
            "x.weight": (BYTES, D.U8),
            "x.weight_scale": ones(D.F8_E4M3, 4, 2),
            "x.weight_scale_2": ones(D.F32),
        },
        ScaleShapeError,
        ("'x.weight'", "[4, 2]", "[4, 4]"),
    ),
    "MXFP4 scales in groups of 16": (
        {"x.weight": (BYTES, D.I8), "x.scale": ones(D.F8_E8M0, 4, 4)},
        ScaleShapeError,
        ("'x.weight'", "'x.scale'", "[4, 4]", "[4, 2]"),
    ),
    "NVFP4 with a factor a row": (
        {
            "x.weight": (BYTES, D.U8),
            "x.weight_scale": ones(D.F8_E4M3, 4, 4),
            "x.weight_scale_2": ones(D.F32, 4),
        },
        ScaleShapeError,
        ("'x.weight_scale_2'", "[4]"),
    ),
    "a BF16 factor": (
        {
            "x.weight": (BYTES, D.U8),
            "x.weight_scale": ones(D.F8_E4M3, 4, 4),
            "x.weight_scale_2": ones(D.BF16),
        },
        ScaleDtypeError,
        ("'x.weight_scale_2'", "BF16", "F32"),
    ),
    "integers of 8 bits, a scale a row": (
        {"x.weight": (BYTES, D.I8), "x.weight_scale": ones(D.F32, 4, 1)},
        ScaleDtypeError,
        ("'x.weight_scale'", "F32"),
    ),
    "FP8 with byte scales": (
        {"x.weight": (FP8, D.F8_E4M3), "x.weight_scale": ones(D.U8, 2, 3)},
        ScaleDtypeError,
        ("'x.weight_scale'", "U8"),
    ),
    "FP8 with E4M3 scales": (
        {"x.weight": (FP8, D.F8_E4M3), "x.weight_scale": ones(D.F8_E4M3, 2, 3)},
        ScaleDtypeError,
        ("'x.weight_scale'", "F8_E4M3"),
    ),
    "FP8 with a factor": (
        {"x.weight": (FP8, D.F8_E4M3), "x.weight_scale": ones(D.F32), "x.weight_scale_2": ones(D.F32)},
        WeightScaleError,
        ("'x.weight'", "'x.weight_scale_2'"),
    ),
    "MXFP4 with a factor": (
        {
            "x.weight": (BYTES, D.U8),
            "x.weight_scale": ones(D.F8_E8M0, 4, 2),
            "x.weight_global_scale": ones(D.F32),
        },
        WeightScaleError,
        ("'x.weight'", "'x.weight_global_scale'"),
    ),
    "two scales": (
        {"x.weight": (FP8, D.F8_E4M3), "x.weight_scale": ones(D.F32), "x.weight_scale_inv": ones(D.F32, 2, 3)},
        AmbiguousScaleError,
        ("'x.weight'", "'x.weight_scale'", "'x.weight_scale_inv'"),
    ),
    "both conventions at once": (
        {
            "x.weight": (BYTES, D.U8),
            "x.weight_scale": ones(D.F8_E4M3, 4, 4),
            "x.weight_scale_2": ones(D.F32),
            "x.weight_global_scale": ones(D.F32),
        },
        AmbiguousScaleError,
        ("'x.weight_scale_2'", "'x.weight_global_scale'"),
    ),
    "packed and not": (
        {"x.weight": ones(D.BF16, 4, 64), "x.weight_packed": (BYTES, D.U8)},
        AmbiguousScaleError,
        ("'x.weight'", "'x.weight_packed'"),
    ),
    "K of 24": (
        {
            "x.weight": (BYTES[:, :12].copy(), D.U8),
            "x.weight_scale": ones(D.F8_E4M3, 4, 2),
            "x.weight_scale_2": ones(D.F32),
        },
        WeightFormatError,
        ("'x.weight'", "K is 24", "16"),
    ),
    "K of 48 for MXFP4": (
        {"x.weight": (BYTES[:, :24].copy(), D.U8), "x.scale": ones(D.F8_E8M0, 4, 2)},
        WeightFormatError,
        ("'x.weight'", "K is 48", "32"),
    ),
    "three dimensions": (
        {"x.weight": ones(D.F8_E4M3, 2, 3, 4), "x.weight_scale": ones(D.F32)},
        WeightFormatError,
        ("'x.weight'", "[2, 3, 4]"),
    ),
    "no elements": (
        {"x.weight": ones(D.F8_E4M3, 0, 4), "x.weight_scale": ones(D.F32)},
        WeightFormatError,
        ("'x.weight'", "[0, 4]"),
    ),
    "FP16": ({"x.weight": ones(D.F16, 3, 4)}, WeightFormatError, ("'x.weight'", "F16")),
    "E5M2": ({"x.weight": ones(D.F8_E5M2, 3, 4)}, WeightFormatError, ("'x.weight'", "F8_E5M2")),
    "no such tensor": ({"y.weight": ones(D.BF16, 3)}, MissingWeightError, ("'x.weight'",)),
}


@pytest.mark.parametrize("case", WRONG)
def test_refused_from_the_headers(opened: Open, case: str) -> None:
    """The error has the exact type and names what is wrong; nothing was read for it."""
    tensors, kind, told = WRONG[case]
    store = opened(tensors)
    for call in (plan_weight, read_weight):
        with pytest.raises(kind) as caught:
            call(store, "x.weight")
        assert type(caught.value) is kind
        for word in told:
            assert word in str(caught.value)
    assert set(store.unread()) == set(tensors)


DTYPES = st.sampled_from([D.U8, D.I8, D.F4, D.F8_E4M3, D.F8_E8M0, D.F8_E5M2, D.BF16, D.F16, D.F32, D.I32])
SHAPES = st.sampled_from([(), (1,), (4,), (4, 1), (1, 1), (4, 2), (2, 4), (4, 4), (4, 32), (4, 64), (4, 24), (0, 32)])
NAMES = (
    "weight",
    "weight_packed",
    "weight_scale",
    "weight_scale_inv",
    "scale",
    "weight_scale_2",
    "weight_global_scale",
)


@given(
    tensors=st.dictionaries(st.sampled_from(NAMES), st.tuples(DTYPES, SHAPES), min_size=1),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=300)
def test_any_set_of_tensors_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, tensors: dict[str, tuple[WeightDtype, tuple[int, ...]]], seed: int
) -> None:
    """Whatever lies in a file: values of the plan's shape, from tensors that are there, or an error of the family."""
    rng = np.random.default_rng(seed)
    made = {
        f"x.{name}": (random_tensor(rng, dtype, *shape), dtype)
        for name, (dtype, shape) in tensors.items()
        if dtype is not D.F4 or np.prod(shape) % 2 == 0
    }
    store = WeightStore.open(write(tmp_path_factory.mktemp("any") / "model.safetensors", dict(made)))
    try:
        weight = read_weight(store, "x.weight")
    except WeightError as error:
        named = "'x.weight" in str(error)
        if not named:
            raise
        return
    assert weight.values.dtype == np.float32
    assert weight.values.shape == weight.plan.shape
    assert set(made) >= {weight.plan.name, *weight.plan.scales}
    assert set(store.unread()) == set(made) - {weight.plan.name, *weight.plan.scales}


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, -1.0])
@pytest.mark.parametrize("dtype", [D.F32, D.BF16])
def test_numbers_that_are_no_scale(opened: Open, value: float, dtype: WeightDtype) -> None:
    scale = np.ones((2, 3), dtype.numpy)
    scale[1, 1] = value
    store = opened({"x.weight": (FP8, D.F8_E4M3), "x.weight_scale_inv": (scale, dtype)})
    with pytest.raises(ScaleValueError, match=r"'x\.weight'.*'x\.weight_scale_inv'.* at 4, one of 1") as caught:
        read_weight(store, "x.weight")
    assert np.isnan(value) or caught.value.value == value
    assert "x.weight" in store.unread()


@pytest.mark.parametrize(("dtype", "byte"), [(D.F8_E8M0, 255), (D.U8, 255), (D.F8_E4M3, 0x7F), (D.F8_E4M3, 0x81)])
def test_bytes_that_are_no_scale(opened: Open, dtype: WeightDtype, byte: int) -> None:
    scale = np.full((4, 4 if dtype is D.F8_E4M3 else 2), 0x30, np.uint8)
    scale[2, 0] = byte
    factor: Tensors = {"x.weight_scale_2": ones(D.F32)} if dtype is D.F8_E4M3 else {}
    store = opened({"x.weight": (BYTES, D.U8), "x.weight_scale": (scale.view(dtype.numpy), dtype)} | factor)
    with pytest.raises(ScaleValueError, match=rf"'x\.weight_scale'.* at {2 * scale.shape[1]}, one of 1"):
        read_weight(store, "x.weight")


def test_scales_of_zero_are_scales(opened: Open) -> None:
    """A group without weights has scale 0."""
    scale = np.zeros((2, 3), np.float32)
    store = opened({"x.weight": (FP8 + 0x40, D.F8_E4M3), "x.weight_scale_inv": (scale, D.F32)})
    assert not read_weight(store, "x.weight").values.any()


MULTIPLIER, DIVISOR = "x.weight_scale_2", "x.weight_global_scale"


def nvfp4(opened: Open, name: str, value: float) -> tuple[WeightStore, WeightPlan]:
    factor = np.array(value, np.float32)
    store = opened({"x.weight": (BYTES, D.U8), "x.weight_scale": ones(D.F8_E4M3, 4, 4), name: (factor, D.F32)})
    return store, plan_weight(store, "x.weight")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (MULTIPLIER, 3584.0),
        (MULTIPLIER, np.nextafter(np.float32(1000), np.float32(2000))),
        (DIVISOR, 2.8e-4),
        (DIVISOR, np.nextafter(np.float32(1), np.float32(0))),
        *((name, value) for name in (MULTIPLIER, DIVISOR) for value in (0.0, -1.0, np.nan, np.inf)),
    ],
)
def test_implausible_factors(opened: Open, name: str, value: Any) -> None:
    store, plan = nvfp4(opened, name, value)
    for call in (lambda: read_factor(store, plan), lambda: read_weight(store, "x.weight")):
        with pytest.raises(ScaleValueError) as caught:
            call()
        assert caught.value.scale == name
        assert caught.value.tensor == "x.weight"
        assert "'x.weight'" in str(caught.value)
        other = {MULTIPLIER: "divisor", DIVISOR: "multiplier"}[name]
        assert (f"looks like a {other}" in str(caught.value)) == bool(np.isfinite(value) and value > 0)


@pytest.mark.parametrize(
    ("name", "value", "warned"),
    [
        (MULTIPLIER, 1.0, False),
        (MULTIPLIER, 1.5, True),
        (MULTIPLIER, 1000.0, True),
        (DIVISOR, 1000.0, False),
        (DIVISOR, 999.0, True),
        (DIVISOR, 1.0, True),
    ],
)
def test_doubtful_factors_are_warned_of(
    opened: Open, caplog: pytest.LogCaptureFixture, name: str, value: float, warned: bool
) -> None:
    store, plan = nvfp4(opened, name, value)
    with caplog.at_level(logging.WARNING, "spark_py"):
        factor = read_factor(store, plan)
    assert factor == (np.float32(value) if name == MULTIPLIER else np.float32(1) / np.float32(value))
    assert bool(caplog.records) == warned
    assert all(name in record.getMessage() and "'x.weight'" in record.getMessage() for record in caplog.records)


# ignore_modules


@pytest.mark.parametrize(
    ("entry", "covered"),
    [
        ("mtp", True),
        ("mtp.fc", True),
        ("mtp.fc.weight", True),
        ("mtp*", True),
        ("*.fc", True),
        ("*fc*", True),
        ("re:.*fc", True),
        (r"re:mtp\.fc$", True),
        ("mt", False),
        ("mtp.f", False),
        ("fc", False),
        ("fc.weight", False),
        ("mtp.fc.weight_scale", False),
        ("mtp.layers.0", False),
        ("re:fc", False),
        ("MTP", False),
    ],
)
def test_entries(opened: Open, entry: str, covered: bool) -> None:
    assert covering("mtp.fc.weight", ["lm_head", entry]) == (entry if covered else None)
    store = opened({"mtp.fc.weight": (FP8, D.F8_E4M3), "mtp.fc.weight_scale": ones(D.F32)})
    if covered:
        with pytest.raises(IgnoredModuleError) as caught:
            read_weight(store, "mtp.fc.weight", ["lm_head", entry])
        assert caught.value.pattern == entry
        assert "'mtp.fc.weight'" in str(caught.value)
        assert repr(entry) in str(caught.value)
    else:
        assert read_weight(store, "mtp.fc.weight", ["lm_head", entry]).plan.ignored_by is None


@pytest.mark.parametrize("entry", ["", "re:", "re:(", 3, None])
def test_bad_entries(entry: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="ignore_modules"):
        covering("mtp.fc.weight", ["mtp", entry])


def test_one_string_is_no_collection() -> None:
    with pytest.raises(InvalidArgumentError, match="not one string"):
        covering("mtp.fc.weight", "mtp")


def test_ignored_bf16_is_marked(opened: Open) -> None:
    """A loader that quantises on its own leaves such a weight alone."""
    store = opened({"mtp.fc.weight": ones(D.BF16, 3, 4)})
    weight: HostWeight = read_weight(store, "mtp.fc.weight", iter(["mtp.fc"]))
    assert weight.plan.ignored_by == "mtp.fc"
    assert not weight.plan.format.is_quantised


# Scales that nothing applied.


def test_unread_scales(opened: Open) -> None:
    store = opened(
        {
            "mtp.a.weight": (FP8, D.F8_E4M3),
            "mtp.a.weight_scale_inv": ones(D.F32, 2, 3),
            "mtp.b.weight": ones(D.BF16, 3),
            "mtp.b.weight_scale_inv": ones(D.F32, 1, 1),
            "mtp.c.weight_zero_point": ones(D.U8, 1),
            "mtp.hc_attn_scale": ones(D.F32, 3),
            "mtp.upscale.weight": ones(D.BF16, 3),
            "model.d.weight_scale": ones(D.F32),
        }
    )
    used = [name for x in ("a", "b") for name in plan_weight(store, f"mtp.{x}.weight").accounted]
    with pytest.raises(UnreadScaleError, match="2 scales") as caught:
        check_scales_applied(store, [*used, "mtp.hc_attn_scale"], "mtp.")
    assert caught.value.tensors == ("mtp.b.weight_scale_inv", "mtp.c.weight_zero_point")
    check_scales_applied(store, [*used, "mtp.hc_attn_scale", *caught.value.tensors], "mtp.")
    with pytest.raises(UnreadScaleError) as caught:
        check_scales_applied(store, [*used, "mtp.hc_attn_scale", "mtp.b.weight_scale_inv", "mtp.c.weight_zero_point"])
    assert caught.value.tensors == ("model.d.weight_scale",)
