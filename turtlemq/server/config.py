"""What a server is told: flags beat the environment (`TURTLEMQ_PORT=…`), which beats a TOML file, which beats the defaults.

>>> load({"port": 9000}, {"TURTLEMQ_PORT": "9001", "TURTLEMQ_HOST": "::1"}, None).port
9000
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from turtlemq.errors import InvalidArgument
from turtlemq.model import Settings
from turtlemq.settings import check_settings

PREFIX = "TURTLEMQ_"
NOT_YET = ("allowed_hosts", "tokens", "tls_cert", "tls_key", "grpc_port")
_ELSEWHERE = ("TURTLEMQ_URL",)  # the command line's own


class Config(Struct, frozen=True, forbid_unknown_fields=True):
    """Everything in force. `defaults` are settings for topics that have none of their own, by their names in topic.toml."""

    data: str = "data"
    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = 8878
    auto_create_topics: bool = True
    reject_past: bool = False
    max_delay_days: Annotated[float, Meta(ge=0)] = 0  # 0: as far as the format reaches, May 2109
    max_body_bytes: Annotated[int, Meta(ge=1024, le=1 << 30)] = 64 << 20
    tick_ms: Annotated[int, Meta(ge=0, le=60_000)] = 0  # ticks are at least this far apart; 0: exactly when something is due
    max_delivery_retries: Annotated[int, Meta(ge=0, le=999_999)] | None = None
    retry_delay_ms: Annotated[int, Meta(ge=0)] | None = None
    defaults: dict[str, Any] = {}

    def topic_defaults(self) -> Settings:
        """Settings of topics that have none of their own."""
        changes = dict(self.defaults)
        if self.max_delivery_retries is not None:
            changes.setdefault("max_attempts", self.max_delivery_retries + 1)
        if self.retry_delay_ms is not None:
            changes.setdefault("backoff_base_ms", self.retry_delay_ms)
        _known(changes, list(Settings.__dataclass_fields__), "defaults")
        return check_settings(replace(Settings(), **changes))


def load(flags: Mapping[str, Any], environ: Mapping[str, str], file: Path | None) -> Config:
    """The configuration in force. Unknown names are errors, with a guess at what was meant."""
    names = list(Config.__struct_fields__)
    told: dict[str, Any] = {}
    if file is not None:
        try:
            told |= tomllib.loads(file.read_text("utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise InvalidArgument(f"{file} cannot be read as TOML: {error}") from error
        _known(told, names, str(file))
    said = {key.removeprefix(PREFIX).lower(): key for key in environ if key.startswith(PREFIX) and key not in _ELSEWHERE}
    _known(said, [name for name in names if name != "defaults"], "the environment")
    told |= {name: environ[key] for name, key in said.items()}
    told |= {name: value for name, value in flags.items() if value is not None}
    try:
        config = msgspec.convert(told, Config, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidArgument(f"configuration: {error}") from error
    config.topic_defaults()
    return config


def _known(told: Mapping[str, Any], names: list[str], where: str) -> None:
    for name in told:
        if name in NOT_YET:
            raise InvalidArgument(f"{where}: {name} is not available yet")
        if name not in names:
            near = difflib.get_close_matches(name, names, 1)
            guess = f"; did you mean {near[0]}?" if near else f"; there are: {', '.join(names)}"
            raise InvalidArgument(f"{where}: unknown setting {name!r}{guess}")
