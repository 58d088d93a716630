"""What the keeper knows of each configured model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edge_runtime.app.outcome import Source
from edge_runtime.config import ModelConfig
from edge_runtime.engine.bundle import Bundle
from edge_runtime.engine.manifest import Backend
from edge_runtime.engine.slot import Resident
from edge_runtime.errors import EdgeError


@dataclass(slots=True)
class Kept:
    """One configured model. `bundle` and `variant` are what is to run, or ran last; None while it is down for `error`.
    The governor may let a lighter variant run meanwhile. `asked`: the variant as it was asked for, which may be "auto".

    `loaded`: the configuration that it was loaded by, where `config` could not be taken over yet.
    `fallback`: why it does not run what was reloaded last. `previous`: the digest of the bundle before, for a way back.
    `left_out`: why a variant of its ladder was not loaded at the start.
    """

    config: ModelConfig
    lanes: int
    streams: int
    loaded: ModelConfig
    bundle: Bundle | None = None
    variant: str = "auto"
    asked: str = "auto"
    source: Source = "configuration"
    error: EdgeError | None = None
    fallback: str | None = None
    left_out: str | None = None
    previous: str | None = None


def missing_variants(bundle: Bundle, config: ModelConfig, resident: Resident) -> str | None:
    """What the ladder was to have and the bundle has not; None where nothing is missing."""
    backend = backend_of([resident])
    missing = sorted(set(config.ladder) - set(bundle.variants_for(backend)))
    return f"not on the ladder, since the bundle has none for {backend}: {', '.join(missing)}" if missing else None


def backend_of(ladder: Sequence[Resident]) -> Backend:
    """By what these run; a ladder is of one backend."""
    return "tensorrt" if any(each.info.backend == "tensorrt" for each in ladder) else "onnxruntime"
