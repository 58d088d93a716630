"""TensorRT: the one door to `tensorrt`, `pycuda` and `cuda`. Nothing here imports them before it is asked to."""
