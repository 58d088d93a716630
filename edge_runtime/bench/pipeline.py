"""How much of the engine's capacity the whole pipeline reaches, and where the CPU goes.

In one run, in turn: (a) engine only, every lane on a fixed input and nothing else; (b) the pipeline at full
pace on a clip; (c) the same stages one after the other in one thread.
"""

from __future__ import annotations

import gc
import resource
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from edge_runtime.app.daemon import SWITCH_INTERVAL_S
from edge_runtime.camera import av_pixels as av_door
from edge_runtime.camera.open import open_camera
from edge_runtime.camera.options import CameraOptions
from edge_runtime.engine.bundle import Bundle
from edge_runtime.engine.onnxrt import load_engine
from edge_runtime.engine.slot import Resident
from edge_runtime.pipeline.pipeline import Pipeline
from edge_runtime.records.frames import Frame
from edge_runtime.vision.decode import build_decoder
from edge_runtime.vision.geometry import plan
from edge_runtime.vision.pixels import fill_level

STAGES = ("decode", "scale", "convert", "infer", "post")
WARM_UP_S = 0.5
GREY = 114.0


@dataclass(frozen=True, slots=True)
class PipelineRepeat:
    """One repeat: fps of (a), (b) and (c), process CPU per frame of (a) and (b) in ms, of each stage in (c)."""

    engine_fps: float
    pipeline_fps: float
    sequential_fps: float
    engine_cpu_ms: float
    pipeline_cpu_ms: float
    stages_ms: dict[str, float]


