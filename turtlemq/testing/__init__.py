"""Tests of applications that use TurtleMQ: a real server inside the test, whose clock the test moves.

    def test_the_mail_goes_out_after_three_days(turtle):
        turtle.client.put("mails", {"to": "ann"}, delay=timedelta(days=3))
        turtle.advance(days=3)
        assert [message.body for message in turtle.client.fetch("mails")] == [{"to": "ann"}]

`turtle` is a fixture of pytest, which `turtlemq.testing.plugin` brings along; `Turtle` is the server for all other frameworks. It
is the server of `turtlemq serve --virtual-clock` with its engine and its files, on a thread and a free port. It belongs to the
distribution `turtlemq`. Guide: docs/TESTING.md. Words: docs/GLOSSARY.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from turtlemq.testing.turtle import Turtle

__all__ = ["Turtle"]


def __getattr__(name: str) -> Any:  # the server is loaded with its first use, not with the plugin
    if name == "Turtle":
        from turtlemq.testing.turtle import Turtle

        return Turtle
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
