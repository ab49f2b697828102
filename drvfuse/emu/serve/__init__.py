# SPDX-License-Identifier: Apache-2.0
"""A machine that other processes use: one process holds it, and their driver calls come to it over Unix sockets.

    server                       client (one process of the operating system)
    Server    a machine          AttachedMachine   stands for the machine; its driver is what code written for
    Session   one client: a                        cuda.bindings uses
              `Process` of it
    Line      one thread of it   Line              a thread of the client has a connection of its own

A driver call travels as `emu.wire` writes it. Each thread of a client has a connection, and each connection a thread
in the server, so what the driver keeps for a thread (the stack of contexts, the capture mode) is kept by that thread,
and a call that waits keeps nobody else waiting. A client has one more connection, its life line, which it opens first
and uses for nothing else but Ctrl-C: when it ends, the client is dead, and the machine does what a driver does then.

Three things do not travel as bytes. Descriptors (exported memory) pass by SCM_RIGHTS. Pinned memory is a file in
memory, which the client maps at the address that it has in the machine; the client keeps the addresses of the machine's
memory free from the start, so that nothing else of its own can lie there, and a device pointer is no address of
anything in the client. Host functions, and callbacks of a driver call, run in the client.

Both ends check that the other belongs to the same user, and that it is of the same version of drvfuse.
"""
