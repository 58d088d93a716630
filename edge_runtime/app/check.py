"""What a valid configuration names, looked at without running it."""

from __future__ import annotations

from edge_runtime.app.models import open_bundle
from edge_runtime.config import Config, ModelConfig
from edge_runtime.errors import BundleError


def check_bundles(config: Config) -> list[str]:
    """Verify every configured bundle's manifest, files and variant; what is wrong, one line each."""
    return [problem for model in config.models if (problem := _check(model)) is not None]


def _check(model: ModelConfig) -> str | None:
    try:
        open_bundle(model.bundle).variant(model.variant, "onnxruntime")
    except BundleError as error:
        return f"model {model.name}: {error}"
    return None
