# SPDX-License-Identifier: Apache-2.0
"""Groups of ranks: workspaces, how peers reach each other's memory, stream ordering and block budgets."""
