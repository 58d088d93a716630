"""`prepare capture`: unlike pictures on disk with a manifest, gone on from, within bounds, whatever interrupts it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edge_runtime.app.capturing import capture_source
from edge_runtime.app.evaluate import read_image
from edge_runtime.cli import prepare_capture
from edge_runtime.cli.main import run
from edge_runtime.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_USAGE, CameraError, EdgeError, UsageError
from edge_runtime.prepare.capture import MANIFEST, CaptureResult, Seen, capture
from tests.awaiting import wait_until
from tests.camera.clips import encode
from tests.prepare.test_diversity import Plain, scene, with_one

PLACES = [(row, column) for row in (4, 24, 44) for column in (4, 24, 44)]


def seen(pictures: Iterable[NDArray[Any]]) -> Iterator[Seen]:
    for number, pixels in enumerate(pictures):
        yield Seen(Plain(pixels), number)


def events(count: int = 9) -> list[NDArray[Any]]:
    return [with_one(scene(place), *where) for place, where in enumerate(PLACES[:count])]


def captured(out: Path, pictures: Iterable[Seen], **options: Any) -> CaptureResult:
    settings: dict[str, Any] = {"source": "test", "count": 100, "max_bytes": 10**9, "read_image": read_image}
    return capture(pictures, out, **{**settings, **options})


def manifest_of(out: Path) -> Any:
    return json.loads((out / MANIFEST).read_bytes())


def test_what_is_kept_lies_there_as_it_was(tmp_path: Path) -> None:
    out = tmp_path / "out"
    shown = [scene(0), *(scene(number) for number in range(20, 40)), *events(3)]
    result = captured(
        out, (Seen(each.pixels, each.number, datetime(2026, 1, 2, tzinfo=timezone.utc)) for each in seen(shown))
    )
    assert [row.number for row in result.pictures] == [0, 21, 22, 23]
    assert (result.looked_at, result.before, result.ended) == (24, 0, "the source ended")
    rows = manifest_of(out)["pictures"]
    assert [row["file"] for row in rows] == [row.file for row in result.pictures]
    assert rows[0]["novelty"] is None
    assert all(row["novelty"] > 0.08 for row in rows[1:])
    assert {(row["source"], row["taken_utc"]) for row in rows} == {("test", "2026-01-02T00:00:00.000+00:00")}
    for row in rows:
        np.testing.assert_array_equal(
            read_image(out / row["file"]).to_rgb(), Plain(shown[row["number"]]).to_rgb()
        )  # lossless
        assert (out / row["file"]).stat().st_size == row["size_bytes"]
        assert (out / row["file"]).stat().st_mode & 0o777 == 0o600
    assert out.stat().st_mode & 0o777 == 0o700
    assert {path.name for path in out.iterdir()} == {MANIFEST, *(row["file"] for row in rows)}


def test_the_same_command_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "out"
    captured(out, seen(events(4)))
    before = {path.name: path.read_bytes() for path in out.glob("*.png")}
    result = captured(out, seen(events(6)), source="more")
    assert (result.before, len(result.pictures)) == (4, 6)
    assert [row.source for row in result.pictures] == ["test"] * 4 + ["more"] * 2
    assert {name: (out / name).read_bytes() for name in before} == before


@pytest.mark.parametrize("less", [{"count": 3}, {"max_bytes": 200}])
def test_pictures_from_before_are_not_removed_for_a_smaller_bound(tmp_path: Path, less: dict[str, int]) -> None:
    """A default that is less than what was asked for then, say."""
    out = tmp_path / "out"
    captured(out, seen(events(4)))
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    with pytest.raises(UsageError, match=r"holds 4 pictures of .* more than are allowed"):
        captured(out, seen(events(6)), **less)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_what_a_kill_left_is_taken_up(tmp_path: Path) -> None:
    """Pictures without a line in the manifest, a picture that is half one, a manifest that names what is gone, files
    that were being written."""
    out = tmp_path / "out"

    def killed() -> Iterator[Seen]:
        first = manifest_of(out)
        yield from seen(events(3))
        (tmp_path / "first").write_text(json.dumps(first))

    captured(out, killed())
    (tmp_path / "first").replace(out / MANIFEST)
    left = [out / ".picture-000004.png.0123456789abcdef.new", out / f".{MANIFEST}.0123456789abcdef.new"]
    for path in left:
        path.write_bytes(b"part of a picture")
    whole = out / "picture-000003.png"
    whole.write_bytes(whole.read_bytes()[:50])
    result = captured(out, seen([]))
    assert not any(path.exists() for path in left)
    assert [(row.file, row.number) for row in result.pictures] == [
        ("picture-000001.png", None),
        ("picture-000002.png", None),
    ]
    (out / "picture-000001.png").unlink()
    assert len(captured(out, seen([])).pictures) == len(manifest_of(out)["pictures"]) == 1
    assert captured(out, seen(events(9)[5:6])).pictures[-1].file == "picture-000003.png"


def test_the_disk_bound_holds_at_every_moment(tmp_path: Path) -> None:
    out = tmp_path / "out"
    one = captured(tmp_path / "one", seen(events(1))).pictures[0].size_bytes
    bound = one * 4

    def watched() -> Iterator[Seen]:
        for each in seen(events()):
            yield each
            assert sum(path.stat().st_size for path in out.glob("*.png")) <= bound

    result = captured(out, watched(), max_bytes=bound)
    assert 2 <= len(result.pictures) <= 4
    full = captured(tmp_path / "full", seen(events()), max_bytes=bound, until_full=True)
    assert full.ended == "they take as much of the disk as they may"
    with pytest.raises(UsageError, match="one picture takes"):
        captured(tmp_path / "small", seen(events(1)), max_bytes=100)


def test_a_large_picture_takes_the_place_of_several_small_ones(tmp_path: Path) -> None:
    large = events(1)[0]
    size = captured(tmp_path / "one", seen([large])).pictures[0].size_bytes
    flat = [np.full_like(large, level) for level in (0, 60, 120, 250)]
    small = sum(row.size_bytes for row in captured(tmp_path / "four", seen(flat)).pictures)
    result = captured(tmp_path / "out", seen([*flat, large]), max_bytes=size + small // 2)
    assert [row.number for row in result.pictures][-1] == 4
    assert sum(path.stat().st_size for path in (tmp_path / "out").glob("*.png")) <= size + small // 2


def test_an_interruption_loses_nothing(tmp_path: Path) -> None:
    out = tmp_path / "out"

    def interrupted() -> Iterator[Seen]:
        yield from seen(events(3))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        captured(out, interrupted())
    assert len(manifest_of(out)["pictures"]) == len(list(out.glob("*.png"))) == 3


def test_folders_of_other_things_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "photo.png").write_bytes(b"mine")
    with pytest.raises(UsageError, match="holds something else"):
        captured(tmp_path / "mine", seen(events(1)))
    (tmp_path / "alike").mkdir()
    (tmp_path / "alike" / "picture-000001.png").write_bytes(b"mine too, by chance of such a name")
    with pytest.raises(UsageError, match="holds something else"):
        captured(tmp_path / "alike", seen(events(1)))
    assert (tmp_path / "alike" / "picture-000001.png").exists()
    with pytest.raises(UsageError, match="5001 pictures are too many"):
        captured(tmp_path / "many", seen(events(1)), count=5001)
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / MANIFEST).write_text('{"pictures": [{"file": 3}]}')
    with pytest.raises(UsageError, match="no list of captured pictures"):
        captured(tmp_path / "odd", seen(events(1)))
    with pytest.raises(EdgeError, match="cannot be written") as caught:
        captured(tmp_path / "none" / "out", seen(events(1)))
    assert caught.value.code == "write_failed"


@pytest.fixture
def clip(tmp_path: Path) -> Path:
    """A still street of 80 frames, and four short visits."""
    frames = []
    for number in range(80):
        pixels = np.repeat(np.repeat(scene(number), 4, axis=0), 4, axis=1)[..., ::-1]
        if number % 20 == 13:
            row, column = PLACES[number // 20 * 2]
            pixels[row * 4 : row * 4 + 40, column * 4 : column * 4 + 20] = (200, 30, 30)
        frames.append(pixels.astype(np.uint8))
    path = tmp_path / "street.mp4"
    encode(path, frames)
    return path


def test_of_a_clip_the_events_are_in_and_again_the_same(
    clip: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["prepare", "capture", str(clip), str(tmp_path / "out"), "--count", "20"]
    assert run([*arguments, "--json"]) == EXIT_DONE
    output = capsys.readouterr()
    document = json.loads(output.out)
    numbers = [row["number"] for row in document["pictures"]]
    assert {13, 33, 53, 73} <= set(numbers)
    assert numbers[0] == 0
    assert len(numbers) <= 8
    assert document["looked_at"] == 80
    assert "pictures as the camera sees them, of people perhaps" in output.err
    names = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert run([*arguments[:3], str(tmp_path / "again"), "--count", "20"]) == EXIT_DONE
    assert {path.name: path.read_bytes() for path in (tmp_path / "again").iterdir()} == names
    assert run(arguments) == EXIT_DONE
    assert "of them from before" in capsys.readouterr().out
    assert {row["number"] for row in manifest_of(tmp_path / "out")["pictures"]} == set(numbers)


def test_a_camera_until_there_are_enough_or_its_time_is_over(tmp_path: Path) -> None:
    few = capture_source("synthetic:?width=64&height=64", tmp_path / "few", count=2, max_bytes=10**8, fps=30.0)
    assert len(few.pictures) == 2
    assert few.ended == "there are as many as were wanted"
    assert all(row.taken_utc for row in few.pictures)
    timed = capture_source(
        "synthetic:?width=64&height=64", tmp_path / "timed", count=500, max_bytes=10**8, fps=30.0, within_s=0.3
    )
    assert timed.ended == "the source ended"
    assert timed.looked_at >= 1


def test_a_camera_is_let_go_whatever_happens(tmp_path: Path) -> None:
    """At once, although the exception and its frames are still held."""

    def interrupted(looked_at: int, kept: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        capture_source(
            "synthetic:?width=64&height=64", tmp_path / "out", count=5, max_bytes=10**8, fps=30.0, within_s=60.0,
            progress=interrupted,
        )  # fmt: skip
    assert "capture" not in {thread.name for thread in threading.enumerate()}
    del caught


def test_a_camera_of_a_configuration(tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text(
        f'[device]\nstore = "{tmp_path / "store"}"\n[[model]]\nname = "m"\nbundle = "bundled:centernet"\n'
        '[[camera]]\nname = "door"\nurl = "synthetic:?width=64&height=64"\nmodel = "m"\n'
    )
    options: dict[str, Any] = {"config": config, "count": 1, "max_bytes": 10**8, "fps": 30.0}
    result = capture_source("door", tmp_path / "out", **options)
    assert [row.source for row in result.pictures] == ["camera door"]
    with pytest.raises(UsageError, match="has no camera 'window'") as caught:
        capture_source("window", tmp_path / "out", **options)
    assert "door" in str(caught.value.remedy)


def test_a_camera_that_is_silent_is_not_waited_for(tmp_path: Path) -> None:
    url = "rtsp://user:secret@127.0.0.1:1/none"
    with pytest.raises(CameraError, match=r"gave no picture within 0\.2 s") as caught:
        capture_source(url, tmp_path / "out", count=1, max_bytes=10**8, open_s=0.2)
    assert "secret" not in str(caught.value)


def test_what_is_no_source(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["prepare", "capture", str(tmp_path / "none.mp4"), str(tmp_path / "out")]) == EXIT_USAGE
    assert "does not exist" in capsys.readouterr().err


def test_an_address_from_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = iter(["rtsp://u:p@camera/1\n", "\n"])
    monkeypatch.setattr(sys, "stdin", type("Stdin", (), {"readline": lambda _: next(lines)})())
    assert prepare_capture._address("-") == "rtsp://u:p@camera/1"
    with pytest.raises(UsageError, match="no URL was given"):
        prepare_capture._address("-")


@pytest.mark.full
def test_ctrl_c_keeps_what_was_done(tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-m", "edge_runtime", "prepare", "capture", "synthetic:?width=320&height=240", str(out)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, env={**os.environ}) as process:
        try:
            wait_until(lambda: len(list(out.glob("picture-*.png"))) >= 2, 60.0)
            process.send_signal(signal.SIGINT)
            _, error = process.communicate(timeout=30)
        finally:
            process.kill()
    assert process.returncode == EXIT_INTERRUPTED
    assert b"interrupted; what was kept is there" in error
    assert len(manifest_of(out)["pictures"]) == len(list(out.glob("picture-*.png"))) >= 2
