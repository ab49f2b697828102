# SPDX-License-Identifier: Apache-2.0
"""Mutated PTX: `python fuzz_ptx.py FIRST COUNT` loads and launches the cases FIRST, FIRST + 1, ... on one machine.

Whatever the text, every driver call must give a CUresult within `SECONDS`. Each case begins from one of a few kernels
and changes it: characters, tokens, numbers, lines, or pieces of other kernels. Prints a line for each case that took
too long or raised. The exit status is 1 if there was one. A crash of native code ends the process, so the caller learns
of it too: the last line that was printed has the number of the case.
"""

from __future__ import annotations

import logging
import random
import re
import sys
import time
import traceback

import numpy as np

SECONDS = 5.0
HEAD = ".version 8.0\n.target sm_90a\n.address_size 64\n"
SEEDS = [
    """.visible .entry k(.param .u64 out, .param .align 8 .b8 p[24]) .maxntid 32, 1, 1
{
    .reg .pred %p<3>;
    .reg .b32 %r<8>;
    .reg .b64 %rd<5>;
    ld.param.u64 %rd1, [out];
    ld.param.v2.u32 {%r1, %r2}, [p+8];
    mov.u32 %r3, %tid.x;
    setp.lt.u32 %p1, %r3, 16;
    @%p1 bra $L1;
    add.s32 %r1, %r1, -7;
$L1:
    mad.lo.s32 %r4, %r1, %r2, %r3;
    mul.wide.u32 %rd2, %r3, 4;
    add.s64 %rd3, %rd1, %rd2;
    st.global.u32 [%rd3], %r4;
    ret;
}""",
    """.shared .align 16 .b8 tile[512];
.global .align 4 .u32 table[4] = {1, 2, 3, 0x10};
.visible .entry k(.param .u64 out, .param .align 8 .b8 p[24])
{
    .reg .b32 %r<9>;
    .reg .f32 %f<4>;
    .reg .b64 %rd<6>;
    ld.param.u64 %rd1, [out];
    mov.u32 %r1, %tid.x;
    shl.b32 %r2, %r1, 2;
    mov.u32 %r3, tile;
    add.u32 %r4, %r3, %r2;
    cvt.rn.f32.u32 %f1, %r1;
    fma.rn.f32 %f2, %f1, 0f40000000, 0f3F800000;
    st.shared.f32 [%r4], %f2;
    bar.sync 0;
    ld.shared.f32 %f3, [tile+4];
    shfl.sync.bfly.b32 %r5, %r1, 1, 31, -1;
    ld.global.u32 %r6, [table+8];
    atom.global.add.u32 %r7, [%rd1], %r5;
    cvt.rzi.u32.f32 %r8, %f3;
    st.volatile.global.u32 [%rd1+64], %r8;
    ret;
}""",
    """.func (.param .b32 result) twice(.param .b32 value, .param .align 8 .b8 more[16])
{
    .reg .b32 %r<4>;
    .local .align 8 .b8 stack[16];
    .reg .b64 %rd<3>;
    ld.param.u32 %r1, [value];
    ld.param.u32 %r2, [more+12];
    mov.u64 %rd1, stack;
    st.local.u32 [stack+4], %r2;
    ld.local.u32 %r3, [%rd1+4];
    add.u32 %r3, %r3, %r1;
    st.param.b32 [result], %r3;
    ret;
}
.visible .entry k(.param .u64 out, .param .align 8 .b8 p[24])
{
    .reg .b32 %r<5>;
    .reg .b64 %rd<4>;
    .reg .pred %p<2>;
    ld.param.u64 %rd1, [out];
    mov.u32 %r1, 0;
$loop:
    {
    .param .b32 result0;
    .param .b32 value0;
    .param .align 8 .b8 more0[16];
    st.param.b32 [value0], %r1;
    st.param.v4.b32 [more0], {%r1, %r1, 5, %r1};
    call.uni (result0), twice, (value0, more0);
    ld.param.b32 %r2, [result0];
    }
    add.u32 %r1, %r1, 1;
    setp.ne.u32 %p1, %r1, 8;
    @%p1 bra $loop;
    and.b32 %r3, %r2, 1;
    brx.idx %r3, targets;
targets: .branchtargets $a, $b;
$a: st.global.u32 [%rd1], %r2;
$b: ret;
}""",
]
_TOKEN = re.compile(r"%?[\w$]+|\.\w+|[^\s\w]|\s+")
NUMBERS = (
    *("0", "1", "-1", "3", "31", "255", "65536", "2147483648", "4294967296", "9223372036854775808", "1e9", "0x"),
    *("18446744073709551616", "1" * 40, "7" * 5000, "0f7FC00000", "0dFFF0000000000000", "08", "1<<62", "-2147483649"),
)
OPENERS = ("(", "{", "[", '"', "/*", "<", "((" * 3000, "{" * 3000, "[" * 2000, "-" * 2000, "!" * 2000, "|" * 9)
WORDS = (
    *(".u64", ".b8", ".pred", ".f32", ".v4", ".v8", ".param", ".local", ".shared", ".extern", ".align 3", ".b128"),
    *("%r1", "%rd1", "%p1", "%tid.x", "_", "WARP_SZ", "tile", "stack", "twice", "ret", "exit", "bar.sync 1", "trap"),
    *(".maxntid 0", ".maxntid 999999999,99999,99999", ".reqntid 64", ".target sm_20", ".align 1099511627776", "\0"),
    *("ld.param.u32 %r1, [2]", "alloca.u64 %rd1, 4096", "barrier.cluster.arrive", "mbarrier.init.shared.b64 [tile], 1"),
    *(".callprototype _ ()", ".section .debug {", '.pragma "x"', '.file 1 "a"', ".loc 1 2 3", "é", "\x7f", ";;", "@"),
)


