# SPDX-License-Identifier: Apache-2.0
"""PTX modules of instruction forms with the same operand kinds. A kernel loads the operands once and stores the result
of each form.

A kernel's parameters are the operand columns (`rows` values each), PAIR, the results (`rows` values for each form), 16
bytes of scratch memory per row, and the number of rows. A row is one set of operands. Each thread handles one row;
blocks have BLOCK threads.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

from . import operands
from .forms import FAMILIES, Form, table

HEAD = ".version 8.8\n.target sm_90a\n.address_size 64\n"
BLOCK = 64
ROOM = 48  # bytes of shared memory per thread, at %room
PAIR = 0x40490FDBC0B504F3  # a parameter of every kernel: the bits of two fp32 numbers
KERNEL_FORMS = 40  # the most forms in a kernel; limited because compilers take long for large kernels

TEMPORARIES = (
    ".reg .pred p, q; .reg .b16 h, i, j, k; .reg .b32 t, u, v; .reg .b64 l, m, n; .reg .f32 f, g; .reg .f64 d, e;"
)
_CONSTANTS = "0x80000001, 7, 0xFFFF8000, 0x12345678, 0, 0xDEADBEEF, 0x7FFF7FFF, 42"
_CALLEE = """.func (.param .b32 out) callee (.param .b32 a, .param .b32 b) { .reg .b32 x, y, z; ld.param.b32 x, [a];
ld.param.b32 y, [b]; sub.s32 z, y, x; shl.b32 z, z, 1; st.param.b32 [out], z; ret; }
"""


def register(kind: str) -> str:
    """The PTX type of a register for operands or results of that kind."""
    return kind if kind in ("f32", "f64") else f"b{width(kind)}"


def width(kind: str) -> int:
    """The number of bits of a register for operands or results of that kind."""
    return 128 if kind == "b128" else operands.width(kind)


@dataclass(frozen=True)
class Batch:
    """The forms of one PTX module, at most KERNEL_FORMS in a kernel. All have the operand kinds `sources`."""

    name: str
    sources: tuple[str, ...]
    forms: tuple[Form, ...]

    @property
    def ptx(self) -> str:
        head = HEAD + f".const .align 4 .b32 constants[8] = {{{_CONSTANTS}}};\n" + _CALLEE
        return head + "\n".join(_kernel(name, self.sources, forms) for name, forms in self.kernels())

    def kernels(self) -> Iterator[tuple[str, tuple[Form, ...]]]:
        for start in range(0, len(self.forms), KERNEL_FORMS):
            yield f"forms_{start}", self.forms[start : start + KERNEL_FORMS]


def _kernel(name: str, sources: tuple[str, ...], forms: tuple[Form, ...]) -> str:
    parameters = [*(f"in{i}" for i in range(len(sources))), "pair", "out", "scratch"]
    out = [f".visible .entry {name}({', '.join(f'.param .u64 {p}' for p in parameters)}, .param .u32 rows)"]
    out.append(".explicitcluster .reqnctapercluster 1, 1, 1 {")  # without clusters, an H200 refuses st.async as illegal
    out.append(TEMPORARIES)
    out.append(".reg .b64 %at<5>, %cell, %out, %own, %rows; .reg .b32 %row, %lane, %near, %size, %block;")
    out.append(f".shared .align 16 .b8 sharedbytes[{16 * BLOCK}]; .local .align 16 .b8 localbytes[16];")
    out.append(f".shared .align 16 .b8 roombytes[{ROOM * BLOCK}]; .reg .b32 %room;")
    out.append("mov.u32 %row, %tid.x; mov.u32 %block, %ctaid.x; mov.u32 %size, %ntid.x;")
    out.append("mov.u32 %near, sharedbytes; mad.lo.u32 %near, %row, 16, %near; mov.u64 %own, localbytes;")
    out.append(f"mov.u32 %room, roombytes; mad.lo.u32 %room, %row, {ROOM}, %room;")
    out.append("mad.lo.u32 %row, %block, %size, %row; mov.u32 %lane, %laneid;")
    out.append("ld.param.u32 %size, [rows]; cvt.u64.u32 %rows, %size;")
    out.append("ld.param.u64 %cell, [scratch]; mad.wide.u32 %cell, %row, 16, %cell; ld.param.u64 %out, [out];")
    for i, kind in enumerate(sources):
        r = register(kind)
        out.append(f".reg .{r} {'xyzw'[i]}; ld.param.u64 %at0, [in{i}];")
        out.append(f"mad.wide.u32 %at0, %row, {width(kind) // 8}, %at0; ld.global.{r} {'xyzw'[i]}, [%at0];")
    for form in forms:
        n = width(form.result) // 8
        r = register(form.result)
        where = f"mad.wide.u32 %at1, %row, {n}, %out; mad.lo.u64 %out, %rows, {n}, %out;"
        if n == 16:
            store = ".reg .b64 r, s;", "st.global.v2.b64 [%at1], {r, s};"
        else:
            store = f".reg .{r} r;", f"st.global.{r} [%at1], r;"
        out.append(f"{{ {store[0]} {form.body}\n {where} {store[1]} }}")
    out.append("setp.eq.u32 p, %lane, 1; @p exit; ret; }")
    return "\n".join(line for line in out if line)


@functools.cache
def batches(families: tuple[str, ...] = FAMILIES) -> tuple[Batch, ...]:
    """All forms of these families, with a batch for each combination of operand kinds. The batches are in the order in
    which these combinations first appear."""
    groups: dict[tuple[str, ...], list[Form]] = {}
    for form in table(families):
        groups.setdefault(form.sources, []).append(form)
    return tuple(Batch(" ".join(s) or "nothing", s, tuple(f)) for s, f in groups.items())


def operand_digest(sources: tuple[str, ...]) -> bytes:
    """A digest of the operands of a batch."""
    digest = hashlib.blake2b(digest_size=8)
    for column in operands.rows(sources):
        digest.update(column.astype("<u8").tobytes())
    return digest.digest()


def form_digest(form: Form) -> bytes:
    """A digest of a form and of its operands."""
    text = repr((form.name, form.body, form.sources, form.result))
    return hashlib.blake2b(text.encode() + operand_digest(form.sources), digest_size=8).digest()
