"""Lines that `tegrastats` printed on real devices, and what they say."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Line:
    """A line and what it says: W, degC, load 0-1, MHz; zones and rails as far as they are worth naming."""

    title: str
    module: str
    text: str
    watts: float
    tj_c: float
    gpu_load: float | None
    gpu_mhz: float | None
    zones_c: dict[str, float]
    rails_w: dict[str, float]
    gone: tuple[str, ...] = ()


LINES = (
    Line(
        "JetPack 4, TX2",
        "tx2",
        "RAM 3276/7859MB (lfb 5x4MB) SWAP 1626/12122MB (cached 181MB) CPU [44%@1421,49%@2031,67%@2034,17%@1420,"
        "25%@1419,8%@1420] EMC_FREQ 1%@1866 GR3D_FREQ 0%@114 APE 150 MTS fg 1% bg 1% PLL@42.5C MCPU@42.5C PMIC@50C "
        "Tboard@38C GPU@39.5C BCPU@42.5C thermal@41.3C Tdiode@39.25C VDD_SYS_GPU 182/182 VDD_SYS_SOC 730/730 "
        "VDD_4V0_WIFI 0/0 VDD_IN 5297/5297 VDD_SYS_CPU 1917/1917 VDD_SYS_DDR 1241/1241",
        watts=5.297,
        tj_c=42.5,
        gpu_load=0.0,
        gpu_mhz=114,
        zones_c={"gpu": 39.5, "bcpu": 42.5, "pmic": 50.0, "tboard": 38.0, "thermal": 41.3, "tdiode": 39.25},
        rails_w={"VDD_SYS_GPU": 0.182, "VDD_4V0_WIFI": 0.0, "VDD_SYS_DDR": 1.241},
    ),
    Line(
        "JetPack 4, AGX Xavier: names that are a zone and a rail",
        "agx-xavier",
        "RAM 721/31927MB (lfb 7291x4MB) SWAP 0/15963MB (cached 0MB) CPU [2%@1190,0%@1190,0%@1190,0%@1190,off,off,off,"
        "off] EMC_FREQ 0%@665 GR3D_FREQ 0%@318 APE 150 MTS fg 0% bg 0% AO@37.5C GPU@37.5C Tdiode@40C PMIC@100C AUX@36C "
        "CPU@37.5C thermal@36.9C Tboard@37C GPU 0/0 CPU 311/311 SOC 932/932 CV 0/0 VDDRQ 621/621 SYS5V 1482/1482",
        watts=3.346,
        tj_c=37.5,
        gpu_load=0.0,
        gpu_mhz=318,
        zones_c={"gpu": 37.5, "cpu": 37.5, "aux": 36.0, "pmic": 100.0},
        rails_w={"GPU": 0.0, "CPU": 0.311, "SOC": 0.932, "CV": 0.0, "VDDRQ": 0.621, "SYS5V": 1.482},
    ),
    Line(
        "JetPack 5, Orin NX",
        "orin-nx-16gb",
        "06-16-2023 10:45:09 RAM 6334/15388MB (lfb 1770x4MB) SWAP 491/7694MB (cached 0MB) CPU [6%@729,9%@729,5%@729,"
        "16%@729,off,off,off,off] EMC_FREQ 0%@2133 GR3D_FREQ 0%@611 GR3D2_FREQ 0%@0 VIC_FREQ 729 APE 174 CV0@45.812C "
        "CPU@47.937C SOC2@46.093C SOC0@46.968C CV1@46.406C GPU@45.875C tj@48.875C SOC1@48.875C CV2@45.75C "
        "VDD_IN 5299mW/5299mW VDD_CPU_GPU_CV 773mW/773mW VDD_SOC 1424mW/1424mW",
        watts=5.299,
        tj_c=48.875,
        gpu_load=0.0,
        gpu_mhz=611,
        zones_c={"cv0": 45.812, "cpu": 47.937, "gpu": 45.875, "tj": 48.875, "soc1": 48.875, "cv2": 45.75},
        rails_w={"VDD_IN": 5.299, "VDD_CPU_GPU_CV": 0.773, "VDD_SOC": 1.424},
    ),
    Line(
        "JetPack 5, AGX Orin: gated GPU, unconnected rails",
        "agx-orin-64gb",
        "04-11-2025 10:36:27 RAM 4321/62801MB (lfb 1759x4MB) SWAP 19/31400MB (cached 0MB) CPU [0%@729,0%@729,0%@729,"
        "0%@729,0%@729,0%@729,0%@729,0%@729,0%@729,0%@729,0%@729,0%@729] EMC_FREQ 0%@2133 GR3D_FREQ 0%@[0,0] "
        "VIC_FREQ 729 APE 174 CV0@-256C CPU@44.562C Tboard@32C SOC2@40.093C Tdiode@33C SOC0@41.093C CV1@-256C "
        "GPU@-256C tj@44.343C SOC1@41.25C CV2@-256C VDD_GPU_SOC 2340mW/2340mW VDD_CPU_CV 390mW/390mW VIN_SYS_5V0 "
        "4025mW/4025mW NC 0mW/0mW VDDQ_VDD2_1V8AO 301mW/301mW NC 0mW/0mW",
        watts=6.755,
        tj_c=44.343,
        gpu_load=0.0,
        gpu_mhz=0,
        zones_c={"cpu": 44.562, "tboard": 32.0, "tj": 44.343},
        rails_w={"VDD_GPU_SOC": 2.340, "VDD_CPU_CV": 0.390, "VIN_SYS_5V0": 4.025, "VDDQ_VDD2_1V8AO": 0.301},
        gone=("cv0", "cv1", "cv2", "gpu"),
    ),
    Line(
        "JetPack 6, Orin NX under load: the average is lower",
        "orin-nx-8gb",
        "05-15-2025 18:30:28 RAM 6982/7620MB (lfb 5x1MB) SWAP 2640/16384MB (cached 0MB) CPU [97%@1984,95%@1984,"
        "95%@1984,91%@1984,88%@1984,93%@247] EMC_FREQ 18%@3199 GR3D_FREQ 84%@[713] NVENC 1%@115 NVDEC 40%@115 NVJPG "
        "off NVJPG1 off VIC 31%@115 OFA off NVDLA0 off PVA0_FREQ off APE 174 cv0@63.031C cpu@65.562C soc2@64.156C "
        "soc0@63.031C cv1@62.937C gpu@63.5C tj@65.562C soc1@64.718C cv2@60.875C VDD_IN 17946mW/15710mW "
        "VDD_CPU_GPU_CV 8896mW/7585mW VDD_SOC 3923mW/3515mW",
        watts=17.946,
        tj_c=65.562,
        gpu_load=0.84,
        gpu_mhz=713,
        zones_c={"cv0": 63.031, "cpu": 65.562, "gpu": 63.5, "tj": 65.562},
        rails_w={"VDD_IN": 17.946, "VDD_CPU_GPU_CV": 8.896, "VDD_SOC": 3.923},
    ),
    Line(
        "JetPack 6, AGX Orin without its gpu zone",
        "agx-orin-64gb",
        "05-09-2026 18:42:06 RAM 18207/62841MB (lfb 466x4MB) SWAP 86/31420MB (cached 0MB) CPU [14%@2188,5%@2112,"
        "8%@2035,14%@2201,46%@1267,47%@1267,2%@1267,10%@1267,4%@1036,5%@1036,6%@1036,10%@1036] EMC_FREQ 3%@2133 "
        "GR3D_FREQ 0%@[0,0] NVENC 79%@166 NVDEC off NVJPG off NVJPG1 off VIC 36%@115 OFA off NVDLA0 off NVDLA1 off "
        "PVA0_FREQ off APE 174 cpu@52.562C soc2@48.437C soc0@49.093C tj@52.562C soc1@49.656C VDD_GPU_SOC 2412mW/2412mW "
        "VDD_CPU_CV 1607mW/1607mW VIN_SYS_5V0 4707mW/4707mW",
        watts=8.726,
        tj_c=52.562,
        gpu_load=0.0,
        gpu_mhz=0,
        zones_c={"cpu": 52.562, "soc2": 48.437, "soc0": 49.093, "tj": 52.562, "soc1": 49.656},
        rails_w={"VDD_GPU_SOC": 2.412, "VDD_CPU_CV": 1.607, "VIN_SYS_5V0": 4.707},
        gone=("gpu",),
    ),
    Line(
        "Orin Nano Super without EMC",
        "orin-nano-8gb",
        "09-17-2026 02:10:03 RAM 1488/7620MB (lfb 105x4MB) SWAP 253/12002MB (cached 2MB) CPU [0%@1036,0%@1036,1%@1036,"
        "1%@1036,0%@729,0%@729] GR3D_FREQ 0% cpu@47.875C soc2@46.75C soc0@47.281C gpu@50.218C tj@50.218C soc1@48.281C "
        "VDD_IN 4654mW/4654mW VDD_CPU_GPU_CV 560mW/560mW VDD_SOC 1484mW/1484mW",
        watts=4.654,
        tj_c=50.218,
        gpu_load=0.0,
        gpu_mhz=None,
        zones_c={"cpu": 47.875, "gpu": 50.218, "tj": 50.218},
        rails_w={"VDD_IN": 4.654, "VDD_CPU_GPU_CV": 0.560, "VDD_SOC": 1.484},
    ),
    Line(
        "JetPack 7, AGX Orin: present/average/maximum, no tj",
        "agx-orin-64gb",
        "07-25-2026 09:08:28 RAM 20642/62817MB (lfb 1x2MB) CPU [23%@2201,10%@2201,4%@2201,14%@2201,30%@2201,18%@2201,"
        "10%@2201,10%@2201,33%@2201,7%@2201,5%@2201,27%@2201] EMC_FREQ 3%@3199 GR3D_FREQ 12%@[1300,1300] NVENC0 off "
        "NVDEC0 off NVJPG0 off NVJPG1 off VIC off OFA off NVDLA0 off NVDLA1 off PVA0_FREQ off APE 174 "
        "cpu@52.968C/52.968C soc2@48.406C/48.406C soc0@49.531C/49.531C gpu@47.625C/47.625C "
        "VDD_GPU_SOC 5139mW/5139mW/5139mW VDD_CPU_CV 3268mW/3268mW/3268mW VIN_SYS_5V0 5500mW/5500mW/5500mW",
        watts=13.907,
        tj_c=52.968,
        gpu_load=0.12,
        gpu_mhz=1300,
        zones_c={"cpu": 52.968, "soc2": 48.406, "soc0": 49.531, "gpu": 47.625},
        rails_w={"VDD_GPU_SOC": 5.139, "VDD_CPU_CV": 3.268, "VIN_SYS_5V0": 5.500},
    ),
    Line(
        "JetPack 7, Thor: no load, the average is lower",
        "thor",
        "08-08-2026 20:58:23 RAM 3429/125749MB (lfb 120x4MB) CPU [0%,5%,off]@2601 EMC_FREQ @4266 GR3D_FREQ "
        "@[1574,1574,1574] cpu@49.75C/49.75C tj@51.218C/51.218C gpu@51.218C/51.218C VDD_GPU 6330mW/6330mW/6330mW "
        "VIN 28906mW/14453mW/28906mW",
        watts=28.906,
        tj_c=51.218,
        gpu_load=None,
        gpu_mhz=1574,
        zones_c={"cpu": 49.75, "tj": 51.218, "gpu": 51.218},
        rails_w={"VDD_GPU": 6.330, "VIN": 28.906},
    ),
)
