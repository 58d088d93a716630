"""A model's batch size, batch time-out and share of lane time, from the live latencies of its completed frames.

Additive up, multiplicative down. A frame over the budget is evidence once: after a cut only what completes later
counts, so that one surge is not paid for several times. What was tried and failed is tried again later and later.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from edge_runtime.records.governing import ModelSeen, ModelSite

MOST_UTILISATION = 0.95
"""Lane time that may be planned for: what is left goes to writing and decoding pictures, which busy time leaves out."""


@dataclass(frozen=True, slots=True)
class Tuning:
    """What a model may do. `utilisation`: the share of lane time that may be planned for. `p99_ms`: of the newest
    frames, None before the first. `overloaded`: more is offered than fits into that share, for long enough to act on.
    """

    batch: int
    batch_timeout_ms: float
    utilisation: float
    p99_ms: float | None
    overloaded: bool


@dataclass(frozen=True, slots=True)
class Work:
    """Sums of what lanes did, older parts fading."""

    busy_s: float = 0.0
    frames: float = 0.0
    batches: float = 0.0

    def per_frame_s(self) -> float:
        """Lane seconds per frame; infinite before the first."""
        return self.busy_s / self.frames if self.frames > 0 else math.inf

    def per_run_s(self) -> float:
        """Lane seconds per batch; infinite before the first."""
        return self.busy_s / self.batches if self.batches > 0 else math.inf


@dataclass(frozen=True, slots=True)
class Trial:
    """Another batch size on trial since `t_s`; what a frame cost with the one before, and what it has cost since."""

    before: int
    before_s: float
    t_s: float
    busy_s: float = 0.0
    frames: int = 0


@dataclass(frozen=True, slots=True)
class TunerState:
    """What is known of a model. Times are seconds of samples, from 0.

    `window`: (time, latencies in ms) of the newest samples. `few`: they are too few for a 99th percentile; then one
    late frame proves nothing. `t_evidence_s`: what completed after it is evidence. `share`: the share of lane time in
    use, peaks fading. `refused`: (variant, batch size, until when) of sizes that did not pay. `ceiling`: a utilisation
    that was too much lies above it; it stays until `t_ceiling_s`, and `hold_s` is for how long the last one did.
    `t_surge_s`: when lanes were last found busier than any plan. `over_s`, `calm_s`: for how long the load has been too
    much, and comfortable; `back_s`: how long it has to be comfortable, `t_back_s`: when it last had been.
    """

    t_s: float = 0.0
    variant: str | None = None
    batch: int = 0
    batch_timeout_ms: float = math.inf
    utilisation: float = MOST_UTILISATION
    window: tuple[tuple[float, tuple[float, ...]], ...] = ()
    few: bool = True
    t_evidence_s: float = 0.0
    work: Work = field(default_factory=Work)
    share: float = 0.0
    trial: Trial | None = None
    refused: tuple[tuple[str, int, float], ...] = ()
    ceiling: float = MOST_UTILISATION
    t_ceiling_s: float = 0.0
    hold_s: float = 0.0
    t_surge_s: float = -math.inf
    offered_hz: float = 0.0
    overloaded: bool = False
    over_s: float = 0.0
    calm_s: float = 0.0
    back_s: float = 0.0
    t_back_s: float = -math.inf


@dataclass(frozen=True, slots=True)
class Tuner:
    """How latencies are answered. Made for a step every 0.25 s; nothing depends on its being exactly that."""

    window_s: float = 2.0
    """Latencies older than this say little about now ..."""
    window_frames: int = 200
    """... unless there are fewer than these: a 99th percentile of less is the slowest frame or the one beside it."""
    least_utilisation: float = 0.5
    """Below it latency is no matter of queueing any more: cameras in step, or a run that takes too long by itself."""
    cut: float = 0.85
    """Two cuts in a row reach the level at which a random queue of several lanes hardly waits (0.95 -> 0.69)."""
    rise: float = 0.02
    """Per step: back from a cut in about two seconds, as long as a window, so that a rise is judged by what it did."""
    shrink: float = 0.5
    runs: float = 2.0
    """A batch is halved where so many runs of it do not fit into the budget: one that is under way, and its own."""
    room: float = 0.9
    """Share of the budget below which there is room for more: the rest is what two windows differ by."""
    plan_slack: float = 0.03
    surge_s: float = 2.0
    """Lanes busier than planned by this: the plan is not in force yet. For so long that is a surge, and says nothing
    about the plan; after it the plan does not hold them."""
    back_off: float = 0.03
    """How far below a utilisation that was too much the ceiling lies: more than one rise."""
    probe_s: float = 5.0
    """How long a utilisation above the last ceiling is lived with before the next: more than two windows."""
    hold_s: float = 10.0
    most_hold_s: float = 160.0
    """How long a ceiling stays the first time, and at most: so that what fails again is tried again less and less."""
    settle_s: float = 0.25
    most_settle_s: float = 1.0
    """How long after a change frames still come out that were captured before it: the latency itself, within these."""
    sure_s: float = 1.0
    """No rise before so much evidence since the last change."""
    sure_frames: int = 10
    memory_s: float = 1.0
    """Fading of what a frame costs: long enough for a few runs of the slowest models, short against a surge's end."""
    cost_frames: float = 5.0
    """With fewer the cost that was measured at load counts."""
    gain: float = 0.95
    """A larger batch has to make a frame cheaper by 5 %: more than noise, and worth its longer run."""
    full: float = 0.9
    """Batches this full on average would take more."""
    busy: float = 0.85
    """Share of the plan from which the lanes are busy enough for larger batches to matter, and below which there is
    comfortable room."""
    trial_s: float = 2.0
    trial_frames: int = 40
    """How long a batch size is tried: the cost of a frame then is known to within the 5 %."""
    trial_most_s: float = 10.0
    """A trial in which no frames come ends, too."""
    useless_s: float = 300.0
    """A size that brought nothing is not asked again before: neither the engine nor its device has changed."""
    late_s: float = 30.0
    """A size that was halved may have been halved for the surge's sake."""
    over_s: float = 0.5
    """Two steps in a row: a camera of few frames a second brings twice its rate in single steps."""
    back_s: float = 10.0
    most_back_s: float = 160.0
    """How long there has to be comfortable room, the first time and at most; doubled where it did not last."""
    offered_s: float = 2.0
    """Fading of the offered load where comfort is judged: no single step ends it."""

    def step(
        self,
        model: ModelSite,
        budget_ms: float | None,
        seen: ModelSeen,
        span_s: float,
        offered_hz: float,
        state: TunerState,
    ) -> tuple[TunerState, Tuning]:
        """What to do from now on, `span_s` after the step before. `offered_hz`: frames a second that are wanted of the
        model. Without a latency budget everything is as configured."""
        state = replace(state, t_s=state.t_s + span_s)
        if seen.variant is not None and (seen.frames > 0 or seen.latencies_ms):
            state = self._took_in(model.lanes, seen, span_s, state)
        if budget_ms is None:
            state = TunerState(state.t_s, state.variant, window=state.window, few=state.few, work=state.work)
            return state, _tuning(model, state, sizes_of(model))
        sizes = sizes_of(model)
        batch = _at_most(sizes, state.batch) if state.batch else sizes[-1]
        timeout_ms = min(state.batch_timeout_ms, model.batch_timeout_ms)
        state = replace(state, batch=batch, batch_timeout_ms=timeout_ms)
        if seen.variant is None:
            return state, _tuning(model, state, sizes)
        late = False
        if seen.frames > 0 or seen.latencies_ms:
            late = self._is_late(budget_ms, state)
            load = self._load(model, offered_hz, state)
            if late:
                # at the least utilisation nothing is left to cut but the model itself
                state = replace(state, overloaded=state.overloaded or state.utilisation <= self.least_utilisation)
                state = self._cut(model, sizes, budget_ms, state)
            elif (p99_ms := self._sure_ms(state)) is not None and p99_ms <= self.room * budget_ms:
                state = self._raised(model, state)
                state = self._tried_batch(sizes, budget_ms, p99_ms, load, state)
            state = self._judged_trial(state)
        state = self._weighed(model, offered_hz, span_s, late, state)
        return state, _tuning(model, state, sizes)

    # --- evidence

    def _took_in(self, lanes: int, seen: ModelSeen, span_s: float, state: TunerState) -> TunerState:
        if seen.variant != state.variant:
            # what another variant did says nothing about this one, but for the share of time that was too much
            settled = state.t_s + self.settle_s if state.variant is not None else 0.0
            state = replace(state, variant=seen.variant, work=Work(), trial=None, window=(), t_evidence_s=settled)
            state = replace(state, ceiling=MOST_UTILISATION, t_ceiling_s=0.0, hold_s=0.0)
        keep = math.exp(-span_s / self.memory_s)
        work = state.work
        work = Work(
            work.busy_s * keep + seen.busy_s,
            work.frames * keep + seen.frames,
            work.batches * keep + seen.batches,
        )
        share = max(seen.busy_s / (span_s * lanes), state.share * keep)
        trial = state.trial
        if trial is not None:
            trial = replace(trial, busy_s=trial.busy_s + seen.busy_s, frames=trial.frames + seen.frames)
        window = state.window
        if seen.latencies_ms:
            window = (*window, (state.t_s, seen.latencies_ms))
        count = sum(len(latencies) for _, latencies in window)
        first = 0
        while window and window[first][0] <= state.t_s - self.window_s:
            if count - len(window[first][1]) < self.window_frames:
                break
            count -= len(window[first][1])
            first += 1
        few = count < self.window_frames
        return replace(state, work=work, share=share, trial=trial, window=window[first:], few=few)

    def _evidence(self, state: TunerState) -> list[tuple[float, ...]]:
        return [latencies for t_s, latencies in state.window if t_s > state.t_evidence_s]

    def _is_late(self, budget_ms: float, state: TunerState) -> bool:
        """Whether more than one frame in a hundred is over the budget. Not one alone, nor in one sample alone: anything
        may hold a device up once."""
        evidence = self._evidence(state)
        over = [sum(latency > budget_ms for latency in latencies) for latencies in evidence]
        count = sum(map(len, evidence))
        return sum(over) > max(1, count / 100) and sum(map(bool, over)) > 1

    def _sure_ms(self, state: TunerState) -> float | None:
        """The 99th percentile, once there is enough to go by since the last change; of few frames it is the slowest."""
        latencies = sorted(latency for chunk in self._evidence(state) for latency in chunk)
        if len(latencies) < self.sure_frames or state.t_s - state.t_evidence_s < self.sure_s:
            return None
        return percentile(latencies)

    def _load(self, model: ModelSite, offered_hz: float, state: TunerState) -> float:
        """The share of lane time that so many frames a second would take; 0 where nobody knows what one costs."""
        busy_s: float | None = state.work.per_frame_s()
        if state.work.frames < self.cost_frames:
            busy_s = next((each.busy_s for each in model.variants if each.name == state.variant), None)
        return 0.0 if busy_s is None else offered_hz * busy_s / model.lanes

    # --- answers

    def _cut(self, model: ModelSite, sizes: Sequence[int], budget_ms: float, state: TunerState) -> TunerState:
        latencies = sorted(latency for chunk in self._evidence(state) for latency in chunk)
        settle_s = min(max(self.settle_s, percentile(latencies) / 1e3), self.most_settle_s)
        # a plan that is not used up is no limit: the cut is one from what was in use
        used = min(state.utilisation, max(state.share, self.least_utilisation))
        utilisation = max(self.least_utilisation, self.cut * used)
        surges = state.share > state.utilisation + self.plan_slack
        if surges and state.t_s - state.t_surge_s > self.hold_s:
            state = replace(state, t_surge_s=state.t_s)
        if not surges or state.t_s - state.t_surge_s >= self.surge_s:
            hold_s = min(2 * state.hold_s, self.most_hold_s) if state.hold_s else self.hold_s
            ceiling = max(self.least_utilisation, used - self.back_off)
            state = replace(state, ceiling=ceiling, t_ceiling_s=state.t_s + hold_s, hold_s=hold_s)
        state = self._halved(sizes, budget_ms, state)
        timeout_ms = self.shrink * state.batch_timeout_ms
        if timeout_ms < model.batch_timeout_ms / 100:
            timeout_ms = 0.0
        t_evidence_s = state.t_s + settle_s
        return replace(state, utilisation=utilisation, batch_timeout_ms=timeout_ms, t_evidence_s=t_evidence_s)

    def _halved(self, sizes: Sequence[int], budget_ms: float, state: TunerState) -> TunerState:
        """Half the batch: for good where it takes too long by itself, else on trial, since where frames are late for
        waiting, batches that make them cheaper are what helps."""
        half, trial, work = _at_most(sizes, state.batch // 2), state.trial, state.work
        if trial is not None and trial.before < state.batch:
            state = self._refused(state.batch, self.useless_s, state)
            return replace(state, batch=trial.before, trial=None, work=Work())
        if half == state.batch:
            return state
        if work.per_run_s() * self.runs * 1e3 > budget_ms:
            state = self._refused(state.batch, self.late_s, state)
            return replace(state, batch=half, trial=None, work=Work())
        if trial is not None or work.frames < self.cost_frames or self._is_refused(half, state):
            return state
        return replace(state, batch=half, trial=Trial(state.batch, work.per_frame_s(), state.t_s), work=Work())

    def _raised(self, model: ModelSite, state: TunerState) -> TunerState:
        if state.ceiling < MOST_UTILISATION and state.t_s >= state.t_ceiling_s:
            ceiling = min(MOST_UTILISATION, state.ceiling + self.rise)
            state = replace(state, ceiling=ceiling, t_ceiling_s=state.t_s + self.probe_s)
            if ceiling == MOST_UTILISATION:
                state = replace(state, hold_s=0.0)
        return replace(
            state,
            utilisation=max(state.utilisation, min(state.utilisation + self.rise, state.ceiling)),
            batch_timeout_ms=min(model.batch_timeout_ms, state.batch_timeout_ms + model.batch_timeout_ms / 20),
        )

    def _tried_batch(
        self, sizes: Sequence[int], budget_ms: float, p99_ms: float, load: float, state: TunerState
    ) -> TunerState:
        """Put the next size on trial, where it can help: lanes are busy and batches are full."""
        following = bisect.bisect_right(sizes, state.batch)
        if state.trial is not None or following == len(sizes) or state.work.frames < self.cost_frames:
            return state
        size, work = sizes[following], state.work
        busy = state.overloaded or load > self.busy * state.utilisation
        full = work.frames >= self.full * state.batch * work.batches
        longer_ms = (size - state.batch) * work.per_frame_s() * 1e3
        if not busy or not full or p99_ms + longer_ms > budget_ms or self._is_refused(size, state):
            return state
        trial = Trial(state.batch, work.per_frame_s(), state.t_s)
        return replace(state, batch=size, trial=trial, work=Work(), t_evidence_s=state.t_s + self.settle_s)

    def _judged_trial(self, state: TunerState) -> TunerState:
        trial = state.trial
        if trial is None:
            return state
        since_s = state.t_s - trial.t_s
        if since_s < self.trial_most_s and (since_s < self.trial_s or trial.frames < self.trial_frames):
            return state
        larger_s, smaller_s = trial.busy_s, trial.before_s * trial.frames
        if trial.before > state.batch:
            larger_s, smaller_s = smaller_s, larger_s
        pays = trial.frames > 0 and larger_s <= self.gain * smaller_s
        stays = pays == (state.batch > trial.before)
        state = self._refused(trial.before if stays else state.batch, self.useless_s, state)
        if stays:
            return replace(state, trial=None)
        return replace(state, trial=None, batch=trial.before, work=Work(), t_evidence_s=state.t_s + self.settle_s)

    def _is_refused(self, size: int, state: TunerState) -> bool:
        return any(each[:2] == (state.variant, size) and each[2] > state.t_s for each in state.refused)

    def _refused(self, size: int, for_s: float, state: TunerState) -> TunerState:
        assert state.variant is not None
        others = [each for each in state.refused if each[2] > state.t_s and each[:2] != (state.variant, size)]
        return replace(state, refused=(*others, (state.variant, size, state.t_s + for_s)))

    # --- overload

    def _weighed(self, model: ModelSite, offered_hz: float, span_s: float, late: bool, state: TunerState) -> TunerState:
        """Whether more is offered than there is time for: soon, and no longer only after it has lasted."""
        smooth_hz = offered_hz + (state.offered_hz - offered_hz) * math.exp(-span_s / self.offered_s)
        pressed = self._load(model, offered_hz, state) > state.utilisation
        comfort = self._load(model, smooth_hz, state) < self.busy * state.utilisation and not late
        state = replace(
            state,
            offered_hz=smooth_hz,
            over_s=state.over_s + span_s if pressed else 0.0,
            calm_s=state.calm_s + span_s if comfort and not pressed else 0.0,
        )
        was = state.overloaded
        if state.over_s >= self.over_s:
            state = replace(state, overloaded=True)
        if was and state.calm_s >= max(state.back_s, self.back_s):
            return replace(state, overloaded=False, t_back_s=state.t_s)
        if state.overloaded and not was and state.t_back_s > -math.inf:
            relapsed = state.t_s - state.t_back_s < 2 * max(state.back_s, self.back_s)
            back_s = min(2 * max(state.back_s, self.back_s), self.most_back_s) if relapsed else self.back_s
            state = replace(state, back_s=back_s)
        return state


def sizes_of(model: ModelSite) -> tuple[int, ...]:
    """The batch sizes that may be asked for, ascending: those that the engine runs as they are, up to the places."""
    if model.sizes is None:
        return tuple(range(1, model.places + 1))
    return *(size for size in model.sizes if size < model.places), model.places


def percentile(ascending: Sequence[float]) -> float:
    """The 99th percentile of at least one value, by nearest rank."""
    return ascending[math.ceil(0.99 * len(ascending)) - 1]


def _at_most(sizes: Sequence[int], size: int) -> int:
    return sizes[max(0, bisect.bisect_right(sizes, size) - 1)]


def _tuning(model: ModelSite, state: TunerState, sizes: Sequence[int]) -> Tuning:
    latencies = sorted(latency for _, chunk in state.window for latency in chunk)
    return Tuning(
        state.batch or sizes[-1],
        min(state.batch_timeout_ms, model.batch_timeout_ms),
        state.utilisation,
        percentile(latencies) if latencies else None,
        state.overloaded,
    )
