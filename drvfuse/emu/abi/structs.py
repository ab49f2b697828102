# SPDX-License-Identifier: Apache-2.0
"""The structures of running kernels that the native runtime, translated code and Python share; those of the race
detector are in `race_structs`.

A launch has an array of block slots, one for each block that can be resident at the same time. A block slot holds a
Block, then the Warps of the block, then a frame for each thread: a Thread and the registers that the kernel keeps
across suspends.
"""

from __future__ import annotations

from ctypes import Structure

from . import BARRIERS, NOTICES, POLL_WORDS, WRITES
from .layout import layout


@layout(
    "u32 resume",  # the place at which the function continues; 0 is its start
    "u32 status",  # the `Status` with which the thread suspended
    "u32 tid[3], lane, warp, linear",  # the thread's index in the block, lane, warp, and index as one number
    # Operands and results of the operation at which the thread is suspended; `Status` says what they mean.
    "u64 op_addr, op_seen",
    "u32 op_mask, op_a, op_b, op_c, op_result, op_pred, op_kind",
    "u32 site",  # the instruction at which it is suspended
    "u64 local_base",  # the address of its local memory
    "Block* block",
    "Launch* launch",
    "u64 op_value",
    "u32 op_size",  # bytes of the access before which it is suspended
    # Bit fields (native/common.cuh). POLL_COUNT: the number of words in the thread's Poll. POLL_KNOWN: set if the
    # thread is suspended at an access that it has made before. From bit POLL_CREDIT on: how many polls the thread may
    # still make although no polled word changes.
    "u32 polls",
    "u64 wake_time",  # the virtual time at which its sleep ends
)
class Thread(Structure):
    """The header of a thread's frame. The runtime sets it up when the block starts. Translated code stores in it the
    operands of operations of the runtime, and loads the results from it; Python reads it for reports. It is valid until
    another block uses the same block slot.
    """


@layout(
    "u64 addr",
    "u64 low, high",  # the value that the last poll read; `high` is the upper half of 16 bytes
    "u32 site, size",  # the instruction, and the bytes of the word
    "u32 change_count, thread_time",  # Race::change_count and RaceThread::time at the last poll
)
class Polled(Structure):
    """A word that a thread polls. The runtime writes it before a poll, and compares it to find words that changed."""


@layout(f"Polled word[{POLL_WORDS}]")
class Poll(Structure):
    """The list of the words that one thread polls; Thread::polls has its length. A store by the thread empties the
    list.
    """


@layout(
    "u32 lanes",  # the lanes with which the warp was started
    "u32 live",  # the lanes that have not exited
    "u32 ready",  # the lanes that can run
    # The lanes that wait, by what they wait for: a strong access, a warp operation, a barrier of the block,
    # griddepcontrol.wait, the end of a sleep, activemask.
    "u32 yielded, warpop, barrier, gdc, sleeping, at_activemask",
    # 1 if all lanes in `warpop` wait at one operation with one mask; that mask and the `WarpOp`.
    "u32 is_uniform, uniform_mask, uniform_kind",
    "u32 gathered",  # the lanes at a barrier that wait for the rest of the warp to arrive
    "u32 syncs",  # the number of bar.warp.sync that the warp has completed
    "u32 cluster",  # the lanes that wait at the barrier of the cluster
    "u32 cluster_arrived",  # the lanes that have arrived there in this phase
    "u32 cluster_passed",  # the lanes that arrived there in the last phase and have not waited for it yet
    "u32 pad[3]",
)
class Warp(Structure):
    """One warp of a resident block, from the start to the end of the block. A member is a mask of lanes unless its
    comment says otherwise. The runtime writes it; Python reads it to say what threads wait for.
    """


@layout(
    "u32 arrived, expected",  # numbers of threads, each warp counted as 32; an `expected` of 0 means the whole block
    "u32 threads",  # the real number of threads of the warps that have arrived
    "u32 kind",  # B_POPC, B_AND or B_OR for a reduction, else B_SYNC
    "u32 count, every",  # how many predicates of this phase are true, and whether all are
    "u32 all_wait",  # 0 once a thread has executed bar.arrive, which does not wait, else 1
    "u32 site",  # the site of the last arrival
    "Thread* last",  # the thread that arrived last
)
class Barrier(Structure):
    """One barrier of a resident block. The runtime alone uses it. It is in use while `arrived` is not 0."""


