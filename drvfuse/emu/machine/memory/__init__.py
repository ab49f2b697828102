# SPDX-License-Identifier: Apache-2.0
"""Memory of a machine and of the processes that use it: allocations, multicast, exports, what the engine lends."""
