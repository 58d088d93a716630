"""GStreamer pipelines as data: texts, sizes, times, reasons, and what becomes of each encoded picture."""

from __future__ import annotations

import re
import subprocess
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_runtime.camera import gst_start
from edge_runtime.camera.gst_files import refused_header
from edge_runtime.camera.gst_pipelines import (
    JETSON,
    MAX_AGE_NS,
    SOFTWARE,
    SOFTWARE_SCALED,
    Chain,
    Plan,
    capture_ns,
    needed_size,
    plan_for,
    raw_caps,
)
from edge_runtime.camera.gst_reasons import hide, position, reason_of_all, split_account, tells_of_damage
from edge_runtime.camera.gst_units import Units
from edge_runtime.camera.ledger import Ledger
from edge_runtime.camera.options import CameraOptions
from edge_runtime.camera.session import REFUSED
from edge_runtime.clock import SystemClock
from edge_runtime.errors import CameraError
from edge_runtime.records.spec import InputSpec, Resize
from edge_runtime.vision.geometry import plan
from tests.awaiting import wait_until

SECRET_URL = "rtsp://ad%40min:p%2F%3As%25@cam.local:8554/live?channel=1"


def everything(element: str) -> bool:
    return True


def planned(url: str, chain: Chain = SOFTWARE, **options: str) -> Plan:
    return plan_for(CameraOptions("cam", url, **options), chain, everything)  # type: ignore[arg-type]


# --- texts


@pytest.mark.parametrize("chain", [SOFTWARE, SOFTWARE_SCALED, JETSON], ids=lambda chain: chain.name + chain.convert[:6])
def test_an_address_and_its_account_are_properties_and_never_in_a_text(chain: Chain) -> None:
    made = planned(SECRET_URL, chain)
    assert {(element, name): value for element, name, value in made.properties} == {
        ("src", "location"): "rtsp://cam.local:8554/live?channel=1",
        ("src", "user-id"): "ad@min",
        ("src", "user-pw"): "p/:s%",
    }
    for secret in ("cam.local", "ad@min", "ad%40min", "p/:s%", "p%2F"):
        assert secret not in made.text
        assert secret not in repr(made)
    assert made.branches == ("h264", "h265", "mjpeg")


def test_the_jetson_decodes_and_scales_in_hardware() -> None:
    made = planned("rtsp://cam/", JETSON)
    assert made.hardware == "nvv4l2decoder"
    assert made.scales
    assert "rtph264depay name=h264_in ! h264parse" in made.text
    assert "nvv4l2decoder name=mjpeg_decoder mjpeg=1 ! nvvidconv" in made.text
    assert made.text.count("format=(string)NV12 ! appsink") == 3
    assert "avdec" not in made.text
    assert "videoconvert" not in made.text


def test_a_sensor_is_read_from_nvmm_memory_with_whatever_chain() -> None:
    made = planned("csi:1")
    assert made.text.startswith(
        "nvarguscamerasrc name=src sensor-id=1 ! video/x-raw(memory:NVMM),format=(string)NV12 ! nvvidconv"
    )
    assert (made.branches, made.live, made.scales, made.hardware) == (("raw",), True, True, "nvarguscamerasrc")


@pytest.mark.parametrize(("transport", "words"), [("tcp", "latency=0 drop-on"), ("udp", "latency=200 drop-on")])
def test_the_transport_is_the_one_that_was_asked_for(transport: str, words: str) -> None:
    made = planned("rtsp://cam/", transport=transport)
    assert f"protocols={transport} " in made.text
    assert words in made.text


def test_a_codec_whose_elements_are_missing_is_left_out_and_none_is_an_error_with_its_package() -> None:
    without_h265 = plan_for(CameraOptions("cam", "rtsp://cam/"), SOFTWARE, lambda name: name != "avdec_h265")
    assert without_h265.branches == ("h264", "mjpeg")
    with pytest.raises(CameraError, match=r"no element videoconvert \(package gstreamer1.0-plugins-base\)") as missing:
        plan_for(CameraOptions("cam", "rtsp://cam/"), SOFTWARE, lambda name: name != "videoconvert")
    assert missing.value.retryable
    with pytest.raises(CameraError, match=r"no element nvarguscamerasrc \(package nvidia-l4t-gstreamer\)"):
        plan_for(CameraOptions("cam", "csi:0"), SOFTWARE, lambda name: not name.startswith("nv"))


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://cam/live.m3u8", "not HLS"),
        ("synthetic:", "does not read synthetic:"),
        ("file:/nowhere/clip.mp4", "no such file"),
        ("gst:videotestsrc ! appsink name=mine", "named mine"),
    ],
)
def test_what_it_does_not_read_is_refused_in_words(url: str, reason: str) -> None:
    with pytest.raises(CameraError, match=reason):
        planned(url)


