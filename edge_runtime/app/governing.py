"""The governor of a daemon: what it sees of the other rooms, what it does to them, and what is told of it."""

from __future__ import annotations

import dataclasses
import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Mapping

from edge_runtime.app.budget import profile_path
from edge_runtime.app.cameras import CameraKeeper
from edge_runtime.app.keeper import ModelKeeper
from edge_runtime.app.machine import Machine
from edge_runtime.config import Config
from edge_runtime.errors import ConfigError
from edge_runtime.governor.controller import Controller
from edge_runtime.governor.lease import PointLease
from edge_runtime.governor.loop import PERIOD_S, GovernorLoop, Look
from edge_runtime.governor.profile import Profile, load_profile
from edge_runtime.governor.readings import safe_point
from edge_runtime.hardware.protocol import ClockControl
from edge_runtime.hardware.sampler import Sampler
from edge_runtime.pipeline.pipeline import Pipeline, Work
from edge_runtime.records.governing import (
    Budget,
    CameraSeen,
    CameraSite,
    Decision,
    GovernorSample,
    LimitWord,
    ModelSeen,
    ModelSite,
    Operating,
    OperatingPoint,
    Site,
)
from edge_runtime.records.power import Unavailable

log = logging.getLogger(__name__)

OLD_PERIODS = 2.0
"""A reading older than so many of its source's periods is none: the next one ought to have come twice by now."""
OLD_S = 0.3
"""The same where that is less: threads come late on a device that is busy."""
FIND_CLOCK_S = 30.0
MOST_PERIOD_S = 0.5
"""The lease and the supervisor want it to go round, however seldom a sensor is read."""
SLOW_PERIOD_S = 1.0
"""Of a source whose period is not known here."""
OC3_S = 60.0
FIRST_NS = 1_000_000_000
NO_LIMIT = sys.maxsize
LAPSED = "the governor does not answer"

Tell = Callable[[Decision, Budget, GovernorSample], None]


