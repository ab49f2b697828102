# SPDX-License-Identifier: Apache-2.0
"""The page of all PTX instructions, covered or refused: `docs/ptx.md`.

    python -m tools.ptx_table > docs/ptx.md

Each instruction of the PTX manual has examples below. Whether they can be translated decides what the page says.
Registers of the examples: p q predicates, h i 16 bits, a to g 32 bits, k l m n 64 bits, w x 128 bits, r s t u fp32, v
fp64; `sh` is 1 KiB of shared memory, `gl` of global memory, `f` a function, `loc` local memory.
"""

from __future__ import annotations

from drvfuse.emu.translate.module import translate
from drvfuse.emu.translate.refused import refusal
from drvfuse.ptx.ir import PtxError

HEAD = """.version 8.8
.target sm_90a
.address_size 64
.global .align 16 .b8 gl[1024];
.const .align 16 .b8 co[64];
.func (.param .b32 o) f (.param .b32 i) { .reg .b32 z; ld.param.b32 z, [i]; st.param.b32 [o], z; ret; }
.visible .entry k(.param .u64 pa) {
.reg .pred p, q; .reg .b16 h, i; .reg .b32 a, b, c, d, e, g; .reg .b64 k, l, m, n; .reg .b128 w, x;
.reg .f32 r, s, t, u; .reg .f64 v, y, z;
.shared .align 128 .b8 sh[1024]; .local .align 16 .b8 loc[64]; .param .b32 p0; .param .b32 p1;
"""

