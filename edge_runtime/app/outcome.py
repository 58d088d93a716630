"""What a change of a model brought and cost: the answer to whoever asked, and a line for everybody."""

from __future__ import annotations

from typing import Literal

from edge_runtime.app.swap import Swapped
from edge_runtime.records.commands import ProofResult, ReloadResult

Source = Literal["configuration", "reload", "desired"]
"""Who wanted a model."""


def describe(result: ReloadResult) -> str:
    """What a change brought, in one line."""
    if not result.changed:
        return f"{result.variant} ran already"
    parts = [f"{result.variant} {result.engine[:19]} runs"]
    if result.exchange_ms is not None:
        parts.append(f"exchanged in {result.exchange_ms:.2f} ms")
    if result.gap_ms is not None:
        parts.append(f"longest gap between results {result.gap_ms:.0f} ms")
    if result.pause_ms is not None:
        parts.append(f"paused for {result.pause_ms:.0f} ms")
    lost = [f"{count} {what}" for what, count in result.lost.items() if count]
    parts.append(f"frames {', '.join(lost)}" if lost else "no frame lost")
    return ", ".join(parts)


def outcome(
    name: str, source: Source, swapped: Swapped, took_s: float, lost: dict[str, int], gap_ns: int | None
) -> ReloadResult:
    """The answer. `lost`: frames of the model that were stale, dropped or failed meanwhile; `gap_ns`: the longest
    gap between two results of one of its cameras, None without results."""
    info, proof = swapped.resident.info, swapped.proof
    return ReloadResult(
        model=name,
        engine=info.digest,
        bundle=info.bundle,
        variant=info.variant,
        backend=info.backend,
        source=source,
        changed=swapped.exchange_ns is not None,
        previous=swapped.previous,
        took_s=round(took_s, 3),
        proof=None
        if proof is None
        else ProofResult(
            took_s=round(proof.took_s, 3),
            load_s=round(proof.load_s, 3),
            inference_ms=round(proof.inference_ms, 3),
            cpu_ms=round(proof.cpu_ms, 3),
            memory_mb=round(proof.memory_bytes / 1e6, 1),
            golden=proof.golden,
        ),
        exchange_ms=_ms(swapped.exchange_ns),
        gap_ms=_ms(gap_ns),
        lost=lost,
        judged=swapped.watched,
        pause_ms=_ms(swapped.pause_ns),
        persisted=True,
        notes=swapped.notes,
    )


def passing(result: ReloadResult, note: str) -> ReloadResult:
    """The same for what the next start does not know of, and why."""
    return result.model_copy(update={"persisted": False, "notes": [*result.notes, note]})


def _ms(value_ns: int | None) -> float | None:
    return None if value_ns is None else round(value_ns / 1e6, 3)
