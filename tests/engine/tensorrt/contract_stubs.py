"""Type stubs of the real bindings, made of what real_bindings.py found, and what is put in the place of api.py."""

from __future__ import annotations

import keyword
import re
from typing import Any

NULLABLE = {
    ("Runtime", "deserialize_cuda_engine"),
    ("ICudaEngine", "create_execution_context"),
    ("ICudaEngine", "create_engine_inspector"),
    ("Builder", "create_network"),
    ("Builder", "create_builder_config"),
    ("Builder", "build_serialized_network"),
    ("IBuilderConfig", "create_timing_cache"),
}
"""What gives None on failure, whatever its signature says: with this, mypy also sees that it is looked at."""
OVERRIDES = ("ILogger", "IOutputAllocator", "IProgressMonitor")
"""The classes whose methods TensorRT calls."""
ALIASES = {
    "TrtBuilder": "Builder",
    "TrtBuilderConfig": "IBuilderConfig",
    "TrtContext": "IExecutionContext",
    "TrtDataType": "DataType",
    "TrtDims": "Dims",
    "TrtEngine": "ICudaEngine",
    "TrtHostMemory": "IHostMemory",
    "TrtInspector": "EngineInspector",
    "TrtLogger": "ILogger",
    "TrtNetwork": "INetworkDefinition",
    "TrtOutputAllocator": "IOutputAllocator",
    "TrtParser": "OnnxParser",
    "TrtProfile": "IOptimizationProfile",
    "TrtProgressMonitor": "IProgressMonitor",
    "TrtRuntime": "Runtime",
    "TrtTimingCache": "ITimingCache",
}
PYCUDA_ALIASES = {
    "PyCudaContext": "Context",
    "PyCudaDevice": "Device",
    "PyCudaEvent": "Event",
    "PyCudaFunction": "Function",
    "PyCudaHostArray": "_Pagelocked",
    "PyCudaMemory": "DeviceAllocation",
    "PyCudaModule": "Module",
    "PyCudaStream": "Stream",
}
_PLAIN = {"int", "str", "bool", "float", "bytes", "object"}
_HEAD = """from __future__ import annotations
import builtins
from typing import Any, ClassVar, Iterator, Sequence, overload
from typing_extensions import Unpack
"""

# Names, arguments and results of PyCUDA 2026.1 as far as the door needs them, from its own sources
# (src/wrapper/wrap_cudadrv.cpp, pycuda/driver.py) and its documentation (doc/source/driver.rst). It cannot be
# installed without CUDA's headers.
PYCUDA = """
class Error(Exception): ...
class MemoryError(Error): ...
class LogicError(Error): ...
class LaunchError(Error): ...
class RuntimeError(Error): ...
class host_alloc_flags:
    PORTABLE: ClassVar[int]
    DEVICEMAP: ClassVar[int]
    WRITECOMBINED: ClassVar[int]
class event_flags:
    DEFAULT: ClassVar[int]
    BLOCKING_SYNC: ClassVar[int]
    DISABLE_TIMING: ClassVar[int]
class ctx_flags:
    SCHED_AUTO: ClassVar[int]
    SCHED_SPIN: ClassVar[int]
    SCHED_YIELD: ClassVar[int]
    SCHED_BLOCKING_SYNC: ClassVar[int]
    MAP_HOST: ClassVar[int]
class device_attribute:
    INTEGRATED: ClassVar[device_attribute]
    CAN_MAP_HOST_MEMORY: ClassVar[device_attribute]
    UNIFIED_ADDRESSING: ClassVar[device_attribute]
class Context:
    def push(self) -> None: ...
    @staticmethod
    def pop() -> None: ...
    def detach(self) -> None: ...
    @staticmethod
    def synchronize() -> None: ...
    @staticmethod
    def get_current() -> Context: ...
class Device:
    def __init__(self, number: int, /) -> None: ...
    @staticmethod
    def count() -> int: ...
    def name(self) -> str: ...
    def compute_capability(self) -> tuple[int, int]: ...
    def total_memory(self) -> int: ...
    def get_attribute(self, attr: device_attribute, /) -> int: ...
    def retain_primary_context(self) -> Context: ...
class Stream:
    def __init__(self, flags: int = 0) -> None: ...
    def synchronize(self) -> None: ...
    def is_done(self) -> bool: ...
    @property
    def handle(self) -> int: ...
class Event:
    def __init__(self, flags: int = ...) -> None: ...
    def record(self, stream: Stream | None = ...) -> Event: ...
    def synchronize(self) -> Event: ...
    def query(self) -> bool: ...
    def time_till(self, event: Event, /) -> float: ...
class Function:
    def prepare(self, arg_types: str, texrefs: Sequence[Any] = ...) -> Function: ...
    def prepared_async_call(self, grid: Any, block: Any, stream: Stream, *args: Any) -> None: ...
class Module:
    def get_function(self, name: str, /) -> Function: ...
class DeviceAllocation:
    def __int__(self) -> int: ...
    def __index__(self) -> int: ...
    def free(self) -> None: ...
class HostPointer:
    def get_device_pointer(self) -> int: ...
class PagelockedHostAllocation(HostPointer):
    def free(self) -> None: ...
    def get_flags(self) -> int: ...
class HostAllocation(PagelockedHostAllocation):
    def free(self) -> None: ...
    def get_flags(self) -> int: ...
class _Ctypes:
    data: int
class _Pagelocked:
    @property
    def base(self) -> PagelockedHostAllocation: ...
    @property
    def ctypes(self) -> _Ctypes: ...
    def fill(self, value: int) -> None: ...
def init(flags: int = 0) -> None: ...
def pagelocked_empty(shape: Any, dtype: Any, order: str = "C", mem_flags: int = 0) -> _Pagelocked: ...
def mem_alloc(bytes: int, /) -> DeviceAllocation: ...
def mem_get_info() -> tuple[int, int]: ...
def module_from_buffer(buffer: bytes, /) -> Module: ...
def memcpy_htod_async(dest: Any, src: Any, stream: Stream | None = ...) -> None: ...
def memcpy_dtoh_async(dest: Any, src: Any, stream: Stream | None = ...) -> None: ...
def get_driver_version() -> int: ...
def get_version() -> tuple[int, int, int]: ...
"""