@layout(
    "u32 m, n, k",  # the shape of the product
    "u32 count",  # the number of products that the instruction computes
    "u32 method, steps",  # the MatrixMethod; the steps of the tensor cores (each step uses an equal part of k)
    "u32 kind[4], registers[4]",  # for A, B, C and D: the MatrixKind, and the registers per lane
)
class Product(Structure):
    """The description of a matrix instruction, a constant of translated code, which the library `matrix` reads.

    Tables for A, B, C and D follow it. For each element of each register of each lane, they have the index of the
    element in the matrix, in 16 bits. Indices in A, C and D count by rows, those in B by columns.
    """


@layout("u32 first, last")
class List(Structure):
    """A list of delayed stores, oldest first, by their indices in Delay::pool; 0 for an empty list. The runtime alone
    uses it (native/delay_view.cuh).
    """


@layout(
    "u64 shared_base",  # the address of its shared memory
    "u32 ctaid[3], index",  # the block's index in the grid, as %ctaid and as one number
    "u32 cluster_rank, smid",  # its rank in the cluster, and the multiprocessor that %smid names
    "u64 cluster_shared_base",  # the address of the shared memory of rank 0; that of the other ranks follows
    "RaceBlock* race",
    "u32 active",  # 1 from the block's start until the block slot is free
    "u32 live",  # the number of threads that have not exited
    "u32 woken",  # 1 if a barrier has completed since the current iteration over the block's warps began
    "u32 triggered",  # 1 once a thread of the block has executed griddepcontrol.launch_dependents
    "Warp* warps",
    "u8* frames",
    "Poll* polls",  # one for each thread
    "u32 slot, pad",  # the index of its block slot
    f"Barrier barrier[{BARRIERS}]",
    "u64 owner",  # a unique number of the block, by which its delayed stores name it
    "List pending",  # delayed stores that only this block sees
    "u32 epoch",  # the number of barriers that the block has completed
    "u32 bulks",  # the first pending bulk copy to its shared memory, in Copies::bulk
    "u32 stores",  # bulk copies to global memory: the number of pieces that are not written yet
    "u32 store_turns",  # how often the runtime has run the block since the first of these pieces was issued
    "u32 has_run",  # 1 once one of its threads has run
    # For the barrier of the cluster, in the block of rank 0: completed phases, threads that have arrived in this phase,
    # and threads that have neither arrived nor exited.
    "u32 cluster_phase, cluster_arrived, cluster_missing",
)
class Block(Structure):
    """A resident block, at the start of its block slot. The runtime writes it when the block starts and as it runs;
    translated code reads its indices and addresses, Python reads it for reports. It is valid while `active` is 1.
    """


@layout(
    "u64 size",  # bytes of each access; 0 if there was none
    "u64 reads[5], writes[5]",  # indexed by MemoryOf
    "u64 pad",
)
class Site(Structure):
    """The counts of accesses at one site in one launch. The runtime counts; Python reads them when the launch has
    ended.
    """


@layout("u32 kind, flags, size, site, block, thread", "u64 addr, value")
class Fault(Structure):
    """The fault that has stopped a launch. The runtime writes it, Python makes a report of it. `kind` is a `FaultKind`,
    0 for no fault. `findings/faults.py` says what the other members mean for each kind.
    """


