# SPDX-License-Identifier: Apache-2.0
"""Functions on number formats in LLVM IR: rounding to small floats, exact directed rounding, unpacking.

LLVM's own conversions of `half` and `bfloat` are library calls on some hosts and flush subnormals on others, so every
conversion here is integer code.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Format:
    """A number format. `width`, `exponent` and `mantissa` are numbers of bits; the other fields are values as bits, of
    which `nan` is the canonical NaN.
    """

    width: int
    exponent: int
    mantissa: int
    largest: int
    infinity: int
    nan: int

    @property
    def bias(self) -> int:
        return (1 << (self.exponent - 1)) - 1


FORMATS = {
    "f64": Format(64, 11, 52, 0x7FEF_FFFF_FFFF_FFFF, 0x7FF0_0000_0000_0000, 0x7FFF_FFFF_FFFF_FFFF),
    "f32": Format(32, 8, 23, 0x7F7F_FFFF, 0x7F80_0000, 0x7FFF_FFFF),
    "tf32": Format(19, 8, 10, 0x3FBFF, 0x3FC00, 0x3FFFF),
    "f16": Format(16, 5, 10, 0x7BFF, 0x7C00, 0x7FFF),
    "bf16": Format(16, 8, 7, 0x7F7F, 0x7F80, 0x7FFF),
    "e4m3": Format(8, 4, 3, 0x7E, 0x7E, 0x7F),
    "e5m2": Format(8, 5, 2, 0x7B, 0x7C, 0x7F),
}


_ROUNDINGS = {"rz": 0, "rp": 2, "rm": 3}  # arguments of llvm.set.rounding


def _signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >> (bits - 1) else value


class Helpers:
    """The helper functions in IR, and the declarations, that a module uses. Each method returns the name of a function,
    with its signature in the method's docstring.
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
        """`i(target) @f(i(source))` on bits: one rounding by `mode` (rn, rz, rm, rp or rna). A NaN becomes canonical.

        With `saturate`, overflow and infinity give the largest finite value.
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
            # Up if the remainder is above half, or exactly half while the quotient is odd.
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
        """`float @f(i(source))`: exact. A NaN becomes canonical, except that of bf16, which hardware only shifts."""
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
            scale = (127 - f.bias + 1023) << 52  # the scale as a double, which LLVM needs
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

    def odd(self) -> str:
        """`i64 @odd(double s, double e)`: s + e rounded to odd, where |e| is below half an ulp of s. Rounding the
        result again to fewer bits gives the correctly rounded sum.
        """
        self.functions["odd"] = """define internal i64 @odd(double %s, double %e) {
  %b = bitcast double %s to i64
  %z = fcmp one double %e, 0.0
  %sn = icmp slt i64 %b, 0
  %en = fcmp olt double %e, 0.0
  %opp = xor i1 %sn, %en
  %dec = zext i1 %opp to i64
  %b1 = sub i64 %b, %dec
  %b2 = or i64 %b1, 1
  %r = select i1 %z, i64 %b2, i64 %b
  ret i64 %r
}"""
        return "@odd"

    def add_odd(self, down: bool = False) -> str:
        """`i64 @f(double a, double b)`: a + b rounded to odd. With `down`, an exact zero has the sign of rounding
        rm.
        """
        name = "add_odd_rm" if down else "add_odd"
        if name not in self.functions:
            odd = self.odd()
            zero = (
                """  %zero = fcmp oeq double %s, 0.0
  %ab = bitcast double %a to i64
  %bb2 = bitcast double %b to i64
  %any = or i64 %ab, %bb2
  %allpos = icmp eq i64 %any, 0
  %zs = select i1 %allpos, i64 0, i64 -9223372036854775808
  %r = select i1 %zero, i64 %zs, i64 %r0"""
                if down
                else "  %r = add i64 %r0, 0"
            )
            self.functions[name] = f"""define internal i64 @{name}(double %a, double %b) {{
  %s = fadd double %a, %b
  %bb = fsub double %s, %a
  %d1 = fsub double %s, %bb
  %e1 = fsub double %a, %d1
  %e2 = fsub double %b, %bb
  %e = fadd double %e1, %e2
  %r0 = call i64 {odd}(double %s, double %e)
{zero}
  ret i64 %r
}}"""
        return f"@{name}"

    def rounded(self, verb: str, mode: str) -> str:
        """`double @f(double, ...)`: an LLVM operation (fmul, fma, fdiv, sqrt), with the CPU's rounding mode set to rz,
        rm or rp.
        """
        name = f"{verb}_{mode}"
        if name not in self.functions:
            count = {"fma": 3, "sqrt": 1}.get(verb, 2)
            self.declare("llvm.set.rounding", "void", "i32")
            operation = f"llvm.experimental.constrained.{verb}.f64"
            self.declare(operation, "double", *["double"] * count, "metadata", "metadata")
            given = ", ".join(f"double %a{i}" for i in range(count))
            self.functions[name] = f"""define internal double @{name}({given}) noinline strictfp {{
  call void @llvm.set.rounding(i32 {_ROUNDINGS[mode]}) strictfp
  %r = call double @{operation}({given}, metadata !"round.dynamic", metadata !"fpexcept.strict") strictfp
  call void @llvm.set.rounding(i32 1) strictfp
  ret double %r
}}"""
        return f"@{name}"

    def add_directed(self, mode: str) -> str:
        """`double @f(double a, double b)`: a + b rounded by rz, rm or rp."""
        name = f"add_f64_{mode}"
        if name not in self.functions:
            largest, infinity = FORMATS["f64"].largest, FORMATS["f64"].infinity
            # The step from the nearest double, with the bits %b, to the rounded sum.
            step = {
                "rz": "%m = xor i1 %sn, %en\n  %step = select i1 %m, i64 -1, i64 0",
                "rp": "%u = select i1 %sn, i64 -1, i64 1\n  %step = select i1 %en, i64 0, i64 %u",
                "rm": "%u = select i1 %sn, i64 1, i64 -1\n  %step = select i1 %en, i64 %u, i64 0",
            }[mode]
            keeps = {"rz": "and i1 false, %sn", "rp": "xor i1 %sn, true", "rm": "and i1 true, %sn"}[mode]
            zero = -(1 << 63) if mode == "rm" else 0
            self.functions[name] = f"""define internal double @{name}(double %a, double %b0) {{
  %s = fadd double %a, %b0
  %bb = fsub double %s, %a
  %d1 = fsub double %s, %bb
  %e1 = fsub double %a, %d1
  %e2 = fsub double %b0, %bb
  %e = fadd double %e1, %e2
  %b = bitcast double %s to i64
  %mag = and i64 %b, {largest | infinity}
  %sn = icmp slt i64 %b, 0
  %en = fcmp olt double %e, 0.0
  {step}
  %inexact = fcmp one double %e, 0.0
  %by = select i1 %inexact, i64 %step, i64 0
  %r0 = add i64 %b, %by
  %ai = bitcast double %a to i64
  %bi = bitcast double %b0 to i64
  %am = and i64 %ai, {infinity}
  %bm = and i64 %bi, {infinity}
  %af = icmp ne i64 %am, {infinity}
  %bf = icmp ne i64 %bm, {infinity}
  %finite = and i1 %af, %bf
  %huge = icmp eq i64 %mag, {infinity}
  %over = and i1 %finite, %huge
  %keep = {keeps}
  %om = select i1 %keep, i64 {infinity}, i64 {largest}
  %os = and i64 %b, {-(1 << 63)}
  %o = or i64 %om, %os
  %r1a = select i1 %huge, i64 %b, i64 %r0
  %r1 = select i1 %over, i64 %o, i64 %r1a
  %same = xor i64 %ai, %bi
  %differ = icmp slt i64 %same, 0
  %iszero = icmp eq i64 %mag, 0
  %cancel = and i1 %differ, %iszero
  %r2 = select i1 %cancel, i64 {zero}, i64 %r1
  %r = bitcast i64 %r2 to double
  ret double %r
}}"""
        return f"@{name}"

    def div_odd(self) -> str:
        """`i64 @div_odd(double a, double b)`: a / b rounded to odd, for a and b with fp32 values."""
        if "div_odd" not in self.functions:
            odd, fma = self.odd(), self.declare("llvm.fma.f64", "double", "double", "double", "double")
            self.functions["div_odd"] = f"""define internal i64 @div_odd(double %a, double %b) {{
  %q = fdiv double %a, %b
  %nq = fneg double %q
  %r = call double {fma}(double %nq, double %b, double %a)
  %rb = bitcast double %r to i64
  %bb = bitcast double %b to i64
  %bs = and i64 %bb, -9223372036854775808
  %es = xor i64 %rb, %bs
  %e = bitcast i64 %es to double
  %o = call i64 {odd}(double %q, double %e)
  %qb = bitcast double %q to i64
  %fin = fcmp one double %r, 0.0
  %res = select i1 %fin, i64 %o, i64 %qb
  ret i64 %res
}}"""
        return "@div_odd"

    def sqrt_odd(self) -> str:
        """`i64 @sqrt_odd(double a)`: the square root of a, which has an fp32 value, rounded to odd."""
        if "sqrt_odd" not in self.functions:
            odd, fma = self.odd(), self.declare("llvm.fma.f64", "double", "double", "double", "double")
            sqrt = self.declare("llvm.sqrt.f64", "double", "double")
            self.functions["sqrt_odd"] = f"""define internal i64 @sqrt_odd(double %a) {{
  %q = call double {sqrt}(double %a)
  %nq = fneg double %q
  %r = call double {fma}(double %nq, double %q, double %a)
  %o = call i64 {odd}(double %q, double %r)
  ret i64 %o
}}"""
        return "@sqrt_odd"

    def flush(self, kind: str) -> str:
        """`float @flush_f32(float)`: a subnormal number becomes a zero of its sign (`.ftz`). For "f16" it takes
        bits.
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

    def int64_odd(self, signed: bool) -> str:
        """`i64 @f(i64)`: a 64-bit integer rounded to odd, as the bits of a double."""
        name = f"int64_odd_{'s' if signed else 'u'}"
        if name not in self.functions:
            self.functions[name] = f"""define internal i64 @{name}(i64 %x) {{
  %neg = {"icmp slt i64 %x, 0" if signed else "icmp ult i64 %x, 0"}
  %minus = sub i64 0, %x
  %mag = select i1 %neg, i64 %minus, i64 %x
  %low = and i64 %mag, 2047
  %st = icmp ne i64 %low, 0
  %hi = and i64 %mag, -2048
  %sticky = or i64 %hi, 2048
  %odd = select i1 %st, i64 %sticky, i64 %mag
  %wide = icmp ugt i64 %mag, 9007199254740991
  %v = select i1 %wide, i64 %odd, i64 %mag
  %d = uitofp i64 %v to double
  %b = bitcast double %d to i64
  %sb = select i1 %neg, i64 -9223372036854775808, i64 0
  %r = or i64 %b, %sb
  ret i64 %r
}}"""
        return f"@{name}"
