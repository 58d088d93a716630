"""How often the GPU has ended this daemon: a count that outlives the process, since each of them ends it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from edge_runtime.clock import Clock, utc_text
from edge_runtime.durable import REAL, Files, write_atomic

log = logging.getLogger(__name__)

FAULTS_NAME = "gpu-faults.json"
_LONGEST_ERROR = 500


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    schema_: Annotated[Literal["edge.gpu-faults/1"], Field(alias="schema")] = "edge.gpu-faults/1"
    count: Annotated[int, Field(ge=0)]
    error: str
    t_utc: str


class GpuFaults:
    """The count in the store. A file that cannot be read or written costs the count, and nothing else."""

    def __init__(self, path: Path, clock: Clock, files: Files = REAL) -> None:
        """Reads `path`; one that is not there, or is damaged, counts from 0."""
        self._path = path
        self._clock = clock
        self._files = files
        self.count = self._read()
        """Since the store was made."""

    def _read(self) -> int:
        try:
            return _File.model_validate_json(self._path.read_bytes()).count
        except FileNotFoundError:
            return 0
        except (OSError, ValidationError) as error:
            log.warning("%s cannot be read, and the GPU's faults are counted from 0: %s", self._path, error)
            return 0

    def add(self, error: str) -> int:
        """Count one, on disk before this returns where the disk takes it; returns the new count."""
        self.count += 1
        kept = _File(count=self.count, error=error[:_LONGEST_ERROR], t_utc=utc_text(self._clock.utc()))
        try:
            write_atomic(self._path, kept.model_dump_json(by_alias=True, indent=1).encode() + b"\n", files=self._files)
        except OSError as failed:
            log.warning("%s cannot be written, and the count of the GPU's faults is lost: %s", self._path, failed)
        return self.count
