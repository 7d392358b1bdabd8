#!/usr/bin/env python3
# SPDX-License-Identifier: AGPL-3.0-only
"""Make the fixtures of tests/parity again, from Hugging Face's code on the CPU.

Needs torch and transformers, which nothing else here does: pip install 'torch==2.13.*' 'transformers==5.24.*' ml_dtypes
safetensors. Two fixtures are made from checkpoints that a seed gives, without and with experts, one from the demo
checkpoint; those named after GLM-4.5 and MiniMax-M2 have several MTP modules, `..._loop` the steps of generate
besides; `v4` is DeepSeek-V4's layers, target and drafts in both modes, `v4_ffn` its mixture with weights of its own.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from tools.goldens import cases, checkpoint, modules, modules_cases, v4, v4_ffn

Array = np.ndarray[Any, Any]

PARTS = {v4_ffn.NAME: v4_ffn.arrays_of}
"""Fixtures of parts of a model, which hold their weights."""
NAMES = (*cases.NAMES, *modules_cases.NAMES, v4.NAME, *PARTS)
FIXTURES = cases.ROOT / "tests" / "parity" / "fixtures"
EXACT = 2e-5
"""Largest difference that --check allows, of values relative to the array's largest: FP32 sums within transformers come
in another order on another machine. Far below the BF16 errors that the fixtures are to show."""
SPREAD = 0.5
"""The same for spreads, relative to each: another torch may draw other random numbers, and each is known to a tenth."""


def make(name: str, scratch: Path, spreads: bool = True) -> tuple[dict[str, Any], dict[str, Array]]:
    """(meta, arrays) of one fixture; without `spreads` those arrays are zero."""
    import torch
    import transformers

    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "numpy": np.__version__}
    if name in PARTS:
        return {"made by": "tools/make_goldens.py", **versions}, PARTS[name]()
    if name == v4.NAME:
        from tools.goldens import v4_hf

        v4.write(scratch)
        meta = {"made by": "tools/make_goldens.py", "checkpoint": checkpoint.digest(scratch), **versions}
        return meta | {"disturbed runs": v4_hf.COPIES}, v4_hf.arrays_of(scratch, spreads)
    if name in modules_cases.NAMES:
        from tools.goldens import modules_hf
        from tools.goldens import spreads as runs

        modules.write(scratch, modules_cases.config_of(name))
        meta = {"made by": "tools/make_goldens.py", "checkpoint": checkpoint.digest(scratch), **versions}
        arrays = modules_hf.arrays_of(scratch, modules_cases.case(name), spreads)
        return meta | {"disturbed runs": runs.COPIES}, arrays
    from tools.goldens import huggingface

    folder = cases.DEMO
    if name in cases.CONFIGS:
        folder = scratch
        checkpoint.write(folder, cases.CONFIGS[name])
    meta = {
        "made by": "tools/make_goldens.py",
        "checkpoint": checkpoint.digest(folder),
        **versions,
        "disturbed runs": huggingface.COPIES,
    }
    return meta, huggingface.arrays_of(folder, cases.case(name), spreads)


def differences(stored: dict[str, Array], made: dict[str, Array]) -> list[str]:
    """What keeps two fixtures from being the same, one line an array."""
    found = [f"{name}: only in one of the two" for name in sorted(stored.keys() ^ made.keys())]
    prefixes = [name.removesuffix("_top_logits") for name in stored if name.endswith("_top_logits")]
    unclear = {prefix: _unclear(stored, made, prefix) for prefix in prefixes}
    for name in sorted(stored.keys() & made.keys()):
        old, new = stored[name], made[name]
        if old.shape != new.shape or old.dtype != new.dtype:
            found.append(f"{name}: {old.dtype} {old.shape} is stored, {new.dtype} {new.shape} is made")
        elif "spread" in name:
            if new.any() and (worst := float(np.max(np.abs(new - old) / np.maximum(np.abs(old), 1e-12)))) > SPREAD:
                found.append(f"{name}: a spread differs by {worst:.2f} of itself")
        elif np.issubdtype(old.dtype, np.floating):
            if (worst := float(np.max(np.abs(new - old)) / np.max(np.abs(old)))) > EXACT:
                found.append(f"{name}: differs by {worst:.1e} of its largest value")
        elif name.endswith("hidden_in"):
            # The nearest BF16 value may be the next one, in the bits one apart.
            if np.abs(old.astype(np.int32) - new.astype(np.int32)).max() > 1:
                found.append(f"{name}: a value is more than one BF16 step away")
        else:
            differs = old != new
            if name.endswith("_ids"):
                differs = differs & ~unclear[name.split("_")[0]].reshape(-1, *[1] * (old.ndim - 1))
            if differs.any():
                found.append(f"{name}: {int(differs.sum())} of {old.size} differ")
    return found


def _unclear(stored: dict[str, Array], made: dict[str, Array], prefix: str) -> Array:
    """Rows of which two of the best logits change places within EXACT."""
    gaps = [np.abs(np.diff(x[f"{prefix}_top_logits"], axis=1)).min(axis=1) for x in (stored, made)]
    unclear: Array = np.minimum(*gaps) <= 2 * EXACT * np.abs(stored[f"{prefix}_logits"]).max()
    return unclear


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=FIXTURES, help=f"folder of the fixtures (default: {FIXTURES})")
    parser.add_argument("--only", choices=NAMES, help="this fixture alone")
    parser.add_argument("--check", action="store_true", help="compare with the stored fixtures instead of writing them")
    parser.add_argument("--quick", action="store_true", help="with --check: leave the spreads out, which take minutes")
    options = parser.parse_args(argv)
    if options.quick and not options.check:
        parser.error("--quick goes with --check: fixtures are made whole")
    faults = 0
    for name in NAMES if options.only is None else (options.only,):
        path = options.output / f"{name}.npz"
        with tempfile.TemporaryDirectory() as scratch:
            meta, arrays = make(name, Path(scratch), not options.quick)
        if not options.check:
            options.output.mkdir(parents=True, exist_ok=True)
            cases.save(path, meta, arrays)
            print(f"{path}: {path.stat().st_size} bytes; {meta}")
            continue
        stored_meta, stored = cases.load(path)
        lines = differences(stored, arrays)
        if stored_meta.get("checkpoint") != meta.get("checkpoint"):
            lines.insert(0, f"made from checkpoint {stored_meta['checkpoint']}, not from {meta['checkpoint']}")
        faults += len(lines)
        print(f"{path}: {'; '.join(lines) or 'the same'} (stored {stored_meta}, now {meta})")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
