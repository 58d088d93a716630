"""The commands of this version, over functions that `app` provides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Generic, Protocol, TypeVar

from pydantic import JsonValue

from edge_runtime.clock import Clock
from edge_runtime.records.commands import (
    CameraArgs,
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


@dataclass(frozen=True, slots=True)
class CommandSpec(Generic[ArgsT]):
    """A command: what arguments it takes, and what obeys it.

    `run` is called on the thread of whoever brings the command (over MQTT that is "mqtt-handler", and the next
    command waits for it). It should be back within `budget_s` seconds: nobody can stop it, being late is logged.
    It returns what goes into the reply as `result`, and may raise EdgeError.
    """

    args: type[ArgsT]
    run: Callable[[ArgsT], JsonValue]
    budget_s: float = 2.0
    slow: bool = False
    """Takes seconds or minutes by its nature: whoever brings commands one by one does not wait for it."""


class CameraControl(Protocol):
    """What can be done to configured cameras. Every method raises EdgeError for a name that is not configured."""

    def pause(self, name: str) -> None: ...

    def resume(self, name: str) -> None: ...

    def cap(self, name: str, fps: float | None) -> None:
        """At most `fps` frames per second; None lifts the cap."""
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

    return CommandSpec(PingArgs, run)


def camera(control: CameraControl) -> CommandSpec[CameraArgs]:
    """`camera`: pause, resume or cap a configured camera. Never more: an address could start a program."""

    def run(args: CameraArgs) -> JsonValue:
        if args.action == "pause":
            control.pause(args.name)
        elif args.action == "resume":
            control.resume(args.name)
        else:
            control.cap(args.name, args.fps)
        return {"name": args.name, "action": args.action, "fps": args.fps}

    return CommandSpec(CameraArgs, run)


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
