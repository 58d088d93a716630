"""GStreamer pipelines as data, and the arithmetic around them. Pure: nothing here needs GStreamer.

A pipeline's text never holds an address: those are set as properties of elements, as `Plan.properties` says, because
GStreamer's messages and debug logs quote the text. What a chain decodes with is a `Chain`; the elements of the Jetson
(`JETSON`) are named as in NVIDIA's "Accelerated GStreamer" and DeepStream's "Gst-nvvideo4linux2" and
"Gst-nvvideoconvert", and are to be seen on a device: here only their syntax is checked, with elements of our own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from edge_runtime.camera.gst_files import refusal
from edge_runtime.camera.gst_reasons import split_account
from edge_runtime.camera.options import CameraOptions
from edge_runtime.camera.streams import local_path
from edge_runtime.errors import CameraError
from edge_runtime.records.spec import InputSpec
from edge_runtime.vision.geometry import plan as place

Codec = Literal["h264", "h265", "mjpeg"]
CODECS: tuple[Codec, ...] = ("h264", "h265", "mjpeg")

MAX_AGE_NS = 5_000_000_000
"""No picture is older than this when it comes out of a live pipeline; an age beyond it is a wrong presentation time."""

PIXEL_FORMATS: Mapping[str, str] = {
    "I420": "yuv420p",
    "NV12": "nv12",
    "Y42B": "yuv422p",
    "Y444": "yuv444p",
    "GRAY8": "gray",
    "YUY2": "yuyv422",
    "UYVY": "uyvy422",
    "RGBA": "rgba",
    "BGRA": "bgra",
    "RGBx": "rgb0",
    "BGRx": "bgr0",
    "RGB": "rgb24",
    "BGR": "bgr24",
}
"""GStreamer's name of a format to FFmpeg's: what comes out of a pipeline unconverted."""

_MATRICES = {1: 0, 2: 4, 3: 1, 4: 6, 5: 7, 6: 9}
"""GstVideoColorMatrix to FFmpeg's AVColorSpace; what is missing is unspecified."""
UNSPECIFIED_MATRIX = 2

PACKAGES: Mapping[str, str] = {
    "rtspsrc": "gstreamer1.0-plugins-good",
    "rtph264depay": "gstreamer1.0-plugins-good",
    "rtph265depay": "gstreamer1.0-plugins-good",
    "rtpjpegdepay": "gstreamer1.0-plugins-good",
    "souphttpsrc": "gstreamer1.0-plugins-good",
    "capssetter": "gstreamer1.0-plugins-good",
    "multipartdemux": "gstreamer1.0-plugins-good",
    "v4l2src": "gstreamer1.0-plugins-good",
    "videoflip": "gstreamer1.0-plugins-good",
    "h264parse": "gstreamer1.0-plugins-bad",
    "h265parse": "gstreamer1.0-plugins-bad",
    "jpegparse": "gstreamer1.0-plugins-bad",
    "avdec_h264": "gstreamer1.0-libav",
    "avdec_h265": "gstreamer1.0-libav",
    "avdec_mjpeg": "gstreamer1.0-libav",
    "appsink": "gstreamer1.0-plugins-base",
    "parsebin": "gstreamer1.0-plugins-base",
    "decodebin": "gstreamer1.0-plugins-base",
    "videoconvert": "gstreamer1.0-plugins-base",
    "videoscale": "gstreamer1.0-plugins-base",
    "nvv4l2decoder": "nvidia-l4t-gstreamer",
    "nvvidconv": "nvidia-l4t-gstreamer",
    "nvarguscamerasrc": "nvidia-l4t-gstreamer",
}
"""Debian's (on a Jetson: NVIDIA's) package of each element that is used here."""


@dataclass(frozen=True, slots=True)
class Chain:
    """What decodes and converts. `scales`: the converter scales as a by-product, so sizes are asked of it.

    `convert` starts with an element named `{b}_convert`, whose sink sees pictures at the camera's size.
    """

    name: str
    decoders: Mapping[Codec, str]
    convert: str
    formats: tuple[str, ...]
    scales: bool

    @property
    def hardware(self) -> str | None:
        """What decodes, where that is no program."""
        return self.name if self.name in HARDWARE_ELEMENTS else None

    def accepted(self, codec: Codec) -> tuple[str, ...]:
        """The elements that decoding `codec` takes beside the source's own."""
        texts = (self.decoders[codec], self.convert)
        return tuple(element for text in texts for element in _elements(text))


_AVDEC = "{decoder} name={b}_decoder max-threads=1 output-corrupt=false"

