"""What an ONNX file says of itself, read from its bytes: inputs, operators, opsets, where its weights are.

Enough to refuse a build before anything is loaded, on a device that has no `onnx`. Weights are passed over, not copied.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from edge_runtime.engine.modelfile import foreign_model
from edge_runtime.errors import BundleError

Shape = tuple[int | str, ...]
"""Of an input: sizes, and a word for each free axis ("" where it has no name)."""

# Field numbers of onnx.proto, which never change.
_MODEL_GRAPH, _MODEL_OPSETS = 7, 8
_OPSET_DOMAIN, _OPSET_VERSION = 1, 2
_GRAPH_NODE, _GRAPH_INITIALIZER, _GRAPH_INPUT, _GRAPH_SPARSE = 1, 5, 11, 15
_NODE_NAME, _NODE_OPERATOR, _NODE_ATTRIBUTE, _NODE_DOMAIN = 3, 4, 5, 7
_ATTRIBUTE_TENSORS, _ATTRIBUTE_GRAPHS = (5, 10), (6, 11)
_TENSOR_NAME, _TENSOR_LOCATION = 8, 14
_VALUE_NAME, _VALUE_TYPE = 1, 2
_TYPE_TENSOR = 1
_TENSOR_TYPE_KIND, _TENSOR_TYPE_SHAPE = 1, 2
_SHAPE_DIM, _DIM_VALUE, _DIM_NAME = 1, 1, 2
_EXTERNAL = 1
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MAX_DEPTH = 32


@dataclass(frozen=True, slots=True)
class Input:
    """An input of the graph that is no weight. `kind`: its TensorProto.DataType; `shape` None: it has none."""

    name: str
    kind: int
    shape: Shape | None

    @property
    def told(self) -> str:
        """For messages: "x [batch, 3, 416, 416]"."""
        if self.shape is None:
            return f"{self.name} (of any shape)"
        return f"{self.name} [{', '.join(str(side) or '?' for side in self.shape)}]"


@dataclass(frozen=True, slots=True)
class Node:
    """An operator in the graph, or in a graph inside of it."""

    name: str
    operator: str
    domain: str


@dataclass(slots=True)
class OnnxFile:
    """`external`: names of tensors whose data lies in another file. `opsets`: version by domain ("" is ONNX's own)."""

    inputs: tuple[Input, ...] = ()
    nodes: list[Node] = field(default_factory=list)
    opsets: Mapping[str, int] = field(default_factory=dict)
    external: list[str] = field(default_factory=list)

    @property
    def quantised(self) -> bool:
        """Whether it carries its own scales (Q/DQ)."""
        return any(node.operator in ("QuantizeLinear", "DequantizeLinear") for node in self.nodes)

    def opset_of(self, domain: str) -> int | None:
        """The version of a domain's operators that the file is written for."""
        return self.opsets.get("" if domain == "ai.onnx" else domain)


def read_onnx(data: bytes, where: str) -> OnnxFile:
    """Read a model's bytes; `where` names the file. Raises BundleError (code "model_invalid")."""
    if (refusal := foreign_model(data, where)) is not None:
        raise refusal
    try:
        return _read_model(memoryview(data))
    except (ValueError, IndexError, UnicodeDecodeError) as error:
        raise BundleError(
            f"is damaged, cut off or no ONNX model at all: {error}",
            code="model_invalid",
            where=where,
            remedy="put the exported ONNX file in its place",
        ) from None


def _read_model(data: memoryview) -> OnnxFile:
    found = OnnxFile()
    opsets: dict[str, int] = {}
    graphs = 0
    for number, value in _fields(data):
        if number == _MODEL_GRAPH:
            graphs += 1
            found.inputs = _read_graph(_part(value), found, 0)
        elif number == _MODEL_OPSETS:
            entry = dict(_fields(_part(value)))
            opsets[_text(entry.get(_OPSET_DOMAIN))] = _integer(entry.get(_OPSET_VERSION))
    if graphs != 1:
        raise ValueError(f"it holds {graphs} graphs")
    found.opsets = opsets
    return found


def _read_graph(data: memoryview, found: OnnxFile, depth: int) -> tuple[Input, ...]:
    if depth > _MAX_DEPTH:
        raise ValueError("its graphs lie too deep in one another")
    inputs, weights = [], set()
    for number, value in _fields(data):
        if number == _GRAPH_NODE:
            _read_node(_part(value), found, depth)
        elif number == _GRAPH_INITIALIZER:
            weights.add(_read_tensor(_part(value), found))
        elif number == _GRAPH_SPARSE:
            raise ValueError("it holds sparse weights")
        elif number == _GRAPH_INPUT:
            inputs.append(_read_input(_part(value)))
    return tuple(each for each in inputs if each.name not in weights)


def _read_node(data: memoryview, found: OnnxFile, depth: int) -> None:
    name = operator = domain = ""
    for number, value in _fields(data):
        if number == _NODE_NAME:
            name = _text(value)
        elif number == _NODE_OPERATOR:
            operator = _text(value)
        elif number == _NODE_DOMAIN:
            domain = _text(value)
        elif number == _NODE_ATTRIBUTE:
            for inner, part in _fields(_part(value)):
                if inner in _ATTRIBUTE_TENSORS:
                    _read_tensor(_part(part), found)
                elif inner in _ATTRIBUTE_GRAPHS:
                    _read_graph(_part(part), found, depth + 1)
    found.nodes.append(Node(name, operator, domain))


def _read_tensor(data: memoryview, found: OnnxFile) -> str:
    name, location = "", 0
    for number, value in _fields(data):
        if number == _TENSOR_NAME:
            name = _text(value)
        elif number == _TENSOR_LOCATION:
            location = _integer(value)
    if location == _EXTERNAL:
        found.external.append(name)
    return name


def _read_input(data: memoryview) -> Input:
    entry = dict(_fields(data))
    name = _text(entry.get(_VALUE_NAME))
    kinds = dict(_fields(_part(entry.get(_VALUE_TYPE, memoryview(b"")))))
    tensor = dict(_fields(_part(kinds.get(_TYPE_TENSOR, memoryview(b"")))))
    kind = _integer(tensor.get(_TENSOR_TYPE_KIND, 0))
    if _TENSOR_TYPE_SHAPE not in tensor:
        return Input(name, kind, None)
    shape: list[int | str] = []
    for number, value in _fields(_part(tensor[_TENSOR_TYPE_SHAPE])):
        if number == _SHAPE_DIM:
            dim = dict(_fields(_part(value)))
            size = _signed(_integer(dim.get(_DIM_VALUE, 0)))  # some exporters write -1 for a free axis
            shape.append(size if size > 0 else _text(dim.get(_DIM_NAME)))
    return Input(name, kind, tuple(shape))


# --- protobuf's wire format


def _fields(data: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """(field number, value) in order: an int, or the bytes of what has a length. Raises ValueError."""
    at, end = 0, len(data)
    while at < end:
        key, at = _varint(data, at)
        number, kind = key >> 3, key & 7
        if number == 0:
            raise ValueError("a field without a number")
        if kind == _VARINT:
            value, at = _varint(data, at)
            yield number, value
        elif kind == _BYTES:
            size, at = _varint(data, at)
            if at + size > end:
                raise ValueError(f"a field of {size} bytes where {end - at} are left")
            yield number, data[at : at + size]
            at += size
        elif kind in (_FIXED64, _FIXED32):
            at += 8 if kind == _FIXED64 else 4
            if at > end:
                raise ValueError("a number that is cut off")
        else:
            raise ValueError(f"a field of kind {kind}")


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(data) or shift > 63:
            raise ValueError("a number that is cut off")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7


def _part(value: int | memoryview | None) -> memoryview:
    if not isinstance(value, memoryview):
        raise ValueError("a number where a message belongs")
    return value


def _integer(value: int | memoryview | None) -> int:
    if not isinstance(value, int):
        raise ValueError("bytes where a number belongs")
    return value


def _signed(value: int) -> int:
    """An int64, which the wire has as its two's complement."""
    return value - (1 << 64) if value >> 63 else value


def _text(value: int | memoryview | None) -> str:
    return "" if value is None else bytes(_part(value)).decode("utf-8")
