"""The decoder for a declared output layout, and which layouts a model's outputs could have.

The layout comes from the bundle, never from shapes: several layouts share a shape. Shapes only prove a
declaration wrong, before the first frame instead of by nonsense boxes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from edge_runtime.errors import BundleError
from edge_runtime.records.frames import Decoder
from edge_runtime.records.spec import InputSpec, Layout, OutputSpec
from edge_runtime.vision.decoders import (
    centernet,
    classify,
    efficientnms,
    nanodet,
    rtdetr,
    rtdetr_topk,
    yolov5,
    yolov8,
    yolov10,
    yolox,
)
from edge_runtime.vision.decoders.common import LayoutMisfit, Shapes


class _Family(NamedTuple):
    classes: Callable[[Shapes, int, int], int | None]
    decoder: Callable[[OutputSpec, InputSpec, Shapes], Decoder]


_FAMILIES: Mapping[Layout, _Family] = {
    "centernet": _Family(centernet.classes, centernet.CenternetDecoder),
    "yolox": _Family(yolox.classes, yolox.YoloxDecoder),
    "nanodet": _Family(nanodet.classes, nanodet.NanodetDecoder),
    "yolov5": _Family(yolov5.classes, yolov5.Yolov5Decoder),
    "yolov8": _Family(yolov8.classes, yolov8.Yolov8Decoder),
    "yolov10": _Family(yolov10.classes, yolov10.RowsDecoder),
    "rtdetr": _Family(rtdetr.classes, rtdetr.decoder),
    "rtdetr-topk": _Family(rtdetr_topk.classes, rtdetr_topk.RtdetrTopkDecoder),
    "efficientnms": _Family(efficientnms.classes, efficientnms.EfficientNmsDecoder),
    "classify": _Family(classify.classes, classify.ClassifyDecoder),
}


@dataclass(frozen=True, slots=True)
class LayoutFit:
    """A layout that a model's output shapes allow, and how many classes it would then have; None: any number."""

    layout: Layout
    classes: int | None


def suggest_layout(shapes: Shapes, width: int, height: int, *, classes: int | None = None) -> tuple[LayoutFit, ...]:
    """The layouts that outputs of these shapes could have, for whoever writes a bundle. Empty when none.

    shapes: output name -> shape for a batch of one, all dimensions known; `width` and `height`: the
    model's input, px; `classes`: only layouts with that many, where the number is known.
    """
    fits = []
    for layout, family in _FAMILIES.items():
        try:
            found = family.classes(shapes, width, height)
        except LayoutMisfit:
            continue
        if classes is None or found is None or found == classes:
            fits.append(LayoutFit(layout, found))
    return tuple(fits)


# The parameter is called `input` as in the bundle's own tables and in EngineInfo.
def build_decoder(output: OutputSpec, input: InputSpec, shapes: Mapping[str, tuple[int, ...]]) -> Decoder:  # noqa: A002
    """The decoder for the declared layout, with its grids made once.

    shapes: output name -> shape for a batch of one, all dimensions known. The order of the outputs means
    nothing; layouts of one output take the only one whatever its name.

    The decoder takes (output name -> [count, ...] array, place in the batch, Transform of that place). It
    reads that place only, copies what it returns, changes nothing and may run on several threads at once.
    A detector's result is in camera px, inside the frame, best first, of scores above
    `output.score_threshold`. It raises EngineError (code "output_mismatch") when an output is not what
    `shapes` said.

    Raises BundleError (code "layout_mismatch") when the declared layout does not fit the shapes or the
    number of labels.
    """
    family = _FAMILIES.get(output.layout)
    if family is None:
        raise _mismatch(output, input, shapes, f"there is no such layout; known are {', '.join(_FAMILIES)}")
    try:
        classes = family.classes(shapes, input.width, input.height)
    except LayoutMisfit as misfit:
        raise _mismatch(output, input, shapes, str(misfit)) from None
    if classes is not None and classes != len(output.labels):
        raise _mismatch(
            output, input, shapes, f"the model has {classes} classes and there are {len(output.labels)} labels"
        )
    return family.decoder(output, input, shapes)


def _mismatch(output: OutputSpec, spec: InputSpec, shapes: Shapes, reason: str) -> BundleError:
    found = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items()) or "no outputs"
    fits = suggest_layout(shapes, spec.width, spec.height)
    would = " or ".join(
        f"{fit.layout!r} with {'any number of' if fit.classes is None else fit.classes} labels" for fit in fits
    )
    return BundleError(
        f"the output layout is declared as {output.layout!r}, but {reason}; found: {found}",
        code="layout_mismatch",
        where="output.layout",
        remedy=f"these outputs would fit {would}" if would else "these outputs fit no layout that is known here",
    )
