"""Every name and argument of TensorRT, cuda.bindings and PyCUDA that the backend uses is one of the real ones.

And so is every member of the fakes, so that what passes through them could pass through the real ones.
"""

from __future__ import annotations

import inspect
import os
import random
import re
from typing import Any

import pytest

from edge_runtime.engine.tensorrt.cuda import STICKY
from tests.engine.tensorrt import contract, contract_stubs, real_bindings
from tests.engine.tensorrt.fake_bindings import make_driver
from tests.engine.tensorrt.fake_machine import Machine
from tests.engine.tensorrt.fake_pycuda import make_pycuda
from tests.engine.tensorrt.fake_tensorrt import make_tensorrt

VERSIONS = real_bindings.VERSIONS
SAMPLE = 8


def load(version: str) -> contract.Bindings:
    """The real bindings; in CI they have to be there."""
    try:
        return contract.Bindings.load(version)
    except real_bindings.Unavailable as reason:
        if os.environ.get("CI") == "true":
            pytest.fail(f"the real bindings have to be there in CI: {reason}")
        pytest.skip(f"no real bindings: {reason}")


@pytest.fixture(params=VERSIONS)
def bindings(request: pytest.FixtureRequest) -> contract.Bindings:
    return load(request.param)


def test_the_backend_uses_real_names_only(bindings: contract.Bindings) -> None:
    wrong = contract.package_errors(bindings)
    for name, source in contract.sources().items():
        others = contract.override_errors(bindings, source) + contract.string_errors(bindings, source)
        wrong += [f"{name}:{error}" for error in others]
    assert wrong == []


@pytest.mark.full
@pytest.mark.parametrize("version", real_bindings.BETWEEN)
def test_the_backend_uses_real_names_of_the_versions_between(version: str) -> None:
    test_the_backend_uses_real_names_only(load(version))


def test_what_tensorrt_calls_is_what_its_own_library_looks_for() -> None:
    for version in VERSIONS:
        table = contract_stubs.override_table(dict(load(version).tensorrt))
        library = real_bindings.libraries(version)
        for methods in table.values():
            for method in methods:
                assert f"\0{method}\0".encode() in library, (version, method)


def test_every_error_that_ends_a_process_is_known() -> None:
    found = load(VERSIONS[-1]).cuda["sticky"]
    if not found:
        pytest.skip("these bindings tell nothing of their errors: those for CUDA 12")
    assert 700 in found
    assert set(found) <= set(STICKY)


def kill(found: list[contract.Mutant], *, thorough: bool) -> list[str]:
    """The mutants that nothing is seen of, with any version."""
    changed = {mutant.file for mutant in found}
    files = {name: source for name, source in contract.sources().items() if name in changed}
    left = found
    for version in reversed(VERSIONS):
        if not left:
            break
        bindings = load(version)
        sources = {f"m{index}": mutant.source for index, mutant in enumerate(left)}
        sources |= {f"original_{name.removesuffix('.py')}": source for name, source in files.items()}
        errors = contract.all_errors(bindings, sources, thorough=thorough)
        left = [
            mutant
            for index, mutant in enumerate(left)
            if not set(errors[f"m{index}"]) - set(errors[f"original_{mutant.file.removesuffix('.py')}"])
        ]
    return [mutant.told for mutant in left]


def all_mutants() -> list[contract.Mutant]:
    words: set[str] = set()
    for version in VERSIONS:
        bindings = load(version)
        words |= bindings.words()
    return contract.mutants(words, contract.sources())


def test_a_name_that_is_misspelt_is_found() -> None:
    own = load(VERSIONS[0]).tensorrt["classes"]
    members = {name for kind in own.values() for name in kind["members"]} | set(own)
    # Those that nothing of numpy's could be: its types are left out here, since they take long.
    found = [mutant for mutant in all_mutants() if mutant.file in ("lane.py", "tensors.py")]
    found = [mutant for mutant in found if mutant.name in members and "_" in mutant.name]
    assert len(found) > SAMPLE
    assert kill(random.Random(4).sample(found, SAMPLE), thorough=False) == []


@pytest.mark.full
@pytest.mark.timeout(900)
def test_every_name_that_is_misspelt_is_found() -> None:
    found = all_mutants()
    assert len(found) > 150
    assert kill(found, thorough=True) == []


def test_what_the_newest_or_the_oldest_does_not_have_is_found() -> None:
    wrong = [
        "engine.get_tensor_nam(0)",
        "engine.get_tensor_name(idx=0)",
        "engine.get_tensor_name()",
        "engine.get_tensor_name(0, 1)",
        "engine.create_execution_context().infer_shapes()",  # it may be None
        "trt.TensorIOMode.INPUTS",
        "trt.BuilderFlag.FP16",
        "trt.Runtime(trt.ILogger(), 1)",
        "engine.device_memory_size",
        "cuda.cuMemAllo(1)",
        "cuda.cuMemAlloc(1, 2)",
        "cuda.CUresult.CUDA_ERROR_NOT_REDY",
        "pycuda.mem_aloc(1)",
        "pycuda.Stream().handel",
        "pycuda.pagelocked_empty(1, int, flags=2)",
    ]
    right = ["engine.get_tensor_name(index=0)", "trt.BuilderFlag.TF32", "cuda.cuMemAlloc(bytesize=1)"]
    head = "from edge_runtime.engine.tensorrt.api import CudaDriver, PyCudaDriver, TensorRt, TrtEngine\n"
    head += "def use(trt: TensorRt, engine: TrtEngine, cuda: CudaDriver, pycuda: PyCudaDriver) -> None:\n    "
    sources = {f"wrong_{index}": head + line for index, line in enumerate(wrong)}
    sources |= {f"right_{index}": head + line for index, line in enumerate(right)}
    seen: set[str] = set()
    for version in VERSIONS:
        seen |= {name for name, errors in contract.all_errors(load(version), sources).items() if errors}
    assert seen == {name for name in sources if name.startswith("wrong")}


