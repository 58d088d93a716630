"""Results on their way out: as `results/{camera}` messages."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from datetime import timedelta

from edge_runtime.clock import Clock, utc_text
from edge_runtime.records.frames import Detections, FrameResult
from edge_runtime.records.identity import Identity
from edge_runtime.records.messages import Detection, FrameDetections
from edge_runtime.telemetry.topics import Topics


class ResultPublisher:
    """Publishes every result with QoS 0. Called on lane threads: it formats, hands over and returns."""

    def __init__(
        self, identity: Identity, clock: Clock, synced: Callable[[], bool], publish: Callable[[str, bytes], bool]
    ) -> None:
        self._identity = identity
        self._topics = Topics(identity.device)
        self._clock = clock
        self._synced = synced
        self._publish = publish
        self._seq = itertools.count()

    def __call__(self, result: FrameResult) -> None:
        now_ns, now_utc = self._clock.monotonic_ns(), self._clock.utc()
        captured_utc = now_utc - timedelta(microseconds=(now_ns - result.t_capture_ns) / 1e3)
        payload = FrameDetections(
            device=self._identity.device,
            boot=self._identity.boot,
            session=self._identity.session,
            seq=next(self._seq),
            clock_synced=self._synced(),
            camera=result.camera,
            model=result.model,
            engine=result.engine,
            variant=result.variant,
            frame_id=result.frame_id,
            t_utc=utc_text(captured_utc),
            latency_ms=round((result.timings.t_result_ns - result.t_capture_ns) / 1e6, 3),
            width=result.width,
            height=result.height,
            cached=result.cached,
            detections=detections_of(result),
        )
        self._publish(self._topics.results(result.camera), payload.to_json())


def detections_of(result: FrameResult) -> list[Detection]:
    """What was found, in words and camera px."""
    output = result.output
    boxes = output.boxes.tolist() if isinstance(output, Detections) else [None] * len(output)
    return [
        Detection(
            label=result.labels[class_id],
            class_id=class_id,
            score=round(min(1.0, max(0.0, score)), 4),
            box=None if box is None else tuple(round(value, 2) for value in box),
        )
        for class_id, score, box in zip(output.class_ids.tolist(), output.scores.tolist(), boxes, strict=True)
    ]
