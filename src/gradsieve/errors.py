"""The one exception that users meet."""


class GradsieveError(ValueError):
    """Says what is wrong, where, and how to mend it."""
