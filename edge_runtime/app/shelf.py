"""The bundles of this device's store and what was chosen of them, with a word for a store that cannot be used."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path

from edge_runtime.clock import Clock, utc_text
from edge_runtime.engine.bundle import Bundle
from edge_runtime.engine.choices import Choice, Choices
from edge_runtime.engine.store import BundleStore
from edge_runtime.engine.upload import Upload
from edge_runtime.errors import EdgeError

log = logging.getLogger(__name__)

UPLOADS_KEPT = 4
UPLOAD_KEPT_S = 3600.0
"""An uploaded bundle waits this long for somebody to reload it; nothing else needs it yet."""


class Shelf:
    """Bundles by digest below `store`, and the last choice per model.

    `trouble`: why what was chosen could not be read at the start; None where it could.
    """

    def __init__(self, store: Path, clock: Clock) -> None:
        self.bundles = BundleStore(store / "bundles")
        self.trouble: str | None = None
        self._choices = Choices(store / "models.json")
        self._clock = clock
        self._uploads: deque[tuple[float, str]] = deque(maxlen=UPLOADS_KEPT)
        # what has just come in must not be collected before it is known to be wanted
        self._collecting = threading.Lock()

    def chosen(self) -> Mapping[str, Choice]:
        """The last local reload of every model that had one. Also clears what a crash left half-done."""
        try:
            self.bundles.sweep()
        except (EdgeError, OSError) as error:
            log.warning("what an interrupted upload left in the store could not be removed: %s", error)
        chosen = self._choices.load()
        if self._choices.trouble is not None:
            self.trouble = f"what was reloaded last cannot be read: {self._choices.trouble}; the configuration's runs"
            log.error("%s", self.trouble)
        return chosen

    def open(self, digest: str) -> Bundle:
        """A bundle of the store, verified. Raises BundleError."""
        return self.bundles.open(digest)

    def finish(self, upload: Upload) -> Bundle:
        """The bundle that came in; somebody is going to ask for it. Raises BundleError, EdgeError."""
        with self._collecting:
            bundle = upload.finish()
            self._uploads.append((time.monotonic(), bundle.digest))
            return bundle

    def add(self, source: Path) -> Bundle:
        """A copy of the bundle in the folder `source`, likewise. Raises BundleError, EdgeError."""
        with self._collecting:
            bundle = self.bundles.add(source)
            self._uploads.append((time.monotonic(), bundle.digest))
            return bundle

    def choose(self, model: str, digest: str, variant: str) -> None:
        """The next start begins with this. Raises EdgeError where that cannot be kept."""
        self._choices.save(Choice(model, digest, variant, utc_text(self._clock.utc())))
        self.trouble = None  # what is in the file from now on is known

    def forget(self, model: str) -> None:
        """The next start begins with the configuration's. Raises EdgeError."""
        self._choices.remove(model)

    def collect(self, needed: set[str]) -> None:
        """Remove bundles that are not `needed`, that no model was reloaded with, and that nobody brought just now."""
        chosen = self._choices.load()
        if self.trouble is not None or self._choices.trouble is not None:
            return  # nobody knows what was chosen: it may be any of them
        keep = needed | {choice.bundle for choice in chosen.values()}
        try:
            with self._collecting:
                keep |= {digest for since, digest in self._uploads if time.monotonic() - since < UPLOAD_KEPT_S}
                for digest in self.bundles.collect(keep):
                    log.info("bundle %s is no longer needed and was removed from the store", digest[:19])
        except (EdgeError, OSError) as error:
            log.warning("bundles that are no longer needed could not be removed: %s", error)
