"""The one exception that users meet."""


class GradsieveError(ValueError):
    """Says what is wrong, where, and how to mend it."""


def check(holds: bool, message: str) -> None:
    """An error with that message unless it holds."""
    if not holds:
        raise GradsieveError(message)
