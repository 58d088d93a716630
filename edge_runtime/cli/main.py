"""The parser of `edge-runtime`, and what each command prints."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from edge_runtime import __version__
from edge_runtime.cli.numbers import port, positive
from edge_runtime.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_USAGE, EdgeError, UsageError

if TYPE_CHECKING:
    from edge_runtime.records.frames import Pixels

DEFAULT_CONFIG = Path("/etc/edge-runtime/config.toml")


def build_parser() -> argparse.ArgumentParser:
    """Every command with its arguments. Imports nothing heavy: `--help` answers at once."""
    parser = argparse.ArgumentParser(
        prog="edge-runtime",
        description="Runs camera inference as a daemon, measures what it costs, reports frames per joule over MQTT.",
        epilog="Exit codes: 0 done; 1 failed at run time; 2 bad usage, configuration or bundle; 3 refused; "
        "4 not there; 130 interrupted.",
    )
    parser.add_argument("--version", action="version", version=f"edge-runtime {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    run = commands.add_parser("run", help="the daemon, in the foreground", description=_RUN)
    run.add_argument(
        "-c", "--config", type=Path, default=DEFAULT_CONFIG, metavar="CONFIG", help=f"default: {DEFAULT_CONFIG}"
    )
    _add_logging(run)
    run.set_defaults(handler=_run)

    demo = commands.add_parser("demo", help="everything embedded: bundled model and clip, broker, simulated power")
    demo.add_argument("--seconds", type=positive, default=60.0, metavar="N", help="default 60; Ctrl-C ends it too")
    demo.add_argument("--port", type=port, metavar="P", help="the broker's port (default 1883, or a free one)")
    demo.add_argument("--clip", type=Path, metavar="FILE", help="another clip or folder of pictures")
    demo.add_argument("--bundle", type=Path, metavar="DIR", help="another model bundle")
    _add_logging(demo)
    demo.set_defaults(handler=_demo)

    status = commands.add_parser("status", help="what the running daemon does")
    from edge_runtime.cli import status as status_command

    status_command.add_arguments(status)
    status.set_defaults(handler=status_command.run)

    reload = commands.add_parser("reload", help="give a running model another bundle", description=_RELOAD)
    from edge_runtime.cli import reload as reload_command

    reload_command.add_arguments(reload)
    reload.set_defaults(handler=reload_command.run)

    budget = commands.add_parser("budget", help="show or change what the running daemon holds", description=_BUDGET)
    from edge_runtime.cli import budget as budget_command

    budget_command.add_arguments(budget)
    budget.set_defaults(handler=budget_command.run)

    camera = commands.add_parser(
        "camera", help="list, add, change, remove, pause or cap cameras of the running daemon", description=_CAMERA
    )
    from edge_runtime.cli import camera as camera_command

    camera_command.add_arguments(camera)
    camera.set_defaults(handler=camera_command.run)

    check = commands.add_parser("check-config", help="say whether a configuration is valid, and if not, why and where")
    check.add_argument("config", type=Path, metavar="CONFIG", nargs="?")
    check.add_argument("--print-default", action="store_true", help="print the default configuration, to start from")
    check.set_defaults(handler=_check_config)

    prepare = commands.add_parser("prepare", help="make model bundles")
    from edge_runtime.cli import prepare as prepare_command

    prepare_command.add_arguments(prepare)
    prepare.set_defaults(handler=_prepare)

    build = commands.add_parser("build", help="engines for this device", description=_BUILD)
    from edge_runtime.cli import build as build_command

    build_command.add_arguments(build)
    build.set_defaults(handler=build_command.run)

    device = commands.add_parser(
        "device-check", help="the checks that need a real Jetson, and a report to send", description=_DEVICE_CHECK
    )
    from edge_runtime.cli import device_check as device_check_command

    device_check_command.add_arguments(device)
    device.set_defaults(handler=device_check_command.run)

    bench = commands.add_parser("bench", help="measure this device")
    from edge_runtime.cli import bench as bench_command

    bench_command.add_arguments(bench)
    bench.set_defaults(handler=bench_command.run)
    return parser


def counted(count: int, noun: str) -> str:
    """`1 camera`, `2 cameras`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


_RUN = (
    "Runs cameras and models as CONFIG says until SIGTERM or SIGINT. Exits 2 for a configuration that cannot be "
    "parsed or validated, a store that cannot be used or that another daemon holds, or no loadable model at all."
)


