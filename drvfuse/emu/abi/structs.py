# SPDX-License-Identifier: Apache-2.0
"""The structures of `runtime.cu`, field for field."""

from __future__ import annotations

from ctypes import Structure, c_uint8, c_uint32, c_uint64, sizeof

u32, u64 = c_uint32, c_uint64


class WarpStruct(Structure):
    """One warp of a resident block: masks of lanes."""

    _fields_ = [
        ("lanes", u32),
        ("live", u32),
        ("ready", u32),
        ("yielded", u32),
        ("warpop", u32),
        ("barrier", u32),
        ("gdc", u32),
        ("sleeping", u32),
        ("cluster", u32),
        ("asking", u32),
        ("alike", u32 * 3),
        ("gathered", u32),
        ("syncs", u32),
        ("pad", u32),
    ]


class ThreadStruct(Structure):
    """The header of a thread's frame."""

    _fields_ = [
        ("resume", u32),
        ("status", u32),
        ("tid", u32 * 3),
        ("lane", u32),
        ("warp", u32),
        ("linear", u32),
        ("op_addr", u64),
        ("op_seen", u64),
        ("op_mask", u32),
        ("op_a", u32),
        ("op_b", u32),
        ("op_c", u32),
        ("op_result", u32),
        ("op_pred", u32),
        ("op_kind", u32),
        ("site", u32),
        ("local_base", u64),
        ("block", u64),
        ("launch", u64),
        ("op_value", u64),
        ("op_size", u32),
        ("polls", u32),
        ("wake", u64),
    ]


class PolledStruct(Structure):
    """A word that a thread polls: one of those in its POLL_BYTES."""

    _fields_ = [("addr", u64), ("low", u64), ("high", u64), ("site", u32), ("size", u32), ("race", u32 * 2)]


class BlockStruct(Structure):
    """A resident block, at the start of its slot."""

    _fields_ = [
        ("shared_base", u64),
        ("ctaid", u32 * 3),
        ("index", u32),
        ("cluster_rank", u32),
        ("smid", u32),
        ("cluster_shared_base", u64),
        ("cluster_shared_stride", u64),
        ("race", u64),
        ("reserved", u32 * 2),
        ("active", u32),
        ("live", u32),
        ("woken", u32),
        ("triggered", u32),
        ("warps", u64),
        ("frames", u64),
        ("polls", u64),
        ("leader", u64),
        ("cluster_arrived", u32),
        ("cluster_live", u32),
        ("cluster_phase", u32),
        ("slot", u32),
        ("barrier", u32 * 10 * 16),
        ("owner", u64),
        ("pending", u32 * 2),
        ("epoch", u32),
        ("bulks", u32),
        ("stores", u32 * 2),
    ]


class FaultStruct(Structure):
    _fields_ = [
        ("kind", u32),
        ("flags", u32),
        ("size", u32),
        ("site", u32),
        ("block", u32),
        ("thread", u32),
        ("addr", u64),
        ("value", u64),
    ]


class LaunchStruct(Structure):
    _fields_ = [
        ("params", u64),
        ("globals", u64),
        ("nctaid", u32 * 3),
        ("ntid", u32 * 3),
        ("device", u32),
        ("smem_dynamic", u32),
        ("shared_static", u32),
        ("cluster", u32),
        ("clock", u64),
        ("sm_count", u32),
        ("envreg1", u32),
        ("envreg2", u32),
        *((name, u32) for name in ("op", "start", "primary", "end", "pad0")),
        ("copies", u64),
        ("copy_pool", u64),
        ("reserved", u32 * 4),
        ("engine", u64),
        ("function", u64),
        ("slots", u64),
        ("slot_stride", u64),
        ("slot_count", u32),
        ("threads", u32),
        ("warps", u32),
        ("frame_stride", u32),
        ("blocks", u32),
        ("next", u32),
        ("finished", u32),
        ("triggered", u32),
        ("shared_base", u64),
        ("shared_stride", u64),
        ("local_base", u64),
        ("local_stride", u64),
        ("local_bytes", u32),
        ("param_bytes", u32),
        ("shared_bytes", u32),
        ("cluster_size", u32),
        ("gdc_open", u32),
        ("state", u32),
        ("free_count", u32),
        ("high", u32),
        ("free_groups", u64),
        ("sites", u64),
        ("polls", u64),
        ("window_base", u64),
        ("window_bytes", u64),
        ("access_base", u64),
        ("barriers", u64),
        ("resumes", u64),
        ("warp_ops", u64),
        ("races", u64),
        ("fault", FaultStruct),
        *((name, u32) for name in ("reported", "part", "turn", "turn_warp")),
        ("owner_class", c_uint8 * 256),
        ("pending", u32),
        ("pad", u32),
    ]


