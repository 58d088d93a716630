"""The check of `device-check` whether a camera's picture should be scaled on the GPU: is it right, and would it pay?"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_runtime.app.device_check_bench import RUNS, Bench, median_ms
from edge_runtime.app.device_check_report import CheckFailed, CheckSkipped, Found
from edge_runtime.camera.av_pixels import AvPixels, frame_of
from edge_runtime.engine.tensorrt.cuda import Cuda, Event
from edge_runtime.engine.tensorrt.letterbox import SOURCE, LetterboxKernel, Source, reference
from edge_runtime.engine.tensorrt.nvrtc import kernel_image
from edge_runtime.errors import EngineError
from edge_runtime.records.spec import InputSpec
from edge_runtime.vision.pixels import factors

WIDTH, HEIGHT = 1920, 1080
_MOST_LEVELS = 0.1
"""How far a value may be from what numpy says, in levels of 0-255; bytes may be rounded the other way, so by one."""


def letterbox(bench: Bench) -> Found:
    """A picture of 1920 x 1080 px in nv12, as the hardware's decoder gives it, on the CPU and on the GPU."""
    spec = bench.bundle.input_spec(bench.variant)
    luma, chroma = _picture()
    try:
        expected = reference((luma, chroma), "nv12", spec, smooth=True)
    except EngineError as error:
        raise CheckSkipped(error.message) from None
    image = kernel_image(bench.kernels, SOURCE, bench.gpu.here, load=bench.load_library)
    owner = bench.gpu.owner
    answer, upload_ms, kernel_ms, copy_ms = owner.call(lambda: _on_gpu(owner.cuda, image, luma, chroma, spec))
    difference = np.abs(answer.astype(np.float64) - expected)
    if spec.pixel == "float32":
        difference /= np.abs(factors(spec)[0])[:, None, None]
    worst = float(difference.max()) if np.isfinite(difference).all() else float("inf")
    cpu_ms = _on_cpu(luma, chroma, spec)
    gpu_ms = copy_ms + upload_ms + kernel_ms
    numbers = {
        "source": [WIDTH, HEIGHT, "nv12"],
        "place": [spec.width, spec.height, spec.pixel],
        "cpu_ms": cpu_ms,
        "gpu_copy_ms": copy_ms,
        "gpu_upload_ms": upload_ms,
        "gpu_kernel_ms": kernel_ms,
        "levels_off": worst,
        "pays": gpu_ms < cpu_ms,
    }
    if not worst <= (_MOST_LEVELS if spec.pixel == "float32" else 1.0):
        raise CheckFailed(f"the kernel is wrong: {worst:.3g} levels off", numbers)
    told = f"on the CPU {cpu_ms:.2f} ms, on the GPU {gpu_ms:.2f} ms ({kernel_ms:.2f} of them the kernel)"
    return Found(f"{told}: it would {'' if gpu_ms < cpu_ms else 'not '}pay", numbers)


def _picture() -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    random = np.random.default_rng(7)
    rows, columns = np.mgrid[0:HEIGHT, 0:WIDTH]
    smooth = 126 + 80 * np.sin(columns / 31) * np.cos(rows / 23)
    luma = np.clip(smooth + random.normal(0, 12, smooth.shape), 16, 235).astype(np.uint8)
    return luma, random.integers(64, 192, (HEIGHT // 2, WIDTH // 2, 2), np.uint8)


def _on_cpu(luma: NDArray[np.uint8], chroma: NDArray[np.uint8], spec: InputSpec) -> float:
    planes = [(memoryview(each.tobytes()), WIDTH) for each in (luma, chroma)]
    pixels = AvPixels(frame_of("nv12", WIDTH, HEIGHT, planes, full_range=False))
    place = np.empty(spec.shape, spec.dtype)
    return median_ms(lambda: pixels.write_into(place, spec))


def _on_gpu(
    cuda: Cuda, image: bytes, luma: NDArray[np.uint8], chroma: NDArray[np.uint8], spec: InputSpec
) -> tuple[NDArray[Any], float, float, float]:
    """(the place, ms of the upload, of the kernel, of the copy into page-locked memory). On the owner's thread."""
    whole = np.concatenate((luma.reshape(-1), chroma.reshape(-1)))
    nbytes = int(np.prod(spec.shape)) * spec.dtype.itemsize
    free: list[Callable[[], None]] = []
    try:
        stream = cuda.stream()
        free.append(lambda: cuda.free_stream(stream))
        there, back = cuda.host(whole.nbytes), cuda.host(nbytes)
        free += [lambda: cuda.free_host(there), lambda: cuda.free_host(back)]
        source, place = cuda.allocate(whole.nbytes), cuda.allocate(nbytes)
        free += [lambda: cuda.free(source), lambda: cuda.free(place)]
        timers = [cuda.timer() for _ in range(3)]
        free += [_freeing(cuda, timer) for timer in timers]
        kernel = LetterboxKernel(cuda, image)
        free.append(kernel.close)
        picture = Source("nv12", WIDTH, HEIGHT, source.address, WIDTH, source.address + luma.nbytes, WIDTH)
        copy_ms = median_ms(lambda: np.copyto(there.array, whole))
        spans = []
        for _ in range(RUNS):
            cuda.record(timers[0], stream)
            cuda.copy_in(source.address, there, whole.nbytes, stream)
            cuda.record(timers[1], stream)
            kernel.enqueue(picture, place.address, spec, stream)
            cuda.record(timers[2], stream)
            cuda.synchronise(stream)
            spans.append([cuda.elapsed_ms(timers[each], timers[each + 1]) for each in range(2)])
        cuda.copy_out(back, place.address, nbytes, stream)
        cuda.synchronise(stream)
        answer = np.array(back.array).view(spec.dtype).reshape(spec.shape)
    finally:
        for each in reversed(free):
            each()
    return answer, statistics.median(span[0] for span in spans), statistics.median(span[1] for span in spans), copy_ms


def _freeing(cuda: Cuda, event: Event) -> Callable[[], None]:
    return lambda: cuda.free_event(event)
