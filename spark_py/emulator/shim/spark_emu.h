// SPDX-License-Identifier: AGPL-3.0-only
// CUDA C++ for a host compiler: read before a kernel file, it makes the file's text mean on a CPU what it means on a
// GPU. Each part of the language has its header under spark_emu/.
#pragma once

#include <cfloat>
#include <climits>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <type_traits>
#include <utility>

#include "../rt/abi.h"

#define SPARK_EMULATED 1

#include "crt/host_defines.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#if __has_include(<cuda_fp4.h>)
#include <cuda_fp4.h>
#endif

#include "spark_emu/threads.h"
#include "spark_emu/memory.h"
#include "spark_emu/warp.h"
#include "spark_emu/atomics.h"
#include "spark_emu/bits.h"
#include "spark_emu/maths.h"
#include "spark_emu/halves.h"
#include "spark_emu/entry.h"
