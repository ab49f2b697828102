# SPDX-License-Identifier: Apache-2.0
"""A machine that other processes use. One process serves it, and the driver calls of the others reach it by Unix
sockets.

    server                       client (one process of the operating system)
    Server    a machine          AttachedMachine   stands for the machine; its driver is what code written for
    Session   one client: a                        cuda.bindings uses
              `Process` of it
    Line      one thread of it   Line              a thread of the client has a connection of its own

`emu.wire` writes a driver call as a message. Each thread of a client has a connection of its own, and each connection
has a thread in the server. So the thread in the server keeps the per-thread state of the driver (the stack of contexts,
the capture mode), and a call that waits does not delay other threads. A client has one more connection, its life line,
which it opens first and uses for Ctrl-C only. When the life line ends, the client has ended, and the machine cleans up
as a driver does.

Three kinds of data are not sent as bytes. File descriptors (exported memory) are passed by SCM_RIGHTS. Pinned memory is
a file in memory, which the client maps at the same address as the machine; for this, the client reserves the addresses
of the machine's memory from the start, so a device pointer is never the address of other memory of the client. Host
functions, and callbacks of a driver call, run in the client.

Both ends check that the other end belongs to the same user and has the same version of drvfuse.
"""
