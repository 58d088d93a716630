"""Model outputs made to order: empty heads, heads with planted boxes, heads of noise."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from edge_runtime.records.frames import Decoder, Detections, Float32Array, Transform
from edge_runtime.records.spec import InputSpec, Layout, OutputSpec, Resize
from edge_runtime.vision.decode import build_decoder
from tests.vision import references

Box = tuple[float, float, float, float]
DETECTORS: tuple[Layout, ...] = ("yolox", "nanodet", "centernet")


def assert_typed(found: Detections) -> None:
    count = len(found)
    assert found.boxes.shape == (count, 4)
    assert found.scores.shape == found.class_ids.shape == (count,)
    assert found.boxes.dtype == np.float32
    assert found.scores.dtype == np.float32
    assert found.class_ids.dtype == np.int32


@dataclass
class Head:
    """Outputs of one layout for a batch, all places empty at first."""

    layout: Layout
    width: int = 64
    height: int = 64
    classes: int = 6
    batch: int = 1
    resize: Resize = "letterbox-center"
    threshold: float = 0.3
    nms_iou: float = 0.6
    max_detections: int = 300
    outputs: dict[str, Float32Array] = field(init=False)

    def __post_init__(self) -> None:
        anchors = len(references.cells(self.width, self.height))
        shapes: dict[Layout, dict[str, tuple[int, ...]]] = {
            "yolox": {"output": (anchors, 5 + self.classes)},
            "nanodet": {"output": (anchors, self.classes + 32)},
            "centernet": {
                "ltrb": (4, self.height // 4, self.width // 4),
                "heatmap": (self.classes, self.height // 4, self.width // 4),
            },
        }
        self.shapes = {name: (1, *shape) for name, shape in shapes[self.layout].items()}
        self.outputs = {
            name: np.zeros((self.batch, *shape), dtype=np.float32) for name, shape in shapes[self.layout].items()
        }

    @property
    def input(self) -> InputSpec:
        return InputSpec(self.width, self.height, resize=self.resize)

    @property
    def output(self) -> OutputSpec:
        labels = tuple(f"class-{k}" for k in range(self.classes))
        return OutputSpec(self.layout, labels, self.threshold, self.nms_iou, self.max_detections)

    def decoder(self) -> Decoder:
        return build_decoder(self.output, self.input, self.shapes)

    def decode(self, transform: Transform, index: int = 0) -> Detections:
        result = self.decoder()(dict(self.outputs), index, transform)
        assert isinstance(result, Detections)
        return result

    def fill(self, value: float, index: int = 0) -> None:
        for array in self.outputs.values():
            array[index] = value

    def noise(self, seed: int, index: int = 0) -> None:
        """Plausible numbers everywhere: some dozens of candidates, overlapping."""
        random = np.random.default_rng(seed)
        if self.layout == "centernet":
            heat = self.outputs["heatmap"][index]
            heat[...] = np.where(random.random(heat.shape) < 0.02, random.random(heat.shape), 0)
            self.outputs["ltrb"][index] = random.random((4, *heat.shape[1:])) * 30 - 2
            return
        head = self.outputs["output"][index]
        head[...] = random.random(head.shape)
        if self.layout == "yolox":
            head[:, 4] **= 2
        else:
            head[:, : self.classes] **= 8
            head[:, self.classes :] *= 6

    def reference(self, index: int = 0) -> list[references.Candidate]:
        """Candidates in model px by the slow reference."""
        if self.layout == "centernet":
            return references.centernet(self.outputs["heatmap"][index], self.outputs["ltrb"][index], self.threshold)
        head = self.outputs["output"][index]
        if self.layout == "yolox":
            return references.yolox(head, self.width, self.height, self.threshold)
        return references.nanodet(head, self.classes, self.width, self.height, self.threshold)

    def plant(self, box: Box, score: float, class_id: int, index: int = 0) -> None:
        """Encode a box (model px) the way a model of this layout says it."""
        middle = (box[0] + box[2]) / 2, (box[1] + box[3]) / 2
        if self.layout == "centernet":
            x, y = math.floor(middle[0] / 4), math.floor(middle[1] / 4)
            self.outputs["heatmap"][index, class_id, y, x] = score
            sides = (4 * x - box[0], 4 * y - box[1], box[2] - 4 * x, box[3] - 4 * y)
            self.outputs["ltrb"][index, :, y, x] = sides
            return
        extent = max(box[2] - box[0], box[3] - box[1])
        stride = next(stride for stride in (8, 16, 32) if extent / 2 + stride < 7 * stride)
        column, row = math.floor(middle[0] / stride), math.floor(middle[1] / stride)
        line = self.outputs["output"][index, references.cells(self.width, self.height).index((column, row, stride))]
        if self.layout == "yolox":
            line[0:2] = middle[0] / stride - column, middle[1] / stride - row
            line[2:4] = math.log((box[2] - box[0]) / stride), math.log((box[3] - box[1]) / stride)
            line[4] = 1.0
            line[5 + class_id] = score
            return
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