_RELOAD = (
    "Sends BUNDLE to the running daemon, which proves it in a process of its own, loads it beside the old one, "
    "exchanges the two between batches, and goes back where the new one fails. Waits for the outcome. What was "
    "reloaded last also runs after the next start, until --reset. Exits 3 where the model was refused or taken back."
)


_BUILD = (
    "Builds TensorRT plans of BUNDLE's variants for this device, in a process of its own, proves them with the "
    "bundle's golden pictures and keeps them in the store, where the daemon finds them. A plan that is there and fits "
    "is left as it is. With --into and --sign it also writes a copy of BUNDLE that carries these plans, signed, for "
    "devices just like this one. Exits 3 where a model is refused, 4 where there is no TensorRT or no GPU: then it "
    "says what it would do."
)


_DEVICE_CHECK = (
    "Builds a plan where none is there, and checks with it what only a real device can show: right answers, memory "
    "over many reloads, threads, CUDA graphs, the DLA, and where the time of a run goes. Cameras and models of a "
    "running daemon disturb the numbers. Exits 3 where a check failed, 4 where there is no TensorRT or no GPU: then "
    "it says what it would do."
)


_CAMERA = (
    "Changes cameras of the running daemon; the others notice nothing. What is changed is kept over starts, until it "
    "is reset. Exits 2 for keys that are wrong, 3 where the change is refused: then everything is as it was."
)


_BUDGET = (
    "Prints the budget in force. With options it changes what they name, until the daemon's next start or until "
    "[budget] in its configuration is another one. Exits 3 for a power above the configuration's max_power_w."
)


def run(arguments: Sequence[str]) -> int:
    """Parse and do; returns the exit code."""
    parser = build_parser()
    parsed = parser.parse_args(arguments)
    try:
        return int(parsed.handler(parsed))
    except EdgeError as error:
        for line in str(error).splitlines():
            print(f"edge-runtime: {line}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of our output is gone
        return EXIT_DONE


def _add_logging(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--log-format", choices=("text", "json"), default="text", help="how logs on standard error look"
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="log more")


def _run(parsed: argparse.Namespace) -> int:
    from edge_runtime.cli.logs import set_up_logs
    from edge_runtime.config import load_config

    set_up_logs(parsed.log_format, logging.DEBUG if parsed.verbose else logging.INFO)
    try:
        config = load_config(parsed.config)
        from edge_runtime.app.main import run_daemon

        return run_daemon(config, parsed.config)
    except EdgeError as error:
        # through the log, so that a machine that reads it finds this too
        for line in str(error).splitlines():
            logging.getLogger("edge_runtime").critical("%s", line)
        return error.exit_code


def _demo(parsed: argparse.Namespace) -> int:
    from edge_runtime.cli.logs import set_up_logs

    set_up_logs(parsed.log_format, logging.INFO if parsed.verbose else logging.WARNING)
    from edge_runtime.app.demo import run_demo

    return run_demo(
        seconds=parsed.seconds,
        port=parsed.port,
        clip=parsed.clip,
        bundle=parsed.bundle,
        say=lambda line: print(line, flush=True),
    )


def _prepare(parsed: argparse.Namespace) -> int:
    from edge_runtime.cli import prepare as prepare_command

    def read_image(path: Path) -> Pixels:
        from edge_runtime.camera.av import decode_image

        return decode_image(path.read_bytes())

    return prepare_command.run(parsed, read_image)


def _check_config(parsed: argparse.Namespace) -> int:
    from edge_runtime.config import DEFAULT_CONFIG as DEFAULT_TEXT
    from edge_runtime.config import load_config

    if parsed.print_default:
        print(DEFAULT_TEXT.read_text(encoding="utf-8"), end="")
        return EXIT_DONE
    if parsed.config is None:
        raise UsageError("no CONFIG was given", remedy="edge-runtime check-config FILE")
    config = load_config(parsed.config)
    from edge_runtime.app.check import check_bundles, check_files

    if problems := check_bundles(config):
        for problem in problems:
            print(f"edge-runtime: {problem}", file=sys.stderr)
        return EXIT_USAGE
    for note in check_files(config):
        print(f"note: {note}")
    print(f"{parsed.config}: valid: {counted(len(config.cameras), 'camera')}, {counted(len(config.models), 'model')}")
    return EXIT_DONE
