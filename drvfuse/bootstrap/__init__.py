# SPDX-License-Identifier: Apache-2.0
"""How the processes of a group find one another, agree, and pass descriptors. Needs no driver.

`place` reads rank and size from what a launcher sets, `rendezvous` connects the ranks, and every step that ranks take
together goes over a `Board`: values are gathered, failures are put to the vote, and every wait ends with an error that
names the missing ranks. Rank 0's process serves the board (`server`), from a thread; `meetings` holds what it decides,
without sockets. `descriptors` passes file descriptors between the processes of one host.
"""
