# SPDX-License-Identifier: Apache-2.0
"""A machine that other processes use. One process serves the machine. The driver calls of the other processes reach it
by Unix sockets.

    in the server
    Server            serves a machine
    Session           serves one client, which is a process of the operating system and a `Process` of the machine
    Line              serves one thread of a client

    in a client
    AttachedMachine   represents the machine; code written for cuda.bindings uses its driver
    Line              the connection of one thread

`emu.wire` writes a driver call as a message. Each thread of a client has a connection of its own, and each connection
has a thread in the server. So the thread in the server keeps the per-thread state of the driver (the stack of contexts,
the capture mode), and a call that waits does not delay other threads. A client has one more connection, its life line,
which it opens first and uses for Ctrl-C only. When the life line ends, the client has ended, and the machine frees
what the client had on it, as a driver does for a process that ends.

Three kinds of data are not sent as bytes. File descriptors (exported memory) are passed by SCM_RIGHTS. Pinned memory is
a file in memory, which the client maps at the same address as the machine; for this, the client reserves the addresses
of the machine's memory from the start, so a device pointer is never the address of other memory of the client. Host
functions, and callbacks of a driver call, run in the client.

Both ends check that the other end belongs to the same user and has the same version of drvfuse.
"""
