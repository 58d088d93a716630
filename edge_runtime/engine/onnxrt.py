"""ONNX Runtime on the CPU: the one door to `onnxruntime` on the frame's way.

One session per engine, shared by all its lanes; every lane runs on the thread that calls it. Measured on two
cores with two lanes (yolox_nano_416 / centernet_416, onnxruntime 1.32): sessions of their own were not faster
(both within the noise) and cost 5 / 20 MB more; the memory pattern cost 4 / 20 MB and brought nothing; without
the CPU arena the peak rose by 28 / 150 MB. So: shared, arena on, memory pattern off.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from edge_runtime.engine.bundle import Bundle
from edge_runtime.engine.manifest import Backend
from edge_runtime.engine.modelfile import foreign_model, plain_message, refused_model
from edge_runtime.engine.protocol import EngineInfo, InputBuffer
from edge_runtime.errors import BundleError, EdgeError, EngineError
from edge_runtime.records.frames import InputArray
from edge_runtime.records.spec import InputSpec
from edge_runtime.vision.decode import build_decoder
from edge_runtime.vision.pixels import fill_level

__all__ = ["OnnxRuntimeEngine", "OnnxRuntimeLane", "load_engine", "open_session", "output_shapes"]

BACKEND: Backend = "onnxruntime"
_ALIGNMENT = 64
_MAX_BOUND = 64
_DTYPES: Mapping[str, type[np.generic]] = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(double)": np.float64,
    "tensor(int64)": np.int64,
    "tensor(int32)": np.int32,
    "tensor(int8)": np.int8,
    "tensor(uint8)": np.uint8,
    "tensor(bool)": np.bool_,
}

# Building sessions concurrently is reported racy; running them is not.
_building = threading.Lock()
# What is wrong becomes an exception of ours; the library's own lines on standard error only repeat it.
ort.set_default_logger_severity(4)


def open_session(model: bytes, where: str) -> Any:
    """An onnxruntime.InferenceSession over the model's bytes: one thread, CPU provider. `where` names the file.

    Raises BundleError (code "model_invalid", "model_unsupported" or "model_external_data").
    """
    if (refusal := foreign_model(model, where)) is not None:
        raise refusal
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    options.enable_cpu_mem_arena = True
    options.enable_mem_pattern = False
    options.log_severity_level = 4
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry("session.inter_op.allow_spinning", "0")
    # Weights in a second file would not be covered by the bundle's sha256. By default they would be looked for
    # in the working directory; below a device file nothing can exist.
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", "/dev/null")
    try:
        with _building:
            session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # noqa: BLE001  its exceptions have no other common base
        raise refused_model(error, where, f"onnxruntime {ort.__version__}") from None
    if session.get_providers() != ["CPUExecutionProvider"]:
        raise EngineError(f"runs on {session.get_providers()}, not on the CPU provider", where=where)
    return session


@dataclass(slots=True)
class _Model:
    """What is known of a session's inputs and outputs once they are proved to fit the bundle."""

    input_name: str
    batch: int | None
    outputs: dict[str, type[np.generic]]


def _check_model(session: Any, spec: InputSpec, where: str) -> _Model:
    """Prove by the declared types and shapes that the model takes what the bundle says. Raises BundleError."""

    def refuse(message: str, remedy: str) -> BundleError:
        return BundleError(message, code="input_mismatch", where=where, remedy=remedy)

    inputs = session.get_inputs()
    told = ", ".join(f"{i.name} {_type_word(i.type)} {_dims(i.shape)}" for i in inputs) or "none"
    wanted = "one float32 input [batch, 3, height, width]"
    fused = spec.pixel != "float32"
    if fused:
        wanted = f"one uint8 input [batch, {', '.join(map(str, spec.shape))}] for {spec.pixel}"
    if len(inputs) != 1:
        raise refuse(f"has {len(inputs)} inputs ({told}), and {wanted} is needed", "export it with the picture alone")
    (only,) = inputs
    shape = list(only.shape)
    if fused:
        sides = zip(shape[1:], spec.shape, strict=False)
        if (
            only.type != "tensor(uint8)"
            or len(shape) != len(spec.shape) + 1
            or any(isinstance(has, int) and has != want for has, want in sides)
        ):
            raise refuse(
                f"takes {told}, and {wanted} is needed",
                'correct size and pixel of the variant (pixel = "float32" for a model without preprocessing), or make '
                "the model with `edge-runtime prepare fuse`",
            )
        return _Model(only.name, _batch_of(shape), _output_types(session, refuse))
    if only.type != "tensor(float)":
        hint = "export it with a float32 input"
        if only.type == "tensor(uint8)":
            hint = f'{hint}, or say with pixel = "bgr24", "rgba" or "nv12" which bytes its graph takes'
        raise refuse(f"takes {told}, and {wanted} is needed", hint)
    if len(shape) != 4:
        raise refuse(f"takes {told}: {len(shape)} axes, and {wanted} is needed", "export it for pictures, NCHW")
    if isinstance(shape[1], int) and shape[1] != 3:
        hint = "export it in NCHW order: this one is NHWC" if shape[3] == 3 else "a model of three colours is needed"
        raise refuse(f"takes {told}: {shape[1]} channels, and {wanted} is needed", hint)
    for axis, word, size in ((2, "high", spec.height), (3, "wide", spec.width)):
        if isinstance(shape[axis], int) and shape[axis] != size:
            fixed = f"{shape[3]}x{shape[2]}"
            message = f"takes pictures {shape[axis]} px {word} only ({told}), and the variant says {size}"
            raise refuse(message, f"write size = [{shape[3]}, {shape[2]}]" if "None" not in fixed else "correct size")
    return _Model(only.name, _batch_of(shape), _output_types(session, refuse))


