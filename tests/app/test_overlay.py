"""What comes of a configuration and of what commands did to its cameras; and how that is kept."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_runtime.app.overlay import Entry, Overlay, OverlayFile, resolve
from edge_runtime.config import CameraConfig, camera_table, check_camera
from edge_runtime.errors import EdgeError
from tests.crash import CrashDisk, frozen, lay_out
from tests.engine.stores import FailingFiles

MODELS = ("m", "n")
URL = "rtsp://admin:hunter2@10.0.0.9/main"


def camera(name: str = "gate", **keys: Any) -> CameraConfig:
    return check_camera({"name": name, "url": "synthetic:", "model": "m", **keys}, MODELS)


def overlay(**entries: Entry) -> Overlay:
    return Overlay(entries)


def test_added_changed_and_removed() -> None:
    configured = [camera("gate", fps=10.0, min_fps=2.0), camera("yard"), camera("roof")]
    over = overlay(
        roof=Entry("removed"),
        lane=Entry("added", {"url": URL, "model": ["n"]}),
        gate=Entry("changed", {"fps": 5, "min_fps": None}),
    )
    found = resolve(configured, over, MODELS)
    assert [each.name for each in found.cameras] == ["gate", "yard", "lane"]
    gate, yard, lane = found.cameras
    assert (gate.fps, gate.min_fps, gate.models) == (5.0, None, ("m",))
    assert yard == configured[1]
    assert (lane.url, lane.models) == (URL, ("n",))
    assert (found.overlay, found.troubles) == (over, {})
    assert "hunter2" not in repr(found)


@pytest.mark.parametrize(
    ("configured", "entry", "in_force", "trouble"),
    [
        # its model is gone
        ([], Entry("added", {"url": "synthetic:", "model": ["x"]}), [], 'camera.model[1]: "x"'),
        ([camera()], Entry("changed", {"model": "x"}), [camera()], "what was changed by a command cannot be used"),
        # what it changes has become something else, to which it does not fit
        ([camera()], Entry("changed", {"transport": "udp"}), [camera()], "only RTSP cameras have a transport"),
        # nobody configures any more what it changed
        ([], Entry("changed", {"fps": 5}), [], "is no longer configured"),
        # the file has that name now, for something else
        ([camera(fps=7.0)], Entry("added", {"url": URL, "model": ["m"]}), [camera(fps=7.0)], "another one"),
        # written by hand, or by another version
        ([], Entry("added", {"url": URL, "model": ["m"], "colour": "red"}), [], "camera.colour: unknown key"),
        ([], Entry("added", {}), [], "camera.url: is missing"),
    ],
)  # fmt: skip
def test_what_does_not_fit_any_more_is_left_alone_and_told(
    configured: list[CameraConfig], entry: Entry, in_force: list[CameraConfig], trouble: str
) -> None:
    over = replace(overlay(gate=entry), paused=frozenset({"gate"}))
    found = resolve(configured, over, MODELS)
    assert list(found.cameras) == in_force
    assert trouble in found.troubles["gate"]
    assert "hunter2" not in str(found.troubles)
    # it counts again once it fits
    assert found.overlay == over


@pytest.mark.parametrize(
    ("configured", "entry"),
    [
        ([camera(fps=5.0)], Entry("added", {"url": "synthetic:", "model": ["m"], "fps": 5})),
        ([camera(fps=5.0)], Entry("changed", {"fps": 5})),
        ([], Entry("removed")),
    ],
)
def test_what_the_file_says_too_is_over_it_no_more(configured: list[CameraConfig], entry: Entry) -> None:
    found = resolve(configured, overlay(gate=entry), MODELS)
    assert (list(found.cameras), found.overlay, found.troubles) == (configured, Overlay(), {})


def test_switches_of_cameras_that_nobody_knows_are_forgotten() -> None:
    over = Overlay(
        {"lane": Entry("added", {"url": "synthetic:"})}, frozenset({"gate", "old"}), {"lane": 3.0, "old": 1.0}
    )
    found = resolve([camera()], over, ("m",))
    assert (found.overlay.paused, found.overlay.caps) == (frozenset({"gate"}), {"lane": 3.0})


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
keys = st.sampled_from(["url", "model", "fps", "min_fps", "pace", "stall_s", "ca_file", "priority", "name"]) | st.text()
entries = st.builds(
    Entry, st.sampled_from(["added", "changed", "removed"]), st.dictionaries(keys, json_values, max_size=4)
)
overlays = st.builds(
    Overlay,
    st.dictionaries(st.sampled_from(["gate", "yard", "lane"]), entries),
    st.frozensets(st.sampled_from(["gate", "lane", "gone"])),
    st.dictionaries(st.sampled_from(["gate", "lane", "gone"]), st.floats(0.1, 100)),
)


@settings(deadline=None)
@given(over=overlays)
def test_no_overlay_whatever_costs_a_camera_that_it_does_not_name(over: Overlay) -> None:
    configured = (camera("gate", fps=3.0), camera("yard"), camera("dock"))
    found = resolve(configured, over, MODELS)
    names = [each.name for each in found.cameras]
    assert len(names) == len(set(names))
    assert configured[2] in found.cameras
    for each in configured:
        entry = over.entries.get(each.name)
        assert (each.name in names) == (entry is None or entry.did != "removed")
    # nothing changes when it is taken over twice
    assert resolve(configured, found.overlay, MODELS) == found


@settings(deadline=None)
@given(over=overlays)
def test_what_is_kept_comes_back(tmp_path_factory: pytest.TempPathFactory, over: Overlay) -> None:
    path = tmp_path_factory.mktemp("kept") / "cameras.json"
    OverlayFile(path).save(over)
    assert OverlayFile(path).load() == over
    assert path.stat().st_mode & 0o777 == 0o600
    path.unlink()


def test_a_table_comes_back_from_what_is_kept_of_it() -> None:
    every = camera("a.b", url="rtsps://u:p@h/x?y=1", fps=5, min_fps=1, transport="udp", stall_s=2, backend="pyav",
                   isolation="process", ca_file="/etc/ca.pem", priority=-3, model=["n", "m"])  # fmt: skip
    again = check_camera(json.loads(json.dumps(camera_table(every))), MODELS)
    assert again == every


GOOD = json.dumps({"schema": "edge.cameras/1", "cameras": [], "paused": ["a"], "caps": {}})


@pytest.mark.parametrize(
    "data",
    [
        "", "{", "[]", "{}", GOOD.replace("/1", "/2"), GOOD[:-5], GOOD.replace('["a"]', "[1]"),
        GOOD.replace("{}", '{"a": 0}'),
        GOOD.replace("[]", '[{"name": "a", "did": "stolen", "keys": {}}]'), "\x00" * 200,
    ],
)  # fmt: skip
def test_a_damaged_file_is_set_aside_and_told(tmp_path: Path, data: str) -> None:
    path = tmp_path / "cameras.json"
    path.write_text(data, encoding="utf-8")
    (tmp_path / ".cameras.json.0.new").write_bytes(b"left by a kill")
    file = OverlayFile(path)
    assert file.load() == Overlay()
    assert "is damaged" in (file.trouble or "")
    assert "kept as cameras.json.damaged" in (file.trouble or "")
    assert [each.name for each in tmp_path.iterdir()] == ["cameras.json.damaged"]
    file.save(overlay(gate=Entry("removed")))
    assert file.trouble is None
    assert OverlayFile(path).load() == overlay(gate=Entry("removed"))


def test_a_disk_that_fails(tmp_path: Path) -> None:
    path = tmp_path / "cameras.json"
    old, new = overlay(gate=Entry("removed")), overlay(yard=Entry("removed"))
    OverlayFile(path).save(old)
    for at in range(1, 4):
        file = OverlayFile(path, files=FailingFiles(at, errno.ENOSPC))
        with pytest.raises(EdgeError) as caught:
            file.save(new)
        assert caught.value.code == "store_write_failed"
        assert OverlayFile(path).load() == old
    path.unlink()
    path.mkdir()
    file = OverlayFile(path)
    assert file.load() == Overlay()
    assert "cannot be read" in (file.trouble or "")
    with pytest.raises(EdgeError) as caught:
        file.save(new)
    assert caught.value.code == "store_unreadable"


CHANGES: list[Callable[[Overlay], Overlay]] = [
    lambda over: over.with_entry("lane", Entry("added", {"url": URL, "model": ["m"]})),
    lambda over: over.with_entry("gate", Entry("changed", {"fps": 5})),
    lambda over: over.with_pause("gate", paused=True).with_cap("lane", 2.0),
    lambda over: over.without("lane").with_entry("yard", Entry("removed")),
    lambda _: Overlay(),
]


def test_a_power_cut_at_any_instant_leaves_the_old_or_the_new_one(tmp_path: Path) -> None:
    root = tmp_path / "store"
    root.mkdir()
    disk = CrashDisk(root)
    file, over = OverlayFile(root / "cameras.json", files=disk), Overlay()
    promises: list[tuple[int, tuple[Overlay, ...]]] = [(0, (Overlay(),))]
    for change in CHANGES:
        before, over = over, change(over)
        promises.append((len(disk.trace), (before, over)))
        file.save(over)
        promises.append((len(disk.trace), (over,)))
    seen = {}
    for number, (begun, tree) in enumerate(disk.states(at_most=64, seed=7)):
        allowed = next(allowed for since, allowed in reversed(promises) if since <= begun)
        key = (frozen(tree), tuple(map(repr, allowed)))
        if key in seen:
            continue
        seen[key] = begun
        place = tmp_path / f"after-{number}"
        lay_out(tree, place)
        again = OverlayFile(place / "cameras.json")
        assert again.load() in allowed, begun
        assert again.trouble is None
        assert {each.name for each in place.iterdir()} <= {"cameras.json"}
    assert len(seen) > 3 * len(CHANGES)
