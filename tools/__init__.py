# SPDX-License-Identifier: Apache-2.0
"""Development tools, run from the root of the repository; no part of the wheel."""