SECTIONS: dict[str, dict[str, tuple[str, ...]]] = {
    "Integer arithmetic": {
        "add, sub": ("add.u32 a, b, c;", "sub.sat.s32 a, b, c;", "add.u16x2 a, b, c;", "sub.s64 k, l, m;"),
        "add.cc, addc, sub.cc, subc": (
            "add.cc.u32 a, b, c; addc.u32 d, e, g;",
            "sub.cc.u64 k, l, m; subc.u64 k, l, m;",
        ),
        "mul, mad": ("mul.wide.s32 k, a, b;", "mad.hi.sat.s32 a, b, c, d;", "mul.lo.u64 k, l, m;"),
        "mad.cc, madc": ("mad.lo.cc.u32 a, b, c, d; madc.hi.u32 a, b, c, d;",),
        "mul24, mad24": ("mul24.hi.u32 a, b, c;", "mad24.lo.s32 a, b, c, d;"),
        "sad, div, rem, abs, neg": (
            "sad.s32 a, b, c, d;",
            "div.u64 k, l, m;",
            "rem.s16 h, i, i;",
            "abs.s32 a, b;",
            "neg.s64 k, l;",
        ),
        "min, max": ("min.u16x2 a, b, c;", "max.relu.s32 a, b, c;", "min.s64 k, l, m;"),
        "popc, clz, bfind, fns, brev": (
            "popc.b64 a, k;",
            "clz.b32 a, b;",
            "bfind.shiftamt.s64 a, k;",
            "fns.b32 a, b, c, d;",
            "brev.b64 k, l;",
        ),
        "bfe, bfi, bmsk, szext": (
            "bfe.s64 k, l, a, b;",
            "bfi.b32 a, b, c, d, e;",
            "bmsk.clamp.b32 a, b, c;",
            "szext.wrap.s32 a, b, c;",
        ),
        "dp4a, dp2a": ("dp4a.u32.s32 a, b, c, d;", "dp2a.lo.s32.u32 a, b, c, d;"),
    },
    "Floating point": {
        "testp, copysign": ("testp.normal.f32 p, r;", "copysign.f64 v, y, z;"),
        "add, sub, mul, fma, mad": (
            "add.rz.ftz.sat.f32 r, s, t;",
            "fma.rp.f64 v, y, z, v;",
            "mad.rn.f32 r, s, t, u;",
            "mul.rm.f64 v, y, z;",
            "fma.rn.relu.bf16x2 a, b, c, d;",
            "sub.rn.f16 h, i, i;",
        ),
        "div, rcp, sqrt, rsqrt": (
            "div.rn.f32 r, s, t;",
            "div.full.ftz.f32 r, s, t;",
            "rcp.approx.ftz.f64 v, y;",
            "sqrt.rn.f64 v, y;",
            "rsqrt.approx.f32 r, s;",
        ),
        "abs, neg, min, max": (
            "abs.f16x2 a, b;",
            "neg.bf16 h, i;",
            "min.NaN.xorsign.abs.f32 r, s, t;",
            "max.f64 v, y, z;",
            "min.NaN.bf16x2 a, b, c;",
        ),
        "sin, cos, lg2, ex2, tanh": (
            "sin.approx.f32 r, s;",
            "cos.approx.ftz.f32 r, s;",
            "lg2.approx.f32 r, s;",
            "ex2.approx.f16x2 a, b;",
            "tanh.approx.bf16 h, i;",
        ),
    },
    "Comparison and selection": {
        "set, setp": ("set.lt.u32.f32 a, r, s;", "setp.gt.and.s64 p|q, k, l, q;", "setp.neu.bf16x2 p|q, a, b;"),
        "selp, slct": ("selp.f64 v, y, z, p;", "slct.u64.f32 k, l, m, r;"),
    },
    "Logic and shifts": {
        "and, or, xor, not, cnot": (
            "and.pred p, p, q;",
            "or.b16 h, i, i;",
            "xor.b64 k, l, m;",
            "not.b32 a, b;",
            "cnot.b64 k, l;",
        ),
        "lop3": ("lop3.b32 a, b, c, d, 0x96;", "lop3.or.b32 a|p, b, c, d, 0x3f, q;"),
        "shl, shr, shf": ("shl.b64 k, l, a;", "shr.s16 h, i, a;", "shf.r.clamp.b32 a, b, c, d;"),
    },
    "Data movement and conversion": {
        "mov": ("mov.b64 {a, b}, k;", "mov.u64 k, sh;", "mov.b128 w, {k, l};", "mov.u64 k, f;"),
        "shfl.sync": ("shfl.sync.bfly.b32 a|p, b, 1, 31, -1;",),
        "prmt": ("prmt.b32.f4e a, b, c, d;",),
        "ld, ldu": (
            "ld.acquire.sys.global.v2.f32 {r, s}, [k];",
            "ld.global.nc.L1::no_allocate.v4.b32 {a, b, c, d}, [k];",
            "ldu.global.u32 a, [k];",
            "ld.b128 w, [k];",
            "ld.const.u8 h, [co];",
        ),
        "st": ("st.release.gpu.global.b32 [k], a;", "st.shared.v4.f32 [a], {r, s, t, u};", "st.local.b64 [loc], k;"),
        "st.async": ("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [a], {b, c}, [d];",),
        "multimem.ld_reduce, .st, .red": (
            "multimem.ld_reduce.relaxed.sys.global.add.v4.f32 {r, s, t, u}, [k];",
            "multimem.st.weak.global.f32 [k], r;",
            "multimem.red.release.gpu.global.add.u32 [k], a;",
        ),
        "prefetch, prefetchu, applypriority, discard, createpolicy": (
            "prefetch.global.L2 [k];",
            "prefetchu.L1 [k];",
            "applypriority.global.L2::evict_normal [k], 128;",
            "discard.global.L2 [k], 128;",
            "createpolicy.fractional.L2::evict_last.b64 k, 1.0;",
        ),
        "isspacep, cvta, mapa, getctarank": (
            "isspacep.shared p, k;",
            "cvta.to.global.u64 k, l;",
            "mapa.shared::cluster.u32 a, b, c;",
            "getctarank.u64 a, k;",
        ),
        "cvt, cvt.pack": (
            "cvt.rni.sat.s8.f32 a, r;",
            "cvt.rn.satfinite.e4m3x2.f32 h, r, s;",
            "cvt.rna.tf32.f32 a, r;",
            "cvt.rz.bf16x2.f32 a, r, s;",
            "cvt.pack.sat.s16.s32 a, b, c;",
            "cvt.pack.sat.u8.s32.b32 a, b, c, d;",
        ),
    },
    "Asynchronous copies": {
        "cp.async, .commit_group, .wait_group, .wait_all": (
            "cp.async.cg.shared.global.L2::128B [a], [k], 16;",
            "cp.async.commit_group;",
            "cp.async.wait_group 1;",
            "cp.async.wait_all;",
        ),
        "cp.async.mbarrier.arrive": ("cp.async.mbarrier.arrive.noinc.shared.b64 [a];",),
        "cp.async.bulk, .commit_group, .wait_group, .prefetch": (
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [a], [k], b, [c], h;",
            "cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [k], [a], b, l;",
            "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [a], [b], 16, [c];",
            "cp.async.bulk.commit_group;",
            "cp.async.bulk.wait_group.read 0;",
            "cp.async.bulk.prefetch.L2.global [k], 16;",
        ),
        "cp.reduce.async.bulk": (
            "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.noftz.bf16 [k], [a], 16;",
            "cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.inc.u32 [a], [b], 16, [c];",
        ),
        "cp.async.bulk.tensor": (
            "cp.async.bulk.tensor.1d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [a], [k, {b}], [c];",
        ),
        "cp.reduce.async.bulk.tensor": (
            "cp.reduce.async.bulk.tensor.1d.global.shared::cta.add.tile.bulk_group [k, {a}], [b];",
        ),
        "cp.async.bulk.prefetch.tensor": ("cp.async.bulk.prefetch.tensor.1d.L2.global.tile [k, {a}];",),
        "tensormap.replace, tensormap.cp_fenceproxy": (
            "tensormap.replace.tile.rank.global.b1024.b32 [k], 1;",
            "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [k], [a], 128;",
        ),
    },
    "Textures and surfaces": {
        "tex, tld4, txq, istypep": (
            "tex.1d.v4.f32.s32 {r, s, t, u}, [k, {a}];",
            "tld4.r.2d.v4.f32.f32 {r, s, t, u}, [k, {r, s}];",
            "txq.width.b32 a, [k];",
            "istypep.texref p, k;",
        ),
        "suld, sust, sured, suq": (
            "suld.b.1d.b32.trap {a}, [k, {b}];",
            "sust.b.1d.b32.trap [k, {b}], {a};",
            "sured.b.add.1d.u32.trap [k, {b}], a;",
            "suq.width.b32 a, [k];",
        ),
    },
    "Control flow": {
        "bra, brx.idx": ("@!p bra L1; L1:", "T: .branchtargets L2, L3; brx.idx a, T; L2: L3:"),
        "call": (
            "call (p0), f, (p1);",
            "P: .callprototype (.param .b32 _) _ (.param .b32 _); mov.u64 k, f; call (p0), k, (p1), P;",
        ),
        "ret, exit, trap, brkpt": ("@p ret;", "@p exit;", "@p trap;", "@p brkpt;"),
        "call of malloc, free, vprintf, __assertfail": (
            ".param .b64 p2; .param .b64 p3; call (p2), malloc, (p3); call free, (p3);",
            ".param .b64 p4; .param .b64 p5; .param .b32 p6; call (p6), vprintf, (p4, p5);",
        ),
        "stacksave, stackrestore, alloca": ("stacksave.u64 k; stackrestore.u64 k;", "alloca.u64 k, l, 16;"),
    },
    "Synchronisation": {
        "bar, barrier": (
            "bar.sync 0;",
            "barrier.cta.red.popc.aligned.u32 a, 1, 64, p;",
            "bar.arrive 2, 64;",
            "bar.red.and.pred p, 0, q;",
        ),
        "bar.warp.sync": ("bar.warp.sync -1;",),
        "barrier.cluster": ("barrier.cluster.arrive.relaxed.aligned;", "barrier.cluster.wait.acquire;"),
        "membar, fence": (
            "membar.sys;",
            "fence.sc.cluster;",
            "fence.acquire.gpu;",
            "fence.mbarrier_init.release.cluster;",
        ),
        "fence.proxy": ("fence.proxy.alias;", "fence.proxy.async.shared::cta;"),
        "fence.proxy.tensormap": ("fence.proxy.tensormap::generic.release.gpu;",),
        "atom, red": (
            "atom.acq_rel.sys.global.cas.b128 w, [k], x, x;",
            "atom.shared.add.f64 v, [a], y;",
            "red.global.v4.f32.add [k], {r, s, t, u};",
            "red.global.add.noftz.bf16x2 [k], a;",
            "atom.global.v2.f16.max.noftz {h, i}, [k], {h, i};",
        ),
        "red.async": ("red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u64 [a], k, [b];",),
        "vote.sync, match.sync, activemask, redux.sync, elect.sync": (
            "vote.sync.ballot.b32 a, p, -1;",
            "match.all.sync.b64 a|p, k, -1;",
            "activemask.b32 a;",
            "redux.sync.max.s32 a, b, -1;",
            "elect.sync a|p, -1;",
        ),
        "griddepcontrol": ("griddepcontrol.wait;", "griddepcontrol.launch_dependents;"),
        "mbarrier.init, .inval, .expect_tx, .complete_tx": (
            "mbarrier.init.shared.b64 [a], 4;",
            "mbarrier.inval.b64 [k];",
            "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [a], 16;",
            "mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [a], 16;",
        ),
        "mbarrier.arrive, .arrive_drop": (
            "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [a], 2;",
            "mbarrier.arrive.noComplete.shared.b64 k, [a], 1;",
            "mbarrier.arrive_drop.expect_tx.shared.b64 k, [a], 16;",
        ),
        "mbarrier.test_wait, .try_wait, .pending_count": (
            "mbarrier.test_wait.shared.b64 p, [a], k;",
            "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [a], b, c;",
            "mbarrier.pending_count.b64 a, k;",
        ),
    },
    "Matrices": {
        "mma of fp16 / bf16 / tf32 / int8 / FP8": (
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {r, s, t, u}, {a, b, c, d}, {e, g}, {r, s, t, u};",
            "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {r, s, t, u}, {a, b, c, d}, {e, g}, {r, s, t, u};",
            "mma.sync.aligned.m16n8k32.row.col.s32.s8.u8.s32 {a, b, c, d}, {a, b, c, d}, {e, g}, {a, b, c, d};",
            "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e5m2.f32 {r, s, t, u}, {a, b, c, d}, {e, g}, {r, s, t, u};",
        ),
        "wmma.load, wmma.store, wmma.mma": (
            "wmma.load.c.sync.aligned.row.m16n16k16.shared.f16 {a, b, c, d}, [e], 16;",
            "wmma.store.d.sync.aligned.row.m16n16k16.global.f32 [k], {r, s, t, u, r, s, t, u}, 16;",
            "wmma.mma.sync.aligned.row.col.m16n16k8.f32.tf32.tf32.f32 {r, s, t, u, r, s, t, u}, {a, b, c, d}, "
            "{a, b, c, d}, {r, s, t, u, r, s, t, u};",
        ),
        "ldmatrix, stmatrix, movmatrix": (
            "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {a, b, c, d}, [e];",
            "stmatrix.sync.aligned.m8n8.x2.shared.b16 [e], {a, b};",
            "movmatrix.sync.aligned.m8n8.trans.b16 a, b;",
        ),
        "mma of fp64 / 4-bit / 1-bit operands": (
            "mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {v, y}, {z}, {z}, {v, y};",
            "mma.sync.aligned.m8n8k32.row.col.s32.s4.s4.s32 {a, b}, {c}, {d}, {a, b};",
            "mma.sync.aligned.m8n8k128.row.col.s32.b1.b1.s32.and.popc {a, b}, {c}, {d}, {a, b};",
        ),
        "mma.sp": (
            "mma.sp.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {r, s, t, u}, {a, b}, {c, d}, {r, s, t, u}, e, 0;",
        ),
        "wgmma": ("wgmma.fence.sync.aligned;", "wgmma.commit_group.sync.aligned;"),
        "tcgen05": ("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [a], 32;",),
    },
    "Video": {
        "vadd, vsub, vabsdiff, vmin, vmax": (
            "vadd.s32.u32.s32.sat a.b1, b.h0, c.b3, d;",
            "vabsdiff.u32.u32.u32.add a, b, c, d;",
        ),
        "vshl, vshr, vmad, vset": (
            "vshl.u32.u32.u32.wrap a, b, c;",
            "vmad.s32.s32.u32.sat.shr7 a, b.h1, -c, d;",
            "vset.s32.u32.lt a, b, c;",
        ),
        "vadd2, vsub2, vavrg2, vabsdiff2, vmin2, vmax2, vset2": (
            "vadd2.s32.s32.u32.sat a.h0, b.h31, c.h02, d;",
            "vavrg2.u32.u32.u32 a, b, c, d;",
            "vset2.u32.s32.ge a, b, c, d;",
        ),
        "vadd4, vsub4, vavrg4, vabsdiff4, vmin4, vmax4, vset4": (
            "vabsdiff4.u32.u32.u32.add a, b, c, d;",
            "vset4.u32.u32.eq a.b31, b, c, d;",
        ),
    },
    "Other": {
        "nanosleep, pmevent, setmaxnreg": ("nanosleep.u32 20;", "pmevent 7;", "setmaxnreg.inc.sync.aligned.u32 96;"),
    },
}

