"""edge-runtime: camera inference on NVIDIA Jetson Orin inside a power and a temperature budget."""

__version__ = "0.1.0"