class PrintStruct(Structure):
    """A call of printf."""

    _fields_ = [("thread", u64), ("format", u64), ("args", u64)]


class EventStruct(Structure):
    """Something that happened: an entry of the engine's ring of the last EVENTS."""

    _fields_ = [
        ("clock", u64),
        ("address", u64),
        ("value", u64),
        *((name, u32) for name in ("op", "block", "thread", "site", "kind", "flags")),
    ]


class EngineStruct(Structure):
    _fields_ = [
        ("seed", u64),
        ("pass_", u64),
        ("clock", u64),
        ("clock_reads", u64),
        ("progress", u64),
        ("quiet", u64),
        ("step", u64),
        ("resumes", u64),
        ("probing", u32),
        ("writes", u32),
        *((name, u64) for name in ("loop_limit", "fuel", "rounds", "work", "tank")),
        *((name, u32) for name in ("pass_open", "pass_at", "pass_ran", "pass_held")),
        *((name, u32) for name in ("probe_force", "probe_streak", "advancing", "slept")),
        *((name, u64) for name in ("pass_random", "pass_before", "probe_rounds", "probe_before", "reads_before")),
        *((name, u64) for name in ("state", "state_kept", "state_reads", "state_rounds", "state_period", "strain")),
        ("watching", u32),
        ("undecided", u32),
        ("clock_thread", u64),
        ("clock_run", u64),
        ("clock_read", u64),
        ("print", u64),
        ("race", u64),
        ("events", u64),
        ("event_count", u64),
        ("fruitless", u32),
        ("idle", u32),
        ("delay", u64),
        ("write", u64 * 4 * 64),
    ]


class OpStruct(Structure):
    """An operation's place in the order of operations."""

    _fields_ = [("chain", u32), ("place", u32), ("device", u32), ("primary", u32)]


class FoundStruct(Structure):
    """Two accesses that nothing orders."""

    _fields_ = [
        ("addr", u64),
        ("events", u64),
        *((name, u32) for name in ("size", "edge", "op", "block", "thread", "site", "flags")),
        *((name, u32) for name in ("other_op", "other_block", "other_warp", "other_lanes")),
        *((name, u32) for name in ("other_site", "other_flags", "store_site", "load_site", "store_op")),
    ]


class RaceStruct(Structure):
    """The race detector's state."""

    _fields_ = [
        *((name, u64) for name in ("arena", "bytes", "top", "cells", "window_base", "ops", "pools")),
        *((name, u32) for name in ("strict", "off", "wholes", "found_count", "random", "serial", "stamp", "pad")),
        ("free", u32 * 40),
        ("certain", u32 * 2 * 32),
        ("joined", u32 * 3 * 256),
        ("found", FoundStruct * 64),
    ]


RACE_BLOCK_BYTES, RACE_THREAD_BYTES = 276, 32
EVENTS = 1 << 14
BLOCK_BYTES = sizeof(BlockStruct)
WARP_BYTES = sizeof(WarpStruct)
POLL_BYTES = 32 * 40
COPY_QUEUE_BYTES = 40
SITE_WORDS = 12