NEWER = (
    "`add`, `sub`, `mul`, `fma` on `.f32x2`",
    "`min` and `max` of three operands",
    "`add`, `sub`, `fma` of mixed precision",
    "`redux.sync` on `.f32`",
    "`cvt.rs`, and conversions of 4-bit and 6-bit types",
    "`ld` and `st` of 256 bits",
    "`st.bulk`",
    "`st.async` and `red.async` with `.mmio`",
    "`clusterlaunchcontrol`",
    "`cp.async.bulk` with `.cp_mask`",
    "`ldmatrix` and `stmatrix` of `.b8`",
    "`mma` with block scaling",
    "`multimem.cp.async.bulk`, `multimem.cp.reduce.async.bulk` (PTX 9.1)",
)
"""Instructions that need a target above sm_90a, or a later assembler than the examples. They are not translated."""

_INTRODUCTION = """# PTX instructions

The emulated driver translates PTX for targets up to `sm_90a` but for the instructions that this page calls refused.
They are refused by name, with CUDA_ERROR_NOT_SUPPORTED, a report of kind `unsupported` and its line: at the load of a
module of which all kernels use them, else at the launch of a kernel that does, so that the other kernels of a module
run. What no table knows is CUDA_ERROR_INVALID_PTX, with its line. Devices of a later architecture run PTX for `sm_90`
and below, and for their own target as far as it has the same instructions.

What a covered instruction computes is compared with a GPU's answers: [emulator.md](emulator.md#measured-on-a-gpu).
Scalar video instructions are the exception: newer GPUs have none, the emulator does as the PTX manual says, and the
code that `ptxas` makes of some of them for `sm_90` does not (saturation of unsigned results, `.min` and `.max` of
intermediate ones, a result for `.h1`, `vmad` with `.sat` or a shift).

`python -m tools.ptx_table > docs/ptx.md` writes this page; each instruction has examples, which are translated.
"""


