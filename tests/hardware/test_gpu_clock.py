"""The GPU's highest clock, in trees of files: found by name, capped to a step, and given back."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edge_runtime.hardware.gpu_clock import GpuClock
from tests.hardware.trees import BOARDS, GPU_STEPS_HZ, Tree, build

MAX_HZ = 1_173_000_000
STEP_HZ = 612_000_000


def max_hz(tree: Tree) -> int:
    return int((tree.gpu_folder() / "max_freq").read_text())


@pytest.mark.parametrize("name", BOARDS)
def test_the_gpu_of_every_module_is_found_and_capped(tmp_path: Path, name: str) -> None:
    tree = build(tmp_path, name)
    clock = GpuClock(tmp_path)
    assert clock.find() is None
    assert clock.steps_hz() == tuple(map(float, GPU_STEPS_HZ))
    assert clock.hz() == 612e6
    assert clock.cap(STEP_HZ) is None
    assert max_hz(tree) == STEP_HZ
    # the steps are those of the mode, not of the cap
    assert clock.steps_hz()[-1] == clock.ceiling_hz() == MAX_HZ
    assert clock.cap(None) is None
    assert max_hz(tree) == MAX_HZ
    # the other devfreq device was left alone
    assert not (tmp_path / "sys/class/devfreq/15340000.vic/max_freq").exists()


def test_only_steps_up_to_the_modes_own_limit(tmp_path: Path) -> None:
    tree = build(tmp_path, "orin-nx-16gb")
    tree.write(tree.gpu_folder() / "max_freq", "612000000\n")
    clock = GpuClock(tmp_path)
    assert clock.steps_hz() == (306e6, 408e6, 510e6, 612e6)
    for wrong in (0, 1, -306e6, 306e6 + 1, 1e12):
        assert "is no step" in str(clock.cap(wrong))
        assert max_hz(tree) == STEP_HZ
    # a step above what the mode allows is no cap
    assert clock.cap(918e6) is None
    assert max_hz(tree) == STEP_HZ
    assert clock.cap(306e6) is None
    assert clock.cap(918e6) is None
    assert max_hz(tree) == STEP_HZ


def test_a_mode_that_changes_under_a_cap_is_what_holds_from_then_on(tmp_path: Path) -> None:
    tree = build(tmp_path, "orin-nx-16gb")
    clock = GpuClock(tmp_path)
    assert clock.cap(510e6) is None
    tree.write(tree.gpu_folder() / "max_freq", "918000000\n")
    assert clock.ceiling_hz() == 918e6
    assert clock.cap(510e6) is None
    assert max_hz(tree) == 510_000_000
    clock.close()
    assert max_hz(tree) == 918_000_000
    # it changes, and the cap is given up before it is asked for again
    assert clock.cap(510e6) is None
    tree.write(tree.gpu_folder() / "max_freq", "408000000\n")
    clock.close()
    assert max_hz(tree) == 408_000_000


def set_mode(tree: Tree, number: int) -> None:
    tree.write("var/lib/nvpmodel/status", f"pmode:{number:04d}")


def test_a_mode_whose_clock_is_by_chance_the_capped_one_keeps_it(tmp_path: Path) -> None:
    tree = build(tmp_path, "orin-nx-16gb")
    note = tmp_path / "capped"
    clock = GpuClock(tmp_path, note=note)
    set_mode(tree, 0)
    assert clock.cap(STEP_HZ) is None
    set_mode(tree, 2)  # and writes 612 MHz
    assert clock.ceiling_hz() == STEP_HZ
    clock.close()
    assert (max_hz(tree), note.exists(), clock.capped) == (STEP_HZ, False, False)
    # renewed, and then lowered and freed: up to this mode's clock and no further
    tree.write(tree.gpu_folder() / "max_freq", f"{MAX_HZ}\n")
    clock = GpuClock(tmp_path, note=note)
    assert clock.cap(STEP_HZ) is None
    set_mode(tree, 1)
    assert clock.cap(STEP_HZ) is None
    assert clock.cap(408e6) is None
    assert clock.cap(None) is None
    assert max_hz(tree) == STEP_HZ
    # killed meanwhile
    tree.write(tree.gpu_folder() / "max_freq", f"{MAX_HZ}\n")
    assert GpuClock(tmp_path, note=note).cap(STEP_HZ) is None
    set_mode(tree, 2)
    assert GpuClock(tmp_path, note=note).recover() is None
    assert (max_hz(tree), note.exists()) == (STEP_HZ, False)


def test_a_mode_that_is_named_after_its_clock_is_set_is_not_taken_for_another_one(tmp_path: Path) -> None:
    tree = build(tmp_path, "orin-nx-16gb")
    clock = GpuClock(tmp_path)
    set_mode(tree, 0)
    assert clock.cap(510e6) is None
    tree.write(tree.gpu_folder() / "max_freq", "918000000\n")
    assert clock.cap(510e6) is None
    set_mode(tree, 2)
    assert clock.ceiling_hz() == 918e6
    assert clock.cap(510e6) is None
    clock.close()
    assert max_hz(tree) == 918_000_000


def test_a_cap_that_cannot_be_freed_stays_known(tmp_path: Path) -> None:
    tree = build(tmp_path, "orin-nx-16gb")
    note = tmp_path / "capped"
    clock = GpuClock(tmp_path, note=note)
    assert clock.cap(510e6) is None
    tree.write(tree.gpu_folder() / "max_freq", "fast")
    assert clock.cap(None) is not None
    assert (clock.capped, note.exists()) == (True, True)
    tree.write(tree.gpu_folder() / "max_freq", "510000000\n")
    assert clock.cap(None) is None
    assert (max_hz(tree), clock.capped, note.exists()) == (MAX_HZ, False, False)


def test_a_kill_is_made_good_by_the_next_start_and_nothing_else_is(tmp_path: Path) -> None:
    tree = build(tmp_path, "orin-nx-16gb")
    note = tmp_path / "capped"
    killed = GpuClock(tmp_path, note=note)
    assert killed.cap(STEP_HZ) is None
    assert killed.cap(408e6) is None
    after = GpuClock(tmp_path, note=note)
    after.recover()
    assert max_hz(tree) == MAX_HZ
    assert not note.exists()
    # somebody has set another clock since: theirs
    assert killed.cap(408e6) is None
    tree.write(tree.gpu_folder() / "max_freq", "714000000\n")
    after.recover()
    assert (max_hz(tree), note.exists()) == (714_000_000, False)
    mode = int((tmp_path / "var/lib/nvpmodel/status").read_text().removeprefix("pmode:"))
    rubbishes = ("", "x y", "1", "-5 3", "1173000000 714000000", "1173000000 - 1", f"1173000000 714000000 {mode} 1")
    for rubbish in (*rubbishes, "- - -", f"1173000000 714000000 {mode + 1}", "1173000000 714000000 -"):
        note.write_text(rubbish)
        after.recover()
        assert max_hz(tree) == 714_000_000


def test_a_cap_that_ends_leaves_no_note(tmp_path: Path) -> None:
    tree = build(tmp_path, "orin-nx-16gb")
    note = tmp_path / "capped"
    clock = GpuClock(tmp_path, note=note)
    set_mode(tree, 2)
    assert clock.cap(408e6) is None
    assert note.read_text() == f"{MAX_HZ} 408000000 2\n"
    (tmp_path / "var/lib/nvpmodel/status").unlink()
    assert clock.cap(306e6) is None
    assert note.read_text() == "408000000 306000000 -\n"
    clock.close()
    clock.close()
    assert not note.exists()


def test_what_is_missing_or_strange_is_told_and_nothing_is_written(tmp_path: Path) -> None:
    assert GpuClock(tmp_path).find() == "no GPU among the devfreq devices"
    assert GpuClock(tmp_path).cap(None) == "no GPU among the devfreq devices"
    assert (GpuClock(tmp_path).steps_hz(), GpuClock(tmp_path).hz()) == ((), None)
    tree = build(tmp_path, "orin-nx-16gb")
    clock = GpuClock(tmp_path)
    folder = tree.gpu_folder()
    for rubbish in ("", "fast", "306000000 x", "-1", "9" * 5000):
        tree.write(folder / "available_frequencies", rubbish)
        assert clock.steps_hz() == ()
        assert "is no step" in str(clock.cap(306e6))
    (folder / "available_frequencies").unlink()
    assert "none is known" in str(clock.cap(306e6))
    tree.write(folder / "available_frequencies", "306000000 1173000000")
    tree.write(folder / "max_freq", "fast")
    assert "max_freq: 'fast' instead of a number" in str(clock.cap(306e6))
    assert (folder / "max_freq").read_text() == "fast"
    tree.write(folder / "max_freq", "1173000000\n")
    tree.write(folder / "cur_freq", "0\n")
    assert clock.hz() is None


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50, deadline=None)
@given(st.lists(st.one_of(st.none(), st.sampled_from(GPU_STEPS_HZ), st.floats(0, 2e9)), max_size=12))
def test_it_never_runs_faster_than_it_was_allowed_and_all_is_given_back(
    tmp_path: Path, asked: list[float | None]
) -> None:
    root = Path(tempfile.mkdtemp(dir=tmp_path))
    tree = build(root, "orin-nx-16gb")
    before = max_hz(tree)
    clock = GpuClock(root)
    for hz in asked:
        reason = clock.cap(hz)
        assert max_hz(tree) in GPU_STEPS_HZ
        assert max_hz(tree) <= before
        if reason is None:
            assert max_hz(tree) == (before if hz is None else min(before, hz))
    clock.close()
    assert max_hz(tree) == before
