// SPDX-License-Identifier: AGPL-3.0-only
// Context switch between the stacks of a block's threads, in assembly: a dozen instructions.
#pragma once

#include <stddef.h>

extern "C" {
// Saves the callee-saved registers on the running stack and its pointer in *save, then goes on where `to` was saved.
void spark_emu_switch(void** save, void* to) __attribute__((visibility("hidden")));
// First code on a new stack; calls spark_emu_fibre.
void spark_emu_start() __attribute__((visibility("hidden")));
void spark_emu_fibre() __attribute__((visibility("hidden"), noreturn, used));
}

namespace emu {

// The frame that spark_emu_switch pops, and where in it the return address is.
#if defined(__x86_64__)
constexpr size_t FRAME_BYTES = 56, RETURN_AT = 48;
#elif defined(__aarch64__)
constexpr size_t FRAME_BYTES = 160, RETURN_AT = 88;
#else
#error "the emulator has a context switch for x86-64 and AArch64 alone"
#endif

}  // namespace emu
