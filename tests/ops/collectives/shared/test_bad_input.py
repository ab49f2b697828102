# SPDX-License-Identifier: Apache-2.0
"""Bad input raises a typed error that names the argument, before anything is written; the group works afterwards."""

from __future__ import annotations

import math

import numpy as np
import pytest
from collective_support import assert_bits, garbage, place, random_inputs, replicate

import drvfuse as df
from drvfuse import reference
from drvfuse.errors import ArgumentError, ClosedError, CompileError, Unsupported

pytestmark = pytest.mark.gpus(3)

SHAPE = (4, 32)


@pytest.fixture
def group(open_group):
    return open_group(3)


@pytest.fixture
def hosts(rng):
    return random_inputs(rng, 3, SHAPE, "bfloat16")


@pytest.fixture
def xs(group, hosts):
    return place(group, hosts)


@pytest.fixture
def refused(group, hosts, xs):
    """`refused(call, argument)`: the call raises ArgumentError for that argument and leaves inputs and group
    unchanged."""

    def check(call, argument, text=""):
        with pytest.raises(ArgumentError) as caught:
            call()
        assert caught.value.argument == argument, caught.value
        assert text in str(caught.value)
        for x, host in zip(xs, hosts, strict=True):
            assert_bits([x], host)
        assert_bits(df.allreduce(group, xs), reference.allreduce(hosts))

    return check


def fused(group, xs, **changes):
    arguments = {"gammas": [rank.zeros(32, "bfloat16") for rank in group], "epsilon": 1e-6, **changes}
    gammas = arguments.pop("gammas")
    return df.allreduce_rmsnorm_fp8(group, xs, gammas, **arguments)


def test_arrays_of_a_closed_buffer_are_refused(group, xs):
    """An array whose symmetric buffer is closed is refused as the operand of any rank, even of the rank on whose device
    the array lies."""
    buffer = group.symmetric(4 * 32 * 2)
    gone = buffer.arrays(SHAPE, "bfloat16")
    buffer.close()
    for call in (df.allreduce, fused):
        with pytest.raises(ClosedError, match="SymmetricBuffer was closed"):
            call(group, gone)
    with pytest.raises(ClosedError, match="SymmetricBuffer was closed"):
        df.allreduce(group, xs, gone)


def test_a_wrong_number_of_arrays_is_refused(group, xs, refused):
    refused(lambda: df.allreduce(group, xs[:2]), "inputs", "3 arrays")
    refused(lambda: df.allreduce(group, xs, xs[:2]), "outputs", "3 arrays")
    refused(lambda: df.allreduce(group, xs[0]), "inputs", "a list of 3 arrays")
    refused(lambda: df.allreduce(group, None), "inputs", "is None; it must be a list of 3 arrays")
    refused(lambda: df.allreduce(group, []), "inputs")
    refused(lambda: fused(group, xs, gammas=xs[:1]), "gammas", "3 arrays")


@pytest.mark.parametrize("wrong", [None, "emu", 2])
def test_an_object_that_is_not_a_group_is_refused(xs, refused, wrong):
    refused(lambda: df.allreduce(wrong, xs), "group", "must be a drvfuse.Group")
    refused(lambda: df.allreduce.prepare(wrong, xs), "group", "must be a drvfuse.Group")
    refused(lambda: df.allreduce_rmsnorm_fp8(wrong, xs, xs, epsilon=1e-6), "group", "must be a drvfuse.Group")


def test_shapes_and_dtypes_that_differ_between_ranks_are_refused(group, xs, refused):
    other = group.ranks[2].zeros((4, 31), "bfloat16")
    refused(lambda: df.allreduce(group, [*xs[:2], other]), "inputs[2]", "(4, 32)")
    flat = group.ranks[1].zeros(128, "bfloat16")
    refused(lambda: df.allreduce(group, [xs[0], flat, xs[2]]), "inputs[1]", "(128,)")
    half = group.ranks[2].zeros(SHAPE, "float16")
    refused(lambda: df.allreduce(group, [*xs[:2], half]), "inputs[2]", "bfloat16")
    refused(lambda: df.allreduce(group, xs, garbage(group, SHAPE, "float32")), "outputs[0]", "bfloat16")
    refused(lambda: df.allreduce(group, xs, garbage(group, (32, 4), "bfloat16")), "outputs[0]", "(4, 32)")


