"""Totals since the start, out of windows."""

from __future__ import annotations

from edge_runtime.app.door import History
from edge_runtime.records.window import CacheCounts, Latency, ModelWindow
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
