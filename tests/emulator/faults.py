# SPDX-License-Identifier: AGPL-3.0-only
"""Deliberate faults, each beside a right twin: what the checked build must find, and what it must leave alone."""

from __future__ import annotations

from dataclasses import dataclass

from spark_py.runtime import errors
from spark_py.runtime.errors import KernelFaultError


@dataclass(frozen=True, slots=True)
class Fault:
    """`bad` and `good` replace BODY in the kernel
    `extern "C" __global__ void k(float* data, float* out, unsigned n) { BODY }`, which is launched with `grid` and
    `block` on two buffers of `n` floats and `shared` bytes of dynamic shared memory."""

    name: str
    error: type[KernelFaultError]
    words: tuple[str, ...]
    bad: str
    good: str
    grid: int = 1
    block: int = 64
    n: int = 64
    shared: int = 0
    before: str = ""

    def source(self, body: str) -> str:
        kernel = f'{self.before}\nextern "C" __global__ void k(float* data, float* out, unsigned n) {{\n{body}\n}}\n'
        return "#include <cuda_bf16.h>\n" + kernel


_LAST = """
    data[blockIdx.x] = 1.0f;
    {fence}
    if (atomicInc(&counter, gridDim.x - 1u) == gridDim.x - 1u) {{
        out[0] = data[0] + data[1];
    }}
"""

_DEEP = """
__device__ __noinline__ float deep(unsigned n, float* p) {
    volatile float held[64];
    held[n % 64u] = p[0];
    return n == 7u ? held[7] : deep(n, p) + held[n % 64u];
}
"""

_SUM = """
    __shared__ float part[64];
    part[threadIdx.x] = data[threadIdx.x];
    {first}
    float sum = 0.0f;
    for (unsigned i = 0u; i < blockDim.x; ++i) {{
        sum += part[i];
    }}
    out[threadIdx.x] = sum;
"""

_TWICE = """
    __shared__ float part[64];
    for (unsigned round = 0u; round < 2u; ++round) {{
        part[threadIdx.x] = data[threadIdx.x] + round;
        __syncthreads();
        out[threadIdx.x] += part[(threadIdx.x + 32u) % 64u];
        {second}
    }}
"""

_WARP = """
    __shared__ float part[32];
    part[threadIdx.x] = data[threadIdx.x];
    {sync}
    out[threadIdx.x] = part[31u - threadIdx.x];
"""

# The tail of a reduction as it was written before Volta: no order between the lanes of a warp.
_TAIL = """
    __shared__ float part[64];
    part[threadIdx.x] = data[threadIdx.x];
    __syncthreads();
    if (threadIdx.x < 32u) {{
        for (unsigned step = 32u; step > 0u; step /= 2u) {{
            const float other = part[threadIdx.x + step];
            {sync}
            part[threadIdx.x] += threadIdx.x < step ? other : 0.0f;
            {sync}
        }}
    }}
    if (threadIdx.x == 0u) {{
        out[0] = part[0];
    }}
"""