def stubs(tensorrt: dict[str, Any], cuda: dict[str, Any]) -> dict[str, str]:
    """File name -> content: of each library one .pyi with its classes, one with a class for the module itself (whose
    names hide the classes' own), and what is put in the place of api.py."""
    return {
        "stub_tensorrt.pyi": _tensorrt_classes(tensorrt),
        "module_tensorrt.pyi": _tensorrt_module(tensorrt),
        "stub_cuda.pyi": _cuda_classes(cuda),
        "module_cuda.pyi": _cuda_module(cuda),
        "stub_pycuda.pyi": _HEAD.replace("from __future__ import annotations\n", "") + PYCUDA,
        "module_pycuda.pyi": _pycuda_module(),
        "api.py": _api_module(),
    }


def _tensorrt_classes(found: dict[str, Any]) -> str:
    lines = [_HEAD]
    for name, kind in found["classes"].items():
        lines += _class(name, kind, found, "")
    return "\n".join(lines) + "\n"


def _tensorrt_module(found: dict[str, Any]) -> str:
    lines = [_HEAD, "import stub_tensorrt as own", "class Module:"]
    lines += [f"    {name} = own.{name}" for name in found["classes"]]
    for name, kind in found["values"].items():
        if name in found["functions"]:
            made = _method("", name, found["functions"][name], found, "    ")
            lines += [re.sub(r"(?<=: |> )(?=I[A-Z]|[A-Z]\w+[a-z]\b)(?!Any\b)", "own.", line) for line in made]
        elif not keyword.iskeyword(name):
            lines.append(f"    {name}: {f'own.{kind}' if kind in found['classes'] else 'Any'}")
    lines.append("    __version__: str")
    return "\n".join(lines) + "\n"


def _class(name: str, kind: dict[str, Any], found: dict[str, Any], indent: str, outer: str = "") -> list[str]:
    base = "(BaseException)" if name.endswith("Exception") else ""
    lines = [f"{indent}class {name}{base}:"]
    inner = indent + "    "
    for other, nested in kind["classes"].items():
        lines += _class(other, nested, found, inner, f"{outer}{name}.")
    for member, told in kind["members"].items():
        if member in kind["classes"] or keyword.iskeyword(member):
            continue
        if told["kind"] == "member":
            lines.append(f"{inner}{member}: ClassVar[{outer}{name}]")
        elif told["kind"] == "property":
            lines += _property(member, told, found, inner)
        elif told["kind"] == "method":
            lines += _method(name, member, told["doc"], found, inner)
        else:
            lines.append(f"{inner}{member}: Any")
    if kind["enum"]:
        lines.append(f"{inner}__members__: ClassVar[dict[str, {outer}{name}]]")
        lines.append(f"{inner}def __int__(self) -> int: ...")
    if name == "Dims":
        lines.append(f"{inner}def __iter__(self) -> Iterator[builtins.int]: ...")  # by its __getitem__ and __len__
    if name == "IHostMemory":
        lines.append(f"{inner}def __buffer__(self, flags: int, /) -> memoryview: ...")
    return lines if len(lines) > 1 else [*lines, f"{inner}pass"]


