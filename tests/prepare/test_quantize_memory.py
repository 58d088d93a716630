"""What calibration takes of memory, in a process of its own: not more with more pictures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from edge_runtime.app.evaluate import read_image
from edge_runtime.prepare.importer import import_model
from edge_runtime.prepare.png import encode_png

PICTURES = 320
ENOUGH = 160
"""The probe keeps 128 pictures in a file that is mapped; from then on nothing is to grow."""
_CHILD = """
import json, resource, sys
from pathlib import Path
from edge_runtime.app.quantizing import quantize
from edge_runtime.prepare.quantize_records import Searched

peaks = {}

def progress(what, done, of):
    if what.startswith("calibrating"):
        peaks[done] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

def search(model, meter, **options):
    return Searched(None, "minmax", 0, None, 0.01, (), (), "", "nothing: keep float")

bundle, out, pictures = sys.argv[1:]
quantize(bundle, Path(out), calibrate=[pictures], evaluate=None, search=search, progress=progress)
print(json.dumps(peaks))
"""


@pytest.mark.full
@pytest.mark.assets
@pytest.mark.timeout(900)
def test_memory_is_that_of_a_picture_whatever_their_number(assets: Path, tmp_path: Path) -> None:
    """1,000 pictures at 416 px may take 1.5 GB."""
    import_model(
        assets / "models/yolox_nano_416.onnx", tmp_path / "float", labels=assets / "models/coco_80_names.txt",
        layout="yolox", accept=True, pictures=sorted((assets / "eval/coco_val128/images").iterdir())[:1],
        read_image=read_image,
    )  # fmt: skip
    found = sorted((assets / "calib/coco_train128").rglob("*.jpg"))[:40]
    sources = [read_image(path).to_rgb() for path in found]
    (tmp_path / "pictures").mkdir()
    rng = np.random.default_rng(0)
    for index in range(PICTURES):
        picture = sources[index % len(sources)]
        top, left = rng.integers(0, 64, 2)
        (tmp_path / f"pictures/{index:04d}.png").write_bytes(encode_png(np.ascontiguousarray(picture[top:, left:])))
    arguments = [str(tmp_path / "float"), str(tmp_path / "out"), str(tmp_path / "pictures")]
    done = subprocess.run([sys.executable, "-c", _CHILD, *arguments], capture_output=True, check=True, timeout=800)
    peaks = {int(count): peak for count, peak in json.loads(done.stdout).items()}
    shown = max(peaks)
    assert shown == PICTURES * 3 // 4
    assert peaks[shown] < 1500
    assert peaks[shown] - peaks[ENOUGH] < 40
