# SPDX-License-Identifier: Apache-2.0
"""Bytes that a call reads and writes in device memory, by algorithm, summed over all ranks.

The numbers follow from the algorithms and are not measured. They count tensors and their copies in workspaces, without
barrier words, gamma and epilogue parameters. `local` bytes are in the memory of the accessing rank's own device,
`remote` bytes in that of another device. A pushed word is stored remotely, read locally by the poll that finds it, and
cleared. An access by a multicast address counts once in the memory of every rank, the accessing rank included.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Traffic:
    """Local and remote bytes, summed over all ranks."""

    local: int
    remote: int

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.local + other.local, self.remote + other.remote)


NONE = Traffic(0, 0)


def reading_sources(algo: str, ranks: int, nbytes: int, staged: bool) -> Traffic:
    """Traffic of summing `nbytes` of input per rank: reading every source, and filling the staging if there is any."""
    if algo == "naive":
        return Traffic(ranks * (2 * ranks - 1) * nbytes, ranks * (ranks - 1) * nbytes)
    if algo in ("push_one_shot", "push_two_shot"):
        sent = (ranks - 1) * nbytes * (ranks if algo == "push_one_shot" else 1)
        return Traffic(ranks * nbytes + 2 * sent, sent)
    staging = Traffic(2 * ranks * nbytes if staged else 0, 0)
    times = ranks if algo in ("one_stage", "multimem_one_stage") else 1
    return staging + Traffic(times * nbytes, times * (ranks - 1) * nbytes)


def writing_results(algo: str, ranks: int, nbytes: int, to_outputs: bool = False) -> Traffic:
    """Traffic of writing `nbytes` of output on every rank. With "two_stage" each part is read from its owner's
    payload, and with "push_two_shot" it is sent by its owner.

    With "multimem_two_stage" the owner stores it by multicast: with `to_outputs` directly into the outputs, otherwise
    into the staging, from which it is copied.
    """
    output = Traffic(ranks * nbytes, 0)
    if algo == "multimem_two_stage":
        return Traffic(nbytes, (ranks - 1) * nbytes) + (NONE if to_outputs else output + output)
    if algo == "push_two_shot":
        return output + Traffic(2 * (ranks - 1) * nbytes, (ranks - 1) * nbytes)
    return output + Traffic(nbytes, (ranks - 1) * nbytes) if algo == "two_stage" else output


def sending_words(ranks: int, nbytes: int) -> Traffic:
    """Traffic of `nbytes` of padding, which push_two_shot sends into slots with the results. No rank stores the
    padding."""
    return Traffic(2 * (ranks - 1) * nbytes, (ranks - 1) * nbytes)


def adding_residual(algo: str, ranks: int, nbytes: int) -> Traffic:
    """Traffic of reading the residual and writing residual_out, the inputs' sum with the residual. With "two_stage"
    all ranks read residual_out from the payloads of the rows' owners.
    """
    # The owner of a row reads its residual and sends residual_out into the slots of the others; each rank stores it.
    if algo == "push_two_shot":
        return Traffic((3 * ranks - 1) * nbytes, (ranks - 1) * nbytes)
    if algo == "two_stage":
        return Traffic((3 + ranks) * nbytes, (ranks - 1) * nbytes)
    if algo == "multimem_two_stage":
        return Traffic((2 + 2 * ranks) * nbytes, (ranks - 1) * nbytes)
    return Traffic(2 * ranks * nbytes, 0)


def of_nodes(nodes: int, inside: Traffic, elements: int, places: int) -> Traffic:
    """Traffic of a call over several nodes: each node has the traffic `inside`, and `elements` float32 partial sums.

    A kernel or the exchange writes the sums of `places` nodes, and a kernel reads them. If the exchange engine adds the
    sums, `places` is 1, and the exchange counts as two steps: every other node sends its sums to one node, and that
    node sends the totals to every other node.
    """
    own = 4 * elements
    local, sent = nodes * 2 * places * own, (nodes - 1) * (nodes if places > 1 else 2) * own
    return Traffic(nodes * inside.local + local, nodes * inside.remote + sent)