@layout(
    "u64 params, globals",  # the addresses of the parameters and of the module's variables
    "u32 nctaid[3], ntid[3], device",  # the shapes of the grid and of a block, and the number of the device
    "u32 smem_dynamic, shared_static",  # bytes of dynamic and of static shared memory
    "u32 cluster",  # the shape of a cluster, x | y << 8 | z << 16; 0: no clusters
    "u32 sm_count",  # multiprocessors of the device
    "u32 envreg1, envreg2",  # the upper and lower half of the address of the workspace for cooperative grid barriers
    "u32 op",  # the number of the operation
    # The race detector's clocks of the launch: at its start, after griddepcontrol.wait, and at its end.
    "u32 start, primary, end",
    "CopyQueue* copies",  # two queues for each thread of each block slot; null if the kernel has no asynchronous copies
    "Copies* copy_pool",  # the table of the asynchronous copies
    "Engine* engine",
    "void* function",  # the translated kernel
    "u8* slots",  # the block slots
    "u64 slot_stride",  # bytes from one block slot to the next
    "u32 slot_count, threads, warps",  # the numbers of block slots, and of threads and warps in a block
    "u32 frame_stride",  # bytes from one frame to the next
    "u32 blocks, next, finished, triggered",  # numbers of blocks: in all; started; ended; triggered (or ended)
    # The address of the shared memory of block slot 0, and the bytes from there to that of the next block slot. The
    # address of the local memory of the first thread, and the bytes from there to that of the next thread.
    "u64 shared_base, shared_stride, local_base, local_stride",
    "u32 local_bytes, param_bytes, shared_bytes",  # local memory of a thread, parameters, shared memory of a block
    "u32 cluster_size",  # blocks of a cluster; 1 without clusters
    "u32 cluster_window",  # bytes of the shared memory of a cluster, with the gaps between the blocks
    "u32 gdc_open",  # 0 while griddepcontrol.wait has to wait for earlier kernels, else 1
    "u32 state",  # a LaunchState
    "u32 free_count",  # the number of entries of free_groups
    "u32 slots_used",  # block slots from this index on were never used
    "u32* free_groups",  # the groups of block slots that are free; a group holds the blocks of one cluster
    "Site* sites",  # one for each site of the kernel
    "Poll* polls",  # one for each thread of each block slot
    "u64 window_base, window_bytes, access_base",  # the window, and the access words of the launch's process
    "u64 barriers, resumes, warp_ops",  # counts for reports
    "u8* races",  # a RaceBlock and its RaceThreads for each block slot
    "Fault fault",
    "u32 reported",  # the last event that rt_run has reported: 1: all blocks have triggered, 2: the launch has ended
    # Where the next call of the runtime continues to run this launch. part: 1 if the last call stopped in the middle of
    # it. turn: how many block slots the last call had finished. turn_warp: 1 plus the index of the warp with which the
    # turn of the next block continues, or 0 if that turn has not begun.
    "u32 part, turn, turn_warp",
    "u8 owner_class[256]",  # the MemoryOf under which accesses are counted, indexed by the owner in the access word
    "u32 pending, pad",  # the number of delayed stores of its blocks, ended blocks included
    "void* heap",  # the function for malloc and free in its context, or null
)
class Launch(Structure):
    """A launch of a kernel. Python makes it when the launch starts and frees it when the launch has ended; the runtime
    runs it. Translated code reads special registers, such as %nctaid, from its members.
    """


@layout("u64 addr, low, high", "u32 size, pad")
class Write(Structure):
    """A word that a thread has written in a probe, with its value before the write. When the thread suspends, the
    runtime compares the values to find out whether the thread has changed memory.
    """


@layout("Thread* thread", "u64 format, args")
class Print(Structure):
    """A call of printf: the addresses of the format and of the arguments. The runtime passes it to Python, for the
    duration of the call.
    """


@layout("Thread* thread", "u64 address, nbytes", "u32 kind, pad")
class Heap(Structure):
    """A call of malloc or free (`HeapCall`). The runtime passes it to Python for the duration of the call, and reads
    the result from `address` or `nbytes`.
    """


@layout("u64 clock, address, value", "u32 op, block, thread, site, kind, flags")
class Event(Structure):
    """An entry of the engine's ring buffer of the last EVENTS events. The runtime writes it; Python decodes it for
    timelines (findings/events.py). `clock` is the virtual time, `kind` an `EventKind`.
    """


@layout(
    "u32 op, kind, site, block, thread",
    "u32 mask",  # the member mask of the instruction
    "u32 lanes, live",  # the lanes with which the warp was started, and the lanes that have not exited
    "u32 lane",  # the lane that a shuffle reads
)
class Notice(Structure):
    """A finding at a site that does not stop the launch. The runtime writes it; Python makes a report of it when the
    run pauses, and empties the list.
    """


@layout("u64 base, nbytes", "u64* members", "u64 devices")
class Team(Structure):
    """A range of addresses at which a multicast object is mapped. Python writes it between calls of the runtime; the
    runtime reads it.

    For each piece of 2 MiB, `members` has MEMBERS addresses, one for each device: that of the memory which the device
    has bound to the piece, or 0. `devices` has a bit for each device of the team.
    """


