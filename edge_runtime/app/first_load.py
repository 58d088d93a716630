"""What a model runs at the start: the last local `reload`, else what the configuration says."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from edge_runtime.app.backing import Backing
from edge_runtime.app.engines import PlanMissing
from edge_runtime.app.kept import Kept
from edge_runtime.app.models import ladder_of, load_variant, open_bundle
from edge_runtime.app.shelf import Shelf
from edge_runtime.app.swap import Swapper, Wish
from edge_runtime.engine.bundle import Bundle
from edge_runtime.engine.choices import Choice
from edge_runtime.engine.slot import Resident
from edge_runtime.errors import BundleError, EdgeError

log = logging.getLogger(__name__)

GIVEN_UP = ("cancelled", "stopping")
"""Codes of errors that say nothing about the model: the daemon ends."""


class FirstLoad:
    """Loads the ladder of each model at the start, and notes in its record what became of that."""

    def __init__(self, shelf: Shelf, swapper: Swapper, backing: Backing) -> None:
        self._shelf = shelf
        self._swapper = swapper
        self._backing = backing

    def load(self, kept: Kept, choice: Choice | None, keep_going: Callable[[], bool]) -> Sequence[Resident] | None:
        """The ladder that is to run, `choice` before what is configured. Empty where none can, with the reason in
        `kept.error`; None where `keep_going` says no meanwhile."""
        ladder: Sequence[Resident] = ()
        if choice is not None:
            ladder = self._load_choice(kept, choice.bundle, choice.variant)
            if not ladder and not keep_going():
                return None
        if not ladder and not isinstance(kept.error, PlanMissing):
            ladder = self._load_configured(kept)
        return ladder

    def _load_choice(self, kept: Kept, digest: str, variant: str) -> Sequence[Resident]:
        """What was reloaded last, proved again: a newer runtime may crash on it. Empty where it cannot run."""
        name = kept.config.name
        try:
            bundle = self._shelf.open(digest)
            wish = self._backing.wish(kept.config, bundle, variant)
            ladder = self._swapper.load_proved(kept.config, wish, lanes=kept.lanes, streams=kept.streams)
        except PlanMissing as missing:
            kept.bundle, kept.asked, kept.source = bundle, variant, "reload"
            self._wait_for_plan(kept, bundle, missing)
            return ()
        except EdgeError as error:
            if error.code in GIVEN_UP:
                return ()
            kept.fallback = f"model {name}: what was reloaded last cannot run ({error}); the configuration decides"
            log.error("%s", kept.fallback)
            return ()
        kept.bundle, kept.asked, kept.source = bundle, variant, "reload"
        self._backing.taken(name, wish)
        return ladder

    def _load_configured(self, kept: Kept) -> Sequence[Resident]:
        try:
            kept.bundle = bundle = open_bundle(kept.config.bundle)
            kept.asked = kept.config.variant
            wish = self._backing.wish(kept.config, bundle, kept.asked)
            first, *others = ladder_of(bundle, kept.config, kept.asked, wish.backend)
            resident = load_variant(
                bundle,
                first,
                kept.config,
                lanes=kept.lanes,
                streams=kept.streams,
                wrap=self._swapper.wrap,
                load=self._swapper.loader(kept.config, wish.backend),
            )
            self._backing.taken(kept.config.name, wish)
            return [resident, *self._load_others(kept, wish, others)]
        except PlanMissing as missing:
            self._wait_for_plan(kept, bundle, missing)
            return ()
        except EdgeError as error:
            kept.bundle, kept.error = None, _bare(error)
            return ()

    def _wait_for_plan(self, kept: Kept, bundle: Bundle, missing: PlanMissing) -> None:
        self._backing.waits(kept.config.name, bundle, missing)
        kept.error = _bare(missing)

    def _load_others(self, kept: Kept, wish: Wish, variants: Sequence[str]) -> list[Resident]:
        """The rest of a ladder at the start. One that cannot be is left out: it must not cost the one that runs."""
        found = [self._load_other(kept, replace(wish, variant=each)) for each in variants]
        return [each for each in found if each is not None]

    def _load_other(self, kept: Kept, wish: Wish) -> Resident | None:
        try:
            return self._swapper.load_beside(kept.config, wish, lanes=kept.lanes, streams=kept.streams)
        except EdgeError as error:
            kept.left_out = f"model {kept.config.name}: {wish.variant} is not on its ladder: {error}"
            log.error("%s", kept.left_out)
            return None


def _bare(error: EdgeError) -> EdgeError:
    """Without the frames that it came through: they hold the model that could not be loaded."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


def no_model(errors: Sequence[EdgeError]) -> BundleError:
    """That not one model could be loaded, and why of each."""
    return BundleError("no model could be loaded:\n" + "\n".join(f"  {error}" for error in errors), code="no_model")
