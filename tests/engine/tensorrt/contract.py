"""Checks the backend's own source against the real bindings: mypy, with their types in the place of api.py's Any.

What mypy cannot see is checked beside it: classes that TensorRT calls, and words of enumerations.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.conftest import ROOT
from tests.engine.tensorrt import contract_stubs, real_bindings

PACKAGE = ROOT / "edge_runtime" / "engine" / "tensorrt"
API = PACKAGE / "api.py"
_UNKNOWN_BASE = re.compile(r'error: Name "trt\.(\w+)" is not defined')


def sources() -> dict[str, str]:
    """File name -> source of every module of the backend."""
    return {path.name: path.read_text() for path in sorted(PACKAGE.glob("*.py")) if path.name != API.name}


@dataclass(frozen=True)
class Bindings:
    """What is known of the vendors' libraries, TensorRT's in one version."""

    tensorrt: Mapping[str, Any]
    cuda: Mapping[str, Any]

    @classmethod
    def load(cls, version: str) -> Bindings:
        """Raises real_bindings.Unavailable."""
        return cls(real_bindings.tensorrt(version), real_bindings.cuda_driver())

    def words(self) -> set[str]:
        """Every name that means something to one of the libraries: what may not be misspelt."""
        words = {
            *self.tensorrt["values"],
            *self.cuda["functions"],
            *self.cuda["nvrtc"],
            *self.cuda["constants"],
            *self.cuda["enums"],
        }
        for members in self.cuda["enums"].values():
            words |= set(members)
        classes = list(self.tensorrt["classes"].items())
        while classes:
            name, kind = classes.pop()
            words |= {name, *(member for member in kind["members"] if not member.startswith("__"))}
            classes += kind["classes"].items()
        for kind in self.tensorrt["classes"].values():
            for told in kind["members"].values():
                words |= set(re.findall(r"[(,] (\w+): ", told.get("doc", "")))
        table = contract_stubs.PYCUDA
        words |= set(re.findall(r"(?:class|def) ([A-Za-z]\w+)", table))
        return words | set(re.findall(r"^    ([A-Z]\w+): ClassVar", table, re.M)) | {"mem_flags"}


def package_errors(bindings: Bindings) -> list[str]:
    """What mypy says of the backend as it is."""
    paths = [path for path in sorted(PACKAGE.glob("*.py")) if path != API]
    return [f"{name}:{line}: {error}" for name, line, error in _mypy(bindings, {}, paths, thorough=False)]


def type_errors(bindings: Bindings, modules: Mapping[str, str], *, thorough: bool = False) -> dict[str, list[str]]:
    """Module name -> what mypy says of it, for sources under names of their own. One run for all of them.

    `thorough`: with the types of numpy and pydantic as well, so that no value but the vendors' own is Any.
    """
    found: dict[str, list[str]] = {name: [] for name in modules}
    for name, line, error in _mypy(bindings, modules, [], thorough=thorough):
        if name in found:
            found[name].append(f"{line}: {error}")
    return found


def _mypy(
    bindings: Bindings, modules: Mapping[str, str], paths: Sequence[Path], *, thorough: bool
) -> list[tuple[str, str, str]]:
    """(module, line, error) of every error in these modules and files, with the real types."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "stubs").mkdir()
        for name, content in contract_stubs.stubs(dict(bindings.tensorrt), dict(bindings.cuda)).items():
            (folder / "stubs" / name).write_text(content)
        for name, source in modules.items():
            (folder / f"{name}.py").write_text(source)
        command = [sys.executable, "-m", "mypy", "--config-file=", "--check-untyped-defs", "--no-error-summary"]
        command += ["--no-color-output", "--ignore-missing-imports", "--warn-unreachable", "--explicit-package-bases"]
        command += [] if thorough else ["--no-site-packages"]
        command += ["--cache-dir", str(real_bindings.cache() / f"mypy-{bindings.tensorrt['version']}-{int(thorough)}")]
        command += ["--shadow-file", str(API), str(folder / "stubs" / "api.py")]
        command += [str(folder / f"{name}.py") for name in modules] + [str(path) for path in paths]
        environment = os.environ | {"MYPYPATH": f"{folder / 'stubs'}:{folder}:{ROOT}"}
        answer = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=400)
        if answer.returncode not in (0, 1) or answer.stderr:
            raise RuntimeError(f"mypy failed: {answer.stdout[-2000:]}{answer.stderr[-2000:]}")
    wanted = {*modules, *(path.stem for path in paths)}
    found = []
    for line in answer.stdout.splitlines():
        match = re.match(r"(?:(.*)/)?(\w+)\.py:(\d+): (error: .*)", line)
        inside = match is not None and (match[1] is None or Path(folder, match[1]).resolve() == PACKAGE.resolve())
        if match is None or not inside or match[2] not in wanted:
            continue
        base = _UNKNOWN_BASE.match(match[4])
        if base is None or base[1] not in bindings.tensorrt["classes"]:
            found.append((match[2], match[3], match[4]))
        # else a class made at run time: mypy takes no base that is a value
    return found


