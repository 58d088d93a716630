"""What a valid configuration names, looked at without running it."""

from __future__ import annotations

from pathlib import Path

from edge_runtime.app.engines import has
from edge_runtime.app.models import open_bundle
from edge_runtime.config import Config, ModelConfig
from edge_runtime.engine.manifest import Backend
from edge_runtime.errors import BundleError
from edge_runtime.secret_file import is_credential


def check_bundles(config: Config) -> list[str]:
    """Verify every configured bundle's manifest, files and variant; what is wrong, one line each."""
    return [problem for model in config.models if (problem := _check(model)) is not None]


def check_files(config: Config) -> list[str]:
    """Files that the configuration names and that are not there now; `run` would wait for them."""
    wanted = [
        (f"camera {camera.name}", Path(camera.source.location))
        for camera in config.cameras
        if camera.source.kind == "file"
    ]
    if config.mqtt is not None:
        mqtt = config.mqtt
        for key in ("password_file", "ca_file", "cert_file", "key_file"):
            path = getattr(mqtt, key)
            if path is not None and not is_credential(path):  # there only while the service runs
                wanted.append((f"mqtt.{key}", path))
    return [f"{who}: {path} does not exist" for who, path in wanted if not path.exists()]


def _check(model: ModelConfig) -> str | None:
    try:
        bundle = open_bundle(model.bundle)
        # with "auto" a plan may be built for what has no file for the CPU
        backend: Backend = "onnxruntime"
        if model.backend == "tensorrt" or (model.backend == "auto" and not has(bundle, model.variant, "onnxruntime")):
            backend = "tensorrt" if has(bundle, model.variant, "tensorrt") or model.backend == "tensorrt" else backend
        bundle.variant(model.variant, backend)
    except BundleError as error:
        return f"model {model.name}: {error}"
    return None
