# SPDX-License-Identifier: AGPL-3.0-only
"""The same .cu files run by the CPU emulation and by a GPU, on the same inputs: are the results the same?

Runs every conformance case of every kernel that the emulation can run on both backends. Outputs of integers, and of
kernels that only copy, have to be equal byte for byte; floats may differ where exp, rsqrt or log are the GPU's own, and
are held to ULPS. Prints one JSON object with a row a kernel; exit code 1 where a kernel is outside.

    python tools/compare_emulated.py [--with cuda] [--seed 0]
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from spark_py import catalog
from spark_py.runtime import open_backend
from spark_py.testing.case import written_by
from spark_py.testing.cases import cases_of
from spark_py.testing.compare import ulps

ULPS = {"bfloat16": 2, "float32": 64}
"""For elements above SMALL of their buffer's largest. BF16 outputs are roundings of FP32 values that differ by a few
ulps: one step, or two across a power of two. FP32 outputs (log-probabilities) sum a row of exponentials that the GPU
gives within 2 + |x| ulps."""
SMALL = 2.0**-10
ORDER = {
    "spark_gemv_rows": 2.0**-16,
    "spark_fp8_gemv_rows": 2.0**-16,
    "spark_w4a16_gemv_rows": 2.0**-16,
    "spark_w8a16_rows": 2.0**-16,
    "spark_mxfp4_experts": 2.0**-16,
    "spark_paged_decode_split": 2.0**-14,
}
"""Modules whose sums are a tensor core's, in an order and with a last bit of its own; for sums that cancel ulps say
little. What a difference may be, of the buffer's largest element. Softmax weights of the last are two BF16, the second
of which a last bit of an exponential may change."""


def difference(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any], slack: float = 0.0) -> tuple[bool, int]:
    """Whether the bytes are equal, and the largest distance in ulps of elements that count; NaN equals NaN. Elements
    that differ by less than `slack` of the largest do not count."""
    if one.tobytes() == other.tobytes():
        return True, 0
    if one.dtype.name not in ULPS:
        return False, 0
    a, b = one.astype(np.float32), other.astype(np.float32)
    with np.errstate(all="ignore"):
        largest = float(np.nanmax(np.abs(np.where(np.isfinite(a), a, 0.0)), initial=0.0))
        counts = ~((np.isnan(a) & np.isnan(b)) | (np.maximum(np.abs(a), np.abs(b)) < SMALL * largest))
        counts &= ~(np.abs(a - b) < slack * largest)
    apart = np.asarray(ulps(one, other))[counts]
    return False, int(apart.max(initial=0))


def main() -> int:
    """Compare and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--with", dest="other", default="cuda", choices=["cuda", "host"], help="default: cuda")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rows = []
    with open_backend("emulated") as emulated, open_backend(options.other) as other:
        for spec in catalog.all_kernels():
            if spec.gpu_only:
                continue
            row = {"kernel": f"{spec.module}::{spec.function}", "cases": 0, "equal": 0, "largest_ulps": 0, "ok": True}
            for number, case in enumerate(cases_of(spec)):
                results = [
                    written_by(gpu, spec, case, np.random.default_rng([options.seed, number]))
                    for gpu in (emulated, other)
                ]
                slack = ORDER.get(spec.module, 0.0)
                found = [difference(results[0][name], results[1][name], slack) for name in results[0]]
                kinds = [array.dtype.name for array in results[0].values()]
                row["cases"] += 1
                row["equal"] += all(same for same, _ in found)
                row["largest_ulps"] = max(row["largest_ulps"], *(apart for _, apart in found))
                row["ok"] &= all(
                    same or apart <= ULPS.get(kind, -1) for (same, apart), kind in zip(found, kinds, strict=True)
                )
            rows.append(row)
        device = other.device_name()
    head = {"with": options.other, "device": device, "seed": options.seed, "ulps_allowed": str(ULPS)}
    print(json.dumps({**head, "rows": rows}))
    return 0 if all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
