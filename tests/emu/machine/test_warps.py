# SPDX-License-Identifier: Apache-2.0
"""Warp operations on the native engine: their results, also when lanes take different paths."""

from __future__ import annotations

import numpy as np
import pytest

WARP = """
KERNEL k(const int* in, int* out, int n) {
    int t = threadIdx.x, v = in[t], r = 0;
    u32 all = 0xffffffffu;
    r = %s;
    out[t] = r;
}"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("__shfl_sync(all, v, 5)", lambda v, t: v[np.full(32, 5)]),
        ("__shfl_sync(all, v, t + 3, 8)", lambda v, t: v[(t & ~7) | (t + 3) % 8]),
        ("__shfl_up_sync(all, v, 3)", lambda v, t: v[np.where(t >= 3, t - 3, t)]),
        ("__shfl_up_sync(all, v, 3, 16)", lambda v, t: v[np.where(t % 16 >= 3, t - 3, t)]),
        ("__shfl_down_sync(all, v, 7)", lambda v, t: v[np.where(t + 7 < 32, t + 7, t)]),
        ("__shfl_xor_sync(all, v, 9)", lambda v, t: v[t ^ 9]),
        ("__ballot_sync(all, v & 1)", lambda v, t: np.full(32, sum((int(x) & 1) << i for i, x in enumerate(v)))),
        ("__any_sync(all, v == n)", lambda v, t: np.zeros(32)),
        ("__all_sync(all, v != n)", lambda v, t: np.ones(32)),
        ("__reduce_add_sync(all, v)", lambda v, t: np.full(32, v.sum())),
        ("__reduce_min_sync(all, v)", lambda v, t: np.full(32, v.min())),
        ("(int)__reduce_max_sync(all, (u32)v)", lambda v, t: np.full(32, v.view(np.uint32).max())),
        ("__reduce_xor_sync(all, (u32)v)", lambda v, t: np.full(32, np.bitwise_xor.reduce(v))),
        ("__match_any_sync(all, t / 5)", lambda v, t: sum((t // 5 == i // 5).astype(int) << i for i in range(32))),
        ("__match_all_sync(all, n, &r)", lambda v, t: np.full(32, -1)),
        ("__activemask()", lambda v, t: np.full(32, -1)),
    ],
)
def test_warp_operations_give_the_documented_results(rig, rng, text, expected):
    v = rng.integers(-(2**20), 2**20, 32, dtype=np.int32)
    out = rig.empty(128)
    rig.run(WARP % text, rig.array(v), out, 1 << 30)
    want = np.asarray(expected(v, np.arange(32))).astype(np.int64).astype(np.uint32).view(np.int32)
    assert (rig.read(out, np.int32, 32) == want).all()


ALL = 0xFFFFFFFF
GARBAGE = 0xDEADBEEF


@pytest.mark.parametrize(
    "block, leaves", [(32, "threadIdx.x >= 17"), (17, "false"), (32, "threadIdx.x >= 17 && load(out)")]
)
def test_warp_operations_wait_for_the_present_lanes_of_their_mask(rig, block, leaves):
    source = f"""
    KERNEL k(u32* out) {{
        u32 i = threadIdx.x;
        if ({leaves}) return;
        out[i] = __shfl_xor_sync({ALL}, i, 1);
        out[32 + i] = __shfl_sync({ALL}, i * 3, 5);
        out[64 + i] = __ballot_sync({ALL}, i & 1);
        out[96 + i] = __all_sync({ALL}, i < 17);
        out[128 + i] = __reduce_add_sync({ALL}, i);
        __syncwarp();
        out[160 + i] = __match_any_sync({ALL}, i / 16);
    }}"""
    out = rig.array(np.ones(192, np.uint32))
    rig.run(source, out, block=block)
    got = rig.read(out, np.uint32, 192).reshape(6, 32)[:, :17].tolist()
    assert got[0] == [i ^ 1 for i in range(16)] + [GARBAGE]
    assert got[1] == [15] * 17
    assert got[2] == [0xAAAA] * 17
    assert got[3] == [1] * 17
    assert got[4] == [sum(range(17))] * 17
    assert got[5] == [0xFFFF] * 16 + [1 << 16]


def test_halves_of_a_warp_can_shuffle_independently(rig):
    source = """
    KERNEL k(int* out) {
        int t = threadIdx.x, v = t * t;
        if (t < 16) for (int i = 8; i; i /= 2) v += __shfl_xor_sync(0xffff, v, i);
        else for (int i = 8; i; i /= 2) v = max(v, __shfl_xor_sync(0xffff0000, v, i));
        __syncwarp();
        out[t] = v;
    }"""
    out = rig.empty(128)
    rig.run(source, out)
    assert rig.read(out, np.int32, 32).tolist() == [sum(i * i for i in range(16))] * 16 + [31 * 31] * 16


def test_lanes_of_one_warp_make_progress_independently(rig):
    source = """
    KERNEL k(u32* flag, u32* out) {
        if (threadIdx.x == 0) { while (!load(flag)); out[0] = 7; }
        else if (threadIdx.x == 31) store(flag, 1);
    }"""
    out = rig.array(np.zeros(1, np.uint32))
    rig.run(source, rig.array(np.zeros(1, np.uint32)), out)
    assert rig.read(out, np.uint32, 1)[0] == 7