SOFTWARE = Chain(
    "avdec",
    {
        # One thread each: cameras and lanes already share the cores, and frame threads cost a picture of delay each.
        "h264": _AVDEC.replace("{decoder}", "avdec_h264"),
        "h265": _AVDEC.replace("{decoder}", "avdec_h265"),
        "mjpeg": "avdec_mjpeg name={b}_decoder output-corrupt=false",
    },
    # Passes through whatever is in PIXEL_FORMATS: pictures are converted when a model takes them, not before.
    "videoconvert name={b}_convert n-threads=1",
    tuple(PIXEL_FORMATS),
    scales=False,
)
"""FFmpeg's decoders on the CPU: the generic chain, which runs everywhere."""

SOFTWARE_SCALED = Chain(
    "avdec",
    SOFTWARE.decoders,
    "videoscale name={b}_convert n-threads=1 add-borders=false ! videoconvert n-threads=1",
    SOFTWARE.formats,
    scales=True,
)
"""The generic chain with a scaler, as the Jetson's has one. Not by itself: scaling twice costs a CPU more."""

JETSON = Chain(
    "nvv4l2decoder",
    {
        "h264": "nvv4l2decoder name={b}_decoder",
        "h265": "nvv4l2decoder name={b}_decoder",
        "mjpeg": "nvv4l2decoder name={b}_decoder mjpeg=1",
    },
    # 3: the VIC's 10-tap filter. Its default is the nearest pixel, and small things would flicker in and out.
    "nvvidconv name={b}_convert interpolation-method=3",
    ("NV12",),
    scales=True,
)
"""The Jetson's NVDEC, and its VIC to scale and to convert from NVMM memory. To be seen on a device."""

HARDWARE_ELEMENTS = ("nvv4l2decoder", "nvvidconv")


@dataclass(frozen=True, slots=True, repr=False)
class Plan:
    """One pipeline. Elements of a branch are named `{branch}_in`, `_gate`, `_decoder`, `_convert`, `_scale`, `_sink`.

    `branches`: the codecs (or `raw`) of which the source may turn out to be one; a branch's `_in` is linked when it is.
    `hardware`: what decodes, or captures, in hardware. `properties`: (element, property, value) to be set; may hold
    credentials. `wishes`: the same as text, set where this GStreamer has the property. `secrets`: what must not be seen
    in a message. `thread`: begins the names of the queues, one per branch, on whose threads is decoded. `own`: an
    operator's text, for positions in error messages. `untimed`: pictures have no times but those of their arrival, and
    the decoder's are made up.
    """

    text: str
    branches: tuple[str, ...]
    chain: Chain
    live: bool
    scales: bool
    properties: tuple[tuple[str, str, object], ...] = ()
    wishes: tuple[tuple[str, str, str], ...] = ()
    secrets: tuple[str, ...] = ()
    own: str = ""
    hardware: str | None = None
    thread: str = ""
    untimed: bool = False

    def __repr__(self) -> str:
        return f"Plan({self.branches}, {self.chain.name})"


# Not dropping: pictures are pulled as they come, and what is overwritten in a sink is not counted by anybody.
_QUIET = "emit-signals=false enable-last-sample=false async=false"
_SINK = f"appsink name={{b}}_sink sync=false max-buffers=2 drop=false {_QUIET}"
# Encoded pictures, for a look at their flags: the very buffers that go on to the decoder, nothing is copied.
_UNITS = f"appsink name={{b}}_units sync=false max-buffers=512 drop=true {_QUIET}"
_PARSERS: Mapping[Codec, str] = {
    "h264": "h264parse name={b}_parse config-interval=-1 ! video/x-h264,stream-format=byte-stream,alignment=au",
    "h265": "h265parse name={b}_parse config-interval=-1 ! video/x-h265,stream-format=byte-stream,alignment=au",
    "mjpeg": "jpegparse name={b}_parse",
}
_RTP: Mapping[Codec, tuple[str, str]] = {
    "h264": ("H264", "rtph264depay"),
    "h265": ("H265", "rtph265depay"),
    "mjpeg": ("JPEG", "rtpjpegdepay"),
}
_MEDIA: Mapping[Codec, str] = {"h264": "video/x-h264", "h265": "video/x-h265", "mjpeg": "image/jpeg"}


def _elements(text: str) -> list[str]:
    """The element names of a pipeline's text."""
    parts = (part.strip() for part in text.split("!"))
    return [part.split()[0] for part in parts if part and "/" not in part.split()[0] and "." not in part.split()[0]]


