"""The app configuration: its label is `turtlemq`, and it has no models."""

from __future__ import annotations

from django.apps import AppConfig


class TurtleConfig(AppConfig):
    """The app `turtlemq`."""

    name = "turtlemq.integrations.django"
    label = "turtlemq"
    verbose_name = "TurtleMQ"
