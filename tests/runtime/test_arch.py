# SPDX-License-Identifier: AGPL-3.0-only
"""The rules of architecture names: plain, `a` and `f`."""

from __future__ import annotations

import pytest

from spark_py.runtime.arch import arch_of, parse_arch, preflight, runs_on
from spark_py.runtime.errors import ArchMismatchError, InvalidArgumentError


@pytest.mark.parametrize(
    ("compiled", "capability", "expected"),
    [
        ("sm_80", (8, 0), True),
        ("sm_80", (8, 9), True),
        ("sm_80", (12, 1), True),
        ("sm_80", (7, 5), False),
        ("sm_90", (10, 0), True),
        ("compute_80", (9, 0), True),
        ("sm_90a", (9, 0), True),
        ("sm_90a", (10, 0), False),
        ("sm_90a", (8, 9), False),
        ("sm_121a", (12, 1), True),
        ("sm_121a", (12, 0), False),
        ("sm_120f", (12, 0), True),
        ("sm_120f", (12, 1), True),
        ("sm_121f", (12, 0), False),
        ("sm_100f", (10, 3), True),
        ("sm_100f", (12, 0), False),
        ("sm_100f", (11, 0), False),
    ],
)
def test_runs_on(compiled: str, capability: tuple[int, int], expected: bool) -> None:
    assert runs_on(compiled, capability) is expected
    if expected:
        preflight(compiled, capability)
        return
    with pytest.raises(ArchMismatchError) as error:
        preflight(compiled, capability)
    message = str(error.value)
    assert compiled in message
    assert "{}.{}".format(*capability) in message
    assert f"Compile for {arch_of(capability)}" in message
    assert (error.value.compiled, error.value.device) == (compiled, arch_of(capability))


@pytest.mark.parametrize(
    ("capability", "expected"),
    [
        ((7, 5), "sm_75"),
        ((8, 0), "sm_80"),
        ((8, 9), "sm_89"),
        ((9, 0), "sm_90a"),
        ((10, 0), "sm_100a"),
        ((10, 3), "sm_103a"),
        ((12, 0), "sm_120a"),
        ((12, 1), "sm_121a"),
    ],
)
def test_arch_of_runs_on_its_own_device(capability: tuple[int, int], expected: str) -> None:
    assert arch_of(capability) == expected
    assert runs_on(expected, capability)
    assert str(parse_arch(expected)) == expected


@pytest.mark.parametrize(
    "name", ["", "sm_", "sm_9", "sm_90b", "90a", "SM_90", "sm_90a ", "sm_1210a", "sm_80a", "sm_90f", "gfx942", None, 90]
)
def test_nonsense_is_refused_by_value(name: object) -> None:
    with pytest.raises(InvalidArgumentError) as error:
        parse_arch(name)  # type: ignore[arg-type]
    assert error.value.value == name


@pytest.mark.parametrize("capability", [(9,), (9, 0, 1), 90, None, ("9", "0"), (0, 0), (9, 10), (9, -1)])
def test_a_capability_that_is_none_is_refused(capability: object) -> None:
    with pytest.raises(InvalidArgumentError):
        runs_on("sm_80", capability)  # type: ignore[arg-type]
