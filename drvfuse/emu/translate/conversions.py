# SPDX-License-Identifier: Apache-2.0
"""Functions in LLVM IR that convert between formats of floating-point numbers.

LLVM's own conversions of `half` and `bfloat` are library calls on some hosts and flush subnormals on others, so every
conversion here is integer code.
"""

from __future__ import annotations

from .formats import FORMATS


def _signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >> (bits - 1) else value


class Conversions:
    """The helper functions in LLVM IR that a module uses, and its declarations of functions. Each method that adds a
    function returns the name of that function, and the method's docstring has the signature of that function.
    """

    def __init__(self) -> None:
        self.functions: dict[str, str] = {}
        self.declarations: dict[str, str] = {}

    def text(self) -> str:
        return "\n".join([*self.declarations.values(), *self.functions.values()])

    def declare(self, name: str, result: str, *arguments: str) -> str:
        if name not in self.declarations:
            self.declarations[name] = f"declare {result} @{name}({', '.join(arguments)})"
        return f"@{name}"

    def pack(self, source: str, target: str, mode: str = "rn", saturate: bool = False) -> str:
        """Add `i(target) @f(i(source))`, which rounds a number of the format `source` to the format `target`, once, by
        `mode` (rn, rz, rm, rp or rna). Both numbers are bits; i(target) is the integer type that has the width of
        `target`. A NaN becomes the canonical NaN of `target`.

        With `saturate`, overflow and infinity give the largest finite value of the same sign.
        """
        name = f"pack_{source}_{target}_{mode}{'_sat' if saturate else ''}"
        if name in self.functions:
            return f"@{name}"
        s, d = FORMATS[source], FORMATS[target]
        t, r = f"i{s.width}", f"i{d.width}"
        half = "%q0, 1"
        if source == "f32" and target == "bf16" and mode == "rn" and not saturate:
            self.functions[name] = f"""define internal i16 @{name}(i32 %x) {{
  %mag = and i32 %x, 2147483647
  %nan = icmp ugt i32 %mag, {s.infinity}
  %h = lshr i32 %x, 16
  %odd = and i32 %h, 1
  %a = add i32 %x, 32767
  %b = add i32 %a, %odd
  %c = lshr i32 %b, 16
  %d = select i1 %nan, i32 32767, i32 %c
  %r = trunc i32 %d to i16
  ret i16 %r
}}"""
            return f"@{name}"
        up = {
            # Round up if the remainder is above half, or exactly half while the quotient is odd.
            "rn": f"""  %odd = and {t} {half}
  %tie = icmp eq {t} %rem, %half
  %isodd = icmp ne {t} %odd, 0
  %tieup = and i1 %tie, %isodd
  %over = icmp ugt {t} %rem, %half
  %up = or i1 %over, %tieup""",
            "rna": f"  %up = icmp uge {t} %rem, %half",
            "rz": "",
            "rm": "  %up = and i1 %inexact, %neg",
            "rp": "  %pos = xor i1 %neg, true\n  %up = and i1 %inexact, %pos",
        }[mode]
        towards = {"rm": (d.infinity, d.largest), "rp": (d.largest, d.infinity)}
        overflow, ovf = "", str(d.largest if mode == "rz" or saturate else d.infinity)
        if mode in towards and not saturate:
            overflow, ovf = "  %ovf = select i1 %neg, {t} {}, {t} {}".format(*towards[mode], t=t), "%ovf"
        infinite = d.largest if saturate else d.infinity
        self.functions[name] = f"""define internal {r} @{name}({t} %x) {{
  %mag = and {t} %x, {(1 << (s.width - 1)) - 1}
  %neg = icmp slt {t} %x, 0
  %nan = icmp ugt {t} %mag, {s.infinity}
  %inf = icmp eq {t} %mag, {s.infinity}
  %e = lshr {t} %mag, {s.mantissa}
  %m = and {t} %mag, {(1 << s.mantissa) - 1}
  %nz = icmp ne {t} %e, 0
  %hid = select i1 %nz, {t} {1 << s.mantissa}, {t} 0
  %sig = or {t} %m, %hid
  %e1 = select i1 %nz, {t} %e, {t} 1
  %dd = sub {t} %e1, {s.bias - d.bias + 1}
  %under = icmp slt {t} %dd, 0
  %dpos = select i1 %under, {t} 0, {t} %dd
  %deep = sub {t} 0, %dd
  %dneg = select i1 %under, {t} %deep, {t} 0
  %sh0 = add {t} %dneg, {s.mantissa - d.mantissa}
  %big = icmp ugt {t} %sh0, {s.mantissa + 2}
  %sh = select i1 %big, {t} {s.mantissa + 2}, {t} %sh0
  %q0 = lshr {t} %sig, %sh
  %one = shl {t} 1, %sh
  %mask = sub {t} %one, 1
  %rem = and {t} %sig, %mask
  %half = lshr {t} %one, 1
  %inexact = icmp ne {t} %rem, 0
{up}
  %upw = zext i1 {"%up" if up else "false"} to {t}
  %q = add {t} %q0, %upw
  %base = shl {t} %dpos, {d.mantissa}
  %r0 = add {t} %base, %q
  %isovf = icmp ugt {t} %r0, {d.largest}
{overflow}
  %r1 = select i1 %isovf, {t} {ovf}, {t} %r0
  %r2 = select i1 %inf, {t} {infinite}, {t} %r1
  %sign = select i1 %neg, {t} {1 << (d.width - 1)}, {t} 0
  %r3 = or {t} %r2, %sign
  %r4 = select i1 %nan, {t} {d.nan}, {t} %r3
  %r5 = {f"trunc {t} %r4 to {r}" if d.width < s.width else f"add {t} %r4, 0"}
  ret {r} %r5
}}"""
        return f"@{name}"

    def unpack(self, source: str) -> str:
        """Add `float @f(i(source))`, which converts bits to their exact value. A NaN becomes canonical, except for
        bf16, which hardware only shifts.
        """
        name = f"unpack_{source}"
        if name in self.functions:
            return f"@{name}"
        f = FORMATS[source]
        t = f"i{f.width}"
        head = f"define internal float @{name}({t} %h) {{\n"
        if source == "bf16":
            body = "  %w = zext i16 %h to i32\n  %b = shl i32 %w, 16\n  %r = bitcast i32 %b to float\n  ret float %r\n}"
        else:
            magnitude = (1 << (f.width - 1)) - 1
            scale = (127 - f.bias + 1023) << 52  # written as a double, as LLVM IR writes float constants
            body = f"""  %mag = and {t} %h, {magnitude}
  %neg = icmp slt {t} %h, 0
  %w = zext {t} %mag to i32
  %s = shl i32 %w, {23 - f.mantissa}
  %f = bitcast i32 %s to float
  %v = fmul float %f, 0x{scale:016X}
  %b = bitcast float %v to i32
  %inf = icmp eq i32 %w, {f.infinity if source != "e4m3" else -1}
  %b1 = select i1 %inf, i32 2139095040, i32 %b
  %sign = select i1 %neg, i32 -2147483648, i32 0
  %b2 = or i32 %b1, %sign
  %nan = icmp ugt i32 %w, {f.infinity}
  %b3 = select i1 %nan, i32 2147483647, i32 %b2
  %r = bitcast i32 %b3 to float
  ret float %r
}}"""
        self.functions[name] = head + body
        return f"@{name}"

    def flush(self, kind: str) -> str:
        """Add `float @flush_f32(float)`, which replaces a subnormal number by a zero of the same sign (`.ftz`). For any
        other format `kind`, the function is `@flush_(kind)`, and takes and returns the number as bits.
        """
        name = f"flush_{kind}"
        if name not in self.functions:
            f = FORMATS[kind]
            t = f"i{f.width}"
            ll = "float" if kind == "f32" else t
            head = f"  %b = {'bitcast float %x to i32' if kind == 'f32' else f'add {t} %x, 0'}"
            tail = f"  %r = {'bitcast i32 %c to float' if kind == 'f32' else f'add {t} %c, 0'}"
            self.functions[name] = f"""define internal {ll} @{name}({ll} %x) {{
{head}
  %e = and {t} %b, {f.infinity}
  %z = icmp eq {t} %e, 0
  %s = and {t} %b, {_signed(1 << (f.width - 1), f.width)}
  %c = select i1 %z, {t} %s, {t} %b
{tail}
  ret {ll} %r
}}"""
        return f"@{name}"