@dataclass(frozen=True, slots=True)
class PipelineResult:
    """Medians over the repeats. `framework_ms` = CPU per frame of (b) less the stages of (c) and, for
    inference, less what the lanes of (a) take: what claim, tickets, threads and the rest cost."""

    bundle: str
    variant: str
    clip: str
    lanes: int
    engine_fps: float
    pipeline_fps: float
    sequential_fps: float
    pipeline_to_engine: float
    pipeline_to_sequential: float
    stages_ms: dict[str, float]
    framework_ms: float
    peak_rss_mb: float
    repeats: list[PipelineRepeat]

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def measure_pipeline(
    bundle: Bundle, variant: str, clip: Path, *, lanes: int, seconds: float = 4.0, repeats: int = 5
) -> PipelineResult:
    """Run (a), (b) and (c) `repeats` times in turn, `seconds` each."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    rounds = [_once(bundle, variant, clip, lanes, seconds) for _ in range(repeats)]
    stages = {stage: statistics.median(each.stages_ms[stage] for each in rounds) for stage in STAGES}
    framework = statistics.median(
        each.pipeline_cpu_ms - each.engine_cpu_ms - sum(each.stages_ms[s] for s in STAGES if s != "infer")
        for each in rounds
    )
    return PipelineResult(
        bundle=bundle.name,
        variant=bundle.variant(variant).name,
        clip=clip.name,
        lanes=lanes,
        engine_fps=statistics.median(each.engine_fps for each in rounds),
        pipeline_fps=statistics.median(each.pipeline_fps for each in rounds),
        sequential_fps=statistics.median(each.sequential_fps for each in rounds),
        pipeline_to_engine=statistics.median(each.pipeline_fps / each.engine_fps for each in rounds),
        pipeline_to_sequential=statistics.median(each.pipeline_fps / each.sequential_fps for each in rounds),
        stages_ms=stages,
        framework_ms=framework,
        peak_rss_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        repeats=rounds,
    )


def _once(bundle: Bundle, variant: str, clip: Path, lanes: int, seconds: float) -> PipelineRepeat:
    engine_fps, engine_cpu_ms = _engine_only(_load(bundle, variant, lanes), seconds)
    pipeline_fps, pipeline_cpu_ms = _pipeline(_load(bundle, variant, lanes), clip, lanes, seconds)
    sequential_fps, stages_ms = _sequential(_load(bundle, variant, 1), clip, seconds)
    return PipelineRepeat(engine_fps, pipeline_fps, sequential_fps, engine_cpu_ms, pipeline_cpu_ms, stages_ms)


def _load(bundle: Bundle, variant: str, lanes: int) -> Resident:
    engine = load_engine(bundle, variant)
    info = engine.info
    decoder = build_decoder(info.output, info.input, info.output_shapes)
    return Resident(engine, decoder, lanes=lanes, places=1, buffers=2 * lanes + 1)


def _engine_only(resident: Resident, seconds: float) -> tuple[float, float]:
    """(a): fps and CPU ms per run of all lanes on a grey picture, nothing else running."""
    counts = [0] * len(resident.lanes)
    t_start = time.perf_counter() + WARM_UP_S
    t_end = t_start + seconds
    cpu = [0.0] * len(counts)

    def loop(index: int) -> None:
        lane, buffer = resident.lanes[index], resident.free[index]
        fill_level(buffer.array, resident.info.input, GREY)
        while time.perf_counter() < t_start:
            lane.submit(buffer, 1)
            lane.collect()
        start = time.thread_time()
        while time.perf_counter() < t_end:
            lane.submit(buffer, 1)
            lane.collect()
            counts[index] += 1
        cpu[index] = time.thread_time() - start

    threads = [threading.Thread(target=loop, args=(index,), name=f"lane-{index}") for index in range(len(counts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took = time.perf_counter() - t_start
    resident.close()
    return sum(counts) / took, sum(cpu) / sum(counts) * 1e3


def _pipeline(resident: Resident, clip: Path, lanes: int, seconds: float) -> tuple[float, float]:
    """(b): fps and process CPU ms per frame of the whole pipeline at full pace."""
    count = [0]

    def take(_: object) -> None:
        count[0] += 1  # results of a stream come one at a time

    pipeline = Pipeline(take)
    pipeline.add_model("model", resident, lanes=lanes)
    camera = open_camera(CameraOptions(name="clip", url=f"file:{clip.resolve()}", pace="max", loop=True))
    pipeline.add_camera(camera, ["model"], full_pace=True)
    gc.collect()
    gc.freeze()
    pipeline.start()
    time.sleep(WARM_UP_S)
    before, cpu, start = count[0], time.process_time(), time.perf_counter()
    time.sleep(seconds)
    done, cpu, took = count[0] - before, time.process_time() - cpu, time.perf_counter() - start
    pipeline.stop()
    pipeline.close()
    gc.unfreeze()
    return done / took, cpu / max(1, done) * 1e3


def _sequential(resident: Resident, clip: Path, seconds: float) -> tuple[float, dict[str, float]]:
    """(c): fps of the stages one after the other in this thread, and each one's CPU ms per frame."""
    camera = open_camera(CameraOptions(name="clip", url=f"file:{clip.resolve()}", pace="max", loop=True))
    spent = dict.fromkeys(STAGES, 0.0)
    lane, buffer, spec = resident.lanes[0], resident.free[0], resident.info.input
    place = buffer.array[0]
    frames, start = 0, 0.0
    t_warm = time.perf_counter() + WARM_UP_S
    marks = [0.0] * (len(STAGES) + 1)
    for frame, marks[0], marks[1] in _decoded(camera):
        assert isinstance(frame.pixels, av_door.AvPixels)
        picture = frame.pixels.frame
        transform = plan(frame.pixels.width, frame.pixels.height, spec)
        scaled = av_door.scale(picture, spec, transform)
        marks[2] = time.thread_time()
        av_door.convert(scaled, place, spec, transform)
        marks[3] = time.thread_time()
        lane.submit(buffer, 1)
        outputs = lane.collect()
        marks[4] = time.thread_time()
        resident.decoder(outputs, 0, transform)
        marks[5] = time.thread_time()
        now = time.perf_counter()
        if now < t_warm:
            start = now
            continue
        for index, stage in enumerate(STAGES):
            spent[stage] += marks[index + 1] - marks[index]
        frames += 1
        if now > start + seconds:
            break
    took = time.perf_counter() - start
    camera.stop()
    camera.close()
    resident.close()
    return frames / took, {stage: value / frames * 1e3 for stage, value in spent.items()}


def _decoded(camera: object) -> Iterator[tuple[Frame, float, float]]:
    """Frames with the thread's CPU time before and after decoding each."""
    while True:
        before = time.thread_time()
        frame = camera.read()  # type: ignore[attr-defined]
        if frame is None:
            return
        yield frame, before, time.thread_time()
