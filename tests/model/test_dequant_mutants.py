# SPDX-License-Identifier: AGPL-3.0-only
"""Dequantisation that is wrong in one detail, made from the package's own source: the checks must catch each."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from spark_py.model import weight_loader
from spark_py.runtime.errors import SparkError
from tests.model.dequant_support import CHECKS, Package, check_store

FOLDER = Path(weight_loader.__file__).parent
MODULES = ("dequant_codes", "dequant", "ignore_modules", "dequant_plan")

MUTANTS: dict[str, tuple[str, tuple[tuple[str, str], ...]]] = {
    "E8M0 bias of 128": ("dequant_codes", (("np.arange(256) - 127", "np.arange(256) - 128"),)),
    "E8M0 read as a number": (
        "dequant_codes",
        (("return decode_e8m0(scale)", "return scale.view(np.uint8).astype(np.float32)"),),
    ),
    "E8M0 255 is 2^128": ("dequant_codes", (("table[255] = np.nan", "table[255] = np.inf"),)),
    "nibble order swapped": (
        "dequant_codes",
        (
            (
                "_E2M1_VALUES[np.arange(256) & 15], _E2M1_VALUES[np.arange(256) >> 4]",
                "_E2M1_VALUES[np.arange(256) >> 4], _E2M1_VALUES[np.arange(256) & 15]",
            ),
        ),
    ),
    "E2M1 without its sign": ("dequant_codes", (("[-m for m in magnitudes]", "magnitudes"),)),
    "E4M3 subnormals halved": ("dequant_codes", (("np.full(256, -6)", "np.full(256, -7)"),)),
    "E4M3 0x7F is 480": ("dequant_codes", (("magnitude[code & 0x7F == 0x7F] = np.nan", "pass"),)),
    "E4M3 NaN decodes to 0": (
        "dequant_codes",
        (("magnitude[code & 0x7F == 0x7F] = np.nan", "magnitude[127::128] = 0"),),
    ),
    "BF16 by truncation": (
        "dequant_codes",
        (("values.astype(BF16)", "(values.view(np.uint32) >> 16).astype(np.uint16).view(BF16)"),),
    ),
    "block grid transposed": ("dequant", (("enumerate(factors):", "enumerate(factors.T):"),)),
    "block scale inverted": ("dequant", (("] *= np.repeat(", "] /= np.repeat("),)),
    "row scale inverted": ("dequant", (("values *= factors.reshape(-1, 1)", "values /= factors.reshape(-1, 1)"),)),
    "row scale along columns": (
        "dequant",
        (("factors.reshape(-1, 1)", "np.resize(factors, (1, values.shape[1]))"),),
    ),
    "edge blocks dropped from the grid": ("dequant", (("-(-n // FP8_BLOCK)", "max(1, n // FP8_BLOCK)"),)),
    "blocks of 64 columns": ("dequant", (("np.repeat(row, FP8_BLOCK)", "np.tile(np.repeat(row, 64), 2)"),)),
    "group scale of the next group": ("dequant", (("scales[:, :, None]", "np.roll(scales, -1, 1)[:, :, None]"),)),
    "NVFP4 factor into the group scale first": (
        "dequant",
        (
            ("decode_e4m3(scale), NVFP4_GROUP)", "decode_e4m3(scale) * multiplier, NVFP4_GROUP)"),
            ("values *= multiplier", "pass"),
        ),
    ),
    "NVFP4 factor left out": ("dequant", (("values *= multiplier", "pass"),)),
    "NVFP4 scales in groups of 32": ("dequant", (("NVFP4_GROUP = 16", "NVFP4_GROUP = 32"),)),
    "divisor taken as multiplier": (
        "dequant_plan",
        (("return np.float32(1) / value if is_divisor else value", "return value"),),
    ),
    "multiplier taken as divisor": (
        "dequant_plan",
        (("return np.float32(1) / value if is_divisor else value", "return np.float32(1) / value"),),
    ),
    "any factor is plausible": (
        "dequant_plan",
        (("if number < 1 if is_divisor else number > _LARGEST_MULTIPLIER:", "if False:"),),
    ),
    "a NaN scale passes": ("dequant_plan", (("if bad.size:", "if False:"),)),
    "ignore_modules has no effect": ("dequant_plan", (("if ignored_by is not None:", "if False:"),)),
    "ignore_modules by the beginning of a name": (
        "ignore_modules",
        (("any(scope == entry or fnmatchcase(scope, entry) for scope in scopes)", "scopes[-1].startswith(entry)"),),
    ),
}


def build(changed: str, edits: tuple[tuple[str, str], ...]) -> Package:
    """The modules, made anew from source so that each imports those before it, one of them edited."""
    made = []
    with pytest.MonkeyPatch.context() as patch:
        for name in MODULES:
            source = (FOLDER / f"{name}.py").read_text()
            for old, new in edits if name == changed else ():
                assert source.count(old) == 1, f"the mutant's place {old!r} is {source.count(old)} times in {name}.py"
                source = source.replace(old, new)
            full = f"{weight_loader.__name__}.{name}"
            module = ModuleType(full)
            module.__package__ = weight_loader.__name__
            patch.setitem(sys.modules, full, module)
            exec(compile(source, f"{name} (mutant)", "exec"), module.__dict__)
            made.append(module)
    return Package(*made)


def run_checks(package: Package, folder: Path) -> None:
    for check in CHECKS:
        check(package)
    check_store(package, folder)


def test_unchanged_source_passes(tmp_path: Path) -> None:
    run_checks(build("", ()), tmp_path)


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_caught(name: str, tmp_path: Path) -> None:
    package = build(*MUTANTS[name])
    with pytest.raises((AssertionError, SparkError, pytest.fail.Exception)):
        run_checks(package, tmp_path)
