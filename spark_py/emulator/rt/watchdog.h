// SPDX-License-Identifier: AGPL-3.0-only
// Ends launches that do not end by themselves: a timer of the OS thread's own CPU time, so that a busy machine is no
// fault of the kernel.
#pragma once

#include <signal.h>
#include <time.h>

namespace emu {

void on_timeout(int number, siginfo_t* info, void* context);

class Watchdog {
   public:
    explicit Watchdog(double seconds);
    ~Watchdog();
    Watchdog(const Watchdog&) = delete;
    Watchdog& operator=(const Watchdog&) = delete;

   private:
    timer_t timer_;
    bool armed_ = false;
};

}  // namespace emu
