"""The commands of this version, over functions that `app` provides."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Generic, Literal, Protocol, TypeVar

from pydantic import JsonValue

from edge_runtime.clock import Clock
from edge_runtime.errors import EdgeError, RefusedError
from edge_runtime.records.commands import (
    CameraArgs,
    CameraResult,
    PingArgs,
    ReloadArgs,
    ReloadResult,
    SetBudgetArgs,
    VariantArgs,
)
from edge_runtime.records.governing import Budget
from edge_runtime.records.identity import Identity
from edge_runtime.records.window import Payload

ArgsT = TypeVar("ArgsT", bound=Payload)

Door = Literal["mqtt", "socket", "http"]
"""Where a command came in."""

Forbid = Callable[[Mapping[str, JsonValue], Door], "EdgeError | None"]
"""Why a command may not come in at a door with these arguments, which nobody has checked yet; None: it may."""


@dataclass(frozen=True, slots=True)
class CommandSpec(Generic[ArgsT]):
    """A command: what arguments it takes, and what obeys it.

    `run` is called on the thread of whoever brings the command; over MQTT on the thread "commands", where the next one
    waits for it, unless it is slow or changes nothing. It should be back within `budget_s` seconds: nobody can stop it,
    being late is logged.
    It returns what goes into the reply as `result`, and may raise EdgeError.
    """

    args: type[ArgsT]
    run: Callable[[ArgsT], JsonValue]
    budget_s: float = 2.0
    slow: bool = False
    """Takes seconds or minutes by its nature: whoever brings commands one by one does not wait for it."""
    forbid: Forbid | None = None
    changes: bool = True
    """Changes something here: whether it was obeyed has to be known after a restart, too."""


class CameraControl(Protocol):
    """What can be done to cameras. Every method raises EdgeError where nothing was done: for a name that is not there,
    for keys that are wrong."""

    def pause(self, name: str) -> CameraResult: ...

    def resume(self, name: str) -> CameraResult: ...

    def cap(self, name: str, fps: float | None) -> CameraResult:
        """At most `fps` frames per second; None lifts the cap."""
        ...

    def add(self, table: Mapping[str, JsonValue]) -> CameraResult:
        """A camera by the keys of a [[camera]]; one that is null counts as left out."""
        ...

    def change(self, name: str, keys: Mapping[str, JsonValue]) -> CameraResult:
        """Other values for some of its keys; null takes a key out."""
        ...

    def remove(self, name: str) -> CameraResult: ...

    def reset(self, name: str | None) -> CameraResult:
        """Back to what the configuration says of it, or of all."""
        ...


class ModelControl(Protocol):
    """What can be done to configured models. Every method waits for the outcome and raises EdgeError where there is
    none: the engine before runs on."""

    def reload(self, args: ReloadArgs) -> ReloadResult: ...

    def switch(self, args: VariantArgs) -> ReloadResult: ...


class BudgetControl(Protocol):
    """What can be done to the budget."""

    def set(self, args: SetBudgetArgs) -> Budget:
        """Change what `args` name; the budget that is in force then. Raises EdgeError for what may not be."""
        ...


RELOAD_BUDGET_S = 180.0


def ping(identity: Identity, clock: Clock) -> CommandSpec[PingArgs]:
    """`ping`: who answers, and for how long it has been running."""

    def run(_: PingArgs) -> JsonValue:
        uptime_s = round((clock.monotonic_ns() - identity.t_start_ns) / 1e9, 3)
        return {"session": identity.session, "uptime_s": uptime_s, "version": identity.version}

    return CommandSpec(PingArgs, run, changes=False)


CAMERA_BUDGET_S = 10.0
"""A camera that is to be opened anew may take seconds to let go of its device."""
ANYWHERE = frozenset({"pause", "resume", "cap"})
"""Actions on a camera that no address comes with."""


def camera(control: CameraControl) -> CommandSpec[CameraArgs]:
    """`camera`: pause, resume or cap a camera; on the control socket also add, change, remove and reset."""

    def run(args: CameraArgs) -> JsonValue:
        return _obey(control, args).model_dump(mode="json")

    return CommandSpec(CameraArgs, run, budget_s=CAMERA_BUDGET_S, forbid=_only_on_the_socket)


def _obey(control: CameraControl, args: CameraArgs) -> CameraResult:
    name = args.name or ""
    if args.action == "pause":
        return control.pause(name)
    if args.action == "resume":
        return control.resume(name)
    if args.action == "cap":
        return control.cap(name, args.fps)
    if args.action == "add":
        return control.add(args.camera or {})
    if args.action == "change":
        return control.change(name, args.camera or {})
    if args.action == "remove":
        return control.remove(name)
    return control.reset(args.name)


def _only_on_the_socket(args: Mapping[str, JsonValue], door: Door) -> EdgeError | None:
    """Whoever may write to a broker or has the web's token may not start programs here."""
    action = args.get("action")
    if door == "socket" or not isinstance(action, str) or action in ANYWHERE:
        return None
    return RefusedError(
        "from here cameras are only paused, resumed and capped: the address of one can start a program",
        code="forbidden",
        where="args.action",
        remedy="add, change, remove and reset them on the device: `edge-runtime camera`, or in its configuration",
    )


def set_budget(control: BudgetControl) -> CommandSpec[SetBudgetArgs]:
    """`set-budget`: other budgets, until the next start. Never a power above what the configuration allows."""
    return CommandSpec(SetBudgetArgs, lambda args: asdict(control.set(args)))


def reload(control: ModelControl) -> CommandSpec[ReloadArgs]:
    """`reload`: another bundle for a model. A digest of the store, never a path or an address."""
    return CommandSpec(
        ReloadArgs, lambda args: control.reload(args).model_dump(mode="json"), budget_s=RELOAD_BUDGET_S, slow=True
    )


def variant(control: ModelControl) -> CommandSpec[VariantArgs]:
    """`variant`: another variant of the bundle that runs."""
    return CommandSpec(
        VariantArgs, lambda args: control.switch(args).model_dump(mode="json"), budget_s=RELOAD_BUDGET_S, slow=True
    )
