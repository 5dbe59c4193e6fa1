"""`manage.py turtlemq_consume TOPIC HANDLER`: a consumer that calls a function of the project for each message."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Callable
from typing import Any

from django.core.management.base import BaseCommand, CommandError
from django.db import close_old_connections
from django.utils.module_loading import import_string

from turtlemq.client import ClientError, Consumer, Message
from turtlemq.integrations.django.producer import client


class Command(BaseCommand):
    """The command. Its handler raises for a message that failed, as every handler of a `Consumer`."""

    help = "Call a function for each message of a topic, until SIGTERM or Ctrl-C."

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Options of a `Consumer`."""
        parser.add_argument("topic")
        parser.add_argument("handler", help="dotted path of a function that takes a message, such as shop.handlers.close_order")
        parser.add_argument("--group", default="default", help="the consumer group")
        parser.add_argument("--concurrency", type=int, default=4, help="handlers at the same time, each in a thread")
        parser.add_argument("--ttr", type=float, default=30.0, help="seconds of a lease; it is extended while a handler runs")
        parser.add_argument("--drain", type=float, default=30.0, help="seconds that handlers may still take after SIGTERM")

    def handle(self, *args: Any, **options: Any) -> None:
        """Run the consumer."""
        try:
            handler = import_string(options["handler"])
        except ImportError as error:
            raise CommandError(str(error)) from error
        own = {name: options[name] for name in ("group", "concurrency", "ttr")}
        try:
            consumer = Consumer(options["topic"], with_fresh_connections(handler), client(), **own)
            consumer.run(signals=True, timeout=options["drain"])
        except (ClientError, ValueError) as error:
            raise CommandError(str(error)) from error


def with_fresh_connections(handler: Callable[[Message], object]) -> Callable[[Message], object]:
    """A handler before and after which unusable database connections are closed, as Django does it around a request."""

    def handle(message: Message) -> object:
        close_old_connections()
        try:
            return handler(message)
        finally:
            close_old_connections()

    return handle
