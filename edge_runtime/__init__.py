"""edge-runtime: camera inference on NVIDIA Jetson Orin inside a power and a temperature budget."""

import os

__version__ = "0.1.0"

# From 1.32 on, onnxruntime's wheel collects usage data for its maker and writes it to disk. It looks at this when it
# is imported, whoever imports it first; an operator who wants to take part sets the variable to 0.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
