// SPDX-License-Identifier: AGPL-3.0-only
// What the compiler's calls and the checks share.
#pragma once

#include "state.h"

namespace emu {

void check_access(const void* pointer, unsigned size, bool write, bool atomic, void* pc);
void misaligned(const void* pointer, unsigned alignment, const char* access, EmuSite site, void* pc);

// Load address of the kernel's file, and whether an address is in the file's own data.
inline uint64_t module_base(const Worker* worker) { return worker->module_start; }
inline bool in_module(const Worker* worker, uint64_t address) {
    return address >= worker->module_start && address < worker->module_end;
}

}  // namespace emu