def _batch_of(shape: list[Any]) -> int | None:
    return shape[0] if isinstance(shape[0], int) and shape[0] > 0 else None


def _output_types(session: Any, refuse: Callable[[str, str], BundleError]) -> dict[str, type[np.generic]]:
    outputs = {}
    for output in session.get_outputs():
        if output.type not in _DTYPES:
            raise refuse(f"has an output {output.name!r} of type {output.type}", "export it with float32 outputs")
        outputs[output.name] = _DTYPES[output.type]
    return outputs


def _type_word(kind: str) -> str:
    return {"tensor(float)": "float32", "tensor(double)": "float64"}.get(kind, kind.removeprefix("tensor(").rstrip(")"))


def _dims(shape: list[Any]) -> str:
    return f"[{', '.join('any' if d is None else str(d) for d in shape)}]"


def grey_picture(spec: InputSpec, batch: int) -> InputArray:
    """[batch, *spec.shape] of `spec.dtype`: a mid-grey picture as preprocessing would give it."""
    picture = np.empty((batch, *spec.shape), spec.dtype)
    fill_level(picture, spec, 128.0)
    return picture


def output_shapes(session: Any, spec: InputSpec, where: str) -> tuple[dict[str, tuple[int, ...]], int | None]:
    """Prove a session with one inference over a grey picture of the spec's size.

    Returns each output's shape for a batch of one, and the fixed batch size (None: any). Raises BundleError
    (code "input_mismatch", "output_mismatch" or "non_finite").
    """
    model = _check_model(session, spec, where)
    batch = model.batch or 1
    try:
        results = session.run(None, {model.input_name: grey_picture(spec, batch)})
    except Exception as error:  # noqa: BLE001  see open_session
        raise BundleError(
            f"cannot take a picture of {spec.width}x{spec.height}: {plain_message(error)}",
            code="input_mismatch",
            where=where,
            remedy=_sizes_it_takes(session, model, spec),
        ) from None
    shapes = {}
    for name, result in zip(model.outputs, results, strict=True):
        if result.ndim < 1 or result.shape[0] != batch:
            raise BundleError(
                f"its output {name!r} is {list(result.shape)} for a batch of {batch}: the first axis is not the batch",
                code="output_mismatch",
                where=where,
                remedy="export it without the steps that join the pictures of a batch (NMS inside the graph)",
            )
        if result.dtype.kind == "f" and not np.isfinite(result).all():
            bad = int(result.size - np.isfinite(result).sum())
            raise BundleError(
                f"answers a grey picture with {bad} of {result.size} values of {name!r} not finite (NaN or infinite)",
                code="non_finite",
                where=where,
                remedy="the weights are damaged, or overflow in this precision: export it again, or use fp32",
            )
        shapes[name] = (1, *result.shape[1:])
    return shapes, model.batch


