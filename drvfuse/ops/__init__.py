# SPDX-License-Identifier: Apache-2.0
"""The fused ops. `call` is the path of every op from its arguments to a launch; the other packages hold the ops by
family.

These packages import `plans`, `trace`, `comm`, `runtime`, `compiler` and `ptx`.
"""
