# SPDX-License-Identifier: AGPL-3.0-only
"""Kernel tests in ten lines: inputs by distribution, guarded outputs, references, bounds; a pytest plugin on top.

The plugin (`spark_py.testing.plugin`) gives the fixtures `gpu`, `rng` and `kernel_case` and the options `--backend`,
`--kernels` and `--seed`.
"""

from .case import Alias, Argument, Case, Difference, KernelCase, Poisoned, run_case
from .compare import (
    Bound,
    assert_rounds,
    assert_same_bits,
    assert_ulps,
    bits,
    f64,
    ordered,
    relative_l2,
    rounds,
    ulps,
    within,
)
from .inputs import (
    BF16,
    F32,
    U32,
    AnyBits,
    Array,
    Distribution,
    Integers,
    Large,
    Normal,
    Subnormal,
    Ties,
    WithNan,
    any_bits,
    normal,
)
from .memory import GUARD_BYTES, POISON, Output, alloc_or_skip, download, upload

__all__ = [
    "BF16",
    "F32",
    "GUARD_BYTES",
    "POISON",
    "U32",
    "Alias",
    "AnyBits",
    "Argument",
    "Array",
    "Bound",
    "Case",
    "Difference",
    "Distribution",
    "Integers",
    "KernelCase",
    "Large",
    "Normal",
    "Output",
    "Poisoned",
    "Subnormal",
    "Ties",
    "WithNan",
    "alloc_or_skip",
    "any_bits",
    "assert_rounds",
    "assert_same_bits",
    "assert_ulps",
    "bits",
    "download",
    "f64",
    "normal",
    "ordered",
    "relative_l2",
    "rounds",
    "run_case",
    "ulps",
    "upload",
    "within",
]