def test_a_pipeline_of_an_operator_is_completed_or_taken_as_it_is() -> None:
    assert planned("gst:videotestsrc").text.startswith("videotestsrc ! videoconvert name=raw_convert")
    assert planned("gst: videotestsrc ! appsink drop=true").text == "videotestsrc ! appsink drop=true name=sink"
    assert planned("gst:videotestsrc ! appsink name=sink").branches == ("",)
    nvidia = planned("gst:nvv4l2camerasrc ! video/x-raw(memory:NVMM)")
    assert "! nvvidconv name=raw_convert" in nvidia.text
    made = planned("gst:rtspsrc location=rtsp://me:hush@cam/ user-pw='it is' ! decodebin")
    assert {"hush", "me", "it is"} <= set(made.secrets)


def test_a_file_is_turned_as_its_tag_says_and_not_scaled(tmp_path: Path) -> None:
    clip = tmp_path / "a clip ! with=a name.mp4"
    clip.write_bytes(b"")
    made = planned(f"file:{clip}", SOFTWARE_SCALED)
    assert "videoflip video-direction=auto ! appsink" in made.text
    assert made.properties == (("src", "location", str(clip)),)
    assert (made.live, made.scales) == (False, False)


# --- sizes and times

SPECS = st.builds(
    InputSpec,
    width=st.integers(32, 1280),
    height=st.integers(32, 1280),
    resize=st.sampled_from(["letterbox-center", "letterbox-topleft", "stretch", "crop"]),
)


@given(st.integers(16, 4096), st.integers(16, 4096), st.lists(SPECS, max_size=3))
def test_no_model_has_to_scale_up_and_the_aspect_stays(width: int, height: int, specs: list[InputSpec]) -> None:
    size = needed_size(width, height, specs)
    if size is None:
        return
    assert size[0] % 2 == size[1] % 2 == 0
    assert size[0] < width
    assert size[1] < height
    for spec in specs:
        transform = plan(width, height, spec)
        assert transform.resized_width <= size[0]
        assert transform.resized_height <= size[1]
    share = max(size[0] / width, size[1] / height)
    assert size[0] > width * share - 2.001 * (1 + width / height)
    assert size[1] > height * share - 2.001 * (1 + height / width)


@pytest.mark.parametrize(
    ("resize", "expected"),
    [("letterbox-center", (416, 234)), ("stretch", (740, 416)), ("crop", (740, 418))],
)
def test_the_size_is_the_smallest_that_will_do(resize: Resize, expected: tuple[int, int]) -> None:
    assert needed_size(1920, 1080, [InputSpec(416, 416, resize=resize)]) == expected
    assert needed_size(320, 240, [InputSpec(416, 416, resize=resize)]) is None


def test_caps_are_one_word_for_the_parser() -> None:
    for chain in (SOFTWARE, JETSON):
        assert not re.search(r"\s", raw_caps(chain, (416, 234)))
        assert raw_caps(chain, (416, 234)).endswith(",width=416,height=234")


@given(st.integers(-(10**18), 10**18), st.integers(0, 10**15), st.integers(0, 10**15), st.integers(10**9, 10**15))
def test_a_picture_was_captured_now_or_a_little_before(
    running_ns: int, clock_ns: int, base_ns: int, now_ns: int
) -> None:
    captured = capture_ns(now_ns, clock_ns, base_ns, running_ns)
    assert now_ns - MAX_AGE_NS <= captured <= now_ns


