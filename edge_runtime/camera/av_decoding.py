"""The door to PyAV for decoding: packets in, intact pictures out. What is not intact is counted, never shown."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

import av.error
import av.logging
from av.packet import Packet
from av.video.frame import VideoFrame
from av.video.stream import VideoStream

from edge_runtime.camera.av_pixels import AvPixels
from edge_runtime.camera.nals import PLAIN, Glance, NalReader
from edge_runtime.camera.pacing import Ordered
from edge_runtime.camera.session import Intake, Picture
from edge_runtime.camera.thrift import DecodeCosts, Kind, Thrift, Verdict

# A stream whose key frames are never marked is taken as it comes after this many; one whose key frames are further
# apart after twice as many as from one to the next.
_KEY_PATIENCE_PACKETS = 300
# What is held of a group of pictures in case its pictures are needed after all.
_HELD_PACKETS, _HELD_BYTES = 512, 4 << 20
_REORDERED_PICTURES = 16  # H.264 and H.265 A.4.2: the most that a decoder holds

_lost = threading.local()


class _LossHandler(logging.Handler):
    """FFmpeg tells of RTP packets that did not come in its log and nowhere else, on the thread that reads."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage().startswith("RTP: missed"):
            _lost.count = losses() + 1


def losses() -> int:
    """How often RTP packets did not come on this thread, once `watch_for_losses` was called."""
    return getattr(_lost, "count", 0)


def watch_for_losses() -> None:
    """Listen to FFmpeg's warnings; nothing of them is shown, they may carry addresses with passwords. Idempotent."""
    logger = logging.getLogger("libav")
    if any(isinstance(handler, _LossHandler) for handler in logging.getLogger("libav.rtsp").handlers):
        return
    logger.propagate = False
    logger.addHandler(logging.NullHandler())
    logger.setLevel(logging.CRITICAL + 1)
    reader = logging.getLogger("libav.rtsp")
    reader.propagate = False
    reader.setLevel(logging.WARNING)
    reader.addHandler(_LossHandler())
    # The second loss on end would otherwise be a repeated message.
    av.logging.set_skip_repeated(False)
    av.logging.set_level(av.logging.WARNING)


@dataclass(slots=True)
class _Fed:
    """A packet that the decoder got: its number in decoding order, and whether its picture has come out, or seems to be
    `lost`: a later one has."""

    number: int
    pts_ns: int
    t_packet_ns: int
    out: bool = False
    lost: bool = False

    @property
    def awaited(self) -> bool:
        return not self.out and not self.lost


