# SPDX-License-Identifier: Apache-2.0
"""What the families of collectives share: options, plans, kernels' settings, multicast, copies, tuned constants."""
