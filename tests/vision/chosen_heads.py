"""The layouts whose models choose the boxes themselves, and all forms of all layouts by name."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.vision import references
from tests.vision.heads import (
    Box,
    Centernet,
    Head,
    Nanodet,
    Random,
    Yolov5,
    Yolov8,
    Yolox,
    centred,
    corners_of,
    some_scores,
    spoil,
)


class _Rows(Head):
    """One row per box: box, score, class id."""

    suppressed = False

    def _places(self) -> Mapping[str, tuple[int, ...]]:
        return {"output0": (self.rows, 6)}

    @abstractmethod
    def written(self, box: Box) -> Box: ...

    @abstractmethod
    def some_rows(self, random: Random) -> NDArray[np.float64]: ...

    def plant(self, box: Box, score: float, class_id: int, index: int = 0) -> None:
        self.outputs["output0"][index, self.next_row(index)] = (*self.written(box), score, class_id)

    def spoil_box(self, value: float) -> None:
        self.outputs["output0"][0, self._planted[0] - 1, 2] = value

    def spoil_score(self, value: float) -> None:
        self.outputs["output0"][0, -1, 4] = value

    def noise(self, seed: int, index: int = 0, *, hostile: bool = False) -> None:
        random = np.random.default_rng(seed)
        head = self.outputs["output0"][index]
        head[:, 0:4] = self.some_rows(random)
        head[:, 4] = some_scores(random, (self.rows,), 0.9)
        head[:, 5] = random.integers(0, self.classes, self.rows)
        if hostile:
            spoil(random, head[:, :5])
            spoil(random, head[:, 5], (-1, self.classes, 0.5, math.nan, math.inf, -math.inf))


class Yolov10(_Rows):
    layout = "yolov10"

    def written(self, box: Box) -> Box:
        return box

    def some_rows(self, random: Random) -> NDArray[np.float64]:
        return corners_of(self.some_boxes(random, self.rows))

    def reference(self, index: int = 0) -> list[references.Candidate]:
        return references.yolov10(self.outputs["output0"][index], self.classes, self.threshold)


class _Shares(Head):
    """Boxes as centre and size, in shares of the input."""

    def written(self, box: Box) -> Box:
        x, y, w, h = centred(box)
        return x / self.width, y / self.height, w / self.width, h / self.height

    def some_rows(self, random: Random) -> NDArray[np.float64]:
        """Sixty-fourths, which multiply with the sides exactly."""
        return random.integers((0, 0, 1, 1), (64, 64, 40, 40), (self.rows, 4)) / 64


class _ShareRows(_Shares, _Rows):
    def reference(self, index: int = 0) -> list[references.Candidate]:
        rows = self.outputs["output0"][index]
        return references.rtdetr_rows(rows, self.classes, self.width, self.height, self.threshold)


class RtdetrTopk(_ShareRows):
    layout = "rtdetr-topk"


class RtdetrRows(_ShareRows):
    layout = "rtdetr"


class RtdetrScores(_Shares):
    layout = "rtdetr"
    suppressed = False

    def _places(self) -> Mapping[str, tuple[int, ...]]:
        return {"output0": (self.rows, 4 + self.classes)}

    def plant(self, box: Box, score: float, class_id: int, index: int = 0) -> None:
        line = self.outputs["output0"][index, self.next_row(index)]
        line[0:4] = self.written(box)
        line[4 + class_id] = score

    def spoil_box(self, value: float) -> None:
        self.outputs["output0"][0, self._planted[0] - 1, 2] = value

    def spoil_score(self, value: float) -> None:
        self.outputs["output0"][0, -1, 6] = value

    def noise(self, seed: int, index: int = 0, *, hostile: bool = False) -> None:
        random = np.random.default_rng(seed)
        head = self.outputs["output0"][index]
        head[:, 0:4] = self.some_rows(random)
        head[:, 4:] = some_scores(random, (self.rows, self.classes), 0.3)
        if hostile:
            spoil(random, head)

    def reference(self, index: int = 0) -> list[references.Candidate]:
        rows = self.outputs["output0"][index]
        return references.rtdetr(rows[:, :4], rows[:, 4:].tolist(), self.width, self.height, self.threshold)


class RtdetrLogits(_Shares):
    layout = "rtdetr"
    suppressed = False

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.outputs["logits"][...] = -9

    def _places(self) -> Mapping[str, tuple[int, ...]]:
        return {"logits": (self.rows, self.classes), "pred_boxes": (self.rows, 4)}

    def plant(self, box: Box, score: float, class_id: int, index: int = 0) -> None:
        row = self.next_row(index)
        self.outputs["pred_boxes"][index, row] = self.written(box)
        self.outputs["logits"][index, row, class_id] = math.log(score / (1 - score))

    def spoil_box(self, value: float) -> None:
        self.outputs["pred_boxes"][0, self._planted[0] - 1, 2] = value

    def spoil_score(self, value: float) -> None:
        self.outputs["logits"][0, -1, 2] = value

    def noise(self, seed: int, index: int = 0, *, hostile: bool = False) -> None:
        random = np.random.default_rng(seed)
        boxes, logits = self.outputs["pred_boxes"][index], self.outputs["logits"][index]
        boxes[...] = self.some_rows(random)
        # Quarters: equal ones are equal as scores too, others stay apart.
        logits[...] = random.integers(-24, 6, logits.shape) / 4
        if hostile:
            spoil(random, boxes)
            spoil(random, logits)

    def reference(self, index: int = 0) -> list[references.Candidate]:
        scores = references.sigmoids(self.outputs["logits"][index])
        boxes = self.outputs["pred_boxes"][index]
        return references.rtdetr(boxes, scores, self.width, self.height, self.threshold)


class EfficientNms(Head):
    """Behind the rows that count lies garbage that would be found if it were read."""

    layout = "efficientnms"
    suppressed = False

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.outputs["det_boxes"][...] = (3, 3, 40, 40)
        self.outputs["det_scores"][...] = 0.99

    def _places(self) -> Mapping[str, tuple[int, ...]]:
        # Not in the plugin's order: nothing may depend on it.
        rows = self.rows
        return {"det_classes": (rows,), "det_scores": (rows,), "num_dets": (1,), "det_boxes": (rows, 4)}

    def _dtype(self, name: str) -> type[np.generic]:
        return np.int32 if name in ("num_dets", "det_classes") else np.float32

    def fill(self, value: float, index: int = 0) -> None:
        self.outputs["num_dets"][index] = self.rows
        for name in ("det_boxes", "det_scores"):
            self.outputs[name][index] = value

    def plant(self, box: Box, score: float, class_id: int, index: int = 0) -> None:
        row = self.next_row(index)
        self.outputs["num_dets"][index] = row + 1
        self.outputs["det_boxes"][index, row] = box
        self.outputs["det_scores"][index, row] = score
        self.outputs["det_classes"][index, row] = class_id

    def spoil_box(self, value: float) -> None:
        self.outputs["det_boxes"][0, self._planted[0] - 1, 2] = value

    def spoil_score(self, value: float) -> None:
        self.plant((1, 1, 9, 9), value, 0)

    def noise(self, seed: int, index: int = 0, *, hostile: bool = False) -> None:
        random = np.random.default_rng(seed)
        boxes, scores, class_ids = (self.outputs[name][index] for name in ("det_boxes", "det_scores", "det_classes"))
        boxes[...] = corners_of(self.some_boxes(random, self.rows))
        scores[...] = some_scores(random, scores.shape, 0.9)
        class_ids[...] = random.integers(0, self.classes, self.rows)
        self.outputs["num_dets"][index] = random.integers(self.rows // 2, self.rows)
        if hostile:
            spoil(random, boxes)
            spoil(random, scores)
            spoil(random, class_ids, (-1, self.classes, 2**31 - 1, -(2**31)))
            wrong = (-1, 0, self.rows, self.rows + 1, 2**31 - 1, -(2**31))
            self.outputs["num_dets"][index] = random.choice(wrong)

    def reference(self, index: int = 0) -> list[references.Candidate]:
        place = {name: array[index] for name, array in self.outputs.items()}
        return references.efficientnms(place, self.classes, self.threshold)


FORMS: dict[str, type[Head]] = {
    "yolox": Yolox,
    "nanodet": Nanodet,
    "centernet": Centernet,
    "yolov5": Yolov5,
    "yolov8": Yolov8,
    "yolov10": Yolov10,
    "rtdetr scores": RtdetrScores,
    "rtdetr rows": RtdetrRows,
    "rtdetr logits": RtdetrLogits,
    "rtdetr-topk": RtdetrTopk,
    "efficientnms": EfficientNms,
}


def make_head(form: str, *size: int, **options: Any) -> Head:
    return FORMS[form](*size, **options)