class Decoding:
    """The packets of one opened stream into intact pictures.

    FFmpeg conceals what it cannot decode, and mostly says so. It doesn't where a picture is missing that later ones are
    decoded from (H.264: NalReader finds the gap), nor where those follow a damaged one: nothing is shown until a key
    frame, from which the decoder begins anew. It says so when a damaged picture comes out, which may be after others
    that were decoded from it: pictures wait for all that were decoded before them.
    """

    def __init__(self, stream: VideoStream, intake: Intake, *, live: bool) -> None:
        context = stream.codec_context
        self._context = context
        self._intake = intake
        self._ledger = intake.ledger
        self._live = live
        self._time_base = stream.time_base or Fraction(1, 1)
        self._intra_only = context.codec.intra_only
        self._nals = NalReader(context.name, context.extradata) if context.name in ("h264", "hevc") else None
        self._thrift = Thrift()
        self._costs = DecodeCosts()
        self._started = self._intra_only
        self._loss = False
        self._before: Packet[VideoStream] | None = None
        # Packets from this number on may be damaged, until a key frame, or until `_clean_from` in a stream that
        # refreshes its pictures bit by bit.
        self._damaged_from: int | None = None
        self._clean_from: int | None = None
        self._waited = self._since_key = 0
        self._patience = _KEY_PATIENCE_PACKETS
        self._leading_before_ns: int | None = None  # where a key frame just began anew
        self._fed = 0
        self._left: dict[int, _Fed] = {}  # by pts, in decoding order
        self._ready: deque[tuple[int, int | None, Picture]] = deque()  # number, pts, in order of presentation
        self._held: list[tuple[Packet[VideoStream], int, Kind]] = []
        self._held_bytes = 0
        self._broken = False  # what the next packet follows was not decoded, or the decoder has been flushed since
        self._anchor: tuple[Packet[VideoStream], int] | None = None  # a key frame that was decoded alone before `_held`
        self._skipped = 0  # pictures since the last one that came out
        self._ordered = Ordered()

    def lose(self) -> None:
        """Something is missing in or before the next packet."""
        self._loss = not self._intra_only

    def feed(self, packet: Packet[VideoStream], t_packet_ns: int) -> Iterator[Picture]:
        """The pictures that come of a packet, or of the end where it is empty. Raises what Intake.early does."""
        if not packet.size:
            yield from self._finish(t_packet_ns)
            return
        damaged, self._loss = self._loss or packet.is_corrupt, False
        if damaged and self._intra_only:
            self._ledger.count(corrupt=1)
            return
        glance = PLAIN if self._nals is None else self._nals.look(memoryview(packet))
        pts_ns = None if packet.pts is None else _ns(packet.pts, self._time_base)
        key = packet.is_keyframe and not damaged and not self._intra_only and not glance.refresh
        if key:
            self._patience, self._since_key = max(_KEY_PATIENCE_PACKETS, 2 * self._since_key), 0
            if self._damaged_from is not None:
                yield from self._restart(pts_ns, t_packet_ns)
            elif not self._started:
                self._leading_before_ns = pts_ns
            self._started = True
        elif self._is_useless(glance, pts_ns):
            self._ledger.count(pre_key=1)
            return
        self._since_key += 1
        before, self._before = self._before, packet
        if glance.gap and before is not None and bytes(before) == bytes(packet):
            # Sent twice. Decoded again, it would be decoded from itself.
            self._ledger.count(decoded=1, duplicate=1)
            return
        if damaged or glance.gap:
            self._damage(self._fed)
        if self._damaged_from is not None:
            if glance.refresh:
                self._clean_from = self._fed + glance.refresh
            yield from self._decode(packet, pts_ns, t_packet_ns, "reference")
            return
        yield from self._decode_if_needed(packet, glance, pts_ns, t_packet_ns, key=key)

    def settle(self) -> None:
        """Count what is held and will not be decoded any more, and what was lost."""
        self._give_up()
        self._ledger.count(corrupt=sum(fed.lost and not fed.out for fed in self._left.values()))
        self._left.clear()

    def _decode_if_needed(
        self, packet: Packet[VideoStream], glance: Glance, pts_ns: int | None, t_packet_ns: int, *, key: bool
    ) -> Iterator[Picture]:
        early_ns, step_ns = self._intake.early(pts_ns, t_packet_ns, self._skipped)
        disposable = self._intra_only or packet.is_disposable or glance.disposable
        kind: Kind = "key" if key else "disposable" if disposable else "reference"
        if step_ns and self._context.has_b_frames:
            # Pictures come out when later ones push them: a live one must not wait for those that are kept, and one
            # that will be kept not for the next key frame.
            disposable = disposable and not self._live
            if pts_ns is not None and any(
                fed.pts_ns >= pts_ns + early_ns for fed in self._left.values() if fed.awaited
            ):
                early_ns = 0
        held = self._thrift.holding
        verdict = self._thrift.judge(pts_ns, early_ns, step_ns, key=key, disposable=disposable)
        if key and held:
            self._give_up()
        if verdict is Verdict.HOLD:
            self._hold(packet, t_packet_ns, kind)
            return
        if verdict is not Verdict.SKIP:
            if key and self._broken:
                yield from self._restart(pts_ns, t_packet_ns)
            if self._can_replay():
                self._replay()
            if not self._broken:
                yield from self._decode(packet, pts_ns, t_packet_ns, kind)
                if self._thrift.alone and verdict is Verdict.DECODE and self._context.has_b_frames:
                    # The decoder would hold its picture back until later ones come.
                    yield from self._finish(t_packet_ns)
                    self._context.flush_buffers()
                    self._broken, self._anchor = True, (packet, t_packet_ns)
                return
            self._give_up()
        self._pass_over(kind)

    def _is_useless(self, glance: Glance, pts_ns: int | None) -> bool:
        """Whether a packet that is no key frame cannot be decoded for want of what comes before."""
        if not self._started:
            self._waited += 1
            self._started = glance.refresh > 0 or self._waited > self._patience
            return not self._started
        if self._leading_before_ns is None:
            return False
        if glance.leading and pts_ns is not None and pts_ns < self._leading_before_ns:
            return True
        # Leading pictures come before all others in decoding order.
        self._leading_before_ns = None
        return False

    def _damage(self, number: int) -> None:
        """The packet of this number is damaged, and whatever is decoded after it."""
        if self._intra_only:
            return
        self._damaged_from = number if self._damaged_from is None else min(number, self._damaged_from)
        self._clean_from, self._waited = None, 0
        self._give_up()
        self._thrift.interrupt()
        doubtful = [ready for ready in self._ready if ready[0] >= number]
        for ready in doubtful:
            self._ready.remove(ready)
            self._left.pop(ready[1] or 0, None)
        self._ledger.count(corrupt=len(doubtful))

    def _restart(self, pts_ns: int | None, t_packet_ns: int) -> Iterator[Picture]:
        """A key frame follows: nothing from before it may be seen in a later picture."""
        yield from self._finish(t_packet_ns)
        self._context.flush_buffers()
        self._damaged_from, self._broken, self._anchor = None, False, None
        self._leading_before_ns = pts_ns

    def _finish(self, t_packet_ns: int) -> Iterator[Picture]:
        """What the decoder still has. It must be flushed before it gets anything more."""
        try:
            frames = self._context.decode(None)
        except (av.error.FFmpegError, MemoryError):
            frames = []
        yield from self._pictures(frames, t_packet_ns)
        for _, _, picture in self._ready:
            yield picture
        self._ready.clear()
        self._ledger.count(corrupt=sum(not fed.out for fed in self._left.values()))
        self._left.clear()

    def _pass_over(self, kind: Kind) -> None:
        self._skipped += 1
        self._ledger.count(skipped_codec=1)
        self._ledger.spent(saved_cpu_ns=self._costs.mean_ns(kind))
        self._broken = self._broken or kind != "disposable"

    def _hold(self, packet: Packet[VideoStream], t_packet_ns: int, kind: Kind) -> None:
        if self._broken and not self._held and self._anchor is None and kind != "key":
            self._pass_over(kind)
            return
        self._skipped += 1
        self._held.append((packet, t_packet_ns, kind))
        self._held_bytes += packet.size
        if self._held_bytes > _HELD_BYTES or len(self._held) > _HELD_PACKETS:
            self._give_up()

    def _give_up(self) -> None:
        """What is held will not be decoded."""
        self._anchor = None
        if self._held:
            self._broken = True
            self._ledger.count(skipped_codec=len(self._held))
            self._ledger.spent(saved_cpu_ns=sum(self._costs.mean_ns(kind) for _, _, kind in self._held))
            self._held.clear()
            self._held_bytes = 0

    def _can_replay(self) -> bool:
        """Whether something has to be decoded first, and can be."""
        if not self._broken:
            return bool(self._held)
        return self._anchor is not None or bool(self._held and self._held[0][2] == "key")

    def _replay(self) -> None:
        """Decode what was held: too old to be shown, but the next picture is decoded from it."""
        held, self._held, self._held_bytes = self._held, [], 0
        if self._anchor is not None:
            held.insert(0, (*self._anchor, "key"))
        skipped, shown = self._skipped, 0
        for packet, t_packet_ns, kind in held:
            pts_ns = None if packet.pts is None else _ns(packet.pts, self._time_base)
            if self._broken:
                shown += sum(1 for _ in self._restart(pts_ns, t_packet_ns))
            shown += sum(1 for _ in self._decode(packet, pts_ns, t_packet_ns, kind))
        self._ledger.count(decoded=shown, skipped_rate=shown)
        self._skipped = skipped

    def _decode(
        self, packet: Packet[VideoStream], pts_ns: int | None, t_packet_ns: int, kind: Kind
    ) -> Iterator[Picture]:
        number, self._fed = self._fed, self._fed + 1
        if packet.pts is not None:
            self._left.pop(packet.pts, None)
            self._left[packet.pts] = _Fed(number, pts_ns or 0, t_packet_ns)
            self._forget_old()
        start_ns = time.thread_time_ns()
        try:
            frames = self._context.decode(packet)
        except (av.error.FFmpegError, MemoryError):
            frames = None
        spent_ns = time.thread_time_ns() - start_ns
        self._costs.add(kind, spent_ns)
        self._ledger.spent(decode_cpu_ns=spent_ns)
        if frames is None:
            self._ledger.count(corrupt=1)
            self._left.pop(packet.pts or 0, None)
            self._damage(number)
            return
        yield from self._pictures(frames, t_packet_ns)

    def _forget_old(self) -> None:
        """A packet of which nothing came in so long: its picture never will."""
        for pts, fed in list(self._left.items()):
            if fed.number >= self._fed - _REORDERED_PICTURES:
                break
            del self._left[pts]
            if not fed.out:
                self._ledger.count(corrupt=1)

    def _pictures(self, frames: Sequence[VideoFrame], t_packet_ns: int) -> Iterator[Picture]:
        for frame in frames:
            pts_ns, t_left_ns, number = None, t_packet_ns, self._fed
            if frame.pts is not None:
                time_base = frame.time_base or self._time_base
                dts_ns = None if frame.dts is None else _ns(frame.dts, time_base)
                pts_ns = self._ordered.choose(_ns(frame.pts, time_base), dts_ns)
                if (fed := self._left.get(frame.pts)) is not None:
                    # One that was taken for lost is as doubtful as what is decoded next.
                    number = self._fed if fed.lost else fed.number
                    t_left_ns, fed.out = fed.t_packet_ns, True
                self._drop_lost(frame)
            if frame.is_corrupt:
                self._damage(number)
            if not self._is_intact(number) or frame.is_corrupt:
                self._ledger.count(corrupt=1)
                self._left.pop(frame.pts or 0, None)
                continue
            skipped, self._skipped = self._skipped, 0
            self._ready.append((number, frame.pts, Picture(AvPixels(frame), pts_ns, t_left_ns, skipped)))
        while self._ready and not self._has_earlier(self._ready[0][0]):
            _, pts, picture = self._ready.popleft()
            self._left.pop(pts or 0, None)
            yield picture

    def _drop_lost(self, frame: VideoFrame) -> None:
        """The decoder keeps some damage to itself: those pictures don't come out. Of two fields one does, as well.

        Times that are wrong look the same, but their pictures do come: they are not waited for, and counted later.
        """
        for pts in [pts for pts, fed in self._left.items() if fed.awaited and pts < (frame.pts or 0)]:
            if frame.interlaced_frame:
                del self._left[pts]
            else:
                self._left[pts].lost = True

    def _is_intact(self, number: int) -> bool:
        """Whether the picture of a packet can be shown, if it is not flagged itself."""
        if self._damaged_from is None or number < self._damaged_from:
            return True
        if (self._clean_from is not None and number >= self._clean_from) or self._waited >= self._patience:
            self._damaged_from = None
            return True
        # It may be decoded from what is missing or damaged: FFmpeg doesn't say so, but it smears.
        self._waited += 1
        return False

    def _has_earlier(self, number: int) -> bool:
        """Whether a packet that was decoded before that of `number` has not shown yet that it is intact."""
        for fed in self._left.values():
            if fed.number >= number:
                return False
            if fed.awaited:
                return True
        return False


def _ns(pts: int, time_base: Fraction) -> int:
    return pts * time_base.numerator * 1_000_000_000 // time_base.denominator
