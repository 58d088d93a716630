"""One job at a time, whatever comes meanwhile, and an end that no job holds up."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

import pytest

from edge_runtime.app.loader import NICE, Loader
from edge_runtime.errors import EdgeError
from tests.awaiting import wait_until


@pytest.fixture
def loader() -> Iterator[Loader]:
    loader = Loader()
    loader.start()
    yield loader
    assert loader.stop(5.0) == []


def test_a_job_runs_on_the_loader_at_low_priority(loader: Loader) -> None:
    def job() -> tuple[str, int]:
        return threading.current_thread().name, os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    assert loader.call("a job", job) == ("loader", min(19, os.getpriority(os.PRIO_PROCESS, 0) + NICE))


def test_what_a_job_raises_reaches_whoever_called(loader: Loader) -> None:
    def job() -> None:
        raise EdgeError("no", code="bad")

    with pytest.raises(EdgeError, match="no"):
        loader.call("a job", job)
    assert loader.call("another", lambda: 3) == 3


def test_nothing_of_a_job_stays(loader: Loader) -> None:
    """An error knows the frames that it came through, and they know the model that could not be loaded."""

    class Model:
        pass

    known: list[weakref.ref[Model]] = []

    def job() -> None:
        model = Model()
        known.append(weakref.ref(model))
        raise EdgeError("no", code="bad")

    with suppress(EdgeError):
        loader.call("a job", job)
    wait_until(lambda: gc.collect() >= 0 and known[0]() is None, 5, "the loader has forgotten it")


def test_a_second_one_is_told_to_wait_and_a_posted_one_waits(loader: Loader) -> None:
    gate, began, done = threading.Event(), threading.Event(), []

    def hold() -> str:
        began.set()
        assert gate.wait(10)
        return "first"

    with ThreadPoolExecutor(1) as pool:
        first: Future[str] = pool.submit(loader.call, "model a: reload", hold)
        assert began.wait(10)
        with pytest.raises(EdgeError, match="under way: model a: reload") as caught:
            loader.call("model b: reload", lambda: None)
        assert (caught.value.code, caught.value.retryable) == ("busy", True)
        # the configuration that was read last is what counts
        loader.post("SIGHUP", lambda: done.append("old"))
        loader.post("SIGHUP", lambda: done.append("new"))
        gate.set()
        assert first.result(10) == "first"
    wait_until(lambda: done == ["new"], 10, "the posted job ran")


def test_posted_jobs_of_different_names_all_come(loader: Loader) -> None:
    gate, done = threading.Event(), []
    loader.post("hold", lambda: done.append("held") if gate.wait(10) else None)
    for name in ("SIGHUP", "a plan", "SIGHUP"):
        loader.post(name, lambda name=name: done.append(name))  # type: ignore[misc]
    gate.set()
    wait_until(lambda: done == ["held", "SIGHUP", "a plan"], 10, "both ran, each once")


def test_stop_tells_the_job_and_refuses_the_next() -> None:
    loader = Loader()
    loader.start()
    began = threading.Event()

    def job() -> bool:
        began.set()
        return loader.cancel.wait(10)

    with ThreadPoolExecutor(1) as pool:
        running: Future[bool] = pool.submit(loader.call, "a job", job)
        assert began.wait(10)
        assert loader.stop(5.0) == []
        assert running.result(5) is True
    with pytest.raises(EdgeError) as caught:
        loader.call("another", lambda: None)
    assert caught.value.code == "stopping"
    loader.post("one more", lambda: None)
