# SPDX-License-Identifier: Apache-2.0
"""The one path of every op from its arguments to a launch. It knows no op: the rooms beside it import it.

1. Check. `operands` and `options` make each array an `Operand`, with its name in messages, its producer and whether it
   is another library's; `streams` makes streams `Stream` objects, once; `results` takes the outputs that were given, or
   allocates them; `scratch` finds the workspace of an op on one device. A wrong argument raises a typed error here.
2. Plan. `plans` decides grids, chunks and algorithms from integers, an op says with a `Specialisation` what its kernel
   is compiled for, and `planned` keeps both, as a `Planned` for each device, for later calls. Its key is all that it
   depends on: shapes, dtypes, options, what addresses are multiples of, the fault planted in the kernels; never an
   address.
   A driver (`KernelCache`) owns the kernels, a device or a group (`PlanCache`) the plans, `Scratch` the workspaces:
   `owner.part(KernelCache)` is the one object of a class.
3. Fill. `Planned.take` gives a launch whose parameters lack what differs between calls; the op writes that in place,
   addresses of arrays by `Ready.point`.
4. Launch. `submit` is the same for every op: `Turns.admit` raises what earlier launches have reported, each
   stream is asked once whether it is captured, `Schedule.check` refuses what the algorithm cannot do there,
   `Turns.follow` and `Route.follow_producers` order the streams, the kernels are queued in one launch group, and the
   arrays, graphs and owners of foreign arrays are told. Nothing is checked or allocated between the launches of two
   ranks, and nothing fails after them but a broken driver.

`op` makes an op of the function that prepares it. A plain call is `prepare` and `launch`. Most plain calls differ from
an earlier one in addresses alone: `repeat` finds that out from the arguments, and then only writes them to the launches
of that call. The launches of any other go back to the plan. Those of a `Prepared` are its own, so its parameters may
change (`set`) and it may be launched rank by rank. `GroupTurns` holds what collectives share, `WorkspaceTurns` what ops
on one device with a workspace share.
"""
