# SPDX-License-Identifier: Apache-2.0
"""Functions in LLVM IR for exact arithmetic: results rounded to odd, and fp64 results with directed rounding."""

from __future__ import annotations

from .conversions import Conversions
from .formats import FORMATS

_ROUNDINGS = {"rz": 0, "rp": 2, "rm": 3}  # arguments of llvm.set.rounding


class Helpers(Conversions):
    """All helper functions in IR that a module uses: those of `Conversions`, and those for exact arithmetic."""

    def odd(self) -> str:
        """Add `i64 @odd(double s, double e)`, which returns s + e rounded to odd, as the bits of a double: of the two
        doubles next to an inexact sum, the one whose last bit is 1. |e| must be below half an ulp of s. Rounding the
        result again to a format with fewer bits gives the correctly rounded sum.
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
        """Add `i64 @f(double a, double b)`, which returns a + b rounded to odd, as the bits of a double. With `down`, a
        sum that is exactly zero is -0, unless both a and b are +0 (rounding mode rm).
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
        """Add `double @f(double, ...)`, which executes an LLVM operation (fmul, fma, fdiv, sqrt) with the CPU's
        rounding mode set to rz, rm or rp.
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
        """Add `double @f(double a, double b)`, which returns a + b rounded by rz, rm or rp."""
        name = f"add_f64_{mode}"
        if name not in self.functions:
            largest, infinity = FORMATS["f64"].largest, FORMATS["f64"].infinity
            # By rounding mode: the code that computes %step. %b is the sum rounded to nearest, as bits. If this
            # rounding was inexact, %step is added to %b.
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
        """Add `i64 @div_odd(double a, double b)`, which returns a / b rounded to odd, for a and b with fp32 values."""
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
        """Add `i64 @sqrt_odd(double a)`, which returns the square root of a, an fp32 value, rounded to odd."""
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

    def int64_odd(self, signed: bool) -> str:
        """Add `i64 @f(i64)`, which rounds a 64-bit integer to odd and returns the bits of a double."""
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
