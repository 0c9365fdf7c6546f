"""The `gradsieve` command: parse, call, print."""

import sys

from .errors import GradsieveError

EXTRAS = "pip install 'gradsieve[images,report]'"


def main() -> None:
    """Runs the command line. Bad input ends with exit code 2 and a message, not with a traceback."""
    try:
        from .commands import app

        app()
    except GradsieveError as error:
        sys.exit(_refuse(str(error)))
    except ModuleNotFoundError as error:
        sys.exit(_refuse(f"this command needs the package {error.name}; install it with: {EXTRAS}"))
    except OSError as error:
        sys.exit(_refuse(f"{error.filename or 'the system'}: {error.strerror or error}."))
    except KeyboardInterrupt:
        print(
            "gradsieve: stopped. What was saved is intact; train goes on with --resume, compare by itself.",
            file=sys.stderr,
        )
        sys.exit(130)


def _refuse(message: str) -> int:
    print(f"gradsieve: {message}", file=sys.stderr)
    return 2
