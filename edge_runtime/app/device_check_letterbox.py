"""The check of `device-check` of the kernel that scales cameras' pictures: right, and from what size does it pay?"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_runtime.app.device_check_bench import Bench, median_ms
from edge_runtime.app.device_check_report import CheckFailed, CheckSkipped, Found
from edge_runtime.camera.av_pixels import AvPixels, frame_of
from edge_runtime.engine.tensorrt.cuda import Cuda, Event
from edge_runtime.engine.tensorrt.letterbox import (
    SOURCE,
    LetterboxKernel,
    reference,
    require_supported,
    source_of,
)
from edge_runtime.engine.tensorrt.nvrtc import kernel_image
from edge_runtime.engine.tensorrt.scaler import MOST_LEVELS
from edge_runtime.errors import EngineError
from edge_runtime.records.frames import PictureLayout
from edge_runtime.records.spec import InputSpec
from edge_runtime.vision.pixels import factors

SIZES = ((1280, 720), (1920, 1080), (3840, 2160))
"""Of cameras, px; the first is compared with numpy."""
KERNEL_RUNS = 7
"""The GPU's own timers need no more."""


def letterbox(bench: Bench) -> Found:
    """Pictures in nv12, as the hardware's decoder gives them, on the CPU and on the GPU."""
    spec = bench.bundle.input_spec(bench.variant)
    try:
        require_supported(spec)
    except EngineError as error:
        raise CheckSkipped(error.message) from None
    image = kernel_image(bench.kernels, SOURCE, bench.gpu.here, load=bench.load_library)
    owner = bench.gpu.owner
    rows: list[dict[str, Any]] = []
    words, worst = [], 0.0
    for size in SIZES:
        pixels = _decoded(*size)
        layout = pixels.layout()
        assert layout is not None
        answer, times_ms = owner.call(partial(_on_gpu, owner.cuda, image, pixels, layout, spec))
        if not rows:
            worst = _levels_off(answer, pixels, layout, spec)
        cpu_ms, gpu_ms = _on_cpu(pixels, spec), sum(times_ms.values())
        rows.append(
            {"source": [*size, "nv12"], "cpu_ms": cpu_ms, **times_ms, "gpu_ms": gpu_ms, "pays": gpu_ms < cpu_ms}
        )
        words.append(f"{size[0]} x {size[1]}: {cpu_ms:.2f} and {gpu_ms:.2f}")
    numbers = {"place": [spec.width, spec.height, spec.pixel], "levels_off": worst, "sources": rows}
    if not worst <= (MOST_LEVELS if spec.pixel == "float32" else 1.0):
        raise CheckFailed(f"the kernel is wrong: {worst:.3g} levels off", numbers)
    return Found(f"ms on the CPU and on the GPU, of pictures of {', '.join(words)}", numbers)


def _decoded(width: int, height: int) -> AvPixels:
    random = np.random.default_rng(7)
    luma = random.integers(16, 236, (height, width), np.uint8)
    chroma = random.integers(64, 192, (height // 2, width // 2, 2), np.uint8)
    planes = [(memoryview(each.tobytes()), width) for each in (luma, chroma)]
    return AvPixels(frame_of("nv12", width, height, planes, full_range=False))


def _levels_off(answer: NDArray[Any], pixels: AvPixels, layout: PictureLayout, spec: InputSpec) -> float:
    """The largest difference from what numpy says, in levels of 0-255; bytes may be rounded the other way, by one."""
    picture = np.empty(layout.nbytes, np.uint8)
    pixels.copy_whole(picture)
    difference = np.abs(answer.astype(np.float64) - reference(picture, layout, spec))
    if spec.pixel == "float32":
        difference /= np.abs(factors(spec)[0])[:, None, None]
    return float(difference.max()) if np.isfinite(difference).all() else float("inf")


def _on_cpu(pixels: AvPixels, spec: InputSpec) -> float:
    place = np.empty(spec.shape, spec.dtype)
    return median_ms(lambda: pixels.write_into(place, spec))


def _on_gpu(
    cuda: Cuda, image: bytes, pixels: AvPixels, layout: PictureLayout, spec: InputSpec
) -> tuple[NDArray[Any], dict[str, float]]:
    """The place; ms of the copy into page-locked memory, of the upload and of the kernel. On the owner's thread."""
    nbytes = int(np.prod(spec.shape)) * spec.dtype.itemsize
    free: list[Callable[[], None]] = []
    try:
        stream = cuda.stream()
        free.append(lambda: cuda.free_stream(stream))
        there, back = cuda.host(layout.nbytes), cuda.host(nbytes)
        free += [lambda: cuda.free_host(there), lambda: cuda.free_host(back)]
        source, place = cuda.allocate(layout.nbytes), cuda.allocate(nbytes)
        free += [lambda: cuda.free(source), lambda: cuda.free(place)]
        timers = [cuda.timer() for _ in range(3)]
        free += [_freeing(cuda, timer) for timer in timers]
        kernel = LetterboxKernel(cuda, image)
        free.append(kernel.close)
        copy_ms = median_ms(lambda: pixels.copy_whole(there.array))
        spans = []
        for _ in range(KERNEL_RUNS):
            cuda.record(timers[0], stream)
            cuda.copy_in(source.address, there, layout.nbytes, stream)
            cuda.record(timers[1], stream)
            kernel.enqueue(source_of(layout, source.address), place.address, spec, stream)
            cuda.record(timers[2], stream)
            cuda.synchronise(stream)
            spans.append([cuda.elapsed_ms(timers[each], timers[each + 1]) for each in range(2)])
        cuda.copy_out(back, place.address, nbytes, stream)
        cuda.synchronise(stream)
        answer = np.array(back.array).view(spec.dtype).reshape(spec.shape)
    finally:
        for each in reversed(free):
            each()
    upload_ms, kernel_ms = (statistics.median(span[each] for span in spans) for each in range(2))
    return answer, {"gpu_copy_ms": copy_ms, "gpu_upload_ms": upload_ms, "gpu_kernel_ms": kernel_ms}


def _freeing(cuda: Cuda, event: Event) -> Callable[[], None]:
    return lambda: cuda.free_event(event)
