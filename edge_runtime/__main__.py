"""`edge-runtime` and `python -m edge_runtime`."""

from __future__ import annotations

import sys


def main() -> int:
    """The command line; returns the exit code."""
    # inside: the entry point itself costs nothing to import
    if sys.argv[1:2] == ["run"]:
        from edge_runtime.hardware.memory import without_thread_caches

        without_thread_caches()
    from edge_runtime.cli.main import run

    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