# --- the fakes


def parameters(function: Any) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]


def real_parameters(doc: str, name: str) -> list[list[str]]:
    """The arguments' names of every overload."""
    lines = [line for line in doc.splitlines() if re.match(rf"(\d+\. )?{name}\(", line) and "*args" not in line]
    found = []
    for line in lines:
        inside, _ = contract_stubs._split_call(line)
        parts = [part.partition(":")[0].strip() for part in contract_stubs._split(inside)]
        found.append([part for part in parts if part != "self"])
    return found


@pytest.mark.parametrize("version", VERSIONS)
def test_the_fake_of_tensorrt_has_nothing_of_its_own(version: str) -> None:
    real = load(version).tensorrt
    fake = make_tensorrt(Machine(), version)
    wrong = []
    for name, kind in vars(fake).items():
        if name.startswith("__"):
            continue
        if name not in real["classes"]:
            if name not in real["values"]:
                wrong.append(name)
            continue
        known = real["classes"][name]["members"]
        if hasattr(kind, "__members__"):
            wrong += [f"{name}.{each.name}" for each in kind if known.get(each.name, {}).get("value") != int(each)]
            continue
        for member, value in vars(kind).items():
            if member.startswith("_"):
                continue
            told = known.get(member)
            if told is None:
                wrong.append(f"{name}.{member}")
            elif told["kind"] == "property" and not isinstance(value, property) and callable(value):
                wrong.append(f"{name}.{member} is no method")
            elif told["kind"] == "property" and isinstance(value, property):
                if value.fset is not None and not told["settable"]:
                    wrong.append(f"{name}.{member} cannot be set")
            elif told["kind"] == "method" and callable(value):
                signatures = real_parameters(told["doc"], member)
                mine = parameters(value)
                if signatures and not any(mine == each or mine == each[: len(mine)] for each in signatures):
                    wrong.append(f"{name}.{member}{mine} and not {signatures}")
    assert wrong == []


def test_the_fake_of_tensorrt_has_the_members_of_its_own_version_only() -> None:
    old, new = make_tensorrt(Machine(), "10.3.0"), make_tensorrt(Machine(), "11.4.1")
    assert hasattr(old.BuilderFlag, "FP16")
    for gone in ("FP16", "INT8", "OBEY_PRECISION_CONSTRAINTS"):
        assert not hasattr(new.BuilderFlag, gone)
    assert int(old.NetworkDefinitionCreationFlag.STRONGLY_TYPED) == 1
    assert int(new.NetworkDefinitionCreationFlag.STRONGLY_TYPED) == 0


def test_the_fake_of_cuda_bindings_has_nothing_of_its_own() -> None:
    real = load(VERSIONS[-1]).cuda
    wrong = []
    for name, value in vars(make_driver(Machine())).items():
        if name.startswith("__"):
            continue
        if name in real["enums"]:
            wrong += [f"{name}.{each.name}" for each in value if real["enums"][name].get(each.name) != int(each)]
        elif name in real["functions"]:
            if parameters(value) != real["functions"][name]:
                wrong.append(f"{name}{parameters(value)} and not {real['functions'][name]}")
        elif name in real["constants"]:
            if real["constants"][name] != value:
                wrong.append(name)
        elif name not in real["classes"]:
            wrong.append(name)
    assert wrong == []


def test_the_fake_of_pycuda_has_nothing_that_the_table_has_not() -> None:
    fake = make_pycuda(Machine())
    table = contract_stubs.PYCUDA
    classes = dict(re.findall(r"^class (\w+)[^\n]*\n((?:    .*\n)*)", table, re.M))
    functions = dict(re.findall(r"^def (\w+)\((.*)\) ->", table, re.M))
    wrong = []
    for name, value in vars(fake).items():
        if name.startswith("__"):
            continue
        if name in functions:
            wanted = [part.partition(":")[0].strip() for part in functions[name].split(",") if part.strip(" /")]
            if name != "mem_alloc" and parameters(value) != wanted:
                wrong.append(f"{name}{parameters(value)} and not {wanted}")
        elif name not in classes:
            wrong.append(name)
        else:
            known = set(re.findall(r"def (\w+)\(|^    (\w+): ClassVar", classes[name], re.M))
            flat = {word for pair in known for word in pair if word}
            wrong += [f"{name}.{each}" for each in vars(value) if not each.startswith("_") and each not in flat]
    assert wrong == []