def _decoding(codec: Codec, chain: Chain, thread: str, flip: bool) -> str:
    """From parsed units to pictures. The tee's first branch is the look at the units: it comes before the decoder."""
    return (
        # A thread of its own to decode on, so that its CPU time can be told; bounded, so that a slow one is felt.
        f"queue name={thread}{codec} max-size-buffers=8 max-size-bytes=0 max-size-time=0"
        f" ! tee name={codec}_tee {codec}_tee. ! {_UNITS} {codec}_tee."
        f" ! identity name={codec}_gate silent=true ! {chain.decoders[codec]} ! {_converting(chain, flip)}"
    ).replace("{b}", codec)


def _converting(chain: Chain, flip: bool) -> str:
    # Only files carry a rotation tag. videoflip works in the CPU's memory, hence after the converter.
    turn = " ! videoflip video-direction=auto" if flip else ""
    return f"{chain.convert} ! capsfilter name={{b}}_scale caps={raw_caps(chain, None)}{turn} ! {_SINK}"


def raw_caps(chain: Chain, size: tuple[int, int] | None) -> str:
    """What the converter may give: the chain's formats, at `size` (width, height; px) where one is asked for."""
    formats = chain.formats[0] if len(chain.formats) == 1 else "{" + ",".join(chain.formats) + "}"
    # parse_launch splits at white space.
    wanted = "" if size is None else f",width={size[0]},height={size[1]}"
    return f"video/x-raw,format=(string){formats}{wanted}"


def plan_for(options: CameraOptions, chain: Chain, have: Callable[[str], bool], *, thread: str = "decode") -> Plan:
    """The pipeline for a camera's URL (csi:, v4l2:, rtsp(s)://, http(s)://, file: or a path, gst:).

    `have` tells whether an element exists; `thread` begins the name of the queue before a decoder. Raises CameraError
    for an element that is missing, with its package, and for a URL that this backend does not read.
    """
    url = options.url
    scheme = match[1].lower() if (match := re.match(r"([A-Za-z][A-Za-z0-9+.-]*):", url)) else "file"
    if scheme in ("rtsp", "rtsps"):
        return _rtsp(options, chain, have, thread)
    if scheme in ("http", "https"):
        return _http(options, chain, have, thread)
    if scheme == "csi":
        _need(have, "nvarguscamerasrc", *_elements(JETSON.convert), "appsink")
        source = f"nvarguscamerasrc name=src sensor-id={int(url[4:])} ! video/x-raw(memory:NVMM),format=(string)NV12"
        text = f"{source} ! {_converting(JETSON, False)}".replace("{b}", "raw")
        return Plan(text, ("raw",), JETSON, live=True, scales=True, hardware="nvarguscamerasrc")
    if scheme == "v4l2":
        _need(have, "v4l2src", "decodebin", *_elements(chain.convert), "appsink")
        # decodebin, since devices give raw pictures, MJPEG or H.264 as they please; max-size-buffers of its own.
        text = f"v4l2src name=src do-timestamp=true ! decodebin ! {_converting(chain, False)}".replace("{b}", "raw")
        return Plan(
            text,
            ("raw",),
            chain,
            hardware=chain.hardware,
            live=True,
            scales=chain.scales,
            properties=(("src", "device", url[len("v4l2:") :]),),
        )
    if scheme == "gst":
        return _own(url[len("gst:") :], chain, have)
    if scheme == "file":
        return _file(url, chain, have, thread)
    raise CameraError(
        f"GStreamer does not read {scheme}:", code="camera_unsupported", remedy="use backend auto or pyav"
    )


def _need(have: Callable[[str], bool], *elements: str) -> None:
    for element in elements:
        if not have(element):
            raise missing_element(element)


def missing_element(element: str) -> CameraError:
    """GStreamer lacks an element; retryable, since it may be installed."""
    package = PACKAGES.get(element)
    return CameraError(
        f"GStreamer has no element {element}" + (f" (package {package})" if package else ""),
        code="gstreamer_missing",
        remedy=f"install {package}" if package else "install the plugin that brings it",
        retryable=True,
    )


def _possible(chain: Chain, have: Callable[[str], bool], before: Callable[[Codec], Sequence[str]]) -> list[Codec]:
    """The codecs whose elements are all there. Raises CameraError where none is."""
    absent: list[str] = []
    possible: list[Codec] = []
    for codec in CODECS:
        wanted = [*before(codec), *_elements(_PARSERS[codec]), *chain.accepted(codec)]
        lacking = [element for element in wanted if not have(element)]
        absent += lacking
        if not lacking:
            possible.append(codec)
    if not possible:
        raise missing_element(absent[0])
    return possible