FAULTS = (
    Fault(
        "missing barrier",
        errors.DataRaceError,
        ("shared 'part'", "thread (", "writes"),
        _SUM.format(first=""),
        _SUM.format(first="__syncthreads();"),
    ),
    Fault(
        "missing second barrier",
        errors.DataRaceError,
        ("shared 'part'", "reads"),
        _TWICE.format(second=""),
        _TWICE.format(second="__syncthreads();"),
    ),
    Fault(
        "missing __syncwarp",
        errors.DataRaceError,
        ("shared 'part'",),
        _WARP.format(sync=""),
        _WARP.format(sync="__syncwarp();"),
        block=32,
        n=32,
    ),
    Fault(
        "warp-synchronous tail",
        errors.DataRaceError,
        ("shared 'part'",),
        _TAIL.format(sync=""),
        _TAIL.format(sync="__syncwarp();"),
    ),
    Fault(
        "global read one past the end",
        errors.KernelBoundsError,
        ("reads 4 bytes", "byte 256 of", "+256 bytes"),
        "out[threadIdx.x] = data[threadIdx.x + 1u];",
        "out[threadIdx.x] = data[min(threadIdx.x + 1u, n - 1u)];",
    ),
    Fault(
        "global write one past the end",
        errors.KernelBoundsError,
        ("writes 4 bytes", "byte 256 of", "+256 bytes"),
        "if (threadIdx.x <= n) { out[threadIdx.x] = 1.0f; }",
        "if (threadIdx.x < n) { out[threadIdx.x] = 1.0f; }",
        block=96,
    ),
    Fault(
        "global read before the start",
        errors.KernelBoundsError,
        ("reads 4 bytes", "byte -4 of"),
        "out[threadIdx.x] = data[(int)threadIdx.x - 1];",
        "out[threadIdx.x] = data[max((int)threadIdx.x - 1, 0)];",
    ),
    Fault(
        "static shared overrun",
        errors.KernelBoundsError,
        ("index 64", "float"),
        "__shared__ float s[64]; s[threadIdx.x] = 1.0f; __syncthreads(); out[threadIdx.x] = s[threadIdx.x + 1u];",
        "__shared__ float s[64]; s[threadIdx.x] = 1.0f; __syncthreads(); out[threadIdx.x] = s[63u - threadIdx.x];",
    ),
    Fault(
        "dynamic shared overrun",
        errors.KernelBoundsError,
        ("256 of 256 bytes of dynamic shared memory",),
        "s[threadIdx.x + 1u] = data[threadIdx.x]; __syncthreads(); out[threadIdx.x] = s[threadIdx.x + 1u];",
        "s[threadIdx.x] = data[threadIdx.x]; __syncthreads(); out[threadIdx.x] = s[63u - threadIdx.x];",
        shared=256,
        before="extern __shared__ float s[];",
    ),
    Fault(
        "uint4 at 2 bytes",
        errors.KernelAlignmentError,
        ("16 bytes", "byte 2 of"),
        "*reinterpret_cast<uint4*>(out) = *reinterpret_cast<const uint4*>(reinterpret_cast<const char*>(data) + 2);",
        "*reinterpret_cast<uint4*>(out) = *reinterpret_cast<const uint4*>(reinterpret_cast<const char*>(data) + 16);",
        block=1,
    ),
    Fault(
        "uninitialised shared",
        errors.UninitializedSharedError,
        ("shared 's'", "written"),
        "__shared__ float s[64]; if (threadIdx.x > 0u) { s[threadIdx.x] = 1.0f; } __syncthreads(); "
        "out[threadIdx.x] = s[threadIdx.x];",
        "__shared__ float s[64]; s[threadIdx.x] = 1.0f; __syncthreads(); out[threadIdx.x] = s[threadIdx.x];",
    ),
    Fault(
        "barrier in a branch",
        errors.BarrierDivergenceError,
        ("32 of 64 threads",),
        "if (threadIdx.x < 32u) { __syncthreads(); } out[threadIdx.x] = 1.0f;",
        "if (n > 32u) { __syncthreads(); } out[threadIdx.x] = 1.0f;",
    ),
    Fault(
        "two barriers of a branch",
        errors.BarrierDivergenceError,
        ("another barrier",),
        "if (threadIdx.x < 32u) {\n __syncthreads();\n } else {\n __syncthreads();\n }\n out[threadIdx.x] = 1.0f;",
        "if (n < 32u) {\n __syncthreads();\n } else {\n __syncthreads();\n }\n out[threadIdx.x] = 1.0f;",
    ),
    Fault(
        "thread that never arrives",
        errors.KernelDeadlockError,
        ("no thread can go on", "a barrier", "a warp collective"),
        "if (threadIdx.x % 32u == 5u) { __syncwarp(1u << 5 | 1u << 6); } __syncthreads(); out[threadIdx.x] = 1.0f;",
        "if (threadIdx.x % 32u / 2u == 3u) { __syncwarp(3u << 6); } __syncthreads(); out[threadIdx.x] = 1.0f;",
    ),
    Fault(
        "early exit before a barrier",
        errors.BarrierDivergenceError,
        ("left the kernel",),
        "if (threadIdx.x == 63u) { return; } __syncthreads(); out[threadIdx.x] = 1.0f;",
        "if (n == 0u) { return; } __syncthreads(); out[threadIdx.x] = 1.0f;",
    ),
    Fault(
        "full-mask shuffle under divergence",
        errors.WarpMaskError,
        ("mask 0xffffffff",),
        "float v = data[threadIdx.x]; if (threadIdx.x < 16u) { v = __shfl_down_sync(0xffffffffu, v, 1); } "
        "out[threadIdx.x] = v;",
        "float v = data[threadIdx.x]; if (threadIdx.x < 16u) { v = __shfl_xor_sync(0xffffu, v, 1); } "
        "out[threadIdx.x] = v;",
        block=32,
    ),
    Fault(
        "lane outside its own mask",
        errors.WarpMaskError,
        ("is not in its mask 0xffff",),
        "out[threadIdx.x] = __shfl_sync(0xffffu, data[threadIdx.x], 0);",
        "out[threadIdx.x] = __shfl_sync(0xffffffffu, data[threadIdx.x], 0);",
        block=32,
    ),
    Fault(
        "shuffle from a lane that does not take part",
        errors.WarpMaskError,
        ("reads lane 16",),
        "if (threadIdx.x < 16u) { out[threadIdx.x] = __shfl_sync(0xffffu, data[threadIdx.x], 16); }",
        "if (threadIdx.x < 16u) { out[threadIdx.x] = __shfl_sync(0xffffu, data[threadIdx.x], 15); }",
        block=32,
    ),
    Fault(
        "two collectives meet",
        errors.WarpMaskError,
        ("different collectives", "__shfl_xor_sync", "a vote"),
        "if (threadIdx.x < 16u) { out[threadIdx.x] = __shfl_xor_sync(~0u, 1.0f, 1); } "
        "else { out[threadIdx.x] = __ballot_sync(~0u, 1); }",
        "if (threadIdx.x < 16u) { out[threadIdx.x] = __shfl_xor_sync(0xffffu, 1.0f, 1); } "
        "else { out[threadIdx.x] = __ballot_sync(0xffff0000u, 1); }",
        block=32,
    ),
    Fault(
        "accumulation by two blocks",
        errors.BlockOverlapError,
        ("block (1, 0, 0)", "block (0, 0, 0)", "byte 0 of"),
        "if (threadIdx.x == 0u) { out[0] += data[blockIdx.x]; }",
        "if (threadIdx.x == 0u) { atomicAdd(out, data[blockIdx.x]); }",
        grid=2,
    ),
    Fault(
        "last block without a fence",
        errors.BlockOverlapError,
        ("block (1, 0, 0)", "block (0, 0, 0)"),
        _LAST.format(fence=""),
        _LAST.format(fence="__threadfence();"),
        grid=2,
        block=1,
        before="__device__ unsigned counter;",
    ),
    Fault(
        "spin wait",
        errors.KernelTimeoutError,
        ("CPU time",),
        "volatile float* flag = data; if (threadIdx.x == 0u) { while (flag[1] >= 0.0f) { } } out[threadIdx.x] = 1.0f;",
        "volatile float* flag = data; if (threadIdx.x == 0u) { while (flag[1] < 0.0f) { } } out[threadIdx.x] = 1.0f;",
    ),
    Fault(
        "assert",
        errors.KernelTrapError,
        ("assert(n < 10u)",),
        "assert(n < 10u); out[threadIdx.x] = 1.0f;",
        "assert(n < 100u); out[threadIdx.x] = 1.0f;",
    ),
    Fault(
        "division by zero",
        errors.KernelCrashError,
        ("divided by zero",),
        "out[threadIdx.x] = 7u / (n - 64u);",
        "out[threadIdx.x] = 7u / (n - 63u);",
    ),
    Fault(
        "endless recursion",
        errors.KernelCrashError,
        ("stack",),
        "out[0] = deep(n, data);",
        "out[0] = deep(7u, data);",
        block=1,
        before=_DEEP,
    ),
)
