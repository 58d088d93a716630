"""Model outputs made to order: empty heads, heads with planted boxes, heads of noise."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from edge_runtime.records.frames import Decoder, Detections, Transform
from edge_runtime.records.spec import InputSpec, Layout, OutputSpec, Resize
from edge_runtime.vision.decode import build_decoder
from tests.vision import references

Box = tuple[float, float, float, float]
Random = np.random.Generator

HOSTILE = (math.nan, math.inf, -math.inf, -4.0, 0.0, 1e15)


def assert_typed(found: Detections) -> None:
    count = len(found)
    assert found.boxes.shape == (count, 4)
    assert found.scores.shape == found.class_ids.shape == (count,)
    assert found.boxes.dtype == np.float32
    assert found.scores.dtype == np.float32
    assert found.class_ids.dtype == np.int32


def assert_same(a: Detections, b: Detections) -> None:
    np.testing.assert_array_equal(a.boxes, b.boxes)
    np.testing.assert_array_equal(a.scores, b.scores)
    np.testing.assert_array_equal(a.class_ids, b.class_ids)
    assert (a.cut, a.invalid) == (b.cut, b.invalid)


class Head(ABC):
    """Outputs of one layout for a batch, all places empty at first."""

    layout: ClassVar[Layout]
    suppressed: ClassVar[bool] = True
    """Whether suppression is ours."""
    any_size: ClassVar[bool] = True
    """Whether the numbers can say a box of no or of negative size."""

    def __init__(
        self,
        width: int = 64,
        height: int = 64,
        *,
        classes: int = 6,
        batch: int = 1,
        rows: int = 60,
        resize: Resize = "letterbox-center",
        threshold: float = 0.3,
        nms_iou: float = 0.6,
        max_detections: int = 300,
    ) -> None:
        self.width, self.height, self.classes, self.rows = width, height, classes, rows
        self.input = InputSpec(width, height, resize=resize)
        self.threshold, self.nms_iou, self.max_detections = threshold, nms_iou, max_detections
        labels = tuple(f"class-{k}" for k in range(classes))
        self.output = OutputSpec(self.layout, labels, threshold, nms_iou, max_detections)
        shapes = self._places()
        self.shapes = {name: (1, *shape) for name, shape in shapes.items()}
        self.outputs: dict[str, NDArray[Any]] = {
            name: np.zeros((batch, *shape), self._dtype(name)) for name, shape in shapes.items()
        }
        self._planted = [0] * batch

    def decoder(self) -> Decoder:
        return build_decoder(self.output, self.input, self.shapes)

    def decode(self, transform: Transform, index: int = 0) -> Detections:
        result = self.decoder()(dict(self.outputs), index, transform)
        assert isinstance(result, Detections)
        return result

    def fill(self, value: float, index: int = 0) -> None:
        for array in self.outputs.values():
            array[index] = value

    def next_row(self, index: int) -> int:
        self._planted[index] += 1
        return self._planted[index] - 1

    def _dtype(self, name: str) -> type[np.generic]:
        return np.float32

    @abstractmethod
    def _places(self) -> Mapping[str, tuple[int, ...]]: ...

    @abstractmethod
    def plant(self, box: Box, score: float, class_id: int, index: int = 0) -> None:
        """Encode a box (model px) the way a model of this layout says it."""

    @abstractmethod
    def spoil_box(self, value: float) -> None:
        """Overwrite one number of the box planted last: its width or right side."""

    @abstractmethod
    def spoil_score(self, value: float) -> None:
        """Overwrite a score where nothing was planted."""

    @abstractmethod
    def noise(self, seed: int, index: int = 0, *, hostile: bool = False) -> None:
        """Plausible numbers everywhere: some dozens of candidates, overlapping; `hostile`: and some of HOSTILE.

        The layouts that are decoded by the model get numbers that float32 computes with exactly.
        """

    @abstractmethod
    def reference(self, index: int = 0) -> list[references.Candidate]:
        """Candidates in model px by the slow reference."""

    def some_boxes(self, random: Random, count: int) -> NDArray[np.float64]:
        """[count, 4] centre and size in whole px, the sizes even: all corners are whole px."""
        sides = (self.width, self.height)
        centre = random.integers(0, sides, (count, 2), endpoint=True)
        size = 2 * random.integers(1, [side // 4 for side in sides], (count, 2))
        return np.concatenate((centre, size), axis=1).astype(np.float64)


def some_scores(random: Random, shape: tuple[int, ...], share: float) -> NDArray[np.float64]:
    """Sixteenths, so that many are equal; all but `share` of them are 0."""
    return np.where(random.random(shape) < share, random.integers(0, 17, shape) / 16, 0.0)


def spoil(random: Random, array: NDArray[Any], values: tuple[float, ...] = HOSTILE) -> None:
    """Overwrite one of 40 numbers."""
    where = random.random(array.shape) < 1 / 40
    array[where] = random.choice(values, int(where.sum()))


def corners_of(boxes: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.concatenate((boxes[:, :2] - boxes[:, 2:] / 2, boxes[:, :2] + boxes[:, 2:] / 2), axis=1)


def centred(box: Box) -> Box:
    return (box[0] + box[2]) / 2, (box[1] + box[3]) / 2, box[2] - box[0], box[3] - box[1]


class _Grid(Head):
    """One output [N, columns] over the cells of three strides, decoded by us."""

    def cell(self, box: Box) -> tuple[int, int, int]:
        x, y, w, h = centred(box)
        stride = next(stride for stride in (8, 16, 32) if max(w, h) / 2 + stride < 7 * stride)
        return math.floor(x / stride), math.floor(y / stride), stride

    def line(self, cell: tuple[int, int, int], index: int = 0) -> NDArray[Any]:
        self.last = cell
        line: NDArray[Any] = self.outputs["output"][index, references.cells(self.width, self.height).index(cell)]
        return line


class Yolox(_Grid):
    layout = "yolox"

    def _places(self) -> Mapping[str, tuple[int, ...]]:
        return {"output": (len(references.cells(self.width, self.height)), 5 + self.classes)}

    def plant(self, box: Box, score: float, class_id: int, index: int = 0) -> None:
        column, row, stride = self.cell(box)
        x, y, w, h = centred(box)
        line = self.line((column, row, stride), index)
        line[0:4] = x / stride - column, y / stride - row, math.log(w / stride), math.log(h / stride)
        line[4], line[5 + class_id] = 1.0, score

    def spoil_box(self, value: float) -> None:
        self.line(self.last)[2] = value

    def spoil_score(self, value: float) -> None:
        self.outputs["output"][0, 7, 4] = value

    def noise(self, seed: int, index: int = 0, *, hostile: bool = False) -> None:
        random = np.random.default_rng(seed)
        head = self.outputs["output"][index]
        head[...] = random.random(head.shape)
        head[:, 4] **= 2
        if hostile:
            spoil(random, head)

    def reference(self, index: int = 0) -> list[references.Candidate]:
        return references.yolox(self.outputs["output"][index], self.width, self.height, self.threshold)


class Nanodet(_Grid):
    layout = "nanodet"
    any_size = False

    def _places(self) -> Mapping[str, tuple[int, ...]]:
        return {"output": (len(references.cells(self.width, self.height)), self.classes + 32)}

    def plant(self, box: Box, score: float, class_id: int, index: int = 0) -> None:
        column, row, stride = self.cell(box)
        line = self.line((column, row, stride), index)
        line[class_id] = score
        across, down = (column + 0.5) * stride, (row + 0.5) * stride
        for side, distance in enumerate((across - box[0], down - box[1], box[2] - across, box[3] - down)):
            # Two neighbouring bins share the weight so that their expectation is the distance.
            low = math.floor(distance / stride)
            share = distance / stride - low
            bins = np.full(8, -80.0)
            bins[low] = math.log(max(1 - share, 1e-30))
            bins[low + 1] = math.log(max(share, 1e-30))
            line[self.classes + 8 * side : self.classes + 8 * side + 8] = bins

    def spoil_box(self, value: float) -> None:
        self.line(self.last)[self.classes + 3] = value

    def spoil_score(self, value: float) -> None:
        self.outputs["output"][0, 7, 1] = value

    def noise(self, seed: int, index: int = 0, *, hostile: bool = False) -> None:
        random = np.random.default_rng(seed)
        head = self.outputs["output"][index]
        head[...] = random.random(head.shape)
        head[:, : self.classes] **= 8
        head[:, self.classes :] *= 6
        if hostile:
            spoil(random, head)

    def reference(self, index: int = 0) -> list[references.Candidate]:
        head = self.outputs["output"][index]
        return references.nanodet(head, self.classes, self.width, self.height, self.threshold)


class Centernet(Head):
    layout = "centernet"
    suppressed = False

    def _places(self) -> Mapping[str, tuple[int, ...]]:
        cells = (self.height // 4, self.width // 4)
        return {"ltrb": (4, *cells), "heatmap": (self.classes, *cells)}

    def plant(self, box: Box, score: float, class_id: int, index: int = 0) -> None:
        x, y = math.floor((box[0] + box[2]) / 8), math.floor((box[1] + box[3]) / 8)
        self.last = y, x
        self.outputs["heatmap"][index, class_id, y, x] = score
        self.outputs["ltrb"][index, :, y, x] = (4 * x - box[0], 4 * y - box[1], box[2] - 4 * x, box[3] - 4 * y)

    def spoil_box(self, value: float) -> None:
        y, x = self.last
        self.outputs["ltrb"][0, 2, y, x] = value

    def spoil_score(self, value: float) -> None:
        self.outputs["heatmap"][0, 4, 1, 1] = value

    def noise(self, seed: int, index: int = 0, *, hostile: bool = False) -> None:
        random = np.random.default_rng(seed)
        heat = self.outputs["heatmap"][index]
        heat[...] = np.where(random.random(heat.shape) < 0.02, random.random(heat.shape), 0)
        self.outputs["ltrb"][index] = random.random((4, *heat.shape[1:])) * 30 - 2
        if hostile:
            spoil(random, heat)
            spoil(random, self.outputs["ltrb"][index])

    def reference(self, index: int = 0) -> list[references.Candidate]:
        return references.centernet(self.outputs["heatmap"][index], self.outputs["ltrb"][index], self.threshold)


class Yolov5(Head):
    layout = "yolov5"

    def _places(self) -> Mapping[str, tuple[int, ...]]:
        return {"output": (3 * len(references.cells(self.width, self.height)), 5 + self.classes)}

    def plant(self, box: Box, score: float, class_id: int, index: int = 0) -> None:
        line = self.outputs["output"][index, self.next_row(index)]
        line[0:5] = (*centred(box), 1.0)
        line[5 + class_id] = score

    def spoil_box(self, value: float) -> None:
        self.outputs["output"][0, self._planted[0] - 1, 2] = value

    def spoil_score(self, value: float) -> None:
        self.outputs["output"][0, -1, 4] = value

    def noise(self, seed: int, index: int = 0, *, hostile: bool = False) -> None:
        random = np.random.default_rng(seed)
        head = self.outputs["output"][index]
        head[:, 0:4] = self.some_boxes(random, head.shape[0])
        head[:, 4] = some_scores(random, head.shape[:1], 0.3)
        head[:, 5:] = some_scores(random, (head.shape[0], self.classes), 0.8)
        if hostile:
            spoil(random, head)

    def reference(self, index: int = 0) -> list[references.Candidate]:
        return references.yolov5(self.outputs["output"][index], self.threshold)


class Yolov8(Head):
    layout = "yolov8"

    def _places(self) -> Mapping[str, tuple[int, ...]]:
        return {"output0": (4 + self.classes, len(references.cells(self.width, self.height)))}

    def plant(self, box: Box, score: float, class_id: int, index: int = 0) -> None:
        cell = self.next_row(index)
        self.outputs["output0"][index, 0:4, cell] = centred(box)
        self.outputs["output0"][index, 4 + class_id, cell] = score

    def spoil_box(self, value: float) -> None:
        self.outputs["output0"][0, 2, self._planted[0] - 1] = value

    def spoil_score(self, value: float) -> None:
        self.outputs["output0"][0, 5, -1] = value

    def noise(self, seed: int, index: int = 0, *, hostile: bool = False) -> None:
        random = np.random.default_rng(seed)
        head = self.outputs["output0"][index]
        head[0:4] = self.some_boxes(random, head.shape[1]).T
        head[4:] = some_scores(random, (self.classes, head.shape[1]), 0.15)
        if hostile:
            spoil(random, head)

    def reference(self, index: int = 0) -> list[references.Candidate]:
        return references.yolov8(self.outputs["output0"][index], self.threshold)