def mutated(number: int) -> str:
    """The PTX of a case."""
    draw = random.Random(number)
    text = HEAD + draw.choice(SEEDS) + "\n"
    for _ in range(draw.choice((1, 1, 1, 2, 3, 8))):
        tokens = _TOKEN.findall(text)
        at = draw.randrange(len(tokens))
        match draw.randrange(11):
            case 0:
                del tokens[at : at + draw.choice((1, 1, 2, 5))]
            case 1:
                tokens.insert(at, tokens[draw.randrange(len(tokens))])
            case 2:
                tokens[at] = tokens[draw.randrange(len(tokens))]
            case 3:
                digits = [i for i, token in enumerate(tokens) if token[0].isdigit()]
                tokens[draw.choice(digits or [at])] = draw.choice(NUMBERS)
            case 4:
                tokens.insert(at, draw.choice(OPENERS))
            case 5:
                tokens.insert(at, " " + draw.choice(WORDS) + " ")
            case 6:
                tokens[at] = draw.choice(WORDS)
            case 7:
                other = draw.randrange(len(tokens))
                tokens[at], tokens[other] = tokens[other], tokens[at]
            case 8:
                lines = "".join(tokens).split("\n")
                lines.insert(draw.randrange(len(lines)), draw.choice(draw.choice(SEEDS).split("\n")))
                tokens = ["\n".join(lines)]
            case 9:
                text = "".join(tokens)
                place = draw.randrange(len(text))
                tokens = [text[:place], chr(draw.choice((0x20, 0x2E, 0x3B, 0x7D, 0x5D, 0x30, 0x25))), text[place + 1 :]]
            case _:
                tokens = tokens[:at]
        text = "".join(tokens) or " "
    return text


class Session:
    """A machine on which cases run, replaced after a case that has lost its context."""

    def __init__(self) -> None:
        from cuda.bindings import driver as types

        from drvfuse import config
        from drvfuse.emu import Machine

        with config.override(emu_loop_limit=20_000, cache=False):
            self.machine = Machine(devices=1)
        self.cuda, self.types = self.machine.driver, types
        self.cuda.cuInit(0)
        _, context = self.cuda.cuDevicePrimaryCtxRetain(0)
        self.cuda.cuCtxSetCurrent(context)
        self.out = self.cuda.cuMemAlloc(4096)[1]
        self.cuda.cuMemsetD8(self.out, 0, 4096)

    def run(self, ptx: str) -> bool:
        """Load and launch a case. Returns whether the context is lost. Raises AssertionError for a call whose result is
        no tuple that begins with a CUresult."""
        data = ptx.encode(errors="surrogateescape") + b"\0"
        code, module = self.call("cuModuleLoadData", data)
        if code:
            return False
        code, kernel = self.call("cuModuleGetFunction", module, b"k")
        if not code:
            words, address = np.arange(6, dtype=np.uint32), np.array([int(self.out)], np.uint64)
            pointers = np.array([address.ctypes.data, words.ctypes.data] + [words.ctypes.data] * 30, np.uint64)
            self.call("cuLaunchKernel", kernel, 1, 1, 1, 32, 1, 1, 0, 0, pointers.ctypes.data, 0)
        lost = self.call("cuCtxSynchronize")[0] != self.types.CUresult.CUDA_SUCCESS
        if not lost:
            self.call("cuModuleUnload", module)
        return lost

    def call(self, name: str, *arguments: object) -> tuple:
        result = getattr(self.cuda, name)(*arguments)
        assert isinstance(result, tuple) and isinstance(result[0], self.types.CUresult), (name, result)
        return result


def main(first: int, count: int) -> int:
    logging.getLogger("drvfuse").addHandler(logging.NullHandler())
    session, bad = Session(), 0
    for number in range(first, first + count):
        begin = time.perf_counter()
        try:
            if session.run(mutated(number)):
                session.machine.close()
                session = Session()
        except BaseException:
            bad += 1
            print(f"case {number} raised", traceback.format_exc(), flush=True)
        if time.perf_counter() - begin > SECONDS:
            bad += 1
            print(f"case {number} took {time.perf_counter() - begin:.1f} s", flush=True)
        print(number, flush=True)
    return bad != 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
