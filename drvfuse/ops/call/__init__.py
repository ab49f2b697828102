# SPDX-License-Identifier: Apache-2.0
"""The steps of every op from its arguments to a launch. No op is imported here: the packages of the ops import these
modules.

1. Check. `operands` makes each array an `Operand`, with its name in messages, its producer, and whether it is another
   library's. `options` checks the other arguments, and `streams` turns the caller's streams into `Stream`
   objects. `results` takes the outputs that the caller gave, or allocates them; `scratch` finds the workspace of an op
   on one device. A wrong argument raises a typed error in this step.
2. Plan. `plans` decides grids, chunks and algorithms from integers. A `Specialisation` says what the op's kernel is
   compiled for. `planned` keeps both for later calls, as one `Planned` for each device. The key of a plan holds
   everything that the plan depends on: shapes, dtypes, options, the alignment of addresses, the fault planted in the
   kernels; never an address. Kernels are kept in the driver's `KernelCache`, plans in the `PlanCache` of a device or a
   group, and workspaces in the device's `Scratch`; `owner.part(PlanCache)` returns the owner's only `PlanCache`.
3. Fill. `Planned.take` gives a launch with all parameters that are equal for all calls of the plan. The op writes the
   other parameters, and the addresses of arrays by `Ready.point`.
4. Launch. `submit` is the same for every op. `Turns.admit` raises errors that earlier launches have reported. Each
   stream is asked once whether it is being captured, and `LaunchSequence.check` refuses what the algorithm cannot do in
   a capture. `Turns.follow` and `Route.follow_producers` order the streams, and the kernels are queued in one launch
   group. Then the arrays of the call record that the launch uses them, a graph that captures the launch keeps them
   alive, and the streams of foreign arrays are ordered after the launch. If an error occurs between the launches, the
   same is done for all launches of the call. Between the launches of two ranks nothing is checked or allocated, so only
   an error of the driver can occur between them. `ReplayOrder` orders the launches of a graph with the streams of
   foreign arrays.

`op` makes an op from the function that prepares its calls. A plain call is `prepare` and `launch`. Most plain calls
differ from an earlier one in addresses alone. `repeat` recognises such a call by its arguments, and writes its
addresses to the launches of the earlier call. After a plain call that `repeat` cannot keep, the launches of the call go
back to the plan. A `Prepared` keeps its launches, so its parameters may change (`set`) and it may be launched rank by
rank. `GroupTurns` holds what all calls of a group share, `WorkspaceTurns` what calls with the same workspace on one
device share.
"""
