// Turns a kernel's access to memory that is not there into a fault of the launch, instead of the end of the process.
#include <signal.h>
#include <ucontext.h>

#include "state.h"

namespace sim {
namespace {

#if !defined(SIM_ADDRESS) && !defined(SIM_THREAD)

struct sigaction before;
void* wild = nullptr;

// Runs on the fiber's stack, as if the kernel had called it in place of the access.
void report() { fail("unknown line", "access to %p, which is no memory; AddressSanitizer names the line", wild); }

void handle(int, siginfo_t* info, void* raw) {
  greg_t* registers = static_cast<ucontext_t*>(raw)->uc_mcontext.gregs;
  if (!scheduler.current || scheduler.has_failed) {  // not the kernel's: happens again, under the handler before
    sigaction(SIGSEGV, &before, nullptr);
    return;
  }
  wild = info->si_addr;
  // Below the red zone, and aligned as behind a call.
  registers[REG_RSP] = ((registers[REG_RSP] - 256) & ~greg_t{15}) - 8;
  registers[REG_RIP] = reinterpret_cast<greg_t>(&report);
}

}  // namespace

void watch_wild_addresses() {
  struct sigaction action {};
  action.sa_sigaction = handle;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigaction(SIGSEGV, &action, &before);
}

void ignore_wild_addresses() { sigaction(SIGSEGV, &before, nullptr); }

#else  // the sanitizer has a handler of its own

}  // namespace

void watch_wild_addresses() {}
void ignore_wild_addresses() {}

#endif

}  // namespace sim