def status(examples: tuple[str, ...]) -> str:
    """What the page says of an instruction with these examples."""
    reasons = []
    for example in examples:
        try:
            refused = translate(f"{HEAD}{example}\nret; }}\n").kernels["k"].refused
        except PtxError:
            return "not translated yet"
        reasons.append(refused and refusal(example.split()[0].rstrip(";")))
    found = {reason for reason in reasons if reason}
    if found and None in reasons:
        raise ValueError(f"some examples are refused, and others are not: {examples}")
    return f"refused: {'; '.join(sorted(found))}" if found else "covered"


def page() -> str:
    """The text of docs/ptx.md."""
    lines = [_INTRODUCTION]
    for section, rows in SECTIONS.items():
        lines += [f"## {section}", "", "| instructions | status |", "|---|---|"]
        lines += [f"| {_quoted(names)} | {status(examples)} |" for names, examples in rows.items()]
        lines.append("")
    lines += [
        "## Not for sm_90a",
        "",
        "Not translated, whatever the devices are:",
        "",
        *(f"- {name}" for name in NEWER),
    ]
    return "\n".join(lines) + "\n"


def _quoted(names: str) -> str:
    """Names in code style; the words that follow a name are plain."""
    return names if " of " in names else ", ".join(f"`{name}`" for name in names.split(", "))


if __name__ == "__main__":
    print(page(), end="")
