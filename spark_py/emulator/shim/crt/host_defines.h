// SPDX-License-Identifier: AGPL-3.0-only
// Stands in for the toolkit's header of this name, which comes with nvcc: CUDA's keywords for a host compiler.
// __shared__ is missing on purpose: spark_emu.h defines it once the toolkit's headers are through.
#pragma once
// The toolkit's own header stands beside those that include it where crt is installed; its guard keeps it out.
#define __HOST_DEFINES_H__

#define __host__
#define __device__
#define __global__ __attribute__((noinline))
#define __constant__
#define __managed__
#define __device_builtin__
#define __device_builtin_texture_type__
#define __device_builtin_surface_type__
#define __cudart_builtin__
#define __grid_constant__
#define __launch_bounds__(...)
#define __maxnreg__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __builtin_align__(n) __align__(n)
#define __inline_hint__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __no_return__ __attribute__((noreturn))
#define __thread__ __thread
#define __import__
#define __export__
#define __cdecl
#define CUDARTAPI
#define CUDARTAPI_CDECL