class Governing:
    """Owns the thread "governor". `_look`, `_act` and what they call run there; `begin` before it, on any other.

    `profile`: what engines cost on this device, as far as that is known; `profile_trouble`: why that which is there is
    not used. `clock`: a cap of the GPU's clock, if there is one. `tell` gets every decision. `hold`: why the safe point
    is to be kept to, if it is: see Controller.held.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        keeper: ModelKeeper,
        cameras: CameraKeeper,
        budget: Callable[[], Budget],
        sampler: Sampler,
        *,
        profile: Profile | None,
        profile_trouble: str | None = None,
        clock: ClockControl | None,
        tell: Tell,
        hold: Callable[[], str | None] = lambda: None,
        on_death: Callable[[str, BaseException], None] | None = None,
    ) -> None:
        self._hold = hold
        self._pipeline = pipeline
        self._keeper = keeper
        self._cameras = cameras
        self._budget = budget
        self._sampler = sampler
        self._profile = profile
        self._profile_trouble = profile_trouble
        self._clock = clock
        self._clock_lock = threading.Lock()  # a lapse may come while the governor hangs in a call
        self._clock_reason: str | None = None
        self._clocks_hz: tuple[float, ...] = ()
        self._t_clock_s = -FIND_CLOCK_S
        self._tell = tell
        self._controller = Controller()
        self._lease = PointLease(self._act)
        self._loop = GovernorLoop(
            self._look,
            self._lease,
            self._told,
            controller=self._controller,
            period_s=self._period_s,
            hold=hold,
            on_death=on_death,
        )
        self._operating = Operating(budget())
        self._applied: OperatingPoint | None = None
        self._latency_ms: float | None = None
        self._complete = True  # all of the point that was applied last is in force
        self._free = True  # nothing is held back
        self._trouble: str | None = None
        self._t_ns = time.monotonic_ns()
        # with what the sampler has read before: the first look must not be one without power
        self._t_power_ns = self._t_ns - FIRST_NS
        self._power_w: float | None = None
        self._decoded: dict[int, int] = {}
        self._work: dict[str, Work] = {}
        self._cached: dict[str, int] = {}
        self._t_oc3_s = -math.inf
        self._over_current: Mapping[str, int] = {}

    # --- life

    def begin(self) -> None:
        """Apply the point to begin with, so that nothing is overshot before the first look. Before `start`."""
        budget = self._budget()
        if budget != Budget():
            site = self._site(self._find_clocks())
            self._lease.grant(self._controller.begin(site, budget), safe_point(site), time.monotonic_ns())

    def start(self) -> None:
        self._loop.start()

    def stop(self, deadline_s: float = 0.3) -> list[str]:
        """Decide nothing more: what is in force stays. The thread's name where it did not end."""
        return self._loop.stop(deadline_s)

    def close(self) -> None:
        """Let the GPU's clock go; once nothing runs any more."""
        if self._clock is not None and self._clock_lock.acquire(timeout=0.2):
            try:
                self._clock.close()
            finally:
                self._clock_lock.release()

    @property
    def tick_ns(self) -> int:
        """When the loop went round last, monotonic."""
        return self._loop.tick_ns

    def check(self) -> None:
        """Take back a point that nobody renews. For another thread than the governor's."""
        if not self._lease.check(time.monotonic_ns()):
            return
        self._trouble = LAPSED
        before, point = self._operating, self._applied
        if point is not None:
            limits: dict[str, LimitWord] = dict.fromkeys(point.fps, "caution")
            decision = Decision(point, "safe", LAPSED, limits, changed=True)
            self._operating = dataclasses.replace(before, decision=decision, changes=before.changes + 1)

    def operating(self) -> Operating:
        """How this device is governed now. Any thread."""
        return dataclasses.replace(self._operating, budget=self._budget())

    def alarms(self) -> list[str]:
        """What keeps a budget from being held as it should, without numbers. Any thread."""
        trouble = None if self._trouble is None else f"the safe point is in force: {self._trouble}"
        decision = self._operating.decision
        derated = None
        if decision is not None and decision.state == "derating":
            why = ", ".join(sorted(set(decision.limits.values()))) or "a lighter variant"
            derated = f"derated: {why}"
        oc3 = None
        if time.monotonic() - self._t_oc3_s < OC3_S:
            oc3 = "over-current input 3 (instantaneous) has triggered: look at the power supply"
        return [each for each in (trouble, derated, oc3, self._profile_trouble) if each is not None]

    # --- what there is and what it does; on the governor's thread

    def _period_s(self) -> float:
        origin = self._sampler.power_origin()
        return PERIOD_S if origin is None else min(max(PERIOD_S, origin.period_s), MOST_PERIOD_S)

    def _look(self) -> Look | None:
        budget = self._budget()
        self._allow(budget.latency_p99_ms)
        if budget == Budget() and self._free:
            # a budget that comes finds the last second, and not all the time since the last one went
            self._sample(self._site(()))
            return None
        site = self._site(self._find_clocks())
        return Look(site, budget, self._sample(site))

    def _allow(self, latency_ms: float | None) -> None:
        """Let lanes leave out what would come too late."""
        if latency_ms != self._latency_ms:
            self._latency_ms = latency_ms
            for pipe in self._pipeline.models.values():
                pipe.desk.set_latency_limit(None if latency_ms is None else latency_ms / 1e3)

    def _site(self, clocks_hz: tuple[float, ...]) -> Site:
        wanted = self._cameras.wanted()
        cameras = tuple(
            CameraSite(
                each.name, each.models, wanted.get(each.name), each.min_fps or 0.0, each.priority, each.pace == "max"
            )
            for each in self._cameras.cameras()
        )
        models = tuple(self._known(model) for model in self._keeper.site_models() if model.variants)
        return Site(cameras, models, clocks_hz, self._period_s())

    def _known(self, model: ModelSite) -> ModelSite:
        """With what the profile knows of its variants."""
        if self._profile is None:
            return model
        engines = {each.info.variant: each.info.digest for each in self._pipeline.models[model.name].desk.ladder()}
        variants = []
        for variant in model.variants:
            engine = engines.get(variant.name)
            costs = None if engine is None else self._profile.costs(engine, lanes=model.lanes)
            variants.append(
                variant if costs is None else dataclasses.replace(variant, busy_s=costs.busy_s, joules=costs.joules)
            )
        return dataclasses.replace(model, variants=tuple(variants))

    def _find_clocks(self) -> tuple[float, ...]:
        if self._clock is None:
            return ()
        now_s = time.monotonic()
        # also where there are some: another power mode has others
        if now_s - self._t_clock_s >= FIND_CLOCK_S:
            self._t_clock_s = now_s
            with self._clock_lock:
                reason = self._clock.find()
                self._clocks_hz = self._clock.steps_hz() if reason is None else ()
            self._note_clock(reason)
        return self._clocks_hz

    def _note_clock(self, reason: str | None) -> None:
        if reason != self._clock_reason:
            log.info("the GPU's clock %s", "can be capped" if reason is None else f"is not capped: {reason}")
        self._clock_reason = reason

    def _sample(self, site: Site) -> GovernorSample:
        now_ns = time.monotonic_ns()
        since_ns, self._t_ns = self._t_ns, now_ns
        power_w, power_reason = self._power(now_ns)
        thermal = self._sampler.temperature()
        tj_c, tj_reason, throttling, over_current = None, None, None, self._over_current
        if isinstance(thermal, Unavailable):
            tj_reason = thermal.reason
        elif (age_s := (now_ns - thermal.t_ns) / 1e9) > self._old_s(thermal.source):
            tj_reason = f"the last reading is {age_s:.1f} s old"
        else:
            tj_c, throttling, over_current = thermal.tj_c, thermal.throttling, thermal.over_current
        # counts since the source was first read: another source begins anew
        new = {name: max(0, count - self._over_current.get(name, count)) for name, count in over_current.items()}
        self._over_current = over_current
        if new.get("oc3", 0) > 0:
            self._t_oc3_s = now_ns / 1e9
            log.warning("over-current input 3 (instantaneous) has triggered: look at the power supply")
        origin = self._sampler.power_origin()
        capped = None if not self._clocks_hz or self._applied is None else self._applied.gpu_hz
        return GovernorSample(
            t_ns=now_ns,
            span_s=max(1e-3, (now_ns - since_ns) / 1e9),
            power_w=power_w,
            tj_c=tj_c,
            cameras=self._seen(),
            models={model.name: self._model(model.name, since_ns) for model in site.models},
            power_reason=power_reason,
            tj_reason=tj_reason,
            quantum_w=None if origin is None else origin.quantum_w,
            throttling=throttling,
            over_current=new,
            gpu_hz=capped,
        )

    def _old_s(self, source: str) -> float:
        """From which age on a reading of a source is none, s."""
        origin = self._sampler.power_origin()
        period_s = origin.period_s if origin is not None and origin.source == source else SLOW_PERIOD_S
        return max(OLD_S, OLD_PERIODS * period_s)

    def _power(self, now_ns: int) -> tuple[float | None, str | None]:
        if readings := self._sampler.readings_since(self._t_power_ns):
            self._t_power_ns = readings[-1][0]
            self._power_w = sum(watts for _, watts in readings) / len(readings)
            return self._power_w, None
        origin = self._sampler.power_origin()
        if origin is None:
            return None, self._sampler.none_reason or "there is none"
        age_s = (now_ns - self._t_power_ns) / 1e9
        fresh = age_s <= self._old_s(origin.source) and self._sampler.watts() is not None
        if self._power_w is not None and fresh:
            return self._power_w, None
        return None, self._sampler.none_reason or f"the last reading is {age_s:.1f} s old"

    def _seen(self) -> dict[str, CameraSeen]:
        seen, before, self._decoded = {}, self._decoded, {}
        for view in self._pipeline.cameras():
            decoded = self._decoded[view.serial] = view.source.decoded
            offered = max(0, decoded - before.get(view.serial, decoded))
            seen[view.name] = CameraSeen(offered, view.status.state == "up")
        return seen

    def _model(self, name: str, since_ns: int) -> ModelSeen:
        work = self._pipeline.work(name)
        before = self._work.get(name, work)
        self._work[name] = work
        latencies_ns = self._pipeline.ledger.latencies_since(name, since_ns)
        cached = self._pipeline.ledger.totals(name).cached
        cached_before, self._cached[name] = self._cached.get(name, cached), cached
        return ModelSeen(
            variant=work.variant,
            busy_s=max(0, work.busy_ns - before.busy_ns) / 1e9,
            frames=work.frames - before.frames,
            batches=work.batches - before.batches,
            latencies_ms=tuple(each / 1e6 for each in latencies_ns),
            changing=self._keeper.changing(name),
            cached=max(0, cached - cached_before),
        )

    # --- what is done

    def _act(self, point: OperatingPoint) -> None:
        """Apply a point. On the governor's thread, and on the one that calls `check`, never at the same time."""
        for name, fps in point.fps.items():
            self._cameras.limit(name, fps)
        # all of it every time: a configuration that was read again, or another engine, may have changed it meanwhile
        complete = True
        for name, variant in point.variants.items():
            desk = self._pipeline.models[name].desk
            resident = desk.resident()
            if resident is None:
                # what comes next must not find what was meant for another one
                desk.set_batch_limit(NO_LIMIT)
                continue
            # who may have all of an engine's places is not held to so many when a larger one comes
            desk.set_batch_limit(point.batch[name] if point.batch[name] < resident.places else NO_LIMIT)
            desk.set_batch_timeout(point.batch_timeout_ms[name] / 1e3)
            if resident.info.variant != variant:
                complete &= self._keeper.prefer(name, variant)
        self._complete, self._free = complete, False
        if self._clock is not None and self._clocks_hz and self._clock_lock.acquire(timeout=0.5):
            try:
                reason = self._clock.cap(point.gpu_hz)
            finally:
                self._clock_lock.release()
            self._note_clock(reason)
            if reason is not None:
                self._clocks_hz = ()
        self._applied = point

    def _told(self, decision: Decision, look: Look) -> None:
        self._free = decision.state == "off" and self._complete
        self._trouble = (self._hold() or _why_safe(look)) if decision.state == "safe" else None
        changes = self._operating.changes + decision.changed
        estimates = self._controller.estimates(look.site, look.sample)
        self._operating = Operating(look.budget, decision, changes, estimates)
        self._tell(decision, look.budget, look.sample)


def _why_safe(look: Look) -> str:
    budget, sample = look.budget, look.sample
    needed = (("power", budget.power_w, sample.power_w), ("temperature", budget.temperature_c, sample.tj_c))
    missing = [name for name, limit, value in needed if limit is not None and value is None]
    return f"no reading of {' and '.join(missing)}" if missing else "readings are in doubt"


def find_profile(config: Config, machine: Machine) -> tuple[Profile | None, str | None]:
    """This device's own profile, if there is one that can be used; and what is wrong with the one that cannot."""
    path = profile_path(config)
    if path is None:
        return None, None
    try:
        profile = load_profile(path)
    except ConfigError as error:
        return None, f"the profile is not used: {error.problems[0]}"
    why = machine.lacks(profile)
    return (profile, None) if why is None else (None, f"the profile is not used: {path}: {why}")
