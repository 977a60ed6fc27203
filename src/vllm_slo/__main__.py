"""Entry point: runs one command line, turns its errors into messages and exit codes. Nothing else exits."""

from __future__ import annotations

import os
import sys
import traceback

from vllm_slo.exporters.errors import SloError

PROGRAM = "vllm-slo"
DEBUG = "VLLM_SLO_DEBUG"

EXTRAS: dict[str, str] = {
    "click": "server",
    "deltalake": "server",
    "duckdb": "server",
    "google": "server",
    "grpc": "server",
    "httpx": "server",
    "numpy": "server",
    "orjson": "server",
    "psutil": "server",
    "pynvml": "gpu",
    "pyarrow": "server",
    "pydantic": "server",
    "rich": "server",
    "starlette": "server",
    "uvicorn": "server",
    "yaml": "server",
    "plotly": "app",
    "streamlit": "app",
}
"""Top-level module -> the extra of this distribution that installs it."""


def run(arguments: list[str] | None = None) -> int:
    """Run one command line and return its exit code; messages go to standard error."""
    try:
        import click

        from vllm_slo.commands.group import group
    except ModuleNotFoundError as error:
        return _fail(_missing(error)) if _module(error) in EXTRAS else _internal(error)
    try:
        outcome = group.main(args=arguments, prog_name=PROGRAM, standalone_mode=False)
    except click.exceptions.Exit as end:
        return end.exit_code
    except click.UsageError as error:
        error.show()
        return 2
    except click.ClickException as error:
        return _fail(error.format_message())
    except (click.Abort, KeyboardInterrupt):
        return _fail("interrupted", code=130)
    except SloError as error:
        return _fail(str(error))
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except ModuleNotFoundError as error:
        return _fail(_missing(error)) if _module(error) in EXTRAS else _internal(error)
    except Exception as error:  # noqa: BLE001 - the edge of the program: nothing above can report it
        return _internal(error)
    return outcome if isinstance(outcome, int) else 0


def main() -> None:
    """Entry point of the installed command."""
    sys.exit(run())


def _missing(error: ModuleNotFoundError) -> str:
    module = _module(error)
    return f"this needs the module '{module}', which is not installed: pip install 'vllm-slo[{EXTRAS[module]}]'"


def _module(error: ModuleNotFoundError) -> str:
    return (error.name or "").partition(".")[0]


def _internal(error: Exception) -> int:
    if os.environ.get(DEBUG):
        traceback.print_exception(error)
        return 1
    return _fail(f"internal error: {type(error).__name__}: {error}; {DEBUG}=1 shows the traceback")


def _fail(message: str, code: int = 1) -> int:
    print(f"{PROGRAM}: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    main()
