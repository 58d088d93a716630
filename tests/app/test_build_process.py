"""The process that builds a plan ends in every way that a process can: the daemon's thread gets a plain word, the store
has a whole plan or none, and nothing of the process is left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest

from edge_runtime import children
from edge_runtime.app import building
from edge_runtime.engine.tensorrt import build, build_child
from edge_runtime.engine.tensorrt.build import BuildFacts, build_plan
from edge_runtime.engine.tensorrt.build_child import save, save_cache
from edge_runtime.errors import EdgeError, EngineError, RefusedError
from tests.app.build_site import CACHE, HERE, LONG_AGO, PLAN, Site, check_told, check_whole, facts_line, need_of
from tests.app.build_site import sidecar_of as sidecar
from tests.awaiting import wait_until

MODEL = '{"stage": "parsing"}\n{"stage": "building", "phase": "tactics", "percent": 40.0}\n'
DONE = json.dumps(facts_line()) + "\n"
WITHIN_S = 0.7


@dataclass(frozen=True)
class Outcome:
    """What a process writes, with what shell command it ends, and what is told of it (None: the plan is there).
    `leaves`: what it leaves on the disk: all of a plan, half of one, or nothing."""

    said: str | bytes
    ending: str
    code: str | None
    words: str = ""
    retryable: bool = False
    leaves: str = "nothing"


def error_line(**more: Any) -> str:
    told = EngineError("it cannot be", code="build_failed", where="m", remedy="none").as_payload() | more
    return json.dumps({"stage": "building", "kind": "EngineError", "error": told}) + "\n"


def done_with(**more: Any) -> str:
    return json.dumps(facts_line(**more)) + "\n"


OUTCOMES: dict[str, Outcome] = {
    "it works": Outcome(MODEL + DONE, "exit 0", None, leaves="plan"),
    "it works, and hangs": Outcome(MODEL + DONE, "exec sleep 60", None, leaves="plan"),
    "it works, and crashes": Outcome(MODEL + DONE, "kill -SEGV $$", None, leaves="plan"),
    "it says nothing": Outcome("", "exit 0", "build_failed", "ended with 0 while starting", retryable=True),
    "it cannot start": Outcome(
        "", "echo 'No module named numpy' >&2; exit 1", "build_failed", "it said: No module named numpy", retryable=True
    ),
    "it ends": Outcome(MODEL, "exit 3", "build_crashed", "its process ended with 3 while building"),
    "SIGSEGV": Outcome(MODEL, "kill -SEGV $$", "build_crashed", "SIGSEGV ended its process while building"),
    "SIGABRT": Outcome(MODEL, "kill -ABRT $$", "build_crashed", "SIGABRT"),
    "SIGBUS": Outcome(MODEL, "kill -BUS $$", "build_crashed", "SIGBUS"),
    "SIGTERM": Outcome(MODEL, "kill -TERM $$", "build_failed", "from outside", retryable=True),
    "memory runs out": Outcome(
        MODEL, "kill -KILL $$", "build_memory", "memory runs out", retryable=True, leaves="half"
    ),
    "it is killed after the plan": Outcome(MODEL, "kill -KILL $$", "build_memory", retryable=True, leaves="plan"),
    "it hangs": Outcome(MODEL, "exec sleep 60", "build_hangs", "was building", retryable=True, leaves="half"),
    "it hangs, deaf": Outcome(MODEL, "trap '' TERM INT HUP; sleep 60", "build_hangs", retryable=True),
    "it closes its output": Outcome(MODEL, "exec >&-; exec sleep 60", "build_failed", "went on"),
    "it floods the log": Outcome(
        MODEL, "head -c 300000 /dev/zero | tr '\\0' x >&2; kill -SEGV $$", "build_crashed", "xxx"
    ),
    "garbage": Outcome(b"\xff\xfe\x00garbage\n", "exec sleep 60", "build_failed", "its process wrote"),
    "a line without an end": Outcome(b"x" * 200_000, "exec sleep 60", "build_failed", "without an end of line"),
    "brackets without an end": Outcome("[" * 50_000 + "\n", "exec sleep 60", "build_failed", "its process wrote"),
    "a list": Outcome("[1]\n", "exec sleep 60", "build_failed", "its process wrote"),
    "no stage": Outcome("{}\n", "exec sleep 60", "build_failed", "its process wrote"),
    "a percentage of no size": Outcome(
        f'{{"stage": "building", "percent": 1{"0" * 400}}}\n', "exec sleep 60", "build_failed", "its process wrote"
    ),
    "an error": Outcome(error_line(), "exit 0", "build_failed", "it cannot be"),
    "an error of no words": Outcome(error_line(message=None), "exit 0", "build_failed", "its process wrote"),
    "an error of other words": Outcome(error_line(more=1), "exit 0", "build_failed", "its process wrote"),
    "no disk": Outcome(
        error_line(code="store_write_failed", message="the plan cannot be written: No space left", retryable=True),
        "exit 0",
        "store_write_failed",
        "No space left",
        retryable=True,
        leaves="half",
    ),
    "a last line without facts": Outcome(
        '{"stage": "done"}\n', "exit 0", "build_failed", "cannot be read", leaves="plan"
    ),
    "a plan of no size": Outcome(
        done_with(plan_bytes=float("inf")), "exit 0", "build_failed", "cannot be read", leaves="plan"
    ),
    "a device of no kind": Outcome(
        done_with(here={**asdict(HERE), "device": 7}), "exit 0", "build_failed", "cannot be read", leaves="plan"
    ),
    "another device": Outcome(
        done_with(here=asdict(replace(HERE, driver="12.8"))),
        "exit 0",
        "plan_mismatch",
        "changed",
        retryable=True,
        leaves="plan",
    ),
    "no plan": Outcome(MODEL + DONE, "exit 0", "plan_sidecar"),
    "half a plan": Outcome(MODEL + DONE, "exit 0", "plan_sidecar", leaves="half"),
    "a plan that is torn": Outcome(MODEL + DONE, "exit 0", "plan_damaged", leaves="torn"),
    "a plan of another version": Outcome(MODEL + DONE, "exit 0", "plan_mismatch", leaves="other"),
}


class Process:
    """Stands in for the child's start: a shell that writes, and ends, as an outcome says."""

    def __init__(self, site: Site, outcome: Outcome, folder: Path) -> None:
        self.site, self.outcome, self.folder = site, outcome, folder
        self.started: list[subprocess.Popen[bytes]] = []

    def __call__(self, module: str, order: Mapping[str, Any]) -> subprocess.Popen[bytes]:
        assert module == build.MODULE
        self._leave(Path(order["plan"]), Path(order["cache"]))
        said = self.folder / "said"
        said.write_bytes(self.outcome.said.encode() if isinstance(self.outcome.said, str) else self.outcome.said)
        process = subprocess.Popen(
            ["/bin/sh", "-c", f'cat "$0"; {self.outcome.ending}', str(said)],
            bufsize=0,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self.started.append(process)
        return process

    def _leave(self, plan: Path, cache: Path) -> None:
        leaves = self.outcome.leaves
        if leaves == "half":
            plan.write_bytes(PLAN)
            plan.with_name(".plan.json.1.new").write_bytes(b"{")
        elif leaves != "nothing":
            save(plan, PLAN, sidecar(self.site.need, LONG_AGO if leaves == "other" else HERE))
            save_cache(cache, CACHE)
        if leaves == "torn":
            plan.chmod(0o644)
            plan.write_bytes(PLAN[:-1])


@pytest.mark.parametrize("name", OUTCOMES)
def test_a_process_that_ends(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = OUTCOMES[name]
    site = Site(need_of(tmp_path / "bundle"), tmp_path)
    process = Process(site, outcome, tmp_path)
    monkeypatch.setattr(children, "END_S", 0.3)
    monkeypatch.setattr(build, "start_child", process)
    monkeypatch.setattr(building, "build_plan", partial(build_plan, within_s=WITHIN_S))
    heard: list[object] = []
    failed: EdgeError | None = None
    try:
        site.maker.make(site.need, HERE, on_progress=heard.append)
    except EdgeError as error:
        failed = error
    for each in process.started:
        assert each.returncode is not None
        wait_until(partial(gone, each.pid), 5, "all of the process's group ended")
    if outcome.code is None:
        assert failed is None
        assert site.store.find(site.need.key(HERE)).fits
        assert len(heard) == 2
    else:
        assert failed is not None
        check_told(failed)
        assert (failed.code, failed.retryable) == (outcome.code, outcome.retryable), failed
        assert outcome.words in failed.message
        assert site.store.find(site.need.key(HERE)).plan is None
        assert outcome.code in ("plan_sidecar", "plan_damaged", "plan_mismatch") or site.proofs == 0
    check_whole(site)
    with site.store.building():
        pass


def gone(group: int) -> bool:
    """Whether nothing of a process group runs; who ended and was not waited for by init is no process any more."""
    found = subprocess.run(["ps", "-eo", "pgid=,stat="], capture_output=True, text=True, check=True).stdout
    rows = (line.split() for line in found.splitlines())
    return not any(int(pgid) == group and not stat.startswith("Z") for pgid, stat in rows)


def test_no_process_can_be_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site(need_of(tmp_path / "bundle"), tmp_path)

    def start(*_: object) -> None:
        raise BlockingIOError("Resource temporarily unavailable")

    monkeypatch.setattr(build, "start_child", start)
    with pytest.raises(EngineError) as caught:
        site.maker.make(site.need, HERE)
    assert (caught.value.code, caught.value.retryable) == ("build_failed", True)
    check_whole(site)


# --- two at once


def test_of_two_at_once_one_builds_and_both_have_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert at_once(tmp_path, monkeypatch, fails=False) == (["built", "there"], 1)


def test_where_the_first_of_two_fails_the_second_builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert at_once(tmp_path, monkeypatch, fails=True) == (["build_crashed", "built"], 2)


def at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, fails: bool) -> tuple[list[str], int]:
    """What became of the two, and how many builds there were."""
    need = need_of(tmp_path / "bundle")
    sites = [Site(need, tmp_path), Site(need, tmp_path)]
    begun, go = threading.Event(), threading.Event()
    builds: list[int] = []

    def slow(*arguments: object, **options: Any) -> BuildFacts:
        builds.append(1)
        begun.set()
        assert go.wait(20)
        if fails and len(builds) == 1:
            raise RefusedError("the build crashed", code="build_crashed", where="m", remedy="none")
        return sites[0].build(*arguments, **options)

    monkeypatch.setattr(building, "build_plan", slow)
    waits = threading.Event()
    real = sites[1].store._locked

    def locked(descriptor: int) -> bool:
        found = real(descriptor)
        if not found:
            waits.set()
        return found

    monkeypatch.setattr(sites[1].store, "_locked", locked)

    def make(site: Site) -> str:
        try:
            return site.maker.make(need, HERE, wait=True, cancel=threading.Event()).how
        except EdgeError as error:
            return error.code

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(make, sites[0])
        assert begun.wait(20)
        second = pool.submit(make, sites[1])
        wait_until(waits.is_set, 20, "the second waits")
        go.set()
        found = [first.result(20), second.result(20)]
    check_whole(sites[0])
    return found, len(builds)


# --- the child's own last words


class Told:
    """Takes the lines of a child in the test's process."""

    lines: ClassVar[list[dict[str, Any]]] = []

    def __init__(self) -> None:
        self.stage = "building"

    def line(self, stage: str, facts: Mapping[str, Any]) -> None:
        self.lines.append({"stage": stage, **facts})


@pytest.mark.parametrize(
    ("raised", "kind", "code", "retryable"),
    [
        (MemoryError(), "RefusedError", "build_memory", True),
        (OSError(28, "No space left on device"), "EngineError", "build_failed", True),
        (ZeroDivisionError("x"), "EngineError", "build_failed", False),
        (RefusedError("no", code="dynamic_axes"), "RefusedError", "dynamic_axes", False),
    ],
)
def test_a_child_tells_what_it_ended_with(
    monkeypatch: pytest.MonkeyPatch, raised: Exception, kind: str, code: str, retryable: bool
) -> None:
    def work(*_: object) -> None:
        raise raised

    ended: list[int] = []
    monkeypatch.setattr(Told, "lines", [])
    monkeypatch.setattr(build_child, "_work", work)
    monkeypatch.setattr(build_child, "settle", lambda *_: None)
    monkeypatch.setattr(build_child, "Report", Told)
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(sys, "argv", ["child", json.dumps({"nice": 0, "parent": 1, "root": "/bundle"})])
    build_child.main()
    (line,) = Told.lines
    assert (line["kind"], line["error"]["code"], line["error"]["retryable"]) == (kind, code, retryable)
    assert ended == [0]