def override_errors(bindings: Bindings, source: str) -> list[str]:
    """What is wrong with the classes that TensorRT calls: methods that it does not call, or with other arguments."""
    table = contract_stubs.override_table(dict(bindings.tensorrt))
    wrong = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.ClassDef):
            continue
        for base in node.bases:
            if not (isinstance(base, ast.Attribute) and isinstance(base.value, ast.Name) and base.value.id == "trt"):
                continue
            if base.attr not in table:
                wrong.append(f"{node.lineno}: {base.attr} is no class that TensorRT calls")
                continue
            wrong += _methods(node, base.attr, table[base.attr])
    return wrong


def _methods(node: ast.ClassDef, base: str, table: Mapping[str, int]) -> list[str]:
    wrong = []
    made = {each.name: each for each in node.body if isinstance(each, ast.FunctionDef)}
    for name, method in made.items():
        if name.startswith("_"):
            continue
        if name not in table:
            wrong.append(f"{method.lineno}: TensorRT never calls {base}.{name}")
        elif len(method.args.args) - 1 != table[name]:
            wrong.append(f"{method.lineno}: TensorRT calls {base}.{name} with {table[name]} arguments")
    wrong += [f"{node.lineno}: {base}.{name} is not there" for name in table if name not in made]
    if "__init__" in made and not any(
        isinstance(each, ast.Attribute) and each.attr == "__init__" for each in ast.walk(made["__init__"])
    ):
        wrong.append(f"{node.lineno}: {base}.__init__ is not called")
    return wrong


def string_errors(bindings: Bindings, source: str, enums: Sequence[str] = ("DataType",)) -> list[str]:
    """Words of TensorRT's enumerations that stand in tables of the source and that it does not know."""
    known = {member for name in enums for member in bindings.tensorrt["classes"][name]["members"]}
    wrong = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Dict) and node.keys and all(_is_word(key) for key in node.keys):
            words = [str(key.value) for key in node.keys if isinstance(key, ast.Constant)]
            if known & set(words):
                wrong += [f"{node.lineno}: {word!s} is no {'/'.join(enums)}" for word in words if word not in known]
    return wrong


def _is_word(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isupper()


def all_errors(bindings: Bindings, modules: Mapping[str, str], *, thorough: bool = False) -> dict[str, list[str]]:
    """Module name -> everything that is wrong with it."""
    found = type_errors(bindings, modules, thorough=thorough)
    for name, source in modules.items():
        found[name] += override_errors(bindings, source) + string_errors(bindings, source)
    return found


@dataclass(frozen=True)
class Mutant:
    """One name in one file, misspelt."""

    file: str
    line: int
    name: str
    source: str

    @property
    def told(self) -> str:
        return f"{self.file}:{self.line}: {self.name}"


def mutants(words: set[str], files: Mapping[str, str]) -> list[Mutant]:
    """Every attribute, keyword, method that TensorRT calls, and word of a table that means something to a library."""
    made = []
    for file, source in files.items():
        lines = source.encode().splitlines(keepends=True)
        for line, column, name in sorted(set(_places(ast.parse(source), lines, words))):
            row = lines[line - 1]
            end = column + len(name.encode())
            assert row[column:end].decode() == name, (file, line, name)
            changed = [*lines[: line - 1], row[:end] + name[-1:].encode() + row[end:], *lines[line:]]
            made.append(Mutant(file, line, name, b"".join(changed).decode()))
    return made


def _places(tree: ast.AST, lines: Sequence[bytes], words: set[str]) -> Iterable[tuple[int, int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in words and not _is_own(node):
            assert node.end_lineno is not None
            assert node.end_col_offset is not None
            yield node.end_lineno, node.end_col_offset - len(node.attr.encode()), node.attr
        elif isinstance(node, ast.keyword) and node.arg in words:
            yield node.lineno, node.col_offset, node.arg
        elif isinstance(node, ast.Dict):
            for key in node.keys:
                if _is_word(key) and isinstance(key, ast.Constant) and key.value in words:
                    yield key.lineno, key.col_offset + 1, key.value
        elif isinstance(node, ast.ClassDef) and any(_is_called(base) for base in node.bases):
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and not method.name.startswith("_"):
                    column = lines[method.lineno - 1].index(method.name.encode())
                    yield method.lineno, column, method.name


def _is_own(node: ast.Attribute) -> bool:
    """An attribute that a class of ours gives itself."""
    return isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name) and node.value.id == "self"


def _is_called(base: ast.expr) -> bool:
    return isinstance(base, ast.Attribute) and base.attr in contract_stubs.OVERRIDES