def test_the_capture_time_is_now_less_the_age_on_the_pipelines_own_clock() -> None:
    # A pipeline clock that has nothing to do with ours: it was at 7 s when the pipeline was started, and is at 19 s.
    assert capture_ns(1_000_000_000_000, 19_000_000_000, 7_000_000_000, 11_960_000_000) == 999_960_000_000
    for wrong_ns in (12_000_000_001, 36_000_000_000_000, -36_000_000_000_000, None):
        assert capture_ns(1_000_000_000_000, 19_000_000_000, 7_000_000_000, wrong_ns) == 1_000_000_000_000


# --- reasons


def test_an_account_is_found_and_decoded() -> None:
    assert split_account(SECRET_URL) == ("rtsp://cam.local:8554/live?channel=1", "ad@min", "p/:s%")
    assert split_account("rtsp://a:b@c@host/x") == ("rtsp://host/x", "a", "b@c")
    assert split_account("http://host/a@b?c=d@e") == ("http://host/a@b?c=d@e", None, None)


def test_no_secret_is_left_in_a_message() -> None:
    text = hide("cannot log in op at rtsp://op:hush@cam/x?key=7 with hush, not hushed", ("hush", "op"))
    assert text == "cannot log in *** at rtsp://***@cam/x?*** with ***, not hushed"


def reason(domain: str, code: int, message: str, debug: str = "") -> tuple[str, str | None]:
    found = reason_of_all([(domain, code, message, debug)], CameraOptions("cam", "v4l2:/dev/video0"))
    return found.text, found.code


def test_errors_are_told_in_an_operators_words() -> None:
    resource, stream = "gst-resource-error-quark", "gst-stream-error-quark"
    assert reason(resource, 16, "Unauthorized") == ("user or password refused: 401 Unauthorized", REFUSED)
    assert reason(resource, 3, "Not found")[0] == "nothing at this path: 404 Not Found"
    assert reason(stream, 6, "No decoder for\nx.")[0] == "its format is not understood: No decoder for x"
    debug = "gstx.c(42): f (): /GstPipeline:p0:\nsystem error: Device or resource busy"
    assert reason(resource, 5, "Could not open", debug)[0] == "cannot open: busy"
    assert reason(stream, 1, "Odd.", "gstx.c(42): f (): /GstPipeline:p0")[0] == "reading failed: Odd"


def test_of_several_errors_the_first_that_says_something_counts() -> None:
    ended = ("gst-stream-error-quark", 1, "Internal data stream error.", "")
    errors = [ended, ("gst-resource-error-quark", 16, "No", "")]
    assert reason_of_all(errors, CameraOptions("cam", "v4l2:/dev/video0")).code == REFUSED


@pytest.mark.parametrize(
    ("own", "message", "at"),
    [
        ("videotestsrc foo=1", 'no property "foo" in element "videotestsrc"', 14),
        ("a ! b ! ! c", "syntax error", 9),
        ("a ! x y", "syntax error", 5),
        ("x", "syntax error", 1),
    ],
)
def test_a_wrong_pipeline_has_a_position(own: str, message: str, at: int) -> None:
    assert position(own, message, lambda text: re.fullmatch(r"\s*[ab](\s*! [ab])*\s*", text) is not None) == at


def test_a_decoders_log_tells_what_it_made_up() -> None:
    assert tells_of_damage("concealing 80 DC, 80 AC, 80 MV errors in P frame", error=False, intra_only=False)
    assert tells_of_damage("Could not find ref with POC -3", error=True, intra_only=False)
    assert not tells_of_damage("SEI type 5 size 928 truncated at 904", error=True, intra_only=False)
    assert tells_of_damage("error dc", error=True, intra_only=True)


# --- encoded pictures


def units(intra_only: bool = False) -> tuple[Units, Ledger]:
    ledger = Ledger(SystemClock())
    return Units(ledger, intra_only=intra_only), ledger


def shown(watch: Units, *times: int) -> list[bool]:
    return [watch.picture(pts)[0] for pts in times]


def test_intact_pictures_pass_in_any_decoding_order() -> None:
    watch, ledger = units()
    for pts in (0, 3, 1, 2, 6, 4, 5):
        watch.arrive(pts, key=pts == 0)
    assert shown(watch, 0, 1, 2, 3, 4, 5, 6) == [True] * 7
    watch.end()
    assert ledger.damage() == (0, 0, 0)


