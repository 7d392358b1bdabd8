# SPDX-License-Identifier: AGPL-3.0-only
"""Kernels for the tests of dependent launches, and a backend that has them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from spark_py.runtime import GpuBackend, open_backend
from spark_py.runtime.manifest import kernels_path

MIX = """
#include "spark_dependent.cuh"

// out[i] = a mix of in[i], of another block's in[j] and of round. The loads of `in` may take the path of constant data.
extern "C" __global__ void mix(const unsigned* __restrict__ in, unsigned* __restrict__ out, unsigned n,
                               unsigned round) {
    spark_let_next_start();
    spark_wait_for_previous();
    const unsigned stride = gridDim.x * blockDim.x;
    for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += stride) {
        const unsigned j = (i * 7919u + round * 104729u) % n;
        unsigned x = in[i] * 2654435761u + (in[j] ^ round);
        x ^= x >> 15;
        out[i] = x * 2246822519u + 1u;
    }
}

// Waits until `flag` is set, or for so many clocks, and says whether it was. No kernel for use: it waits for the next.
extern "C" __global__ void see(const unsigned* flag, unsigned* seen, unsigned clocks) {
    spark_let_next_start();
    spark_wait_for_previous();
    const long long start = clock64();
    const volatile unsigned* now = flag;
    while (*now == 0u && clock64() - start < clocks) {
    }
    *seen = *now;
}
"""

# Sets the flag before it waits, against the rules: so `see` can tell that it has started.
TELL = """
#include "spark_dependent.cuh"

extern "C" __global__ void tell(unsigned* flag) {
    *static_cast<volatile unsigned*>(flag) = 1u;
    __threadfence();
    spark_let_next_start();
    spark_wait_for_previous();
}
"""


def _module(name: str, text: str, folder: Path) -> str:
    (folder / f"{name}.cu").write_text(f"// SPDX-License-Identifier: AGPL-3.0-only\n{text}")
    return f'[modules.{name}]\nsource = "{name}.cu"\nflags = ["-I{kernels_path()}"]\ndependent = true\n'


@contextmanager
def dependent_backend(gpu: GpuBackend, folder: Path) -> Iterator[GpuBackend]:
    """A backend of the kind of `gpu` whose modules mix and tell are dependent; skips where kernels are no sources."""
    if gpu.name == "host":
        pytest.skip("has no kernels of its own")
    (folder / "kernels.toml").write_text(_module("mix", MIX, folder) + _module("tell", TELL, folder))
    options = {} if gpu.name == "cuda" else {"checked": gpu.checked}  # type: ignore[attr-defined]
    with open_backend(gpu.name, gpu.ordinal, kernels=folder, **options) as made:  # type: ignore[call-overload]
        yield made
