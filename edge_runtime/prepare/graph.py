"""A float graph made ready for what is written into it later: nothing in it that need not be computed for a picture.

Constants are computed and normalisation is folded into the layers before it (onnxslim), outputs that nobody reads go
with all that only they needed, the opset is one that has Q/DQ with an axis, and every node has a name of its own. All
of it may move the last bits of an answer and nothing else: `optimise_artefact` compares both models on the golden
pictures and on noise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxslim
from numpy.typing import NDArray
from onnx import version_converter

from edge_runtime.engine.bundle import Bundle
from edge_runtime.engine.manifest import Backend, VariantTable
from edge_runtime.engine.onnxrt import open_session
from edge_runtime.engine.probe import ReadImage
from edge_runtime.engine.session_check import grey_picture, output_shapes
from edge_runtime.errors import BundleError
from edge_runtime.prepare.noise import Noise
from edge_runtime.prepare.parity import Parity, prove_parity
from edge_runtime.records.frames import Transform
from edge_runtime.records.spec import InputSpec, OutputSpec
from edge_runtime.vision.decode import build_decoder

__all__ = ["LEAST_OPSET", "Optimised", "dead_outputs", "optimise", "optimise_artefact", "prove_same"]

LEAST_OPSET = 13
"""Before it, Q/DQ have no axis: scales per channel cannot be written."""
_LEAST_IR = 4
"""Before it, weights had to be inputs too."""
_NOISE = 4


@dataclass(frozen=True, slots=True)
class Optimised:
    """The model's bytes, what was done to it in words, and how like the original it answers (None: not compared)."""

    data: bytes
    notes: tuple[str, ...]
    parity: Parity | None = None


def optimise(data: bytes, where: str, *, drop: Iterable[str] = (), code: str = "graph_refused") -> Optimised:
    """The ONNX model `data` without what need not be computed; inputs keep their names, as do the outputs that stay.

    drop: names of outputs that nobody reads. Deterministic: the same bytes in, the same out.

    Raises BundleError (`code`) where it cannot be simplified, converted to opset 13, or checked afterwards.
    """
    doing = "cannot be simplified"
    try:
        model: Any = onnx.load_model_from_string(data)
        before = Counter(node.op_type for node in model.graph.node)
        dropped = _drop(model, frozenset(drop))
        made: Any = onnxslim.slim(model)
        slimmed = Counter(node.op_type for node in made.graph.node)
        opset = _opset(made)
        if opset < LEAST_OPSET:
            doing = f"is of opset {opset} and cannot be raised to {LEAST_OPSET}"
            made.ir_version = max(made.ir_version, _LEAST_IR)
            made = version_converter.convert_version(made, LEAST_OPSET)
        doing = "is no valid model when it is simplified"
        made.ir_version = max(made.ir_version, _LEAST_IR)
        _only_pictures(made)
        named = _name_nodes(made)
        onnx.checker.check_model(made)
        result: bytes = made.SerializeToString(deterministic=True)
    except Exception as error:  # noqa: BLE001  protobuf, onnxslim and onnx have no common base
        raise BundleError(
            f"{doing}: {' '.join(str(error).split())[:200]}",
            code=code,
            where=where,
            remedy="export it again with standard operators of ONNX opset 13 to 17",
        ) from None
    notes = []
    if gone := before - slimmed:
        told = ", ".join(f"{count} {kind}" for kind, count in sorted(gone.items()))
        notes.append(f"{gone.total()} of {before.total()} nodes were computed beforehand or folded: {told}")
    if dropped:
        notes.append(f"outputs that its layout does not read were left out: {', '.join(dropped)}")
    if opset < LEAST_OPSET:
        notes.append(f"its opset was raised from {opset} to {LEAST_OPSET}")
    if named:
        notes.append(f"{named} nodes got names of their own")
    return Optimised(result, tuple(notes))


