"""The parts of a world: cameras with their caps, mailboxes, lanes and batches. Times in s of virtual time."""

from __future__ import annotations

import math

from edge_runtime.camera.pacing import RateCap
from edge_runtime.sim.load import SimCamera, SimModel, SimVariant

Frame = tuple[float, "Mailbox"]
"""When it was captured (s), and which mailbox it was in."""


class Camera:
    """A camera's state. `offered` counts the pictures that it gave; `due_s` is when the next one is due."""

    __slots__ = (
        "_cap",
        "due_s",
        "mailboxes",
        "model",
        "offered",
        "seen",
        "told_completed",
        "told_offered",
    )

    def __init__(self, model: SimCamera) -> None:
        self.model = model
        self.mailboxes: list[Mailbox] = []
        self.offered = self.seen = self.told_offered = self.told_completed = 0
        self.due_s = 0.0
        self._cap = RateCap(model.wanted_hz)

    def limit(self, cap_hz: float | None) -> None:
        """The governor's cap, beside the wanted rate."""
        rates = [rate for rate in (self.model.wanted_hz, cap_hz) if rate is not None]
        self._cap.change(min(rates, default=None))

    def wants(self, t_s: float) -> bool:
        """Whether the picture captured then is one to keep."""
        return self._cap.wants(int(t_s * 1e9))


class Mailbox:
    """The newest frame of a camera that waits for a model, and the counts of all of them:
    `captured = completed + stale + waiting + running`."""

    __slots__ = ("camera", "captured", "completed", "interval_s", "model", "passes", "priority", "stale", "t_put_s")

    def __init__(self, camera: Camera, model: Model) -> None:
        self.camera = camera
        self.model = model
        self.priority = camera.model.priority
        self.captured = self.completed = self.stale = 0
        self.passes = 0
        self.t_put_s = -math.inf
        self.interval_s = 0.0

    def put(self, now_s: float) -> None:
        """A picture was captured; one that still waits is stale now."""
        self.captured += 1
        if self in self.model.ready:
            self.stale += 1
        else:
            self.model.ready.append(self)
        if math.isfinite(self.t_put_s):
            gap_s = now_s - self.t_put_s
            known_s = self.interval_s or gap_s
            self.interval_s = known_s + (gap_s - known_s) / 8
        self.t_put_s = now_s

    def expects_before(self, now_s: float, deadline_s: float) -> bool:
        """Whether another frame is likely to come by then, as the pipeline's mailboxes judge it."""
        if self.interval_s == 0.0:
            return False
        due_s = self.t_put_s + self.interval_s
        return due_s <= deadline_s and due_s + self.interval_s > now_s


class Lane:
    """A lane and the run it has in hand until `end_s`; an end with an older `version` is none any more."""

    __slots__ = ("end_s", "frames", "model", "version")

    def __init__(self, model: Model) -> None:
        self.model = model
        self.frames: list[Frame] = []
        self.end_s = 0.0
        self.version = 0


class Batch:
    """Frames that will run together, on the variant that it was opened with."""

    __slots__ = ("deadline_s", "frames", "model", "variant", "wake_s")

    def __init__(self, model: Model) -> None:
        self.model = model
        self.variant: SimVariant = model.variant
        self.frames: list[Frame] = []
        self.deadline_s = math.inf
        self.wake_s = math.inf


class Model:
    """A model's state. `busy_s`: lane time in which something ran, up to `t_s`; `ready`: mailboxes with a frame, in the
    order in which they became so."""

    __slots__ = (
        "_variants",
        "batch",
        "batches",
        "busy_s",
        "busy_seen_s",
        "busy_ticked_s",
        "frames",
        "idle",
        "latencies_ms",
        "mailboxes",
        "model",
        "open",
        "ready",
        "running",
        "t_s",
        "timeout_s",
        "variant",
    )

    def __init__(self, model: SimModel) -> None:
        self.model = model
        self._variants = {variant.name: variant for variant in model.variants}
        self.variant = model.variants[0]
        self.mailboxes: list[Mailbox] = []
        self.ready: list[Mailbox] = []
        self.idle = [Lane(self) for _ in range(model.lanes)]
        self.running: list[Lane] = []
        self.open: Batch | None = None
        self.batch = model.places
        self.timeout_s = model.batch_timeout_ms / 1e3
        self.busy_s = self.busy_seen_s = self.busy_ticked_s = self.t_s = 0.0
        self.frames = self.batches = 0
        self.latencies_ms: list[float] = []

    def choose(self, variant: str) -> None:
        """What new batches run on. Raises KeyError where there is no such variant."""
        self.variant = self._variants[variant]

    def account(self, now_s: float) -> None:
        """Bring `busy_s` up to now."""
        self.busy_s += len(self.running) * (now_s - self.t_s)
        self.t_s = now_s

    def halt(self, now_s: float) -> None:
        """Nothing runs, and nothing will."""
        self.account(now_s)
        self.running, self.idle = [], []


def take(model: Model) -> Frame:
    """The next frame by priority and age, none passed over more than N - 1 times: the rule of the pipeline's mailboxes.
    There has to be one."""
    ready = model.ready
    best = 0
    if len(ready) > 1:
        most = len(model.mailboxes) - 1
        for index, mailbox in enumerate(ready):
            if mailbox.priority > ready[best].priority:
                best = index
            if mailbox.passes + 1 + index > most:
                break
    chosen = ready.pop(best)
    for mailbox in ready:
        mailbox.passes += 1
    chosen.passes = 0
    return chosen.t_put_s, chosen
