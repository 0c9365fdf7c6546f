"""`python -m gradsieve` is the `gradsieve` command."""

from .cli import main

main()
