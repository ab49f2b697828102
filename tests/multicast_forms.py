# SPDX-License-Identifier: Apache-2.0
"""Which functions the installed bindings have for multicast."""

from __future__ import annotations

from cuda.bindings import driver as bindings

BIND = "cuMulticastBindMem_v2" if hasattr(bindings, "cuMulticastBindMem_v2") else "cuMulticastBindMem"
"""The function by which drvfuse binds memory: the form that names the device, which 13.x has."""
