// SPDX-License-Identifier: AGPL-3.0-only
// Dependent launches: in a graph a kernel may start while the one before it still runs (PTX ISA, griddepcontrol).
//
// A module that kernels.toml marks `dependent` keeps three rules in each of its kernels:
//   - Every thread calls spark_wait_for_previous, before its first store to global memory and before it ends. So a kernel
//     that has ended says that all before it have, and what those wrote is there.
//   - Before that call a thread reads nothing but weights (the parameters that the catalogue calls `early`), which no
//     kernel of a graph writes.
//   - Every thread calls spark_let_next_start. A product that fills the GPU and asks for weights early does so at its
//     beginning: the next kernel's blocks come as its own end. Others do so right after the wait: what the next kernel
//     asks for early would else stand in the way of their own loads, and of the last blocks of the kernel before. One that
//     fills the GPU and asks for nothing early does so when its loads have come.
// A kernel that was launched the ordinary way passes both calls at once. Before Hopper there is neither.
#pragma once

#ifdef SPARK_EMULATED
#define spark_let_next_start() ((void)0)
// A macro, so that a fault is on the kernel's own line.
#define spark_wait_for_previous() spark_emu_wait_for_previous()
#else

// The next kernel may start when every block of this one has come here or has ended.
__device__ __forceinline__ void spark_let_next_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Waits until the kernels before this one have ended and what they wrote can be read.
__device__ __forceinline__ void spark_wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

#endif
