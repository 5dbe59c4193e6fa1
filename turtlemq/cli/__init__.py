"""The command line `turtlemq`: the server, client verbs for a running server, tools for its files. One module per kind of verb.

`verbs` lists them; `start` is the fast path of `turtlemq serve`. Shared by the verbs: `parameters`, `call` (HTTP), `output`,
`times`, `credentials`. Exit codes: 0 for success, 1 for failure, 2 for wrong use. Words are explained in docs/GLOSSARY.md.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point of the program."""
    from turtlemq.cli.start import parse_plain_flags, start
    from turtlemq.errors import TurtleError

    try:
        if (flags := parse_plain_flags(sys.argv[1:])) is not None:
            sys.exit(start(*flags))
        from turtlemq.cli.verbs import command_line  # loads typer, which a server start must not wait for

        command_line(*sys.argv[1:2])()
    except TurtleError as error:
        print(f"turtlemq: {error}", file=sys.stderr)
        sys.exit(1)
    except BrokenPipeError:  # the reader of our output, such as `head`, has ended
        sys.stderr.close()
        sys.exit(1)
    except KeyboardInterrupt:  # before the server has installed its signal handlers
        sys.exit(130)
