// SPDX-License-Identifier: Apache-2.0
// Compares a call with those that the peers make, before the kernels of the call begin.
//
// Grid. One block of 32 threads, of which thread p waits for rank p.
// Memory ordering. sync/calls.cuh. What follows on the stream begins when this kernel has completed: with DRVFUSE_RANKS
// equal calls, or with the abort word set, so that it waits for nobody.
// Failure. A wait that lasts `timeout_ns` and a call that differs are reported, and abort all ranks.
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
        if (polls % 1024 != 0) continue;
        const u64 now = ptx::nanoseconds();
        if (deadline == 0) deadline = now + p.call.timeout_ns;
        if (listener.differs() || now > deadline) {
            give_up<RANKS>(p.call, [&](Report* report) { calls.describe(report, listener); });
            return;
        }
    }
}
