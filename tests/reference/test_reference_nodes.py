# SPDX-License-Identifier: Apache-2.0
"""The reference over several nodes: which sums are added, and in which order."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from drvfuse import reference
from drvfuse.plans.quantisation import Quantisation
from drvfuse.reference import bits

BF16 = ml_dtypes.bfloat16
NONE = Quantisation.none()


def test_the_sums_of_nodes_are_added_in_node_order():
    big, small = np.float32(2.0**24), np.float32(1.0)
    inputs = [np.full(4, v, np.float32) for v in (big, small, -big, small)]
    assert reference.allreduce(inputs)[0] == 1
    assert reference.allreduce(inputs, nodes=2)[0] == 1  # 2**24 + (1 - 2**24)
    assert reference.allreduce(inputs, nodes=[0, 1, 0, 1])[0] == 2  # big - big, and small + small
    assert reference.allreduce(inputs, nodes=[0, 1, 1, 0])[0] == 1
    ones = [inputs[i] for i in (0, 1, 1, 2)]
    sums = [reference.allreduce(ones, nodes=nodes)[0] for nodes in (1, 2, [0, 1, 1, 0], [0, 1, 1, 2])]
    assert sums == [0, 1, 2, 2]


def test_sums_are_kept_in_float32_between_nodes():
    inputs = [np.array([v], BF16) for v in (1, 2.0**-9, -1, 0)]
    assert reference.allreduce(inputs, nodes=2)[0] == BF16(2.0**-9)


def test_one_node_and_nodes_of_one_rank_give_the_sum_of_ranks():
    rng = np.random.default_rng(1)
    inputs = [rng.standard_normal(500).astype(np.float32) for _ in range(6)]
    plain = bits(reference.allreduce(inputs))
    assert (bits(reference.allreduce(inputs, nodes=1)) == plain).all()
    assert (bits(reference.allreduce(inputs, nodes=6)) == plain).all()
    assert (bits(reference.allreduce(inputs, nodes=range(6))) == plain).all()
    assert (bits(reference.allreduce(inputs, nodes=2)) != plain).any()


def test_sums_of_every_partition_lie_within_the_bounds():
    rng = np.random.default_rng(2)
    inputs = [(rng.standard_normal(2000) * 2.0 ** rng.integers(-8, 8, 2000)).astype(np.float32) for _ in range(6)]
    low, high = reference.sum_bounds(inputs)
    for nodes in (1, 2, 3, 6, [0, 1, 2, 2, 1, 0]):
        total = reference.allreduce(inputs, nodes=nodes)
        assert ((low <= total) & (total <= high)).all()


def test_sums_of_minus_zeros_are_plus_zero():
    inputs = [np.full(3, -0.0, np.float32)] * 4
    assert bits(reference.allreduce(inputs, nodes=2)).tolist() == [0, 0, 0]


def test_the_fused_op_begins_with_the_sum_of_the_nodes():
    rng = np.random.default_rng(3)
    inputs = [rng.standard_normal((5, 96)).astype(BF16) for _ in range(6)]
    gamma, residual = np.ones(96, BF16), rng.standard_normal((5, 96)).astype(BF16)
    total = reference.sum_ranks(inputs, 3)
    for added in (None, residual):
        several = reference.allreduce_rmsnorm_fp8(inputs, gamma, 1e-6, residual=added, nodes=3, quantisation=NONE)
        one = reference.allreduce_rmsnorm_fp8([total], gamma.astype(np.float32), 1e-6, quantisation=NONE)
        if added is None:
            close = np.abs(several.output.astype(np.float32) - one.output) <= np.abs(one.output) * 2.0**-8
            assert close.all()
        else:
            assert (bits(several.residual) == bits((total + residual.astype(np.float32)).astype(BF16))).all()


@pytest.mark.parametrize("nodes", [0, 4, -2, [0, 0, 1], [0, 2, 2, 0, 0, 0], [1, 1, 1, 1, 1, 1]])
def test_wrong_nodes_are_refused(refused, nodes):
    inputs = [np.zeros(4, np.float32)] * 6
    refused(lambda: reference.allreduce(inputs, nodes=nodes), "nodes")
