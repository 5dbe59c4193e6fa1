"""The command line, `turtlemq`: a server, a client of a running one, and tools for its files. One module for each kind of verb.

Exit codes: 0 for success, 1 for failure, 2 for wrong use.
"""

from __future__ import annotations

import sys


def main() -> None:
    """The program's entry."""
    from turtlemq.cli.verbs import app
    from turtlemq.errors import TurtleError

    try:
        app()
    except TurtleError as error:
        print(f"turtlemq: {error}", file=sys.stderr)
        sys.exit(1)
    except BrokenPipeError:  # the reader of our output has seen enough
        sys.stderr.close()
        sys.exit(1)
