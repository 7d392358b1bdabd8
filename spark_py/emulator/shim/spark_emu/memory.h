// SPDX-License-Identifier: AGPL-3.0-only
// Shared memory and cached accesses.
#pragma once

// A block never leaves its OS thread, so a thread's own storage is a block's. thread_local is implicitly static, which
// covers functions, templates and files. The block's dynamic part is one more such object: see entry.h.
#define __shared__ thread_local

// Macros, so that a fault in one of them is on the kernel's own line.
#define __ldg(p) (*(p))
#define __ldcg(p) (*(p))
#define __ldca(p) (*(p))
#define __ldcs(p) (*(p))
#define __ldlu(p) (*(p))
#define __ldcv(p) (*(p))
#define __stwb(p, v) ((void)(*(p) = (v)))
#define __stcg(p, v) ((void)(*(p) = (v)))
#define __stcs(p, v) ((void)(*(p) = (v)))
#define __stwt(p, v) ((void)(*(p) = (v)))

static inline unsigned __isShared(const void* p) { return spark_emu_is_shared(p); }
static inline unsigned __isGlobal(const void* p) { return !spark_emu_is_shared(p); }
