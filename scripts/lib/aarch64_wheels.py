"""Checks that every runtime dependency, with all it needs itself, has a wheel for the Jetson's Pythons.

pip picks the wheels for the foreign platform, but evaluates environment markers for the machine it runs
on. So this walks the requirements itself with the target's markers, and asks pip again for what it left out.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

tomllib = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")

ROOT = Path(__file__).resolve().parents[2]
STAMP = ROOT / ".cache" / "aarch64-wheels.json"
EXTRAS = ("demo", "jtop", "prepare", "fleet", "web")
"""The extras a device installs, those that exist."""

OFFLINE = re.compile(r"NewConnectionError|ConnectionError|NameResolutionError|ConnectTimeout|ReadTimeout|ProxyError")


@dataclass(frozen=True, slots=True)
class Target:
    python: str
    glibc_minor: int
    what: str

    @property
    def markers(self) -> dict[str, str]:
        return {
            "python_version": self.python,
            "python_full_version": f"{self.python}.0",
            "implementation_name": "cpython",
            "implementation_version": f"{self.python}.0",
            "platform_python_implementation": "CPython",
            "platform_machine": "aarch64",
            "platform_system": "Linux",
            "platform_release": "",
            "platform_version": "",
            "os_name": "posix",
            "sys_platform": "linux",
        }

    @property
    def platforms(self) -> list[str]:
        return ["manylinux2014_aarch64", *(f"manylinux_2_{minor}_aarch64" for minor in range(17, self.glibc_minor + 1))]


JETPACK_6 = Target("3.10", 35, "JetPack 6")
JETPACK_7 = Target("3.12", 39, "JetPack 7")
TARGETS = (JETPACK_6, JETPACK_7)


class MissingWheelError(Exception):
    """A dependency has no wheel for a target."""


class OfflineError(Exception):
    """The package index cannot be reached."""


def declared() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project.get("optional-dependencies", {})
    return [*project["dependencies"], *(line for extra in EXTRAS for line in extras.get(extra, []))]


def applies(requirement: Requirement, target: Target, extras: frozenset[str]) -> bool:
    if requirement.marker is None:
        return True
    return any(requirement.marker.evaluate({**target.markers, "extra": extra}) for extra in (extras or {""}))


def ask_pip(wanted: list[str], target: Target) -> dict[str, Any]:
    """What pip would install for the target: canonical name -> its metadata."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--no-input", "--report", "-"]
        command += ["--disable-pip-version-check", "--retries", "1", "--target", folder]
        command += ["--only-binary=:all:", "--implementation", "cp", "--python-version", target.python]
        command += [word for platform in target.platforms for word in ("--platform", platform)]
        done = subprocess.run([*command, *wanted], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        errors = "\n".join(line for line in done.stderr.splitlines() if not line.startswith("WARNING"))
        raise (OfflineError if OFFLINE.search(done.stderr) else MissingWheelError)(errors)
    return {
        canonicalize_name(item["metadata"]["name"]): item["metadata"] for item in json.loads(done.stdout)["install"]
    }


def left_out(roots: list[Requirement], found: dict[str, Any], target: Target) -> list[str]:
    """Requirements that hold on the target and that pip did not follow."""
    missing: list[str] = []
    seen: set[tuple[str, frozenset[str]]] = set()
    queue = list(roots)
    while queue:
        requirement = queue.pop()
        name, extras = canonicalize_name(requirement.name), frozenset(requirement.extras)
        if name not in found:
            requirement.marker = None
            missing.append(str(requirement))
        elif (name, extras) not in seen:
            seen.add((name, extras))
            needs = [Requirement(line) for line in found[name].get("requires_dist", [])]
            queue += [need for need in needs if applies(need, target, extras)]
    return missing


def resolve(lines: list[str], target: Target) -> dict[str, Any]:
    """Every package the target needs. Raises MissingWheelError, OfflineError."""
    roots = [need for need in map(Requirement, lines) if applies(need, target, frozenset())]
    for requirement in roots:
        requirement.marker = None
    wanted = [str(requirement) for requirement in roots]
    while True:
        found = ask_pip(wanted, target)
        missing = left_out(roots, found, target)
        if not missing:
            return found
        wanted += missing


def main() -> int:
    lines = declared()
    question = {"requirements": lines, "targets": [f"{target.python} {target.platforms[-1]}" for target in TARGETS]}
    if STAMP.exists() and STAMP.read_text() == json.dumps(question):
        print("unchanged since they were last resolved")
        return 0
    for target in TARGETS:
        try:
            found = resolve(lines, target)
        except OfflineError:
            print("cannot reach the package index: the wheels for aarch64 are not checked", file=sys.stderr)
            return 1 if os.environ.get("CI") == "true" else 0
        except MissingWheelError as error:
            print(f"{target.what}, Python {target.python}: no wheel for aarch64\n{error}", file=sys.stderr)
            return 1
        print(f"{target.what}, Python {target.python}: {len(found)} packages, all with wheels")
    STAMP.parent.mkdir(exist_ok=True)
    STAMP.write_text(json.dumps(question))
    return 0


if __name__ == "__main__":
    sys.exit(main())
