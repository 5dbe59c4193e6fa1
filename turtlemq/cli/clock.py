"""`turtlemq clock`: the time of a server with a virtual clock, and moving it."""

from __future__ import annotations

from typing import Annotated

from turtlemq.cli.call import URL, call
from turtlemq.cli.output import fail, print_json
from turtlemq.cli.parameters import AsJson, Url, duration_option, time_option
from turtlemq.cli.times import TIME_HELP, format_time


def clock(
    advance: Annotated[float | None, duration_option("Move it on by so much, as 3d.")] = None,
    to: Annotated[int | None, time_option(f"Move it on to a time: {TIME_HELP}.", "--to")] = None,
    url: Url = URL,
    as_json: AsJson = False,
) -> None:
    """Show the time of a server that was started with --virtual-clock, or move it on: messages that come due are ready then.

    turtlemq clock --advance 3d
    """
    if advance is not None and to is not None:
        fail("give one of --advance and --to", 2)
    wanted = {"advance_ms": round(advance * 1000)} if advance is not None else {"now_ms": to} if to is not None else None
    answer = call(url, "GET", "/v1/clock") if wanted is None else call(url, "POST", "/v1/clock", wanted)
    if as_json:
        print_json(answer)
    else:
        print(format_time(answer["now_ms"]))