def optimise_artefact(
    source: Bundle,
    tables: Sequence[VariantTable],
    backend: Backend,
    read_image: ReadImage,
    *,
    code: str = "graph_refused",
) -> Optimised:
    """The file that these variants of a bundle share for `backend`, optimised and compared at the size of each.

    Raises BundleError (`code`) as `optimise` does, RefusedError (code "parity") where the answers differ.
    """
    artefact = source.artefact(tables[0].name, backend)
    where = str(artefact.path)
    data = source.read_artefact(tables[0].name, backend)
    output = source.output_spec()
    specs = [source.input_spec(table.name) for table in tables]
    dead = set.intersection(*(set(dead_outputs(data, spec, output, where)) for spec in specs))
    made = optimise(data, where, drop=dead, code=code)
    worst: Parity | None = None
    for table, spec in zip(tables, specs, strict=True):
        pictures = source.golden_inputs(table.name)
        found = prove_same(data, made.data, spec, output, table.precision, pictures, read_image, where)
        worst = found if worst is None or found.deviation > worst.deviation else worst
    assert worst is not None
    told = f"against the model as it was, {worst.pictures} pictures: {worst.deviation:.2g} of an output's range"
    return replace(made, notes=(*made.notes, told), parity=worst)


def prove_same(
    before: bytes,
    after: bytes,
    spec: InputSpec,
    output: OutputSpec,
    precision: str,
    pictures: Sequence[Path],
    read_image: ReadImage,
    where: str,
) -> Parity:
    """Compare a model with its optimised self on pictures, and on a few of seeded noise, as `prove_parity` does.

    Raises RefusedError (code "parity") with the figures, BundleError where one of them does not run.
    """
    noises = {Path(f"noise-{seed}"): Noise(seed) for seed in range(_NOISE)}
    return prove_parity(
        (before, spec),
        (after, spec),
        output,
        precision,
        [*pictures, *noises],
        lambda path: noises[path] if path in noises else read_image(path),
        where,
        what="the optimised model",
    )


def dead_outputs(data: bytes, spec: InputSpec, output: OutputSpec, where: str) -> tuple[str, ...]:
    """The outputs that the layout's decoder has no use for: it fits the others without them, and reads the others only.

    Raises BundleError where the model does not run or does not fit its layout.
    """
    session = open_session(data, where)
    shapes, batch = output_shapes(session, spec, where)
    build_decoder(output, spec, shapes)
    names = [each.name for each in session.get_outputs()]
    if len(names) < 2:
        return ()
    picture = {session.get_inputs()[0].name: grey_picture(spec, batch or 1)}
    answers = dict(zip(names, session.run(None, picture), strict=True))
    read = _Read(answers)
    whole = Transform(spec.width, spec.height, spec.width, spec.height, spec.width, spec.height, 0, 0)
    build_decoder(output, spec, shapes)(read, 0, whole)
    dead = tuple(name for name in names if name not in read.names)
    try:
        build_decoder(output, spec, {name: shape for name, shape in shapes.items() if name not in dead})
    except BundleError:
        return ()  # it reads one of them for other pictures than a grey one, say
    return dead


@dataclass(slots=True)
class _Read(Mapping[str, NDArray[Any]]):
    """Outputs that note which of them were looked at."""

    answers: Mapping[str, NDArray[Any]]
    names: set[str] = field(default_factory=set)

    def __getitem__(self, name: str) -> NDArray[Any]:
        self.names.add(name)
        return np.asarray(self.answers[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.answers)

    def __len__(self) -> int:
        return len(self.answers)


def _opset(model: Any) -> int:
    return max((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), default=0)


def _drop(model: Any, names: frozenset[str]) -> list[str]:
    """Take outputs away; what only they needed is taken away by onnxslim."""
    dropped = [value.name for value in model.graph.output if value.name in names]
    kept = [value for value in model.graph.output if value.name not in names]
    del model.graph.output[:]
    model.graph.output.extend(kept)
    return dropped


def _only_pictures(model: Any) -> None:
    """Weights that are listed as inputs could be given anew at every run, so that nothing would fold them."""
    stored = {tensor.name for tensor in model.graph.initializer}
    inputs = [value for value in model.graph.input if value.name not in stored]
    del model.graph.input[:]
    model.graph.input.extend(inputs)


def _name_nodes(model: Any) -> int:
    """Give every node that has none, or another's, a name of its own: its kind and its place. Returns how many."""
    given = Counter(node.name for node in model.graph.node)
    taken = set(given)
    seen: set[str] = set()
    named = 0
    for place, node in enumerate(model.graph.node):
        if node.name and node.name not in seen:
            seen.add(node.name)
            continue
        name = f"{node.op_type}_{place}"
        while name in taken:
            name += "_"
        node.name = name
        taken.add(name)
        named += 1
    return named