def _property(member: str, told: dict[str, Any], found: dict[str, Any], indent: str) -> list[str]:
    signature = re.search(r"->\s*(.+)", told["doc"])
    kind = "str" if member in ("name", "__name__") else _type(signature[1].strip(), found) if signature else "Any"
    lines = [f"{indent}@property", f"{indent}def {member}(self) -> {kind}: ..."]
    if told["settable"]:
        given = "Any" if kind.startswith("Dims") else f"{kind} | None" if kind in found["classes"] else kind
        lines += [f"{indent}@{member}.setter", f"{indent}def {member}(self, value: {given}) -> None: ..."]
    return lines


def _method(owner: str, member: str, doc: str, found: dict[str, Any], indent: str) -> list[str]:
    lines = doc.splitlines()
    numbered = [line for line in lines if re.match(rf"\d+\. {re.escape(member)}\(", line)]
    plain = [line for line in lines[:1] if line.startswith(f"{member}(") and "*args" not in line]
    signatures = numbered or plain
    if not signatures:
        result = "None" if member == "__init__" else "Any"
        return [f"{indent}def {member}(self, *args: Any, **kwargs: Any) -> {result}: ..."]
    made = []
    for line in signatures:
        arguments, result = _signature(line, found)
        if (owner, member) in NULLABLE:
            result = f"{result} | None"
        if member == "__eq__":
            arguments = ["self", "other: Any", "/"]  # mypy wants object here; what it refuses is seen by the fake
        made.append(f"{indent}def {member}({', '.join(arguments)}) -> {result}: ...")
    made = list(dict.fromkeys(made))
    return made if len(made) == 1 else [line for each in made for line in (f"{indent}@overload", each)]


def _signature(line: str, found: dict[str, Any]) -> tuple[list[str], str]:
    """A pybind11 signature as arguments of a stub, and the result's type."""
    inside, result = _split_call(line)
    arguments, positional, optional = ["self"], False, False
    for part in [each for each in _split(inside) if not each.startswith("self:")]:
        name, _, rest = part.partition(":")
        kind, equals, _ = rest.partition("=")
        name = name.strip()
        if name.startswith("*"):
            arguments.append(f"{name}: Any")
            continue
        positional = positional or re.fullmatch(r"arg\d+", name) is not None
        safe = f"{name}_" if keyword.iskeyword(name) else name
        optional = optional or bool(equals)  # pybind11 lets others follow; Python does not
        arguments.append(f"{safe}: {_accepted(kind.strip(), found)}{' = ...' if optional else ''}")
    return ([*arguments, "/"] if positional else arguments), _type(result, found)


def _split_call(line: str) -> tuple[str, str]:
    start = line.index("(")
    depth = 0
    for place, letter in enumerate(line[start:], start):
        depth += (letter in "([<") - (letter in ")]" or (letter == ">" and line[place - 1] != "-"))
        if depth == 0:
            return line[start + 1 : place], line[place + 1 :].partition("->")[2].strip()
    raise ValueError(line)


def _split(text: str) -> list[str]:
    parts, depth, start = [], 0, 0
    for place, letter in enumerate(text):
        depth += (letter in "([<") - (letter in ")]>")
        if letter == "," and depth == 0:
            parts.append(text[start:place])
            start = place + 1
    return [part.strip() for part in [*parts, text[start:]] if part.strip()]


def _type(text: str, found: dict[str, Any]) -> str:
    text = re.sub(r"tensorrt_bindings\.tensorrt\.", "", text.strip())
    if match := re.fullmatch(r"(?:[Ll]ist|collections\.abc\.Sequence)\[(.+)\]", text):
        return f"list[{_type(match[1], found)}]"
    if match := re.fullmatch(r"[Tt]uple\[(.+)\]", text):
        return f"tuple[{', '.join(_type(each, found) for each in _split(match[1]))}]"
    last = re.split(r"::", text)[-1]
    last = {"IParserError": "ParserError", "IBuilder": "Builder"}.get(last, last)
    if "." in last and last.split(".")[0] in found["classes"]:
        return last
    if last in found["classes"]:
        return last
    # A class may have a property called `name`, or `bool` may be a value of the module.
    return "None" if last == "None" else f"builtins.{last}" if last in _PLAIN else "Any"


