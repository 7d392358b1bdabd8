# SPDX-License-Identifier: AGPL-3.0-only
"""DevicePtr: exact unsigned 64-bit arithmetic, whatever the integers are."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_py.runtime import DevicePtr
from spark_py.runtime.errors import InvalidPointerError

TOP = DevicePtr(2**63 + 16)


@pytest.mark.parametrize(
    ("base", "step", "address"),
    [
        (2**63 + 16, np.int32(5), 2**63 + 21),
        (2**63 + 16, np.uint8(255), 2**63 + 271),
        (2**63 + 16, np.int64(-8), 2**63 + 8),
        (2**63 + 16, np.int8(-128), 2**63 - 112),
        (2**63 - 1, np.int64(2**63 - 1), 2**64 - 2),
        (2**63 + 16, np.uint64(2**63 - 17), 2**64 - 1),
        (2**40, 2**40, 2**41),
        (2**64 - 1, 0, 2**64 - 1),
        (2**64 - 1, -(2**64) + 2, 1),
        (1, 0, 1),
    ],
)
def test_offset_is_exact(base: int, step: Any, address: int) -> None:
    moved = DevicePtr(base).offset(step)
    assert moved == DevicePtr(address)
    assert type(moved.address) is int


@given(base=st.integers(1, 2**64 - 1), step=st.integers(-(2**65), 2**65))
def test_offset_is_integer_addition_or_an_error(base: int, step: int) -> None:
    if 1 <= base + step <= 2**64 - 1:
        assert DevicePtr(base).offset(step).address == base + step
    else:
        with pytest.raises(InvalidPointerError, match="limit"):
            DevicePtr(base).offset(step)


@pytest.mark.parametrize(
    "step", [True, np.True_, 1.0, np.float64(1), "1", None, b"1", [1], DevicePtr(8), 1j, np.array([1, 2])]
)
def test_offset_needs_an_integer(step: Any) -> None:
    with pytest.raises(InvalidPointerError, match="offset"):
        TOP.offset(step)


@pytest.mark.parametrize("address", [-1, 2**64, np.int64(-1), True, False, 1.0, None, "0x10", float("nan")])
def test_addresses_out_of_range_or_of_another_type(address: Any) -> None:
    with pytest.raises(InvalidPointerError, match="address"):
        DevicePtr(address)


@pytest.mark.parametrize("step", [0, 1, -1])
def test_null_has_no_offset(step: int) -> None:
    with pytest.raises(InvalidPointerError, match="NULL"):
        DevicePtr.NULL.offset(step)


def test_offset_to_null_is_refused() -> None:
    with pytest.raises(InvalidPointerError):
        DevicePtr(16).offset(-16)


def test_top_bit() -> None:
    same = DevicePtr(np.uint64(2**63 + 16))
    assert same == TOP
    assert hash(same) == hash(TOP)
    assert repr(TOP) == "DevicePtr(0x8000000000000010)"
    assert f"{TOP}" == repr(TOP)
    assert f"{TOP:#x}" == "0x8000000000000010"
    assert int(TOP) == 2**63 + 16
    assert {TOP: 1}[same] == 1


def test_equality_and_order() -> None:
    assert DevicePtr(16) != 16
    assert DevicePtr(16) != DevicePtr(17)
    assert sorted([TOP, DevicePtr(1), DevicePtr(2**62)]) == [DevicePtr(1), DevicePtr(2**62), TOP]
    assert DevicePtr(1) < TOP
    assert DevicePtr(2**63 + 16) <= TOP
    assert DevicePtr(2**63 + 16) >= TOP
    assert TOP > DevicePtr.NULL
    with pytest.raises(TypeError):
        assert DevicePtr(1) < 2  # type: ignore[operator]


def test_null() -> None:
    assert DevicePtr.NULL.is_null
    assert DevicePtr(0) == DevicePtr.NULL
    assert not DevicePtr.NULL
    assert TOP
    assert not TOP.is_null


def test_immutable() -> None:
    with pytest.raises(AttributeError):
        TOP.address = 1
    with pytest.raises(AttributeError):
        del TOP.address
    with pytest.raises(AttributeError):
        TOP.other = 1  # type: ignore[attr-defined]
    assert TOP.address == 2**63 + 16


def test_copies() -> None:
    assert copy.deepcopy(TOP) == copy.copy(TOP) == pickle.loads(pickle.dumps(TOP)) == TOP
