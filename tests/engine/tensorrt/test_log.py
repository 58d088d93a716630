"""TensorRT's reasons reach our errors: one logger, kept for ever, that never raises."""

from __future__ import annotations

import gc
import logging
import weakref
from enum import IntEnum
from types import SimpleNamespace

import pytest

from edge_runtime.engine.tensorrt.log import Lines, capture


class Severity(IntEnum):
    INTERNAL_ERROR = 0
    ERROR = 1
    WARNING = 2
    INFO = 3
    VERBOSE = 4


class ILogger:
    def __init__(self) -> None:
        self.ready = True

    def log(self, severity: object, msg: str) -> None:
        raise NotImplementedError


def test_one_logger_for_ever() -> None:
    trt = SimpleNamespace(ILogger=ILogger)
    logger, lines = capture(trt)
    assert logger.ready
    assert capture(trt) == (logger, lines)
    assert capture(SimpleNamespace(ILogger=ILogger))[0] is not logger
    kept = weakref.ref(logger)
    del logger, trt
    gc.collect()
    assert kept() is not None


def test_errors_are_told_before_warnings_and_only_those_since_a_mark(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    logger, lines = capture(SimpleNamespace(ILogger=ILogger))
    logger.log(Severity.ERROR, "an older one")
    mark = lines.mark()
    assert lines.tail(mark) == "it says no reason"
    logger.log(Severity.VERBOSE, "every layer")
    logger.log(Severity.INFO, "loaded")
    assert lines.tail(mark) == "it says no reason"
    logger.log(Severity.WARNING, "built on another\n   device")
    assert lines.tail(mark) == "built on another device"
    logger.log(Severity.INTERNAL_ERROR, "first")
    logger.log(Severity.ERROR, "second")
    assert lines.tail(mark) == "first; second"
    assert lines.since(mark) == ["first", "second"]
    levels = {record.getMessage(): record.levelno for record in caplog.records}
    assert levels["TensorRT: second"] == logging.ERROR
    assert levels["TensorRT: built on another device"] == logging.WARNING
    assert levels["TensorRT: loaded"] == logging.DEBUG
    assert not any("every layer" in message for message in levels)


def test_it_keeps_a_bounded_number_of_bounded_lines() -> None:
    lines = Lines(kept=10)
    for number in range(100):
        lines.add(1, f"{number} " + "x" * 10_000)
    kept = lines.since(0)
    assert [line.split()[0] for line in kept] == [str(number) for number in range(90, 100)]
    assert all(len(line) <= 2000 for line in kept)
    assert lines.since(95)[0].startswith("95")


def test_nothing_is_raised_into_tensorrt() -> None:
    logger, lines = capture(SimpleNamespace(ILogger=ILogger))
    logger.log("no severity", "x")
    logger.log(Severity.ERROR, "y")
    assert lines.tail() == "y"
