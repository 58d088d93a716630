"""Which module this is, and its power by the declared rails alone."""

from __future__ import annotations

import math
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_runtime.config import Hardware
from edge_runtime.hardware.modules import MODULES, Module, Unknown, identify, module_power, recognise
from tests.hardware.trees import BOARDS, build

BY_NAME = {module.name: module for module in MODULES}


def device_tree(root: Path, compatible: str = "", model: str = "", memory_gib: float | None = None) -> Path:
    folder = root / "proc/device-tree"
    folder.mkdir(parents=True)
    (folder / "compatible").write_text(compatible.replace(" ", "\0") + "\0")
    (folder / "model").write_text(model + "\0")
    if memory_gib is not None:
        (root / "proc/meminfo").write_text(f"MemTotal:  {int(memory_gib * 1024**2)} kB\nMemFree: 1 kB\n")
    return root


@pytest.mark.parametrize("name", list(BOARDS))
def test_every_module_is_recognised_from_its_own_files(tmp_path: Path, name: str) -> None:
    module = identify(build(tmp_path, name).root)
    assert isinstance(module, Module)
    assert module.name == name


def test_the_simulated_modules_have_the_names_of_the_real_ones() -> None:
    simulated = {word.removeprefix("sim:") for word in get_args(Hardware) if word.startswith("sim:")}
    assert simulated <= set(BY_NAME)


@pytest.mark.parametrize(
    ("compatible", "model", "memory_gib", "name", "by"),
    [
        ("nvidia,p3737-0000+p3701-0000 nvidia,tegra234", "", 61.4, "agx-orin-64gb", "MemTotal 61.4 GiB"),
        ("nvidia,p3737-0000+p3701-0000 nvidia,tegra234", "", 29.8, "agx-orin-32gb", "MemTotal 29.8 GiB"),
        ("nvidia,p3737-0000+p3701-0000 nvidia,tegra234", "", None, "agx-orin-32gb", "the smaller one is assumed"),
        # a part number that tells is not put in doubt by memory that was taken away at the boot
        ("nvidia,p3737-0000+p3701-0005 nvidia,tegra234", "", 29.8, "agx-orin-64gb", "p3701-0005"),
        ("nvidia,p3737-0000+p3701-0004 nvidia,tegra234", "", None, "agx-orin-32gb", "p3701-0004"),
        ("nvidia,p3768-0000+p3767-0003 nvidia,tegra234", "", None, "orin-nano-8gb", "p3767-0003"),
        # a carrier board's own number, and a module number that is not known yet
        ("vendor,x-p3509-0000+p3767-0099", "NVIDIA Jetson Orin NX", 15.2, "orin-nx-16gb", "model"),
        ("vendor,x-p3509-0000+p3767-0099", "NVIDIA Jetson Orin Nano", 7.4, "orin-nano-8gb", "model"),
        ("vendor,x-p3509-0000+p3767-0099", "NVIDIA Jetson Orin Nano", 3.4, "orin-nano-4gb", "MemTotal 3.4 GiB"),
        ("nvidia,galen nvidia,jetson-xavier nvidia,tegra194", "", None, "agx-xavier", "nvidia,jetson-xavier"),
        ("nvidia,p3448-0000-b00 nvidia,jetson-nano", "", None, "nano", "p3448-0000"),
        ("nvidia,p3509-0000+p3636-0001 nvidia,tegra186", "", None, "tx2", "p3636-0001"),
        ("nvidia,p3971-0089+p3834-0008 nvidia,tegra264", "", None, "thor", "p3834-0008"),
    ],
)
def test_what_a_module_is_recognised_by(
    tmp_path: Path, compatible: str, model: str, memory_gib: float | None, name: str, by: str
) -> None:
    found = recognise(device_tree(tmp_path, compatible, model, memory_gib))
    assert isinstance(found.module, Module), found
    assert found.module.name == name
    assert by in found.because


@pytest.mark.parametrize(
    ("compatible", "model", "reason"),
    [
        ("raspberrypi,5-model-b brcm,bcm2712", "Raspberry Pi 5", "'Raspberry Pi 5' is no Jetson module"),
        ("rockchip,rk3588", "", "'rockchip,rk3588' is no Jetson module"),
        ("", "", "not a Jetson"),
    ],
)
def test_what_is_no_jetson_says_so(tmp_path: Path, compatible: str, model: str, reason: str) -> None:
    module = identify(device_tree(tmp_path, compatible, model))
    assert isinstance(module, Unknown)
    assert reason in module.reason


def test_a_machine_without_a_device_tree_is_no_jetson(tmp_path: Path) -> None:
    module = identify(tmp_path)
    assert isinstance(module, Unknown)
    assert "not a Jetson" in module.reason


