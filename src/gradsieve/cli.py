"""The `gradsieve` command: parse, call, print."""

import signal
import sys
from typing import Any

from .errors import GradsieveError
from .runs.memory import keep_freed_memory

EXTRAS = "pip install 'gradsieve[images,translation,report]'"


def main() -> None:
    """Runs the command line. Bad input ends with exit code 2 and a message, not with a traceback."""
    signal.signal(signal.SIGTERM, _stop)
    keep_freed_memory()
    try:
        from .commands import app

        app()
    except GradsieveError as error:
        sys.exit(_refuse(str(error)))
    except ModuleNotFoundError as error:
        sys.exit(_refuse(f"this command needs the package {error.name}; install it with: {EXTRAS}"))
    except OSError as error:
        sys.exit(_refuse(f"{error.filename or 'the system'}: {error.strerror or error}."))
    except SystemExit as ended:  # typer makes of Ctrl-C a silent exit
        if ended.code == 130:
            _refuse("stopped; what was saved is intact. Go on with --resume; compare by the same command.")
        raise


def _stop(*_: Any) -> None:
    raise KeyboardInterrupt


def _refuse(message: str) -> int:
    print(f"gradsieve: {message}", file=sys.stderr)
    return 2
