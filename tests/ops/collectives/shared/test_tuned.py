# SPDX-License-Identifier: Apache-2.0
"""The constants by which algo="auto" chooses: the default ones, and those that `drvfuse tune` stores and removes."""

from __future__ import annotations

import os
import stat

import pytest

import drvfuse as df
from drvfuse import config, reference
from drvfuse.__main__ import main
from drvfuse.bench import tune
from drvfuse.errors import ArgumentError, DrvfuseError
from drvfuse.ops.collectives.shared import tuned
from drvfuse.plans import tuning
from drvfuse.plans.tuning import HOPPER, Cost

SLOW_ONE_SHOT = {"one_shot": Cost(100.0, 320e3)}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "tuning.json"
    with config.override(tuning=str(path)):
        yield path


def chosen(machine) -> str:
    with df.Group.local(2, driver=machine, max_blocks=4) as group:
        xs, ys = ([rank.empty(512, "bfloat16") for rank in group] for _ in range(2))
        return df.allreduce.prepare(group, xs, ys).algo


@pytest.mark.emulated
def test_stored_constants_decide_until_they_are_removed(file, capsys):
    with df.emu.Machine(devices=2) as machine:
        assert chosen(machine) == "push_one_shot"
        name = tuned.key([df.device(index, driver=machine) for index in range(2)])
        tuned.store(file, {name: SLOW_ONE_SHOT, "2 x another": HOPPER._asdict()})
        assert chosen(machine) == "push_two_shot"
        assert tuned.stored(file) == {name: SLOW_ONE_SHOT, "2 x another": HOPPER._asdict()}
        with config.override(driver=machine):
            assert main(["tune", "--remove"]) == 0
        assert "removed" in capsys.readouterr().out
        assert chosen(machine) == "push_one_shot"
        assert tuned.stored(file) == {"2 x another": HOPPER._asdict()}


@pytest.mark.emulated
def test_stored_constants_decide_between_push_and_algorithms_with_barriers(file):
    slow = Cost(100.0, 300e3)
    with df.emu.Machine(devices=2) as machine:
        name = tuned.key([df.device(index, driver=machine) for index in range(2)])
        found = []
        for stored in ({"one_shot": slow}, {"scatter_push": slow, "move_push": slow}):
            tuned.store(file, {name: stored})
            with df.Group.local(2, driver=machine, max_blocks=4) as group:
                xs = [rank.empty(512, "bfloat16") for rank in group]
                found.append([op.prepare(group, xs).algo for op in (df.reduce_scatter, df.all_gather)])
    assert found == [["push", "push"], ["pull", "put"]]


@pytest.mark.emulated
def test_tune_measures_every_constant_and_stores_nothing_of_emulated_devices(file, capsys):
    assert main(["tune", "--driver", "emu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "have no meaning" in lines[0]
    assert [line.split(": ")[1].split()[0] for line in lines[1:]] == [
        name for name in HOPPER._fields if name != "move_relay"
    ]
    assert not file.exists()


@pytest.mark.emulated
@pytest.mark.parametrize("wrong", ["sum", "output", "scales"])
def test_tune_refuses_to_measure_an_algorithm_with_wrong_results(monkeypatch, wrong):
    """One bit of the expected results is changed."""
    plain, norm = reference.allreduce, reference.allreduce_rmsnorm_fp8

    def changed(array, what):
        found = array.copy()
        found.view("uint8").reshape(-1)[-1] ^= what == wrong
        return found

    def changed_norm(*given, **options):
        result = norm(*given, **options)
        return result._replace(output=changed(result.output, "output"), scales=changed(result.scales, "scales"))

    monkeypatch.setattr(reference, "allreduce", lambda *given, **options: changed(plain(*given, **options), "sum"))
    monkeypatch.setattr(reference, "allreduce_rmsnorm_fp8", changed_norm)
    op, of = ("allreduce", "sums") if wrong == "sum" else ("allreduce_rmsnorm_fp8", wrong)
    with (
        df.emu.Machine(devices=2) as machine,
        df.Group.local(2, driver=machine, max_blocks=4) as group,
        pytest.raises(DrvfuseError, match=f"^{op} push_one_shot of .*: the {of} of rank 0 are wrong"),
    ):
        dict(tune.measure(group, tune.LEAST))


@pytest.mark.parametrize("gpus", ["1", "9"])
def test_tune_refuses_more_devices_than_exist(file, gpus, capsys):
    assert main(["tune", "--driver", "emu", "--gpus", gpus]) == 2
    assert "2 to 8" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text",
    ["{", "[]", '{"2 x a": {}}', '{"2 x a": {"any_shot": [1, 1]}}', '{"2 x a": 1}', '{"2 x a": {"one_shot": [0, 1]}}'],
)
def test_a_file_that_tune_did_not_write_is_an_error(file, text):
    file.write_text(text)
    with pytest.raises(ArgumentError, match="tuning file"):
        tuned.stored(file)


@pytest.mark.emulated
def test_a_folder_in_place_of_the_file_is_an_error(tmp_path):
    with (
        config.override(tuning=str(tmp_path)),
        df.emu.Machine(devices=2) as machine,
        pytest.raises(ArgumentError, match="tuning file .* unreadable"),
    ):
        chosen(machine)


def test_what_is_stored_is_this_users_alone(tmp_path):
    file = tmp_path / "cache" / "tuning.json"
    tuned.store(file, {"2 x a": SLOW_ONE_SHOT})
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert list(file.parent.iterdir()) == [file]
    link = tmp_path / "link.json"
    link.symlink_to(file)
    tuned.store(link, {"2 x b": SLOW_ONE_SHOT})
    assert link.is_symlink() and tuned.stored(link) == tuned.stored(file) == {"2 x b": SLOW_ONE_SHOT}


def test_a_file_whose_folder_does_not_exist_or_is_no_folder_has_no_constants(tmp_path):
    (tmp_path / "text").write_text("")
    for folder in ("missing", "text"):
        assert tuned.stored(tmp_path / folder / "tuning.json") == {}


def test_a_link_to_itself_in_place_of_the_file_is_an_error(file):
    file.symlink_to(file)
    with pytest.raises(ArgumentError, match="tuning file .* unreadable"):
        tuned.stored(file)


def test_a_file_that_others_may_have_written_is_an_error(file):
    tuned.store(file, {"2 x a": SLOW_ONE_SHOT})
    file.chmod(0o666)
    with pytest.raises(ArgumentError, match="tuning file .* may be written by other users"):
        tuned.stored(file)


def test_a_fifo_in_place_of_the_file_is_not_waited_for(file):
    os.mkfifo(file, 0o600)
    with pytest.raises(ArgumentError, match="tuning file .* not a regular file"):
        tuned.stored(file)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_small_calls_use_one_shot_and_large_ones_two_shot(ranks):
    def algo(nbytes: int) -> str:
        return tuning.allreduce_algorithm(HOPPER, ranks, nbytes)

    sizes = [1 << k for k in range(10, 28)]
    order = [algo(nbytes) for nbytes in sizes]
    assert (order[0], order[-1]) == tuning.ALGORITHMS
    assert order == sorted(order)  # with growing sizes, the algorithm changes at most once
    assert tuning.fused_algorithm(HOPPER, ranks, 16384, 8192, 1) == "push_one_shot"
    assert tuning.fused_algorithm(HOPPER, ranks, 16384, 8192, 4096) == "push_two_shot"


def test_one_rank_sends_nothing():
    assert tuning.allreduce_algorithm(HOPPER, 1, 1 << 30) == "push_one_shot"
