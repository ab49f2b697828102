# SPDX-License-Identifier: Apache-2.0
"""The fused ops. `call` has the steps of every op from its arguments to a launch. Each other package holds a family of
ops.

These packages import `plans`, `trace`, `comm`, `runtime`, `compiler` and `ptx`.
"""