def test_dtypes_that_cannot_be_summed_are_refused(group, refused):
    refused(lambda: df.allreduce(group, [rank.zeros(8, "int32") for rank in group]), "dtype of inputs[0]", "float32")
    eight = [rank.zeros((2, 8), "float8_e4m3fn") for rank in group]
    refused(lambda: fused(group, eight), "dtype of inputs[0]", "bfloat16")


def test_arrays_on_a_wrong_device_are_refused(group, xs, refused):
    refused(lambda: df.allreduce(group, [xs[1], xs[0], xs[2]]), "inputs[0]", "device 1")
    ys = garbage(group, SHAPE, "bfloat16")
    refused(lambda: df.allreduce(group, xs, [ys[0], ys[2], ys[1]]), "outputs[1]", "device 2")


def test_arrays_in_host_memory_are_refused(group, hosts, xs, refused):
    refused(lambda: df.allreduce(group, hosts), "inputs[0]", "host memory")
    floats = [np.zeros(SHAPE, np.float32)] * 3
    refused(lambda: df.allreduce(group, floats), "inputs[0]", "host memory")
    refused(lambda: df.allreduce(group, [xs[0], None, xs[2]]), "inputs[1]")


class Strided:
    """An array of another library with every second column."""

    def __init__(self, array):
        self.array = array
        interface = dict(array.__cuda_array_interface__)
        rows, columns = array.shape
        interface["shape"], interface["strides"] = (rows, columns // 2), (columns * 4, 8)
        self.__cuda_array_interface__ = interface


def test_arrays_that_are_not_contiguous_are_refused(group, refused):
    wide = [Strided(rank.zeros((4, 64), "float32")) for rank in group]
    refused(lambda: df.allreduce(group, wide), "inputs[0]", "contiguous")


def test_misaligned_arrays_are_refused(group, xs, refused):
    flat = [rank.zeros(200, "bfloat16") for rank in group]
    shifted = [df.view(a.ptr + 2, SHAPE, "bfloat16", a.device, owner=a) for a in flat]
    refused(lambda: df.allreduce(group, shifted), "inputs[0]", "aligned to 16 bytes")
    refused(lambda: df.allreduce(group, xs, shifted), "outputs[0]", "aligned to 16 bytes")
    refused(lambda: fused(group, xs, residuals=shifted), "residuals[0]", "aligned to 16 bytes")


def test_overlapping_outputs_are_refused(group, refused):
    both = [rank.zeros((8, 32), "bfloat16") for rank in group]
    xs = [df.view(a.ptr, SHAPE, "bfloat16", a.device, owner=a) for a in both]
    ys = [df.view(a.ptr + 64, SHAPE, "bfloat16", a.device, owner=a) for a in both]
    refused(lambda: df.allreduce(group, xs, ys), "outputs[0]", "overlapping inputs[0]")
    foreign = df.view(xs[1].ptr, SHAPE, "bfloat16", group.ranks[0].device, owner=both[1])
    refused(lambda: df.allreduce(group, xs, [foreign, xs[1], xs[2]]), "outputs[0]")
    none = df.Quantisation.none()
    refused(lambda: fused(group, xs, quantisation=none, outputs=xs), "outputs[0]", "overlapping inputs[0]")
    refused(lambda: fused(group, xs, residuals=xs, residual_outputs=xs), "residual_outputs[0]", "overlapping")
    out = garbage(group, SHAPE, "bfloat16")
    refused(
        lambda: fused(group, xs, quantisation=none, outputs=out, residuals=xs, residual_outputs=out),
        "residual_outputs[0]",
        "overlapping outputs[0]",
    )


def test_gammas_of_a_wrong_shape_or_dtype_are_refused(group, xs, refused):
    refused(lambda: fused(group, xs, gammas=[r.zeros(31, "bfloat16") for r in group]), "gammas[0]", "(32,)")
    refused(lambda: fused(group, xs, gammas=[r.zeros((1, 32), "bfloat16") for r in group]), "gammas[0]", "(32,)")
    refused(lambda: fused(group, xs, gammas=[r.zeros(32, "float16") for r in group]), "gammas[0]", "bfloat16")


def test_negative_and_nan_scalars_are_refused(group, xs, refused):
    for value in (-1.0, math.nan, -math.inf, "1", None, True):
        refused(lambda value=value: fused(group, xs, epsilon=value), "epsilon", "at least 0")


def test_scalars_that_are_not_finite_are_refused(group, xs, refused):
    refused(lambda: fused(group, xs, epsilon=math.inf), "epsilon")
    refused(lambda: fused(group, xs, weight_offset=math.nan), "weight_offset")
    refused(lambda: fused(group, xs, weight_offset=1e300), "weight_offset")


def test_unknown_names_are_refused_with_the_known_ones(group, xs, refused):
    refused(lambda: df.allreduce(group, xs, algo="ring"), "algo", "'one_stage'")
    refused(lambda: df.allreduce(group, xs, algo=1), "algo")
    refused(lambda: fused(group, xs, algo="split"), "algo")
    refused(lambda: df.allreduce(group, xs, streams="mine"), "streams", "current")


@pytest.mark.parametrize("wrong", [("a", "b"), ["float8_e4m3fn"], {}, np.zeros(2), ("float32", (2,)), object()])
def test_options_that_are_not_strings_are_refused(group, xs, refused, wrong):
    refused(lambda: fused(group, xs, quantisation=wrong), "quantisation", "a drvfuse.Quantisation or None")
    refused(lambda: fused(group, xs, algo=wrong), "algo", "one_stage")
    refused(lambda: df.allreduce(group, xs, pdl_level=wrong), "pdl_level", "PDLLevel.OFF")
    refused(lambda: df.allreduce(group, xs, max_num_blocks=wrong), "max_num_blocks", "1 to 4")


def test_numbers_of_columns_out_of_range_are_refused(group, refused):
    for shape in ((), (3, 0), (1, 16385)):
        arrays = [rank.zeros(shape, "bfloat16") for rank in group]
        refused(lambda arrays=arrays: fused(group, arrays), "inputs[0]", "16384")


def test_contradictory_arguments_are_refused(group, xs, refused):
    scales = garbage(group, SHAPE[:-1], "float32")
    refused(lambda: fused(group, xs, quantisation=df.Quantisation.none(), scales=scales), "scales")
    refused(lambda: fused(group, xs, residual_outputs=garbage(group, SHAPE, "bfloat16")), "residual_outputs")
    refused(lambda: fused(group, xs, scales=garbage(group, SHAPE, "float32")), "scales[0]", "(4,)")
    refused(lambda: fused(group, xs, scales=garbage(group, SHAPE[:-1], "bfloat16")), "scales[0]", "float32")


def test_a_wrong_block_limit_is_refused(group, xs, refused):
    for value in (0, -1, 5, 1.0, True):
        refused(lambda value=value: df.allreduce(group, xs, max_num_blocks=value), "max_num_blocks", "1 to 4")


def test_unknown_and_unsupported_pdl_levels_are_refused(group, xs, refused):
    accepted = "one of PDLLevel.OFF, PDLLevel.ON, PDLLevel.OVERLAP_AT_BEGINNING"
    refused(lambda: df.allreduce(group, xs, pdl_level=7), "pdl_level", accepted)
    with pytest.raises(ArgumentError) as error:
        df.allreduce(group, xs, pdl_level=7)
    assert "NO_WAIT" not in str(error.value)  # the message does not offer a level that no op accepts
    with pytest.raises(Unsupported, match="NO_WAIT_OVERLAP_AT_END"):
        df.allreduce(group, xs, pdl_level=df.PDLLevel.NO_WAIT_OVERLAP_AT_END)


def test_streams_of_a_wrong_number_or_device_are_refused(group, xs, refused):
    streams = [rank.stream for rank in group]
    refused(lambda: df.allreduce(group, xs, streams=streams[:2]), "streams", "3 streams")
    refused(lambda: df.allreduce(group, xs, streams=[streams[1], streams[0], streams[2]]), "streams[0]")
    refused(lambda: df.allreduce(group, xs, streams=streams[0]), "streams")


def test_ranks_that_are_not_local_are_refused(group, xs, refused):
    prepared = df.allreduce.prepare(group, xs)
    for rank in (3, -1, True, "0"):
        refused(lambda rank=rank: prepared.launch(rank=rank), "rank", "[0, 1, 2]")
    stream = group.ranks[0].stream
    refused(lambda: prepared.launch(stream=stream), "stream")
    refused(lambda: prepared.launch([stream] * 3, rank=0), "streams")


def test_two_stages_refuse_options_that_differ_by_rank(group, xs, refused):
    epilogue = df.Epilogue("x + rank")
    refused(lambda: df.allreduce(group, xs, algo="two_stage", epilogue=epilogue), "algo", "one_stage")


@pytest.mark.parametrize(
    ("expression", "columns", "text"),
    [
        ("x + nonsense", [4], 'identifier "nonsense" is undefined'),
        ("x +\tnonsense", [4], 'identifier "nonsense" is undefined'),
        ("other + x * nonsense", [0, 12], 'identifier "other" is undefined'),
        ("fminf(x, 1, 2)", None, "function"),
        ("x + ", [4], "expected an expression"),
        ("x + (1", [6], 'expected a ")"'),
        ("(void)x", [0], "invalid type conversion"),
        ("&x", [0], "invalid type conversion"),
    ],
)
def test_epilogue_that_does_not_compile_is_shown_with_marks_below_its_faults(group, xs, expression, columns, text):
    with pytest.raises(CompileError) as caught:
        df.allreduce(group, xs, algo="one_stage", epilogue=df.Epilogue(expression))
    message = str(caught.value)
    assert message.startswith(f"epilogue {expression!r} does not compile:\nerror: ") and text in message
    assert ".cu" not in message and "epilogue(" not in message
    lines = caught.value.log.split("\n")
    marks = [number for number, line in enumerate(lines) if line.strip() == "^"]
    assert marks and all(lines[number - 1] == f"  {expression}" for number in marks)
    assert columns in (None, [lines[number].index("^") - 2 for number in marks])


def test_a_group_works_after_an_epilogue_that_does_not_compile(group, xs, hosts):
    with pytest.raises(CompileError):
        df.allreduce(group, xs, epilogue=df.Epilogue("x + nonsense"))
    assert_bits(df.allreduce(group, xs), reference.allreduce(hosts))


def test_wrong_arguments_of_an_epilogue_are_refused(group, xs, refused):
    for expression in ("", "  ", "x; y", "{x}", 'x // "', "x\n+1", 3):
        with pytest.raises(ArgumentError) as caught:
            df.Epilogue(expression)
        assert caught.value.argument == "epilogue"
    for name in ("x", "rank", "float", "a__b", "_a", "col"):
        with pytest.raises(ArgumentError, match="reserved"):
            df.Epilogue("x", **{name: df.float32(1)})
    with pytest.raises(ArgumentError, match="a-b is a name .* must be a C"):
        df.Epilogue("x", **{"a-b": df.float32(1)})
    with pytest.raises(ArgumentError, match="float32"):
        df.Epilogue("x * s", s=0.5)
    with pytest.raises(ArgumentError):
        df.int32(2**31)
    epilogue = df.Epilogue("x * s", s=df.float32(0.5))
    with pytest.raises(ArgumentError, match="unknown"):
        epilogue.with_(t=df.float32(1))
    refused(lambda: df.allreduce(group, xs, epilogue="x * 2"), "epilogue")
    one = df.Epilogue("x * s", s=[df.float32(1)])
    refused(lambda: df.allreduce(group, xs, epilogue=one), "epilogue parameter s", "list of 3")
    mixed = df.Epilogue("x * s", s=[df.float32(1), df.int32(1), df.float32(1)])
    refused(lambda: df.allreduce(group, xs, epilogue=mixed), "epilogue parameter s[1]", "float32")
    host = df.Epilogue("x * s[col]", s=np.zeros(32, np.float32))
    refused(lambda: df.allreduce(group, xs, epilogue=host), "epilogue parameter s", "host memory")
    ys = garbage(group, SHAPE, "bfloat16")
    overlapping = df.Epilogue("x * s[col]", s=df.Replicated(ys))
    refused(lambda: df.allreduce(group, xs, ys, epilogue=overlapping), "outputs[0]", "overlapping epilogue parameter s")


def test_a_workspace_too_small_for_a_row_is_refused(open_group):
    group = open_group(3, workspace_bytes=4096)
    xs = [rank.zeros((2, 4096), "bfloat16") for rank in group]
    gammas = replicate(group, np.zeros(4096, np.float32).astype(xs[0].dtype.numpy))
    for algo in ("two_stage", "naive"):
        with pytest.raises(ArgumentError) as caught:
            fused(group, xs, gammas=gammas, algo=algo)
        assert caught.value.argument == "workspace_bytes"


def test_calls_of_a_closed_group_are_refused(new_group):
    group = new_group(2)
    xs = [rank.zeros(8, "float32") for rank in group]
    prepared = df.allreduce.prepare(group, xs)
    group.close()
    group.close()
    calls = [
        lambda: df.allreduce(group, xs),
        lambda: df.allreduce_rmsnorm_fp8(group, xs, xs, epsilon=1e-6),
        prepared.launch,
        lambda: prepared.launch(rank=0),
        group.synchronize,
        group.check,
        group.reset,
        lambda: group.symmetric(8),
    ]
    for call in calls:
        with pytest.raises(ClosedError):
            call()
    assert "closed" in repr(group)
    assert_bits(xs, np.zeros(8, np.float32))


def test_epilogue_arrays_without_elements_are_refused(group, xs, refused):
    nothing = df.Replicated([rank.zeros(0, "float32") for rank in group])
    refused(
        lambda: df.allreduce(group, xs, epilogue=df.Epilogue("x + b[0]", b=nothing)),
        "epilogue parameter b[0]",
        "at least one element",
    )


@pytest.mark.parametrize("wrong", ["array", "1", 1.5, -1, 1 << 64])
def test_objects_that_are_not_streams_are_refused(group, xs, refused, wrong):
    if wrong == "array":
        wrong = xs[0]
    refused(lambda: df.allreduce(group, xs, streams=[wrong] * 3), "streams[0]")


def test_auto_takes_one_stage_where_a_push_does_not_fit_the_workspace(new_group):
    group = new_group(3, workspace_bytes=4096)
    inputs = [rank.zeros((300, 8192), "bfloat16") for rank in group]
    gammas = [rank.zeros(8192, "bfloat16") for rank in group]
    call = df.allreduce_rmsnorm_fp8.prepare(group, inputs, gammas, epsilon=1e-6)
    assert call.algo == "one_stage"
    with pytest.raises(ArgumentError, match="workspace_bytes"):
        df.allreduce_rmsnorm_fp8.prepare(group, inputs, gammas, epsilon=1e-6, algo="two_stage")
    assert not call.launch().output[0].numpy().any()