@pytest.mark.parametrize(
    ("name", "rails_w", "watts"),
    [
        # VDD_IN holds the other two
        ("orin-nx-16gb", {"VDD_IN": 5.299, "VDD_CPU_GPU_CV": 0.773, "VDD_SOC": 1.424}, 5.299),
        # neither VIN_SYS_5V0 alone nor everything: VDDQ_VDD2_1V8AO is part of VIN_SYS_5V0
        (
            "agx-orin-64gb",
            {"VDD_GPU_SOC": 2.34, "VDD_CPU_CV": 0.39, "VIN_SYS_5V0": 4.025, "VDDQ_VDD2_1V8AO": 0.301, "NC": 0.0},
            6.755,
        ),
        ("nano", {"POM_5V_IN": 1.75, "POM_5V_GPU": 0.1, "POM_5V_CPU": 0.366}, 1.75),
        ("nano", {"VDD_IN": 1.75, "VDD_GPU": 0.1}, 1.75),
        ("xavier-nx", {"5V_IN": 4.0, "VDD_CPU_GPU": 1.0}, 4.0),
        ("tx2", {"VDD_SYS_GPU": 0.182, "VDD_IN": 5.297, "VDD_SYS_CPU": 1.917}, 5.297),
        (
            "agx-xavier",
            {"GPU": 0.0, "CPU": 0.311, "SOC": 0.932, "CV": 0.0, "VDDRQ": 0.621, "SYS5V": 1.482},
            3.346,
        ),
        ("thor", {"VDD_GPU": 6.33, "VIN": 28.906, "VIN_SYS_5V0": 6.5}, 28.906),
    ],
)
def test_module_power_is_the_sum_of_the_declared_rails(name: str, rails_w: dict[str, float], watts: float) -> None:
    found, why = module_power(BY_NAME[name], rails_w)
    assert found == pytest.approx(watts)
    assert why is None


@pytest.mark.parametrize(
    ("name", "rails_w", "reason"),
    [
        ("agx-orin-64gb", {"VIN_SYS_5V0": 4.0}, "VDD_GPU_SOC is missing"),
        ("orin-nano-8gb", {"VDD_CPU_GPU_CV": 0.56, "VDD_SOC": 1.4}, "VDD_IN is missing"),
        ("thor", {"VDD_GPU": 6.33}, "VIN is missing"),
        ("orin-nano-8gb", {"VDD_IN": 0.0}, "cannot be"),
        ("orin-nano-8gb", {"VDD_IN": math.nan}, "cannot be"),
        ("orin-nano-8gb", {"VDD_IN": math.inf}, "cannot be"),
    ],
)
def test_a_part_of_the_power_is_no_power(name: str, rails_w: dict[str, float], reason: str) -> None:
    watts, why = module_power(BY_NAME[name], rails_w)
    assert watts is None
    assert why is not None
    assert reason in why


def test_power_of_an_unknown_module_is_unknown() -> None:
    assert module_power(Unknown("no device tree"), {"VDD_IN": 5.0}) == (
        None,
        "which rails make up module power is not known: no device tree",
    )


@given(st.sampled_from(MODULES), st.floats(0.01, 100.0), st.dictionaries(st.text(max_size=5), st.floats(0.0, 100.0)))
def test_other_rails_never_change_module_power(module: Module, watts: float, others: dict[str, float]) -> None:
    rails_w = {**others, **dict.fromkeys(module.other_rails, 50.0), **dict.fromkeys(module.rails, watts)}
    found, _ = module_power(module, rails_w)
    assert found == pytest.approx(watts * len(module.rails))


def test_a_power_mode_is_known_by_number_and_name_together() -> None:
    nano = BY_NAME["orin-nano-8gb"]
    mode = nano.power_mode(1, "25W")
    assert mode is not None
    assert (mode.cpu_cores, mode.cpu_mhz, mode.gpu_mhz) == (6, 1344.0, 918.0)
    # the number 1 was another mode before the Super update
    before = nano.power_mode(1, "7W")
    assert before is not None
    assert before.gpu_mhz == 408.0
    assert nano.power_mode(1, "MAXN") is None
    agx = BY_NAME["agx-orin-64gb"].power_mode(2, "MODE_30W")
    assert agx is not None
    assert agx.cpu_cores == 8


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.name)
def test_the_tables_agree_with_themselves(module: Module) -> None:
    assert not set(module.rails) & set(module.other_rails)
    for modes, default in ((module.modes, module.default_mode), (module.super_modes, module.super_default_mode)):
        numbers = [mode.number for mode in modes]
        assert len(numbers) == len(set(numbers))
        assert default is None or default in numbers