def _rtsp(options: CameraOptions, chain: Chain, have: Callable[[str], bool], thread: str) -> Plan:
    _need(have, "rtspsrc", "appsink")
    location, user, password = split_account(options.url)
    udp = options.transport == "udp"
    # The jitter buffer holds packets back only where one is missing, which TCP does not know: 0 costs nothing there.
    # With UDP what comes later than 200 ms is lost, and old packets go first when decoding cannot keep up.
    source = (
        f"rtspsrc name=src protocols={'udp' if udp else 'tcp'} latency={200 if udp else 0}"
        f" drop-on-latency={'true' if udp else 'false'} do-rtsp-keep-alive=true teardown-timeout=0"
        # us. `timeout` is for UDP and falls back to TCP, which was not asked for: silence is noticed here.
        f" tcp-timeout={round(options.open_s * 1e6)} timeout=0"
    )
    branches = _possible(chain, have, lambda codec: [_RTP[codec][1]])
    wishes: list[tuple[str, str, str]] = []
    for codec in branches:
        encoding, depay = _RTP[codec]
        source += (
            f" src. ! application/x-rtp,media=video,encoding-name={encoding} ! {depay} name={codec}_in"
            f" ! {_PARSERS[codec].replace('{b}', codec)} ! {_decoding(codec, chain, thread, False)}"
        )
        wishes.append((f"{codec}_in", "request-keyframe", "true"))
    properties: list[tuple[str, str, object]] = [("src", "location", location)]
    if user is not None:
        properties += [("src", "user-id", user), ("src", "user-pw", password or "")]
    return Plan(
        source,
        tuple(branches),
        chain,
        hardware=chain.hardware,
        thread=thread,
        live=True,
        scales=chain.scales,
        properties=tuple(properties),
        wishes=tuple(wishes) + _careful(branches),
        secrets=_secrets(user, password),
    )


def _http(options: CameraOptions, chain: Chain, have: Callable[[str], bool], thread: str) -> Plan:
    location, user, password = split_account(options.url)
    if urlsplit(location).path.lower().endswith((".m3u8", ".m3u")):
        raise CameraError(
            "GStreamer reads MJPEG over HTTP here, not HLS",
            code="camera_unsupported",
            remedy="use backend auto or pyav",
        )
    _need(have, "souphttpsrc", "multipartdemux", *_elements(_one_jpeg_each(chain)), *chain.accepted("mjpeg"), "appsink")
    text = (
        # do-timestamp: the parts of a multipart stream have no times but that of their arrival.
        f"souphttpsrc name=src is-live=true do-timestamp=true retries=0 keep-alive=false"
        f" timeout={max(1, round(options.open_s))} ! multipartdemux single-stream=true"
        f" ! {_one_jpeg_each(chain)} ! {_decoding('mjpeg', chain, thread, False)}"
    )
    properties: list[tuple[str, str, object]] = [("src", "location", location)]
    if user is not None:
        properties += [("src", "user-id", user), ("src", "user-pw", password or "")]
    return Plan(
        text,
        ("mjpeg",),
        chain,
        hardware=chain.hardware,
        thread=thread,
        live=True,
        scales=chain.scales,
        properties=tuple(properties),
        wishes=_careful(["mjpeg"]),
        untimed=True,
        secrets=_secrets(user, password),
    )


def _one_jpeg_each(chain: Chain) -> str:
    """What makes pictures of the parts of a multipart stream, which are one each.

    jpegparse (seen in 1.22) ends the stream with the first one that is cut off. A decoder in hardware needs it for the
    picture's size.
    """
    if chain.hardware is not None:
        return "jpegparse name=mjpeg_in"
    return "capssetter name=mjpeg_in caps=image/jpeg,parsed=(boolean)true"


def _file(url: str, chain: Chain, have: Callable[[str], bool], thread: str) -> Plan:
    path = local_path(url)
    if not path.exists():
        raise CameraError(f"no such file: {path}", retryable=True)
    if not path.is_file():
        raise CameraError(f"{path} is not a regular file", retryable=True, remedy="use backend auto or pyav")
    try:
        refused = refusal(path)
    except OSError as error:
        raise CameraError(f"{path} cannot be read: {error.strerror}", retryable=True) from None
    if refused is not None:
        raise CameraError(f"{path} is not read: {refused}", retryable=True)
    _need(have, "filesrc", "parsebin", "videoflip", "appsink")
    branches = _possible(chain, have, lambda _: [])
    text = "filesrc name=src ! parsebin name=parts"
    for codec in branches:
        parser = _PARSERS[codec].replace("{b}_parse", f"{codec}_in")
        text += f" parts. ! {_MEDIA[codec]} ! {parser} ! {_decoding(codec, chain, thread, True)}"
    return Plan(
        text,
        tuple(branches),
        chain,
        hardware=chain.hardware,
        thread=thread,
        live=False,
        scales=False,
        properties=(("src", "location", str(path)),),
        wishes=_careful(branches),
    )


