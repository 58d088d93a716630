"""NVIDIA's elements as far as names, properties and caps go, around the generic ones; and cameras through them.

Run by test_gstreamer.py as a process of its own: an element that is registered stays. Prints one line of JSON.
"""

from __future__ import annotations

import importlib
import json
import sys
import threading
from typing import Any

from edge_runtime.camera.gst_pipelines import JETSON, plan_for
from edge_runtime.camera.gstreamer import GstCamera, hardware_decoder, have_element, load
from edge_runtime.camera.options import CameraOptions
from edge_runtime.camera.synthetic import read_number
from edge_runtime.records.spec import InputSpec

Gst: Any = load().Gst
GObject: Any = importlib.import_module("gi.repository.GObject")
Bin: Any = Gst.Bin
NVMM = "video/x-raw(memory:NVMM)"
seen: dict[str, Any] = {}


def wrap(outer: Any, first: Any, last: Any) -> None:
    """The pads of a bin are those of its first and last element."""
    for name, element in (("sink", first), ("src", last)):
        if element is not None:
            outer.add_pad(Gst.GhostPad.new(name, element.get_static_pad(name)))


def part(outer: Any, name: str, caps: str = "") -> Any:
    element = Gst.ElementFactory.make(name)
    if caps:
        element.set_property("caps", Gst.Caps.from_string(caps))
    outer.add(element)
    return element


class Relabel:
    """An appsink and an appsrc that give its buffers on as being in ordinary memory, which no one element does."""

    def __init__(self, outer: Any) -> None:
        self.sink, self.source = Gst.ElementFactory.make("appsink"), Gst.ElementFactory.make("appsrc")
        self.sink.set_property("emit-signals", True)
        self.sink.set_property("sync", False)
        self.source.set_property("format", Gst.Format.TIME)
        self.sink.connect("new-sample", self.forward)
        self.sink.connect("eos", lambda _: self.source.end_of_stream())
        self.sink.set_property("async", False)
        outer.add(self.sink)
        outer.add(self.source)

    def forward(self, sink: Any) -> Any:
        sample = sink.pull_sample()
        caps = Gst.Caps.from_string(sample.get_caps().to_string().replace("(memory:NVMM)", ""))
        self.source.set_property("caps", caps)
        return self.source.push_buffer(sample.get_buffer())


class Decoder(Bin):  # type: ignore[misc]
    mjpeg = GObject.Property(type=bool, default=False)

    def __init__(self) -> None:
        super().__init__()
        shape = "stream-format=byte-stream,alignment=au"
        taken = part(self, "capsfilter", f"image/jpeg;video/x-h264,{shape};video/x-h265,{shape}")
        out = part(self, "identity")
        self.ends = [taken, out]
        wrap(self, taken, out)
        seen["decoder"] = self

    def do_change_state(self, transition: Any) -> Any:
        if transition == Gst.StateChange.NULL_TO_READY and len(self.ends) == 2:
            inner = part(self, f"avdec_{self.get_name().partition('_')[0]}")
            self.ends.insert(1, inner)
            self.ends[0].link(inner)
            inner.link(self.ends[2])
            if self.mjpeg:
                seen["mjpeg"] = self.get_name()
        return Gst.Bin.do_change_state(self, transition)


class Converter(Bin):  # type: ignore[misc]
    interpolation_method = GObject.Property(type=int, default=0, nick="interpolation-method")

    def __init__(self) -> None:
        super().__init__()
        self.relabel = Relabel(self)
        self.relabel.sink.set_property("caps", Gst.Caps.from_string(f"{NVMM};video/x-raw"))
        scaler, converter = part(self, "videoscale"), part(self, "videoconvert")
        scaler.set_property("add-borders", False)
        out = part(self, "capsfilter", "video/x-raw,format=NV12")
        self.relabel.source.link(scaler)
        scaler.link(converter)
        converter.link(out)
        wrap(self, self.relabel.sink, out)
        seen["converter"] = self


class Sensor(Bin):  # type: ignore[misc]
    sensor_id = GObject.Property(type=int, default=0, nick="sensor-id")

    def __init__(self) -> None:
        super().__init__()
        source = Gst.ElementFactory.make("appsrc")
        wanted = "video/x-raw(memory:NVMM),format=NV12,width=640,height=360,framerate=30/1"
        for name, value in (("is-live", True), ("do-timestamp", True), ("format", Gst.Format.TIME)):
            source.set_property(name, value)
        source.set_property("caps", Gst.Caps.from_string(wanted))
        picture = Gst.Buffer.new_wrapped(bytes([128]) * (640 * 360 * 3 // 2))
        source.connect("need-data", lambda inner, _: inner.push_buffer(picture.copy()))
        self.add(source)
        wrap(self, None, source)
        seen["sensor"] = self


def frames_of(url: str, count: int, **options: Any) -> tuple[GstCamera, list[Any]]:
    camera = GstCamera(CameraOptions("cam", url, open_s=5, stall_s=5, **options))
    if url.startswith("csi"):
        camera.expect([InputSpec(160, 160)])
    guard = threading.Timer(15, camera.stop)
    guard.start()
    frames: list[Any] = []
    while len(frames) < count and (frame := camera.read()) is not None:
        frames.append(frame)
    guard.cancel()
    if not frames:
        sys.exit(f"{url}: {camera.status()}")
    camera.stop()
    camera.close()
    return camera, frames


def main() -> None:
    for name, kind in (("nvv4l2decoder", Decoder), ("nvvidconv", Converter), ("nvarguscamerasrc", Sensor)):
        Gst.Element.register(None, name, Gst.Rank.NONE, kind)
    answer: dict[str, Any] = {"decoder": hardware_decoder()}
    for name, path in json.loads(sys.argv[1]).items():
        camera, frames = frames_of(f"file:{path}", 100, pace="max", loop=False)
        answer[name] = {
            "backend": camera.effort().backend,
            "numbers": [read_number(frame.pixels.to_rgb()) for frame in frames],
            "format": frames[0].pixels.frame.format.name,
            "interpolation": seen["converter"].interpolation_method,
            "corrupt": camera.source().corrupt,
        }
    camera, frames = frames_of("csi:1", 12)
    answer["csi"] = {
        "backend": camera.effort().backend,
        "sensor": seen["sensor"].sensor_id,
        "camera": [frames[-1].pixels.width, frames[-1].pixels.height],
        "scaled": [frames[-1].pixels.frame.width, frames[-1].pixels.frame.height],
    }
    camera, frames = frames_of("gst:nvarguscamerasrc sensor-id=2", 2)
    answer["own"] = {"format": frames[0].pixels.frame.format.name, "sensor": seen["sensor"].sensor_id}
    plan = plan_for(CameraOptions("cam", "rtsp://cam/"), JETSON, have_element)
    Gst.parse_launch_full(plan.text, None, Gst.ParseFlags.FATAL_ERRORS)
    answer["rtsp"] = list(plan.branches)
    answer["mjpeg=1"] = seen["mjpeg"]
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
