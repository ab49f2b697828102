# SPDX-License-Identifier: Apache-2.0
"""The one path of every op from a call to a launch: checked operands, streams, workspaces, prepared launches.

It knows no op: the op rooms beside it import it, and it imports none of them.
"""