_OWN_SINK = re.compile(r"!\s*appsink\b([^!]*)$")
_SECRET_PROPERTY = re.compile(r"(?i)[\w-]*(?:pw|pass\w*|user-id|key|token|secret)\s*=\s*(\"[^\"]*\"|'[^']*'|[^\s!]+)")


def _own(text: str, chain: Chain, have: Callable[[str], bool]) -> Plan:
    """An operator's pipeline, up to its pictures; or one that ends in an appsink."""
    text = text.strip()
    # NVMM memory can be read by NVIDIA's converter alone, and only with its elements is there any.
    nvidia = re.search(r"(?:^|!|\s)nv\w+|memory:NVMM", text) is not None and have("nvvidconv")
    own_chain = JETSON if nvidia else SOFTWARE if chain is JETSON else chain
    secrets = tuple(value.strip("\"'") for value in _SECRET_PROPERTY.findall(text))
    secrets += tuple(
        secret
        for address in re.findall(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s\"'!]+", text)
        for secret in _secrets(*_account_of(address))
    )
    if ends := _OWN_SINK.search(text):
        named = re.search(r"\bname\s*=\s*(\S+)", ends[1])
        if named is not None and named[1].strip("\"'") != "sink":
            raise CameraError(
                f"its appsink is named {named[1]}", code="gst_pipeline", remedy="name it sink, or leave it out"
            )
        whole = text if named is not None else f"{text} name=sink"
        return Plan(whole, ("",), own_chain, live=True, scales=False, secrets=secrets, own=text)
    _need(have, *_elements(own_chain.convert), "appsink")
    whole = f"{text} ! {_converting(own_chain, False)}".replace("{b}", "raw")
    scales = own_chain.scales
    return Plan(
        whole,
        ("raw",),
        own_chain,
        live=True,
        scales=scales,
        secrets=secrets,
        own=text,
        hardware="nvvidconv" if nvidia else None,
    )


def _careful(branches: Sequence[str]) -> tuple[tuple[str, str, str], ...]:
    return tuple((f"{branch}_decoder", "discard-corrupted-frames", "true") for branch in branches)


def _account_of(url: str) -> tuple[str | None, str | None]:
    _, user, password = split_account(url)
    return user, password


def _secrets(user: str | None, password: str | None) -> tuple[str, ...]:
    return tuple(secret for secret in (password, user) if secret)


def needed_size(width: int, height: int, inputs: Sequence[InputSpec]) -> tuple[int, int] | None:
    """The smallest even size (px) with the picture's aspect from which no model has to scale up; None: its own.

    A picture of `width` x `height` px is never made larger, and a side may end up to 2 px longer than its share.
    """
    if not inputs:
        return None
    share = 0.0
    for spec in inputs:
        transform = place(width, height, spec)
        share = max(share, transform.resized_width / width, transform.resized_height / height)
    wanted = (_even(width * share), _even(height * share))
    if wanted[0] >= width or wanted[1] >= height:
        return None
    return wanted


def _even(side: float) -> int:
    return max(2, 2 * -int(-side // 2))


def capture_ns(now_ns: int, clock_ns: int, base_ns: int, running_ns: int | None) -> int:
    """Monotonic time (ns) of a live picture with the running time `running_ns`; `clock_ns` is the pipeline's now.

    A live source stamps its buffers with the time of their arrival on the pipeline's clock, since `base_ns`: the
    difference to that clock's now is the picture's age, whatever the clock is. An age below 0 or beyond MAX_AGE_NS
    comes from a wrong presentation time, and tells nothing: such a picture counts as captured now.
    """
    if running_ns is None:
        return now_ns
    age_ns = clock_ns - base_ns - running_ns
    return now_ns - age_ns if 0 <= age_ns <= MAX_AGE_NS else now_ns


def matrix_of(matrix: int) -> int:
    """FFmpeg's number (AVColorSpace) of GStreamer's GstVideoColorMatrix."""
    return _MATRICES.get(matrix, UNSPECIFIED_MATRIX)
