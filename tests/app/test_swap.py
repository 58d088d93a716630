"""Exchanges with real engines and real proofs: memory, pauses, ladders, and a way back from everything."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edge_runtime.app.models import load_variant
from edge_runtime.app.proof import Proof, prove
from edge_runtime.app.swap import RESERVE_BYTES, MiB, Swapper, Target, Wish
from edge_runtime.camera.av import decode_image
from edge_runtime.camera.synthetic import SyntheticCamera
from edge_runtime.config import ModelConfig
from edge_runtime.engine.bundle import Bundle, load_bundle
from edge_runtime.engine.slot import Resident
from edge_runtime.errors import EdgeError, RefusedError
from edge_runtime.pipeline.pipeline import Pipeline
from edge_runtime.records.frames import FrameResult
from tests.awaiting import wait_until
from tests.engine import bad_models
from tests.engine.graphs import classifier, write_bundle


class Device:
    """One camera on one model, and how much memory is free."""

    def __init__(self, folder: Path, *, allow_pause: bool = False) -> None:
        self.config = ModelConfig.model_validate(
            {"name": "m", "bundle": str(folder / "old"), "allow_pause": allow_pause}, context={"base": folder}
        )
        self.bundle = load_bundle(write_bundle(folder / "old", classifier()))
        self.results: list[FrameResult] = []
        self.pipeline = Pipeline(self.results.append)
        self.pipe = self.pipeline.add_model("m", self.load()[0], lanes=2)
        self.pipeline.add_camera(SyntheticCamera(name="c", url="synthetic:?width=32&height=32&fps=100"), ["m"])
        self.free = 10_000 * MiB
        self.free_with_old_closed: int | None = None
        self.proofs = 0
        self.cancel = threading.Event()
        self.swapper = Swapper(
            self.pipeline,
            prove=self._prove,
            free_bytes=self._free_bytes,
            read_image=lambda path: decode_image(path.read_bytes()),
            cancel=self.cancel,
        )
        self.pipeline.start()
        wait_until(lambda: len(self.results) > 3, 10, "frames flow")

    def load(self) -> Sequence[Resident]:
        return [load_variant(self.bundle, "auto", self.config, lanes=2, streams=1)]

    def _prove(self, bundle: Bundle, variant: str, **options: Any) -> Proof:
        self.proofs += 1
        return prove(bundle, variant, **options)

    def _free_bytes(self) -> int:
        down = self.pipe.desk.resident() is None
        return self.free_with_old_closed if down and self.free_with_old_closed is not None else self.free

    def target(self, restore: Callable[[], Sequence[Resident]] | None = None) -> Target:
        return Target(self.config, self.pipe, 2, 1, restore or self.load)

    def running(self) -> str | None:
        resident = self.pipe.desk.resident()
        return None if resident is None else resident.info.bundle

    def frames_go_on(self) -> None:
        count = len(self.results)
        wait_until(lambda: len(self.results) > count + 3, 10, "frames go on")


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Device]]:
    devices: list[Device] = []

    def start(**options: Any) -> Device:
        devices.append(Device(tmp_path, **options))
        return devices[-1]

    yield start
    for device in devices:
        assert device.pipeline.stop() == []
        device.pipeline.close()
        ids = [result.frame_id for result in device.results]
        assert ids == sorted(set(ids))


def other(folder: Path) -> Bundle:
    return load_bundle(write_bundle(folder / "other", classifier(), bundle={"version": "2"}))


def test_memory_that_is_not_there_is_told_before_anything_happens(make: Callable[..., Device], tmp_path: Path) -> None:
    device = make()
    device.free = RESERVE_BYTES + 20 * MiB
    old = device.pipe.desk.resident()
    with pytest.raises(RefusedError, match="does not fit into memory") as caught:
        device.swapper.swap(device.target(), Wish(other(tmp_path)))
    assert caught.value.code == "memory"
    assert "--allow-pause" in str(caught.value.remedy)
    assert device.proofs == 0
    assert device.pipe.desk.resident() is old
    device.frames_go_on()


def test_with_leave_the_old_engine_goes_first_and_the_pause_is_measured(
    make: Callable[..., Device], tmp_path: Path
) -> None:
    device = make()
    old = device.pipe.desk.resident()
    assert old is not None
    device.free, device.free_with_old_closed = RESERVE_BYTES + 20 * MiB, 10_000 * MiB
    new = other(tmp_path)
    start = time.monotonic_ns()
    done = device.swapper.swap(device.target(), Wish(new, allow_pause=True))
    assert done.pause_ns is not None
    assert 0 < done.pause_ns < time.monotonic_ns() - start
    assert old.closed.is_set()
    assert device.running() == new.digest
    device.frames_go_on()


def test_a_pause_that_does_not_help_ends_with_the_old_model(make: Callable[..., Device], tmp_path: Path) -> None:
    device = make(allow_pause=True)  # by the configuration this time
    device.free = device.free_with_old_closed = RESERVE_BYTES + 20 * MiB
    with pytest.raises(RefusedError) as caught:
        device.swapper.swap(device.target(), Wish(other(tmp_path)))
    assert caught.value.code == "memory"
    assert device.running() == device.bundle.digest
    device.frames_go_on()


def test_a_bad_model_after_a_pause_and_an_old_one_that_is_gone(make: Callable[..., Device], tmp_path: Path) -> None:
    device = make(allow_pause=True)
    device.free, device.free_with_old_closed = RESERVE_BYTES + 20 * MiB, 10_000 * MiB
    bad = load_bundle(bad_models.wrong_labels(tmp_path / "bad"))
    with pytest.raises(EdgeError) as caught:
        device.swapper.swap(device.target(), Wish(bad))
    assert caught.value.code == "layout_mismatch"
    assert device.running() == device.bundle.digest

    def gone() -> Sequence[Resident]:
        raise EdgeError("the disk is gone")

    with pytest.raises(EdgeError) as caught:
        device.swapper.swap(device.target(gone), Wish(bad))
    assert caught.value.code == "layout_mismatch"  # of the first error whoever asked is told
    assert device.running() is None
    assert "the disk is gone" in str(device.pipe.desk.down_reason)
    # and a good one brings it up again
    assert device.swapper.swap(device.target(), Wish(other(tmp_path))).previous is None
    device.frames_go_on()


def test_what_fails_on_real_frames_is_taken_back(make: Callable[..., Device], tmp_path: Path) -> None:
    """The proof cannot know the pictures of these cameras: here it is made to pass."""
    device = make()
    nan = load_bundle(bad_models.answers_nan(tmp_path / "nan", "bright"))
    proof = prove(device.bundle, "auto", lanes=2, places=1)

    def waved_through(bundle: Bundle, variant: str, **_: Any) -> Proof:
        return proof

    swapper = Swapper(
        device.pipeline,
        prove=waved_through,
        free_bytes=lambda: None,
        read_image=lambda path: decode_image(path.read_bytes()),
        cancel=device.cancel,
    )
    old = device.pipe.desk.resident()
    with pytest.raises(RefusedError, match="hold no usable value") as caught:
        swapper.swap(device.target(), Wish(nan))
    assert caught.value.code == "rolled_back"
    assert device.pipe.desk.resident() is old
    assert device.pipe.desk.ladder() == (old,)
    device.frames_go_on()
    assert device.pipeline.ledger.totals("m").failed == 0


def test_a_stop_before_the_new_engine_was_seen_at_work(make: Callable[..., Device], tmp_path: Path) -> None:
    """What nobody has watched must not be what the next start begins with."""
    device = make()
    old, new = device.pipe.desk.resident(), other(tmp_path)
    seen: list[Resident] = []

    def stop() -> None:
        wait_until(lambda: device.running() == new.digest, 10, "the exchange")
        seen.extend(device.pipe.desk.ladder())
        device.cancel.set()

    stopping = threading.Thread(target=stop)
    stopping.start()
    with pytest.raises(EdgeError) as caught:
        device.swapper.swap(device.target(), Wish(new))
    stopping.join()
    assert caught.value.code == "stopping"
    assert device.pipe.desk.ladder() == (old,)
    assert seen[0].closed.wait(5)


def test_an_old_engine_that_does_not_run_is_nothing_to_compare_with(make: Callable[..., Device]) -> None:
    device = make()
    proof = replace(prove(device.bundle, "auto", lanes=2, places=1), cpu_ms=1000.0)
    (old,) = device.load()
    device.swapper._check_speed(device.target(), replace(proof, cpu_ms=0.01), 30.0, [old])
    old.run_cpu_s = 1.0
    device.swapper._check_speed(device.target(), proof, 30.0, [old])  # no worse than that
    old.run_cpu_s = None
    old.close()
    with pytest.raises(RefusedError) as caught:
        device.swapper._check_speed(device.target(), proof, 30.0, [old])
    assert caught.value.code == "too_slow"


def test_a_stop_in_the_middle(make: Callable[..., Device], tmp_path: Path) -> None:
    device = make()
    hanging = load_bundle(bad_models.hangs(tmp_path / "hangs"))
    threading.Timer(1.0, device.cancel.set).start()
    start = time.monotonic()
    with pytest.raises(EdgeError) as caught:
        device.swapper.swap(device.target(), Wish(hanging))
    assert caught.value.code == "cancelled"
    assert time.monotonic() - start < 4
    assert device.running() == device.bundle.digest


@pytest.mark.full
def test_the_way_back_is_not_proved_again_and_what_was_refused_is(make: Callable[..., Device], tmp_path: Path) -> None:
    device = make()
    new, bad = other(tmp_path), load_bundle(bad_models.wrong_labels(tmp_path / "bad"))
    for bundle, proofs in [(new, 1), (device.bundle, 2), (new, 2), (device.bundle, 2)]:
        device.swapper.swap(device.target(), Wish(bundle))
        assert (device.running(), device.proofs) == (bundle.digest, proofs)
    for proofs in (3, 4):
        with pytest.raises(EdgeError):
            device.swapper.swap(device.target(), Wish(bad))
        assert device.proofs == proofs
    device.swapper.forget()
    device.swapper.swap(device.target(), Wish(new))
    assert device.proofs == 5
    device.frames_go_on()
