"""Cameras that come, go and change while others run: all or nothing, kept over starts, and nobody else notices."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from edge_runtime.app.camera_set import difference
from edge_runtime.app.cameras import CameraKeeper
from edge_runtime.app.overlay import OverlayFile
from edge_runtime.camera.protocol import Camera
from edge_runtime.camera.synthetic import SyntheticCamera
from edge_runtime.config import CameraConfig, check_camera
from edge_runtime.durable import REAL, Files
from edge_runtime.errors import CameraError, EdgeError
from edge_runtime.pipeline.pipeline import Pipeline
from edge_runtime.records.activity import LedgerCut
from edge_runtime.records.frames import Frame
from edge_runtime.records.spec import InputSpec
from tests.awaiting import wait_until
from tests.engine.stores import FailingFiles
from tests.fakes import FakeEngine, ScriptedCamera
from tests.pipeline.test_ledger import identity_holds
from tests.pipeline.test_pipeline import make_resident

SECRET = "rtsp://admin:hunter2@10.0.0.9/main"
MODELS = ("m", "n")


def camera(name: str = "gate", url: str = "synthetic:?width=8&height=8&fps=50", **keys: Any) -> CameraConfig:
    return check_camera({"name": name, "url": url, "model": "m", **keys}, MODELS)


class Seen(SyntheticCamera):
    """Notes when it gave each frame, and what it was told."""

    def __init__(self, config: CameraConfig) -> None:
        url = config.url if config.source.kind == "synthetic" else "synthetic:?width=8&height=8&fps=20"
        super().__init__(name=config.name, url=url, fps=config.fps)
        self.config = config
        self.times: list[float] = []
        self.told: list[tuple[str, object]] = []
        self.closed = False

    def last(self) -> tuple[str, object]:
        """What it was told last."""
        return self.told[-1]

    def read(self) -> Frame | None:
        frame = super().read()
        if frame is not None:
            self.times.append(time.monotonic())
        return frame

    def set_cap(self, fps: float | None) -> None:
        self.told.append(("cap", fps))
        super().set_cap(fps)

    def set_base(self, fps: float | None) -> None:
        self.told.append(("base", fps))
        super().set_base(fps)

    def pause(self) -> None:
        self.told.append(("pause", True))
        super().pause()

    def resume(self) -> None:
        self.told.append(("pause", False))
        super().resume()

    def expect(self, inputs: Sequence[InputSpec]) -> None:
        self.told.append(("expect", tuple(inputs)))
        super().expect(inputs)

    def close(self) -> None:
        super().close()
        self.closed = True


class Device:
    """A keeper over a pipeline of two models, "m" and "n"."""

    def __init__(self, store: Path, configured: Sequence[CameraConfig], files: Files = REAL) -> None:
        self.made: list[Seen] = []
        self.refused: Callable[[CameraConfig], Exception | None] = lambda _: None
        self.told: list[tuple[str, str, dict[str, Any]]] = []
        self.changes = 0
        self.deaths: list[str] = []
        self.pipeline = Pipeline(lambda _: None, lambda name, _: self.deaths.append(name))
        self.engines = {name: FakeEngine(f"sha256:{name}") for name in MODELS}
        for name, engine in self.engines.items():
            self.pipeline.add_model(name, make_resident(engine), lanes=2)
        self.keeper = CameraKeeper(
            configured,
            MODELS,
            self.pipeline,
            OverlayFile(store / "cameras.json", files=files),
            self._open,
            tell=lambda severity, text, data: self.told.append((severity, text, dict(data))),
            changed=self._changed,
        )
        self.keeper.load()
        self.keeper.start()
        self.pipeline.start()

    def _open(self, config: CameraConfig) -> Camera:
        if (error := self.refused(config)) is not None:
            raise error
        self.made.append(Seen(config))
        return self.made[-1]

    def _changed(self) -> None:
        self.changes += 1

    def newest(self, name: str) -> Seen:
        return [each for each in self.made if each.name == name][-1]

    def running(self) -> dict[str, tuple[str, ...]]:
        return {view.name: view.models for view in self.pipeline.cameras()}

    def stop(self) -> None:
        assert self.pipeline.stop() == []
        self.pipeline.close()
        assert self.deaths == []
        wait_until(lambda: all(each.closed or not each.times for each in self.made), 2, "every camera is closed")


Make = Callable[..., Device]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    devices: list[Device] = []

    def start(*configured: CameraConfig, **options: Any) -> Device:
        devices.append(Device(tmp_path, configured, **options))
        return devices[-1]

    yield start
    for device in devices:
        device.stop()


def code_of(action: Callable[[], object]) -> str:
    with pytest.raises(EdgeError) as caught:
        action()
    assert "hunter2" not in str(caught.value)
    return caught.value.code


def cuts_of(pipeline: Pipeline) -> LedgerCut:
    cut = pipeline.cut()
    identity_holds(cut)
    return cut


def test_what_differs_is_done_in_an_order_in_which_devices_are_free() -> None:
    before = [camera("a"), camera("b"), camera("c"), camera("d", fps=5.0)]
    after = [camera("new"), camera("d", fps=6.0, min_fps=1.0), camera("b", url="synthetic:?fps=3"), camera("a")]
    steps = difference(before, after)
    assert [str(step) for step in steps] == [
        "camera c: removed",
        "camera b: url changed, opened anew",
        "camera d: fps, min_fps changed",
        "camera new: added",
    ]  # fmt: skip
    assert difference(after, after) == []


def test_twenty_changes_and_the_other_camera_notices_none(make: Make) -> None:
    device = make(camera("steady"), camera("gate", "synthetic:?width=8&height=8&fps=20"))
    keeper, steady = device.keeper, device.newest("steady")
    wait_until(lambda: len(steady.times) > 5, 5, "frames flow")
    threads = {
        thread.name: thread for thread in threading.enumerate() if thread.name.startswith(("cam-steady", "lane-"))
    }
    told, captured = list(steady.told), 0
    changes: list[Callable[[], object]] = [
        lambda: keeper.add({"name": "new", "url": "synthetic:?fps=30", "model": "n"}),
        lambda: keeper.change("new", {"model": ["m", "n"]}),
        lambda: keeper.change("gate", {"fps": 5, "priority": 3}),
        lambda: keeper.change("gate", {"url": "synthetic:?fps=11"}),
        lambda: keeper.cap("gate", 3.0),
        lambda: keeper.pause("new"),
        lambda: keeper.apply([camera("steady"), camera("gate", "synthetic:?fps=7"), camera("third")]),
        lambda: keeper.remove("new"),
        lambda: keeper.reset(None),
        lambda: keeper.apply([camera("steady"), camera("gate")]),
    ]
    for number in range(20):
        changes[number % len(changes)]()
        cut = cuts_of(device.pipeline)
        captured += sum(each.counters.captured for each in cut.streams if each.camera == "steady")
        seen = len(steady.times)
        wait_until(lambda seen=seen: len(steady.times) > seen, 5, "frames go on")  # type: ignore[misc]
    assert device.pipeline.camera("steady") is steady
    assert all(thread.is_alive() for thread in threads.values())
    assert steady.told == told
    steady.stop()
    wait_until(lambda: steady.closed, 5, "it ends")
    captured += sum(each.counters.captured for each in cuts_of(device.pipeline).streams if each.camera == "steady")
    # everything that was read was captured, and no picture of the source was missed: its schedule never moved
    assert captured == len(steady.times) == steady.source().decoded
    assert steady.reanchored == 0


def test_what_changes_alive_and_what_is_opened_anew(make: Make) -> None:
    device = make(camera("gate", fps=20.0))
    first = device.newest("gate")
    wait_until(lambda: first.times, 5, "frames flow")
    result = device.keeper.change("gate", {"fps": 10, "min_fps": 2, "priority": 5, "model": ["n", "m"]})
    assert result.done == ["camera gate: model, fps, min_fps, priority changed"]
    assert (device.made, device.running()) == ([first], {"gate": ("n", "m")})
    assert first.told[-2] == ("base", 10.0)
    assert first.last() == ("expect", (InputSpec(1, 1),))
    assert device.keeper.wanted() == {"gate": 10.0}
    wait_until(lambda: device.pipeline.work("n").frames > 0, 5, "the other model has its frames")
    assert device.keeper.change("gate", {"model": "n"}).done == ["camera gate: model changed"]
    before = device.pipeline.work("m").frames
    wait_until(lambda: len(first.times) > 8, 5, "frames flow")
    assert device.pipeline.work("m").frames <= before + 2
    assert device.keeper.change("gate", {"url": SECRET, "stall_s": 3}).done == [
        "camera gate: url, stall_s changed, opened anew"
    ]
    second = device.newest("gate")
    assert second is not first
    assert second.config.url == SECRET
    wait_until(lambda: first.closed, 2, "the one before lets go")
    # null takes a key out
    device.keeper.change("gate", {"fps": None})
    assert device.keeper.wanted() == {"gate": None}
    assert device.keeper.change("gate", {"fps": None}).done == []


def test_one_that_is_opened_anew_keeps_what_it_was_told(make: Make) -> None:
    device = make(camera("gate"))
    device.keeper.pause("gate")
    device.keeper.cap("gate", 3.0)
    device.keeper.limit("gate", 2.0)
    device.keeper.change("gate", {"url": "synthetic:?fps=9"})
    second = device.newest("gate")
    assert [each for each in second.told if each[0] != "expect"][:2] == [("pause", True), ("cap", 2.0)]
    assert second.times == []
    assert device.keeper.resume("gate").done == ["camera gate: resumed"]
    wait_until(lambda: second.times, 5, "it goes on")
    device.keeper.limit("gate", None)
    assert second.last() == ("cap", 3.0)
    # nobody limits what has gone meanwhile
    device.keeper.remove("gate")
    device.keeper.limit("gate", 1.0)
    device.keeper.reset("gate")
    third = device.newest("gate")
    assert [each for each in third.told if each[0] == "cap"][-1] == ("cap", None)
    assert not any(each == ("pause", True) for each in third.told)


def test_the_lowest_of_all_caps_is_in_force_and_only_peoples_is_wanted(make: Make) -> None:
    device = make(camera("gate", fps=15.0), camera("yard"))
    keeper, gate = device.keeper, device.newest("gate")
    assert keeper.wanted() == {"gate": 15.0, "yard": None}
    assert keeper.cap("gate", 10.0).fps == 10.0
    keeper.limit("gate", 4.0)
    assert [keeper.wanted()["gate"], gate.last()] == [10.0, ("cap", 4.0)]
    keeper.cap("gate", 2.0)
    assert [keeper.wanted()["gate"], gate.last()] == [2.0, ("cap", 2.0)]
    keeper.cap("gate", None)
    assert [keeper.wanted()["gate"], gate.last()] == [15.0, ("cap", 4.0)]
    keeper.limit("gate", None)
    assert gate.last() == ("cap", None)
    # above what is configured it changes nothing
    keeper.limit("gate", 100.0)
    assert [keeper.wanted()["gate"], gate.last()] == [15.0, ("cap", 100.0)]


def test_a_newcomer_waits_for_the_governor_where_it_holds_others_back(make: Make) -> None:
    device = make(camera("gate"))

    def caps_of(name: str, **keys: Any) -> list[object]:
        device.keeper.add({"name": name, "url": "synthetic:?fps=30", "model": "m", **keys})
        return [value for key, value in device.newest(name).told if key == "cap"]

    assert set(caps_of("free")) == {None}
    device.keeper.limit("gate", 5.0)
    assert set(caps_of("one")) == {1.0}
    assert set(caps_of("least", min_fps=4)) == {4.0}
    device.keeper.limit("one", None)
    assert device.newest("one").last() == ("cap", None)


def test_at_full_pace_the_governor_may_and_a_command_may_not(make: Make) -> None:
    device = make(camera("clip", "file:/srv/clip.mp4", pace="max"))
    assert code_of(lambda: device.keeper.cap("clip", 5.0)) == "full_pace"
    device.keeper.limit("clip", 5.0)
    assert (device.keeper.wanted(), device.newest("clip").last()) == ({"clip": None}, ("cap", 5.0))


def test_one_name_gone_and_back_in_one_window_is_one_entry_of_it(make: Make) -> None:
    device = make(camera("gate"), camera("yard"))
    for _ in range(3):
        wait_until(lambda: len(device.newest("gate").times) > 2, 5, "frames flow")
        device.keeper.change("gate", {"url": f"synthetic:?width=8&height=8&fps={50 + len(device.made)}"})
    wait_until(lambda: len(device.newest("gate").times) > 2, 5, "frames flow")
    wait_until(
        lambda: all(each.closed for each in device.made if each.name == "gate" and each is not device.newest("gate"))
    )
    cut = cuts_of(device.pipeline)
    views = [view for view in device.pipeline.cameras_of_cut() if view.name == "gate"]
    assert len([each for each in cut.streams if each.camera == "gate"]) == len(views) == 4
    assert len({view.serial for view in views}) == 4
    assert [view.status.reason for view in views] == ["removed", "removed", "removed", None]
    captured = sum(each.counters.captured for each in cut.streams if each.camera == "gate")
    assert captured <= sum(view.source.decoded for view in views)
    # once told they are forgotten
    cuts_of(device.pipeline)
    assert len([view for view in device.pipeline.cameras_of_cut() if view.name == "gate"]) == 1
    wait_until(lambda: len([each for each in cuts_of(device.pipeline).streams if each.camera == "gate"]) == 1)


# --- all or nothing


def test_a_change_of_which_one_camera_cannot_be_made_changes_nothing(make: Make) -> None:
    device = make(camera("gate"), camera("yard"))
    before, running = device.keeper.cameras(), list(device.made)

    def refuse(config: CameraConfig) -> Exception | None:
        if config.name == "b":
            return CameraError(f"no element for {SECRET}", code="camera_unsupported", remedy="install it")
        return RuntimeError(f"{SECRET} broke") if config.name == "c" else None

    device.refused = refuse
    for bad, code in (("b", "camera_unsupported"), ("c", "camera_failed")):
        after = [camera("yard", fps=3.0), camera("a"), camera("gate", "synthetic:?fps=2"), camera(bad)]
        assert code_of(lambda after=after: device.keeper.apply(after)) == code  # type: ignore[misc]
        assert code_of(lambda bad=bad: device.keeper.add({"name": bad, "url": SECRET})) == "invalid"  # type: ignore[misc]
        assert code_of(lambda bad=bad: device.keeper.add({"name": bad, "url": SECRET, "model": "n"})) == code  # type: ignore[misc]
    assert device.keeper.cameras() == before
    assert [device.pipeline.camera(each.name) for each in running] == running
    assert device.running() == {"gate": ("m",), "yard": ("m",)}
    assert [each.told for each in running if ("base", 3.0) in each.told] == []
    assert all(each.closed for each in device.made if each not in running)
    assert (device.told, device.changes) == ([], 0)


def test_a_change_that_fails_half_way_is_taken_back(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    device = make(camera("gate", fps=9.0), camera("yard"), camera("old"))
    before, add_camera = device.keeper.cameras(), device.pipeline.add_camera

    def no_thread(source: Camera, *args: Any, **options: Any) -> None:
        if source.name == "new":
            raise RuntimeError("can't start new thread")
        add_camera(source, *args, **options)

    monkeypatch.setattr(device.pipeline, "add_camera", no_thread)
    after = [camera("gate", fps=3.0), camera("yard", "synthetic:?fps=2"), camera("new"), camera("other")]
    assert code_of(lambda: device.keeper.apply(after)) == "change_failed"
    assert device.keeper.cameras() == before
    assert set(device.running()) == {"gate", "yard", "old"}
    assert device.newest("gate").told[-2] == ("base", 9.0)
    for name in ("gate", "yard", "old"):
        seen = len(device.newest(name).times)
        wait_until(lambda name=name, seen=seen: len(device.newest(name).times) > seen, 5, name)  # type: ignore[misc]
    assert device.newest("yard").config == before[1]
    assert all(each.closed for each in device.made if each.name in ("new", "other"))
    # and a command that fails so is not kept either
    assert code_of(lambda: device.keeper.add({"name": "new", "url": "synthetic:", "model": "m"})) == "change_failed"
    assert make(*before).keeper.cameras() == before


def test_one_that_cannot_be_brought_back_is_told_and_comes_with_the_next_change(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = make(camera("gate"), camera("yard"))
    before, add_camera = device.keeper.cameras(), device.pipeline.add_camera

    def no_thread(source: Camera, *args: Any, **options: Any) -> None:
        raise RuntimeError(f"can't start new thread for {SECRET}")

    monkeypatch.setattr(device.pipeline, "add_camera", no_thread)
    assert code_of(lambda: device.keeper.change("gate", {"url": "synthetic:?fps=3"})) == "change_failed"
    assert (device.keeper.cameras(), set(device.running())) == (before, {"yard"})
    assert device.keeper.alarms() == ["not running since a change of cameras failed: gate; the next change tries again"]
    wait_until(lambda: all(each.closed for each in device.made if each.name == "gate"), 2, "nothing is left")
    # what fails once more loses nobody
    assert code_of(lambda: device.keeper.add({"name": "new", "url": "synthetic:", "model": "m"})) == "change_failed"
    monkeypatch.setattr(device.pipeline, "add_camera", add_camera)
    assert device.keeper.cap("yard", 5.0).done == ["camera gate: added", "camera yard: at most 5 fps"]
    assert device.keeper.alarms() == []
    wait_until(lambda: bool(device.newest("gate").times), 5, "it is there again")


def test_a_stop_in_the_middle_of_a_change_leaves_what_was_and_no_noise(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    device = make(camera("gate"), camera("yard"))
    before, await_removed = device.keeper.cameras(), device.pipeline.await_removed

    def stop_meanwhile(within_s: float) -> list[str]:
        device.pipeline.stop()
        return await_removed(within_s)

    monkeypatch.setattr(device.pipeline, "await_removed", stop_meanwhile)
    assert code_of(lambda: device.keeper.change("gate", {"url": "synthetic:?fps=3"})) == "stopping"
    assert device.keeper.alarms() == []
    assert all(each.closed for each in device.made)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "Traceback" not in caplog.text
    assert make(*before).keeper.cameras() == before


def test_at_the_start_one_that_cannot_be_made_is_down_and_stops_nobody(
    tmp_path: Path, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Device, "_open", _refusing(Device._open, "bad"))
    device = make(camera("bad", SECRET), camera("gate"))
    wait_until(lambda: device.newest("gate").times, 5, "frames flow")
    (bad, _) = device.pipeline.cameras()
    assert (bad.name, bad.status.state, bad.status.reason) == (
        "bad",
        "down",
        "no rtsp://***@10.0.0.9/main here (sorry)",
    )
    device.keeper.remove("bad")
    assert device.running() == {"gate": ("m",)}


def _refusing(open_: Callable[[Device, CameraConfig], Camera], name: str) -> Callable[[Device, CameraConfig], Camera]:
    def opener(device: Device, config: CameraConfig) -> Camera:
        if config.name == name:
            raise CameraError(f"no {SECRET} here", remedy="sorry")
        return open_(device, config)

    return opener


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda keeper: keeper.add({"name": "gate", "url": "synthetic:", "model": "m"}), "camera_exists"),
        (lambda keeper: keeper.add({"name": "new", "url": "clip.mp4", "model": "m"}), "invalid"),
        (lambda keeper: keeper.add({"name": "new", "url": SECRET, "model": "x"}), "invalid"),
        (lambda keeper: keeper.add({"name": SECRET, "url": SECRET, "model": "m"}), "invalid"),
        (lambda keeper: keeper.add({"name": "new", "url": SECRET, "model": "m", SECRET: 1}), "invalid"),
        (lambda keeper: keeper.change("gate", {"fps": 0}), "invalid"),
        (lambda keeper: keeper.change("gate", {"min_fps": 5, "fps": 4}), "invalid"),
        (lambda keeper: keeper.change("gate", {"name": "other"}), "invalid"),
        (lambda keeper: keeper.change("gate", {"url": None}), "invalid"),
        (lambda keeper: keeper.change("yard", {"fps": 1}), "unknown_camera"),
        (lambda keeper: keeper.remove("yard"), "unknown_camera"),
        (lambda keeper: keeper.pause(SECRET), "unknown_camera"),
        (lambda keeper: keeper.reset("yard"), "unknown_camera"),
        (lambda keeper: keeper.apply([check_camera({"name": "b", "url": SECRET}, ["x"])]), "needs_restart"),
    ],
)  # fmt: skip
def test_what_is_refused_changes_nothing(make: Make, change: Callable[[CameraKeeper], object], code: str) -> None:
    device = make(camera("gate"))
    assert code_of(lambda: change(device.keeper)) == code
    assert (len(device.made), device.changes, device.keeper.alarms()) == (1, 0, [])


# --- over starts


def test_the_next_start_has_what_commands_did_until_it_is_reset(make: Make, tmp_path: Path) -> None:
    configured = camera("gate", fps=9.0), camera("yard"), camera("roof")
    first = make(*configured)
    first.keeper.add({"name": "lane", "url": SECRET, "model": ["m", "n"], "fps": None})
    first.keeper.change("gate", {"fps": 4, "url": SECRET})
    first.keeper.remove("yard")
    first.keeper.pause("roof")
    assert first.keeper.cap("lane", 2.0).persisted
    wanted = first.keeper.cameras()
    assert [(each.name, each.fps, each.url == SECRET) for each in wanted] == [
        ("gate", 4.0, True), ("roof", None, False), ("lane", None, True),
    ]  # fmt: skip
    again = make(*configured)
    assert again.keeper.cameras() == wanted
    assert again.newest("roof").told[0] == ("pause", True)
    assert ("cap", 2.0) in again.newest("lane").told
    said = {each.name: (each.source, each.paused, each.cap_fps) for each in again.keeper.reported()}
    assert said == {
        "gate": ("overlay", False, None), "roof": ("overlay", True, None), "lane": ("overlay", False, 2.0),
    }  # fmt: skip
    assert "hunter2" not in str([first.told, again.told, again.keeper.reported(), again.keeper.cameras()])
    assert again.keeper.removed() == ["yard"]
    assert code_of(lambda: again.keeper.add({"name": "yard", "url": "synthetic:", "model": "m"})) == "camera_exists"
    assert again.keeper.reset("yard").done == ["camera yard: added"]
    assert again.keeper.reset(None).done == [
        "camera lane: removed", "camera gate: url, fps changed, opened anew", "camera roof: resumed",
    ]  # fmt: skip
    assert again.keeper.reset(None).done == []
    assert make(*configured).keeper.cameras() == configured
    assert {each.source for each in again.keeper.reported()} == {"configuration"}


def test_a_file_that_says_something_else_now(make: Make) -> None:
    device = make(camera("gate"), camera("yard"))
    device.keeper.change("gate", {"fps": 4})
    device.keeper.add({"name": "lane", "url": "synthetic:?fps=5", "model": "m"})
    device.keeper.remove("yard")
    # what a command did goes first, and whoever changed the file is told where that is not what it says
    notes = device.keeper.apply([camera("gate", fps=8.0), camera("yard"), camera("lane", "synthetic:?fps=6")])
    assert notes == [
        "camera gate: what a command did to it goes before what the file says, until `edge-runtime camera reset gate`"
    ]
    assert device.keeper.wanted() == {"gate": 4.0, "lane": None}
    # an added one gives way to the file's of the same name
    assert device.newest("lane").config.url.endswith("fps=6")
    assert any("it was added by a command" in alarm for alarm in device.keeper.alarms())
    assert code_of(lambda: device.keeper.change("lane", {"fps": 3})) == "camera_exists"
    assert device.keeper.reset("lane").done == []
    assert device.keeper.alarms() == []
    assert device.keeper.change("lane", {"fps": 3}).done == ["camera lane: fps changed"]
    # written into the file, it is the file's
    device.keeper.apply([camera("gate", fps=4.0), camera("lane", "synthetic:?fps=6", fps=3.0)])
    assert {each.source for each in device.keeper.reported()} == {"configuration"}
    device.keeper.apply([camera("gate", fps=5.0)])
    assert device.keeper.wanted() == {"gate": 5.0}


def test_the_last_camera_may_go(make: Make) -> None:
    device = make(camera("gate"))
    assert device.keeper.remove("gate").done == ["camera gate: removed"]
    assert (device.running(), device.keeper.cameras(), device.keeper.wanted()) == ({}, (), {})
    assert make(camera("gate")).keeper.cameras() == ()


def test_a_store_that_takes_no_writes(make: Make, tmp_path: Path) -> None:
    device = make(camera("gate"), files=FailingFiles(1, errno.EROFS))
    result = device.keeper.pause("gate")
    assert (result.persisted, result.done) == (False, ["camera gate: paused"])
    assert "the next start will not know of it" in result.notes[0]
    assert "not for the next start" in device.keeper.alarms()[0]
    # the disk takes it again (only the first write fails)
    assert device.keeper.cap("gate", 3.0).persisted
    assert device.keeper.alarms() == []
    assert make(camera("gate")).newest("gate").told[0] == ("pause", True)


def test_a_damaged_file_costs_nothing_but_what_was_in_it(make: Make, tmp_path: Path) -> None:
    (tmp_path / "cameras.json").write_text('{"schema": "edge.cameras/1", "cameras": [{"na', encoding="utf-8")
    device = make(camera("gate"))
    wait_until(lambda: device.newest("gate").times, 5, "frames flow")
    (alarm,) = device.keeper.alarms()
    assert "kept as cameras.json.damaged; the configuration's run" in alarm
    device.keeper.tell_start()
    assert device.told[0][:2] == ("error", alarm)
    # reading the configuration again is no answer to it, a command is
    device.keeper.apply([camera("gate")])
    assert device.keeper.alarms() == [alarm]
    assert device.keeper.reset(None).persisted
    assert device.keeper.alarms() == []


def test_thirty_cameras_come_and_go_and_nothing_is_left(make: Make) -> None:
    device = make(camera("gate"))
    wait_until(lambda: device.newest("gate").times, 5, "frames flow")
    threads = threading.active_count()
    for number in range(30):
        device.keeper.add({"name": f"c{number % 3}", "url": "synthetic:?width=8&height=8&fps=100", "model": "n"})
        wait_until(lambda: device.newest(device.made[-1].name).times, 5, "it flows")
        device.keeper.remove(device.made[-1].name)
        cuts_of(device.pipeline)
    wait_until(lambda: threading.active_count() == threads, 2, "their threads end")
    wait_until(lambda: len(cuts_of(device.pipeline).streams) == 1, 2, "nothing of them is counted any more")
    cuts_of(device.pipeline)
    assert len(device.pipeline.cameras_of_cut()) == 1


def test_cameras_know_what_models_make_of_their_pictures(make: Make) -> None:
    device = make(camera("gate"), camera("yard", model="n"))
    gate, yard = device.newest("gate"), device.newest("yard")
    assert ("expect", (InputSpec(1, 1),)) in gate.told
    larger, yards = FakeEngine("sha256:larger"), list(yard.told)
    larger.info = type(larger.info)(**{**_fields(larger.info), "input": InputSpec(2, 2)})
    desk = device.pipeline.models["m"].desk
    (before,) = desk.ladder()
    fresh = make_resident(larger)
    desk.exchange(fresh, others=[before])
    assert gate.last() == ("expect", (InputSpec(2, 2), InputSpec(1, 1)))
    desk.exchange(fresh)
    assert gate.last() == ("expect", (InputSpec(2, 2),))
    assert yard.told == yards
    wait_until(before.closed.is_set, 5, "the engine before is closed")


def _fields(info: Any) -> dict[str, Any]:
    return {name: getattr(info, name) for name in type(info).__slots__}


def test_removing_a_camera_in_a_blocking_read_holds_up_nobody_for_long(make: Make) -> None:
    device = make(camera("gate"), camera("yard"))
    woken = threading.Event()
    try:
        stuck = ScriptedCamera("stuck", (woken.wait(60) and 0 for _ in range(1)))
        device.pipeline.add_camera(stuck, ["m"])
        device.pipeline.remove_camera("stuck")
        start = time.monotonic()
        device.keeper.change("gate", {"url": "synthetic:?fps=3"})
        assert time.monotonic() - start < 4
        # nor for ever: it has had its time
        start = time.monotonic()
        device.keeper.change("gate", {"url": "synthetic:?fps=4"})
        assert time.monotonic() - start < 1
        assert device.pipeline.await_removed(0.5) == ["stuck"]
        seen = len(device.newest("yard").times)
        wait_until(lambda: len(device.newest("yard").times) > seen, 5, "frames go on")
    finally:
        woken.set()
    wait_until(lambda: stuck.closed, 2, "it ends")