def _accepted(text: str, found: dict[str, Any]) -> str:
    """A parameter's type: TensorRT takes any row of numbers for Dims, and whatever has __int__ or __index__ for int."""
    kind = _type(text, found)
    if kind == "Dims":
        return "Dims | Sequence[builtins.int]"
    if "SupportsInt" in text and not text.startswith(("collections", "list", "List")):
        return "builtins.int"
    return {"tuple": "tuple[builtins.int, ...]", "list": "list[builtins.int]"}.get(text, kind)


def _cuda_classes(found: dict[str, Any]) -> str:
    lines = [_HEAD]
    for name, members in found["enums"].items():
        lines.append(f"class {name}(builtins.int):")
        lines += [f"    {member}: ClassVar[{name}]" for member in members] or ["    pass"]
    return "\n".join(lines) + "\n"


def _cuda_module(found: dict[str, Any]) -> str:
    """Every function gives a tuple whose first is a CUresult."""
    lines = [_HEAD, "import stub_cuda as own", "class Module:"]
    lines += [f"    {name} = own.{name}" for name in found["enums"]]
    lines += [f"    {name}: Any" for name in found["classes"] if name not in found["enums"]]
    lines += [f"    {name}: builtins.int" for name in found["constants"]]
    for name, parameters in found["functions"].items():
        given = ", ".join(["self", *(f"{each}: Any" for each in parameters)])
        lines.append(f"    def {name}({given}) -> tuple[own.CUresult, Unpack[tuple[Any, ...]]]: ...")
    lines.append("class Library:")
    lines += [f"    {name}: Any" for name in found["functions"]]
    lines += ["class Nvrtc:", *(f"    {name}: Any" for name in found["nvrtc"])]
    return "\n".join(lines) + "\n"


def _pycuda_module() -> str:
    classes = re.findall(r"^class ([A-Za-z]\w*)", PYCUDA, re.M)
    functions = re.findall(r"^def (\w+)\((.*)\) -> (.+): \.\.\.$", PYCUDA, re.M)

    def own(text: str) -> str:
        return re.sub(rf"\b({'|'.join([*classes, '_Pagelocked'])})\b", r"own.\1", text)

    lines = [_HEAD, "import stub_pycuda as own", "class Module:"]
    lines += [f"    {name} = own.{name}" for name in classes]
    lines += [f"    def {n}({', '.join(filter(None, ('self', own(a))))}) -> {own(r)}: ..." for n, a, r in functions]
    return "\n".join(lines) + "\n"


def _api_module() -> str:
    lines = ["from typing import Any, TypeAlias"]
    lines += ["import module_cuda, module_pycuda, module_tensorrt, stub_pycuda, stub_tensorrt"]
    lines += ["TensorRt: TypeAlias = module_tensorrt.Module", "PyCudaDriver: TypeAlias = module_pycuda.Module"]
    lines += ["CudaDriver: TypeAlias = module_cuda.Module"]
    lines += ["CudaLibrary: TypeAlias = module_cuda.Library", "NvrtcLibrary: TypeAlias = module_cuda.Nvrtc"]
    lines += [f"{alias}: TypeAlias = stub_tensorrt.{name}" for alias, name in ALIASES.items()]
    lines += [f"{alias}: TypeAlias = stub_pycuda.{name}" for alias, name in PYCUDA_ALIASES.items()]
    return "\n".join(lines) + "\n"


def override_table(found: dict[str, Any]) -> dict[str, dict[str, int]]:
    """Class -> method -> how many arguments TensorRT calls it with, from its documentation."""
    table: dict[str, dict[str, int]] = {}
    for name in OVERRIDES:
        kind = found["classes"][name]
        shown = re.findall(r"def (\w+)\(self((?:, \w+)*)\):", kind["doc"])
        table[name] = {method: given.count(",") for method, given in shown if method != "__init__"}
        for member, told in kind["members"].items():
            if told["kind"] == "method" and not member.startswith("__"):
                inside, _ = _split_call(told["doc"].splitlines()[0])
                table[name][member] = len(_split(inside)) - 1
    return table