def _sizes_it_takes(session: Any, model: _Model, spec: InputSpec) -> str:
    """Try the nearest multiples of 32, which most detectors want, to be able to say what would work."""
    works = []
    for up in (0, 1):
        width, height = (max(side // 32 + up * bool(side % 32), 1) * 32 for side in (spec.width, spec.height))
        shape = replace(spec, width=width, height=height).shape
        try:
            session.run(None, {model.input_name: np.zeros((model.batch or 1, *shape), spec.dtype)})
        except Exception:  # noqa: BLE001, S112  a size that does not work is simply not named
            continue
        works.append(f"{width}x{height}")
    if works:
        return f"it takes multiples of 32, such as {' or '.join(dict.fromkeys(works))}"
    return "set the variant's size to the one that the model was exported for"


@dataclass(slots=True)
class _Bound:
    """Input and outputs of one (buffer, count), bound once. Holds the arrays whose addresses the binding has."""

    binding: Any
    source: InputArray
    outputs: Mapping[str, NDArray[Any]]


class OnnxRuntimeLane:
    """One execution context. The run happens in `collect`, on the calling thread, without the GIL."""

    def __init__(self, engine: OnnxRuntimeEngine) -> None:
        self._engine = engine
        self._outputs: dict[str, NDArray[Any]] = {}
        self._bound: dict[tuple[int, int], _Bound] = {}
        self._pending: tuple[InputBuffer, int] | None = None

    def submit(self, buffer: InputBuffer, count: int) -> None:
        """Note a run over the first `count` places of the buffer.

        Raises EngineError: engine closed, a run not collected yet, a buffer of another engine's shape, or a
        batch size that the engine cannot run.
        """
        engine = self._engine
        engine.session()
        if self._pending is not None:
            raise EngineError("a lane was given a second run before the first was collected", code="engine_state")
        array = buffer.array
        spec = engine.info.input
        if array.shape[1:] != spec.shape or array.dtype != spec.dtype or not array.flags.c_contiguous:
            raise EngineError(
                f"a buffer of {array.dtype} {list(array.shape)} is not one of this engine's", code="buffer"
            )
        allowed = engine.allowed_batches
        if not 1 <= count <= array.shape[0] or (allowed is not None and count not in allowed):
            can = "any size" if allowed is None else f"batches of {', '.join(map(str, allowed))}"
            raise EngineError(
                f"a batch of {count} in a buffer of {array.shape[0]} cannot be run: the model takes {can}", code="batch"
            )
        self._pending = (buffer, count)

    def collect(self) -> Mapping[str, NDArray[Any]]:
        """Run what was submitted: output name -> [count, ...], the lane's own arrays, valid until its next run.

        Raises EngineError: nothing submitted, engine closed, or the run failed.
        """
        if self._pending is None:
            raise EngineError("nothing was submitted to this lane", code="engine_state")
        (buffer, count), self._pending = self._pending, None
        session = self._engine.session()  # held here: a close in between only takes effect after this run
        if self._engine.outputs_fixed:
            bound = self._bind(session, buffer, count)
            try:
                session.run_with_iobinding(bound.binding)
                return bound.outputs
            except Exception:  # noqa: BLE001, S110  see open_session; run anew below, where a real fault shows again
                pass
        return self._run_unbound(session, buffer, count)

    def _run_unbound(self, session: Any, buffer: InputBuffer, count: int) -> Mapping[str, NDArray[Any]]:
        """Run with outputs that the library allocates: for models whose outputs' shapes depend on the picture."""
        engine = self._engine
        try:
            results = session.run(None, {engine.input_name: buffer.array[:count]})
        except Exception as error:  # noqa: BLE001  see open_session
            raise EngineError(
                f"inference failed: {plain_message(error)}", where=engine.where, code="inference_failed"
            ) from None
        outputs = dict(zip(engine.output_types, results, strict=True))
        for name, array in outputs.items():
            if array.shape[:1] != (count,):
                message = f"output {name!r} is {list(array.shape)} for a batch of {count}"
                raise EngineError(message, where=engine.where, code="output_mismatch")
            if array.shape[1:] != engine.info.output_shapes[name][1:]:
                engine.outputs_fixed = False
                self.forget()
        return outputs

    def _bind(self, session: Any, buffer: InputBuffer, count: int) -> _Bound:
        key = (id(buffer.array), count)  # the entry holds the array, so that its id stays its own
        bound = self._bound.get(key)
        if bound is not None:
            return bound
        engine = self._engine
        if len(self._bound) >= _MAX_BOUND:
            self._bound.clear()
        outputs = {name: self._output(name, count, shape) for name, shape in engine.info.output_shapes.items()}
        source = buffer.array[:count]
        binding = session.io_binding()
        binding.bind_input(engine.input_name, "cpu", 0, source.dtype.type, source.shape, source.ctypes.data)
        for name, array in outputs.items():
            binding.bind_output(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
        bound = self._bound[key] = _Bound(binding, buffer.array, outputs)
        return bound

    def _output(self, name: str, count: int, shape: tuple[int, ...]) -> NDArray[Any]:
        """The first `count` places of the lane's one array for this output, grown where it is too small."""
        whole = self._outputs.get(name)
        if whole is None or whole.shape[0] < count:
            whole = self._outputs[name] = np.zeros((count, *shape[1:]), self._engine.output_types[name])
            # Bindings to the smaller array stay right, and would keep its memory.
            self._bound = {key: bound for key, bound in self._bound.items() if name not in bound.outputs}
        return whole[:count]

    def forget(self, array: InputArray | None = None) -> None:
        """Drop what is bound to an input array, or everything. Called by the engine."""
        if array is None:
            self._bound, self._outputs = {}, {}
            return
        self._bound = {key: bound for key, bound in self._bound.items() if bound.source is not array}


class OnnxRuntimeEngine:
    """A model in an ONNX Runtime session on the CPU; made by `load_engine`. Lanes may run concurrently."""

    def __init__(self, session: Any, info: EngineInfo, batch: int | None, where: str) -> None:
        self._session: Any = session
        self._info = info
        self._batches = None if batch is None else (batch,)
        self._lanes: list[OnnxRuntimeLane] = []
        self._buffers = 0
        self._lock = threading.Lock()
        self.where = where
        self.input_name: str = session.get_inputs()[0].name
        self.output_types = {output.name: _DTYPES[output.type] for output in session.get_outputs()}
        self.outputs_fixed = True  # until a picture gives another shape than the warm-up did

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def allowed_batches(self) -> tuple[int, ...] | None:
        return self._batches

    def session(self) -> Any:
        """The session. Raises EngineError (code "engine_closed") after `close`."""
        session = self._session
        if session is None:
            raise EngineError("the engine is closed", code="engine_closed", where=self.where)
        return session

    def open_lane(self) -> OnnxRuntimeLane:
        """A new lane. Raises EngineError after `close`."""
        self.session()
        lane = OnnxRuntimeLane(self)
        with self._lock:
            self._lanes.append(lane)
        return lane

    def allocate(self, max_batch: int) -> InputBuffer:
        """[max_batch, *spec.shape] zeros of `spec.dtype` at a 64-byte boundary. Raises EngineError after `close`."""
        self.session()
        if max_batch < 1:
            raise EngineError(f"a buffer of {max_batch} places cannot be made", code="batch")
        spec = self._info.input
        shape = (max_batch, *spec.shape)
        size = int(np.prod(shape)) * spec.dtype.itemsize
        raw = np.zeros(size + _ALIGNMENT, np.uint8)  # pages that are never written cost nothing
        start = -raw.ctypes.data % _ALIGNMENT
        array = raw[start : start + size].view(spec.dtype).reshape(shape)
        with self._lock:
            self._buffers += 1
            return InputBuffer(self._buffers - 1, array)

    def release(self, buffer: InputBuffer) -> None:
        """Let go of a buffer: its memory is freed with the caller's last reference."""
        with self._lock:
            lanes = list(self._lanes)
        for lane in lanes:
            lane.forget(buffer.array)

    def close(self) -> None:
        """Free session, lanes' arrays and bindings; idempotent. A run in progress ends first, then frees its own."""
        with self._lock:
            lanes, self._lanes = self._lanes, []
        for lane in lanes:
            lane.forget()
        self._session = None
        _give_memory_back()


def load_engine(
    bundle: Bundle, variant: str = "auto", *, opened: Callable[[], None] = lambda: None
) -> OnnxRuntimeEngine:
    """Load a variant of a verified bundle and warm it up: one inference proves its shapes and its layout.

    `opened` is called between the two.

    Raises BundleError when the artefact changed, cannot be loaded, takes other pictures than the bundle says,
    answers with NaN, or does not fit the declared output layout.
    """
    table = bundle.variant(variant, BACKEND)
    where = str(bundle.artefact(table.name, BACKEND).path)
    spec, output = bundle.input_spec(table.name), bundle.output_spec()
    # The bytes live only in this expression: the session has its own copy of what it needs.
    session = open_session(bundle.read_artefact(table.name, BACKEND), where)
    opened()
    shapes, batch = output_shapes(session, spec, where)
    try:
        build_decoder(output, spec, shapes)
    except EdgeError as error:
        raise BundleError(error.message, code=error.code, where=where, remedy=error.remedy) from None
    info = EngineInfo(
        digest=bundle.engine_digest(table.name, BACKEND),
        bundle=bundle.digest,
        variant=table.name,
        backend=BACKEND,
        precision=table.precision,
        input=spec,
        output=output,
        output_shapes=shapes,
    )
    _give_memory_back()
    return OnnxRuntimeEngine(session, info, batch, where)


def _give_memory_back() -> None:
    """Return what parsing and closing a model freed: glibc keeps it, 11 MB after a load and 30 to 70 after a close."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it, musl has not
    if trim is not None:
        trim(0)
