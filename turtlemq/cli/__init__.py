"""The command line, `turtlemq`: a server, a client of a running one, and tools for its files. One module for each kind of verb.

Exit codes: 0 for success, 1 for failure, 2 for wrong use.
"""

from __future__ import annotations

import sys


def main() -> None:
    """The program's entry."""
    from turtlemq.cli.start import parse_plain_flags, start
    from turtlemq.errors import TurtleError

    try:
        if (told := parse_plain_flags(sys.argv[1:])) is not None:
            sys.exit(start(*told))
        from turtlemq.cli.verbs import command_line  # not for a server: see `start`

        command_line(*sys.argv[1:2])()
    except TurtleError as error:
        print(f"turtlemq: {error}", file=sys.stderr)
        sys.exit(1)
    except BrokenPipeError:  # the reader of our output has seen enough
        sys.stderr.close()
        sys.exit(1)
    except KeyboardInterrupt:  # before the server had its own way to stop
        sys.exit(130)
