"""Totals since the start, out of windows."""

from __future__ import annotations

from edge_runtime.app.door import History
from edge_runtime.records.window import CacheCounts, CameraWindow, DecodeWindow, Latency, ModelWindow, SourceCounts
from tests.web.doors import window


def of_engine(engine: str, cache: CacheCounts | None) -> ModelWindow:
    nothing = Latency(p50=None, p99=None, buckets=[])
    return ModelWindow(
        name="detector",
        engine=engine,
        variant="v",
        backend="b",
        frames=window().frames,
        batch_mean=None,
        latency_ms=nothing,
        inference_ms=nothing,
        cache=cache,
    )


def test_what_a_cache_was_asked_adds_up_over_windows_and_engines() -> None:
    history = History()
    assert history.cache("detector") is None
    two = [of_engine("one", CacheCounts(lookups=3, hits=2, misses=1)), of_engine("two", CacheCounts(bypassed=20))]
    history.add(window(0).model_copy(update={"models": two}))
    history.add(window(1).model_copy(update={"models": [of_engine("two", None)]}))
    history.add(window(2).model_copy(update={"models": [of_engine("two", CacheCounts(lookups=1, hits=1))]}))
    assert history.cache("detector") == CacheCounts(lookups=4, hits=3, misses=1, bypassed=20)
    assert history.cache("other") is None


def of_camera(name: str, model: str = "detector", decoded: int = 10, backend: str | None = "pyav") -> CameraWindow:
    counts = SourceCounts(decoded=decoded, skipped_rate=1, skipped_codec=0, corrupt=0, pre_key=0, duplicate=0)
    decode = DecodeWindow(cpu_s=0.5, saved_cpu_s=0.25, opened=1, backend=backend)
    return CameraWindow(
        name=name,
        model=model,
        state="up",
        reason=None,
        frames=window().frames,
        source=counts,
        decode=None if backend is None else decode,
        fps=14.8,
        latency_ms=Latency(p50=None, p99=None, buckets=[]),
    )


def test_what_a_source_gave_adds_up_once_for_all_its_models_and_ends_with_its_camera() -> None:
    history = History()
    assert history.source("gate") == (None, None)
    both = [of_camera("gate"), of_camera("gate", "other"), of_camera("yard", backend=None)]
    for number in range(3):
        history.add(window(number).model_copy(update={"cameras": both}))
    counts, decode = history.source("gate")
    assert counts is not None
    assert decode is not None
    assert (counts.decoded, counts.skipped_rate) == (30, 3)
    assert decode.model_dump() == {"cpu_s": 1.5, "saved_cpu_s": 0.75, "opened": 3, "backend": "pyav"}
    assert history.source("yard")[1] is None
    assert history.camera("gate", "other")[0].completed == 3 * 148
    # removed, it ends; back again, it begins anew, and the others go on
    history.add(window(3).model_copy(update={"cameras": [of_camera("yard")]}))
    assert history.source("gate") == (None, None)
    assert history.camera("gate", "other")[0].completed == 0
    history.add(window(4).model_copy(update={"cameras": [of_camera("yard"), of_camera("gate")]}))
    found = [history.source(name)[0] for name in ("gate", "yard")]
    assert [None if each is None else each.decoded for each in found] == [10, 50]