@layout("Team* first", "u64 count")
class Teams(Structure):
    """The list of all multicast addresses of a machine. Python writes it, and the runtime reads it."""


@layout(
    "u64 seed",  # decides the schedule
    "u64 pass, clock, clock_reads",  # passes so far, the virtual time in nanoseconds, how often threads have read it
    "u64 progress",  # counts changes of memory, exits and other signs that threads do not merely poll
    "u64 quiet",  # polls since the last write
    "u64 step",  # nanoseconds by which rt_advance moved the clock last
    "u64 resumes",  # resumes of threads so far
    "u32 probing",  # 1 in a probe, in which all waiting threads poll once more to find out whether one can continue
    "u32 writes",  # the number of entries of `write`
    "u64 loop_limit",  # the most accesses, or iterations of loops without accesses, between two suspends of a thread
    # Of the running thread: accesses left until `refuel`; iterations of loops without accesses since its resume.
    "u64 fuel, rounds",
    "u64 work",  # the cost of this call so far, in accesses
    "u64 fuel_given",  # the accesses that the running thread was given since its resume, `fuel` included
    # The state of a pass over all launches (native/pass.cuh) and of a probe. If a call leaves a pass or a probe
    # unfinished, the next call continues it. pass_open: 1 while a pass is unfinished. pass_at: how many launches the
    # pass has finished. pass_ran: the resumes of threads in the pass so far. pass_held: 1 if the pass has held back a
    # warp or a launch, 2 if the pass holds back nothing any more. probe_force: 1 if all waiting threads poll in the
    # next pass of the probe. probe_streak: the number of passes of the probe since the last one with probe_force.
    "u32 pass_open, pass_at, pass_ran, pass_held, probe_force, probe_streak",
    "u32 advancing",  # 1 during a call of rt_advance or rt_pass_time, else 0
    "u32 wake_count",  # how often sleepers were woken since the last progress
    "u32 counted",  # how rt_run measures its budget: 1: in resumes of threads, 0: in nanoseconds
    "u32 timed",  # 1: sleeping threads sleep until their time, and are not woken early
    "u64 pass_random, pass_before, probe_rounds, probe_before, reads_before",
    # For the last check before a deadlock is reported. `state` is a hash of the saved states of all threads. It is
    # compared with an older hash, `state_kept`, which is replaced after 1, 2, 4, ... rounds of the probe to find every
    # cycle.
    "u64 state, state_kept, state_reads, state_rounds, state_period",
    # The number of resumes since a thread last exited or a block last started, where a resume at a strong access
    # counts STRAIN times. Above a limit the launch fails as endless.
    "u64 strain",
    # watching: 1 during the last check before a deadlock is reported. undecided: 1 if a limit has ended that check.
    "u32 watching, undecided",
    # The last read of the clock: the thread, the nanoseconds by which the read advanced the clock, and the time that
    # the read returned.
    "void* clock_thread",
    "u64 clock_run, clock_read",
    "void* print",  # Python's function for printf; with a null argument it returns whether an interrupt is pending
    "Race* race",  # null without the race detector
    "Event* events",  # the ring buffer of the last EVENTS events
    "u64 event_count",  # the number of events so far
    "u32 repeats_poll",  # 1 while the running thread makes a poll that reads the same value as its last poll
    "u32 skips_check",  # 1 if the race detector need not check that poll, since it could find nothing new
    "Delay* delay",  # null if stores are not delayed
    "Teams* teams",
    "u64 stack",  # the beginning of the host stack of the running thread
    f"Write write[{WRITES}]",
    "u32 notices",  # the number of entries of `notice`
    f"Notice notice[{NOTICES}]",
)
class Engine(Structure):
    """The state that all launches of one machine share. Python makes it with the machine, and changes it only between
    calls of the runtime.
    """


@layout(
    "u32 first, last",  # the copies of the queue, by their indices in Copies::pool; 0 for none
    "u32 commits, issued",  # numbers of committed groups, and of copies that were issued
    "u32 unread",  # the oldest piece of a bulk copy for which no wait_group.read has waited
)
class CopyQueue(Structure):
    """A queue of a thread's asynchronous copies, oldest first. Each thread has two (`queue_of` in native/copy.cuh). The
    runtime alone uses it, from the start to the end of the block.
    """