def test_what_comes_before_the_first_key_frame_is_not_shown() -> None:
    watch, ledger = units()
    for pts in range(5):
        watch.arrive(pts, key=pts == 3)
    assert shown(watch, 1, 2, 3, 4) == [False, False, True, True]
    assert ledger.damage() == (0, 3, 0)


def test_a_picture_that_never_comes_spoils_all_up_to_the_next_key_frame() -> None:
    watch, ledger = units()
    for pts in range(8):
        watch.arrive(pts, key=pts in (0, 5))
    assert shown(watch, 0, 1, 3, 4, 5, 6, 7) == [True, True, False, False, True, True, True]
    assert ledger.damage() == (3, 0, 0)


def test_a_gap_and_a_complaint_spoil_as_well() -> None:
    watch, ledger = units()
    for pts in range(12):
        watch.arrive(pts, key=pts in (0, 5, 10), gap=pts == 2)
    watch.complain(7)
    watch.complain(7)
    assert shown(watch, *range(12)) == [True, True, False, False, False, True, True, False, False, False, True, True]
    assert ledger.damage() == (6, 0, 0)


def test_a_flag_of_the_decoder_counts_and_every_jpeg_stands_for_itself() -> None:
    watch, ledger = units(intra_only=True)
    for pts in range(4):
        watch.arrive(pts, key=False, whole=pts != 1)
    assert [watch.picture(pts, flagged=pts == 2)[0] for pts in range(4)] == [True, False, False, True]
    assert ledger.damage() == (2, 0, 0)


def test_a_wrong_presentation_time_spoils_nothing() -> None:
    watch, ledger = units()
    times = [0, 1, 36_000_000, 3, 4, -36_000_000, 6]
    for pts in times:
        watch.arrive(pts, key=pts == 0)
    assert shown(watch, *times) == [True] * 7
    assert ledger.damage() == (0, 0, 0)


def test_lost_pictures_are_counted_once_even_where_no_later_one_tells() -> None:
    watch, ledger = units()
    for pts in range(100):
        watch.arrive(pts, key=pts == 0)
    watch.end()
    assert ledger.damage()[0] == 100


def test_with_key_frames_alone_the_rest_is_skipped_and_after_it_the_next_key_frame_is_waited_for() -> None:
    watch, ledger = units()
    for pts in range(30):
        if pts == 11:
            watch.gate(True)
        if pts == 23:
            watch.gate(False)
        watch.arrive(pts, key=pts % 5 == 0)
        # The gate is not exact: what it let pass may come out, and may not be shown.
        assert watch.picture(pts)[0] is (pts < 11 or pts % 5 == 0 or pts > 25)
    assert watch.key_interval_ns == 5
    # 11-14, 16-19, 21-24
    assert ledger.damage() == (0, 0, 12)
    assert watch.take_skipped() == 12
    assert watch.take_skipped() == 0
    assert watch.take_counts() == (18, 12)


