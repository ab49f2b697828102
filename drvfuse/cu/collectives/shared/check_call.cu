// SPDX-License-Identifier: Apache-2.0
// Compares a rank's call with the calls of its peers, before the call's own kernels begin.
//
// Layout. None: the kernel moves no data.
// Grid. One block of 32 threads; thread p waits for rank p.
// Memory ordering. As sync/calls.cuh says. The call's kernels begin when this kernel has completed. Then the calls are
// equal, or the abort word is set, which keeps those kernels from waiting.
// Failure. A call that differs, and a wait that lasts `timeout_ns`, are reported and abort all ranks.
#include "common/faults.cuh"
#include "sync/calls.cuh"
#include "sync/pdl.cuh"

constexpr int RANKS = DRVFUSE_RANKS;

struct CheckParams {
    Call call;
};

extern "C" __global__ void __launch_bounds__(32) check_call(const __grid_constant__ CheckParams p) {
    wait_for_producer();
    Calls<RANKS> calls(p.call);
    calls.start();
    calls.tell();
    Listener listener = calls.listener();
    u64 deadline = 0;
    for (u32 polls = 1; listener.listen(); ++polls) {
        if (polls % 32 == 0 && ptx::load_relaxed_sys(abort_word(p.call.workspaces[p.call.rank])) != 0) return;
        const bool differs = polls % 32 == 0 && listener.differs();
        if (polls % 1024 != 0 && !differs) continue;
        const u64 now = ptx::nanoseconds();
        if (deadline == 0) deadline = now + p.call.timeout_ns;
        if (differs || now > deadline) {
            give_up<RANKS>(p.call, [&](Report* report) { calls.describe(report, listener); });
            return;
        }
    }
}
