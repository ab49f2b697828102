# SPDX-License-Identifier: Apache-2.0
"""How the processes of a group find one another, agree, and pass descriptors. Needs no driver.

`place` reads rank and size from the variables that a launcher sets. `rendezvous` connects the ranks. Every step that
ranks take together uses a `Board`: it gathers values, lets the ranks vote on failures, and bounds every wait. A wait
that takes too long ends with an error that names the missing ranks. A thread of rank 0's process serves the board
(`server`); `meetings` makes the server's decisions, without sockets. `descriptors` passes file descriptors between the
processes of one host.
"""