def test_a_stream_with_b_frames_is_not_thinned_to_key_frames() -> None:
    watch, _ = units()
    for number, step in enumerate((0, 3, 1, 2) * 20):
        pts = (number // 4 * 4 + step) * 40_000_000
        watch.arrive(pts, key=number % 8 == 0)
    assert watch.key_interval_ns is None


def test_a_stream_without_marked_key_frames_is_taken_in_the_end() -> None:
    watch, ledger = units()
    for pts in range(400):
        watch.arrive(pts, key=False)
        if watch.picture(pts)[0]:
            break
    assert 290 < pts < 310
    assert ledger.damage()[1] == pts


# --- what is kept from GStreamer


def ebml(*elements: tuple[int, bytes]) -> bytes:
    body = b"".join(name.to_bytes(2, "big") + bytes([0x80 | len(value)]) + value for name, value in elements)
    return b"\x1a\x45\xdf\xa3" + bytes([0x80 | len(body)]) + body


@pytest.mark.parametrize(
    ("head", "reason"),
    [
        (b"", None),
        (b"\0\0\0 ftypisom", None),
        (ebml((0x4282, b"matroska"), (0x4285, b"\2")), None),
        (ebml((0x4282, b"webm\0\0")), None),
        (ebml((0x4286, b"\1")), None),
        (ebml((0x4282, b"matroska"))[:9], "it is of the kind 'm', and no Matroska or WebM file"),
        (ebml((0x4282, b"oatros{a")), "it is of the kind 'oatros{a', and no Matroska or WebM file"),
        (ebml((0x4282, b"matroska"), (0x4285, b"\7")), "its Matroska is of version 7, and 2 is read"),
    ],
)
def test_matroska_that_gstreamer_stumbles_over_is_not_given_to_it(
    head: bytes, reason: str | None, tmp_path: Path
) -> None:
    assert refused_header(head) == reason
    if reason is not None:
        (tmp_path / "clip.mkv").write_bytes(head)
        with pytest.raises(CameraError, match=re.escape(reason)) as refused:
            planned(str(tmp_path / "clip.mkv"))
        assert refused.value.retryable


@given(st.binary(max_size=64))
def test_no_header_is_too_much(rest: bytes) -> None:
    refused_header(b"\x1a\x45\xdf\xa3" + rest)


# --- the start


def test_the_list_of_plugins_goes_where_it_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    nowhere = {"HOME": str(tmp_path / "file")}
    for before, chosen in (
        ({"HOME": str(tmp_path), "STATE_DIRECTORY": str(tmp_path)}, None),
        (nowhere, None),
        (nowhere | {"STATE_DIRECTORY": f"{tmp_path}:/else"}, f"{tmp_path}/gstreamer-1.0.registry"),
        (nowhere | {"STATE_DIRECTORY": str(tmp_path), "GST_REGISTRY": "/mine"}, None),
        (nowhere | {"XDG_CACHE_HOME": str(tmp_path), "STATE_DIRECTORY": str(tmp_path)}, None),
    ):
        environ = dict(before)
        gst_start.choose_registry(environ)
        assert environ == (before if chosen is None else before | {"GST_REGISTRY_1_0": chosen})


def test_a_search_for_plugins_that_hangs_is_ended(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    scanner = tmp_path / "gst-plugin-scanner"
    scanner.symlink_to("/bin/sleep")
    ended = []
    assert gst_start.start(lambda: ended.append(subprocess.run([scanner, "60"]).returncode), 0.2)
    assert ended == [-9]
    assert "its scanner is ended" in caplog.text
    with pytest.raises(RuntimeError, match="no"):
        gst_start.start(lambda: (_ for _ in ()).throw(RuntimeError("no")).__next__())


def test_one_that_hangs_all_the_same_is_left_and_not_begun_again() -> None:
    release, calls = threading.Event(), []

    def init() -> None:
        calls.append(1)
        release.wait(20)

    assert not gst_start.start(init, 0.05)
    assert not gst_start.start(init, 0.05)
    release.set()
    wait_until(lambda: not any(thread.name == "gst-init" for thread in threading.enumerate()), 5, "its end")
    assert gst_start.start(lambda: None)
    assert calls == [1]


# --- parts of a multipart stream


def test_pictures_with_made_up_times_are_told_by_their_order() -> None:
    ledger = Ledger(SystemClock())
    units = Units(ledger, intra_only=True)
    units.arrive(10, key=True, t_ns=1)
    assert units.picture(10, newest=True)[1].t_ns == 1  # type: ignore[union-attr]
    for number, whole in ((2, True), (3, False), (4, True)):
        units.arrive(None, key=True, whole=whole, t_ns=number)
    good = [units.picture(50 + at) for at in range(3)]
    assert [(intact, unit.t_ns if unit else None) for intact, unit in good] == [(True, 2), (False, 3), (True, 4)]
    assert ledger.damage()[0] == 1


def test_a_part_of_which_nothing_comes_shifts_the_others_for_a_while_only() -> None:
    ledger = Ledger(SystemClock())
    units = Units(ledger, intra_only=True)
    units.arrive(None, key=True, t_ns=0)
    for number in range(1, 8):
        units.arrive(None, key=True, t_ns=number)
        unit = units.picture(1000 + number, newest=True)[1]
        assert unit is not None
        assert unit.t_ns == (number - 1 if number <= 4 else number)
    assert ledger.damage()[0] == 1
