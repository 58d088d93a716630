"""The exchange of what one model runs, and what that cost."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from edge_runtime.app.backing import Backing
from edge_runtime.app.kept import Kept, backend_of, missing_variants
from edge_runtime.app.models import ladder_of
from edge_runtime.app.outcome import Source, outcome
from edge_runtime.app.swap import Swapper, Target, Wish
from edge_runtime.engine.slot import Resident
from edge_runtime.pipeline.pipeline import Pipeline
from edge_runtime.records.commands import ReloadResult

log = logging.getLogger(__name__)


class Exchanger:
    """Lets a model run what is wished for and keeps its record true. On the loader's thread."""

    def __init__(self, pipeline: Pipeline, swapper: Swapper, backing: Backing) -> None:
        self._pipeline = pipeline
        self._swapper = swapper
        self._backing = backing

    def exchange(self, kept: Kept, wish: Wish, source: Source, *, applying: bool = False) -> ReloadResult:
        """Let the model run what is wished for, and say what that cost. What is loaded already is only switched to.

        `applying` a configuration, what its other batches or its shorter ladder call for is done, too.
        """
        started_ns = time.monotonic_ns()
        name = kept.config.name
        pipe, ledger = self._pipeline.models[name], self._pipeline.ledger
        ladder = {each.info.digest: each for each in pipe.desk.ladder()}
        running, before_it = [each.info.variant for each in ladder.values()], kept.bundle

        def restore() -> Sequence[Resident]:
            assert before_it is not None  # it ran a moment ago
            return self._swapper.load(kept.config, before_it, running, kept.lanes, kept.streams, backend)

        backend = backend_of(list(ladder.values()))
        target = Target(kept.config, pipe, kept.lanes, kept.streams, restore)
        digests = [
            wish.bundle.engine_digest(each, wish.backend)
            for each in ladder_of(wish.bundle, kept.config, wish.variant, wish.backend)
        ]
        ledger.begin_gaps(name)
        before = ledger.totals(name)
        anew = self._backing.is_new(name, wish.choice) or (
            applying
            and (
                (kept.loaded.max_batch, kept.loaded.letterbox) != (kept.config.max_batch, kept.config.letterbox)
                or any(len(each.lanes) != kept.lanes for each in ladder.values())
            )
        )
        # one that was left out at the start cannot be asked for now: it must not cost the others their switch
        complete = set(digests) <= set(ladder) or (kept.left_out is not None and not applying and digests[0] in ladder)
        if complete and not anew:
            shorter = applying and kept.loaded.ladder != kept.config.ladder
            keep = [each for digest, each in ladder.items() if digest in digests or not shorter]
            wanted, current = ladder[digests[0]], pipe.desk.ladder()[0]
            # a file that wants what was wanted before leaves the governor its choice
            same = wanted.info.variant == kept.variant and wanted.info.bundle == current.info.bundle
            stays = applying and same and current in keep
            swapped = self._swapper.switch(target, current if stays else wanted, keep)
            variant = wanted.info.variant
        else:
            swapped = self._swapper.swap(target, wish)
            variant = swapped.resident.info.variant
        if applying or swapped.proof is not None:
            kept.loaded = kept.config
        if before_it is not None and before_it.digest != wish.bundle.digest:
            kept.previous = before_it.digest
        kept.bundle, kept.variant, kept.source, kept.error = wish.bundle, variant, source, None
        kept.asked = wish.variant
        self._backing.taken(name, wish)
        if swapped.proof is not None:
            kept.left_out = None  # all of the ladder was loaded anew
        if (note := missing_variants(wish.bundle, kept.config, swapped.resident)) is not None:
            swapped.notes.append(note)
            log.warning("model %s: %s", name, note)
        after = ledger.totals(name)
        lost = {
            "stale": after.stale - before.stale,
            "dropped": sum(after.dropped.values()) - sum(before.dropped.values()),
            "failed": after.failed - before.failed,
        }
        gap_ns = ledger.longest_gap_ns(name)
        return outcome(name, source, swapped, (time.monotonic_ns() - started_ns) / 1e9, lost, gap_ns)

    def on_lanes(self, kept: Kept, wish: Wish, source: Source, lanes: int) -> ReloadResult:
        """Exchange what runs for what is configured now, on so many lanes: fewer before it, more after it, so that
        no lane ever comes upon an engine that has no context for it."""
        name, before = kept.config.name, kept.lanes
        desk = self._pipeline.models[name].desk
        old = desk.ladder()
        if lanes < desk.lanes:
            self._pipeline.set_lanes(name, lanes)
        kept.lanes = lanes
        try:
            result = self.exchange(kept, wish, source, applying=True)
        except BaseException:
            if all(len(each.lanes) >= before for each in desk.ladder()):
                kept.lanes = before
                self._pipeline.set_lanes(name, before)
            raise
        if lanes > desk.lanes:
            if not all(each.closed.is_set() or each in desk.ladder() for each in old):
                note = "the old engine still has a batch in hand: more lanes at the next time the configuration is read"
                return result.model_copy(update={"notes": [*result.notes, note]})
            self._pipeline.set_lanes(name, lanes)
        return result
