"""The configuration of a server: flags beat the environment (`TURTLEMQ_PORT=…`), that beats a TOML file, and that the defaults.

Unknown names and values outside their limits are errors that name their origin and the nearest known name. Settings of topics
are in `turtlemq.settings`; here they appear as `defaults`, in the names and units of HTTP.

>>> load({"port": 9000}, {"TURTLEMQ_PORT": "9001", "TURTLEMQ_HOST": "::1"}, None).port
9000
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from turtlemq.errors import InvalidArgument
from turtlemq.model import DUE_MS_MAX
from turtlemq.server.auth import HOSTS_MAX, LOOPBACK, TOKENS_MAX, Token, check_tokens, networks_of
from turtlemq.server.cluster_config import Cluster, check_cluster
from turtlemq.server.tenants import TENANTS_MAX, Tenant, check_tenants
from turtlemq.server.topic_settings import TopicSettings, to_flat, to_nested
from turtlemq.settings import LIMITS, RATE_MAX, RATE_MIN, Settings, check_settings
from turtlemq.storage.names import SHARDS_MAX

PREFIX = "TURTLEMQ_"
# Variables of the command line, and of supervisors
NO_SETTINGS = (
    "TURTLEMQ_URL",
    "TURTLEMQ_TOKEN",
    "TURTLEMQ_CACERT",
    "TURTLEMQ_CONFIG",
    "TURTLEMQ_SUPERVISOR",
    "TURTLEMQ_SHARD_COUNT",
    "TURTLEMQ_LISTENING",
    "TURTLEMQ_LISTENING_GRPC",
    "TURTLEMQ_SIBLINGS",
    "TURTLEMQ_KERNEL",
)
# Kubernetes sets these in every pod for a Service whose name begins with "turtlemq": its addresses, and no settings of ours
_SERVICE = re.compile(r"TURTLEMQ_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_PROTO|_PORT|_ADDR)?)")
_SERVICE_URL = re.compile(r"(tcp|udp|sctp)://")
HIDDEN = "(hidden)"
TABLES = ("cluster", "defaults")
_BEAT, _ATTEMPTS, _BACKOFF = LIMITS["beat_ms"], LIMITS["max_attempts"], LIMITS["backoff_base_ms"]


class Config(Struct, frozen=True, forbid_unknown_fields=True):
    """The configuration of a server. `defaults` are settings of topics without their own, as in PUT /v1/topics/{topic}.

    Limits and descriptions are also the source of the example file and the table in docs/CONFIGURATION.md."""

    data: Annotated[str, Meta(min_length=1)] = "data"
    data_mode: Annotated[
        Literal["0700", "0750", "0755"], Meta(description='of its folders; "0750": the group of the server may read')
    ] = "0700"
    host: Annotated[str, Meta(min_length=1)] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="0: any that is free")] = 8878
    shards: Annotated[
        int,
        Meta(
            ge=1, le=SHARDS_MAX, description="processes that share the topics, see OPERATIONS.md; shard N also has port + 1 + N"
        ),
    ] = 1
    allowed_hosts: Annotated[
        tuple[str, ...],
        Meta(max_length=HOSTS_MAX, description='clients served beside 127.0.0.1 and ::1: addresses, networks, "*" for all'),
    ] = LOOPBACK
    host_names: Annotated[
        tuple[str, ...],
        Meta(max_length=HOSTS_MAX, description="domain names by which clients call a server without tokens and TLS; see below"),
    ] = ()
    tls_cert: Annotated[str, Meta(description="PEM files of a certificate with its chain, and of its key: https")] = ""
    tls_key: str = ""
    grpc_port: Annotated[int, Meta(ge=-1, le=65535, description="for gRPC, see GRPC.md; 0: any that is free, -1: none")] = -1
    grpc_host: Annotated[str, Meta(description="the address for gRPC; by default that of host")] = ""
    grpc_window: Annotated[int, Meta(ge=1, le=10_000, description="deliveries of a gRPC stream without an ack, at most")] = 256
    grpc_past_grace_ms: Annotated[
        int, Meta(ge=-1, le=DUE_MS_MAX, description="how late a scheduled message may arrive; -1: the past is allowed")
    ] = 500
    grpc_beat_s: Annotated[
        float, Meta(ge=0.05, le=3_600, description="silence before a gRPC client is pinged; after 3 of them it is gone")
    ] = 10
    grpc_topic_prefix: Annotated[
        str,
        Meta(max_length=100, pattern=r"^[A-Za-z0-9._-]*$", description="of the topics behind route keys, see GRPC.md"),
    ] = ""
    tokens: Annotated[tuple[Token, ...], Meta(max_length=TOKENS_MAX, description="see below; none")] = ()
    tenants: Annotated[tuple[Tenant, ...], Meta(max_length=TENANTS_MAX, description="see below; none")] = ()
    auto_create_topics: Annotated[bool, Meta(description="false: only PUT makes a topic")] = True
    reject_past: Annotated[bool, Meta(description="true: a due time in the past is refused")] = False
    max_delay_days: Annotated[float, Meta(ge=0, le=50_000, description="how long a message may sleep; 0: until May 2109")] = 0
    max_body_bytes: Annotated[int, Meta(ge=1024, le=1 << 30, description="of a request, unpacked")] = 64 << 20
    max_held_bytes: Annotated[
        int, Meta(ge=1 << 20, le=1 << 40, description="of all requests under way; at least twice max_body_bytes")
    ] = 512 << 20
    max_topics: Annotated[int, Meta(ge=1, le=1_000_000)] = 100_000
    max_groups: Annotated[int, Meta(ge=1, le=1_000_000, description="of one topic")] = 1_000
    max_connections: Annotated[int, Meta(ge=1, le=1_000_000, description="as far as the system grants open files")] = 20_000
    max_waiting: Annotated[int, Meta(ge=0, le=1_000_000, description="long polls")] = 15_000
    body_timeout_s: Annotated[
        float, Meta(ge=0.1, le=3_600, description="for a body to come, and one more second for each 64 KiB of it")
    ] = 30
    client_produce_per_s: Annotated[
        float, Meta(ge=0, le=RATE_MAX, description=f"messages of one token or address, {RATE_MIN} or more; 0: no limit")
    ] = 0
    client_burst: Annotated[
        int, Meta(ge=0, le=1 << 40, description="messages at once after a quiet time; 0: those of one second")
    ] = 0
    tick_ms: Annotated[
        int, Meta(ge=0, le=60_000, description="ticks are at least this far apart; 0: exactly when a message is due")
    ] = 0
    virtual_clock: Annotated[bool, Meta(description="true: a clock that only moves when told to, see TESTING.md")] = False
    beat_ms: Annotated[int, Meta(ge=_BEAT.low, le=_BEAT.high, description="how often deliveries and acks reach the disk")] = (
        Settings().beat_ms
    )
    max_delivery_retries: (
        Annotated[
            int,
            Meta(ge=_ATTEMPTS.low - 1, le=_ATTEMPTS.high - 1, description="for topics without their own: max_attempts less one"),
        ]
        | None
    ) = None
    retry_delay_ms: (
        Annotated[int, Meta(ge=_BACKOFF.low, le=_BACKOFF.high, description="for topics without their own: the first back-off")]
        | None
    ) = None
    log_format: Annotated[Literal["text", "json"], Meta(description='or "json": see OBSERVE.md')] = "text"
    log_level: Annotated[Literal["debug", "info", "warning", "error"], Meta(description="debug, info, warning or error")] = "info"
    slow_request_ms: Annotated[
        int, Meta(ge=0, le=3_600_000, description="requests that take longer are logged, waits left out; 0: none")
    ] = 1_000
    tracing: Annotated[bool, Meta(description="true: spans of OpenTelemetry, see OBSERVE.md")] = False
    push_hosts: Annotated[
        tuple[str, ...],
        Meta(max_length=HOSTS_MAX, description="hosts and networks that callbacks may go to, see PUSH.md; none: they are off"),
    ] = ()
    push_timeout_s: Annotated[
        float, Meta(ge=0.1, le=600, description="for the answer to a callback, unless the client asked for another time")
    ] = 30
    push_connections: Annotated[int, Meta(ge=1, le=100_000, description="callbacks under way")] = 1_000
    cluster: Cluster = Cluster()
    defaults: dict[str, Any] = {}

    def topic_defaults(self) -> Settings:
        """Settings of topics that have none of their own."""
        _refuse_unknown(self.defaults, TopicSettings, "defaults")
        try:
            changes = to_flat(msgspec.convert(self.defaults, TopicSettings))
        except msgspec.ValidationError as error:
            raise InvalidArgument(f"defaults: {error}") from None
        if self.max_delivery_retries is not None:
            changes.setdefault("max_attempts", self.max_delivery_retries + 1)
        if self.retry_delay_ms is not None:
            changes.setdefault("backoff_base_ms", self.retry_delay_ms)
        if changes.get("partitions", 1) > 1:
            raise InvalidArgument("defaults: partitions is given when a topic is made, with PUT /v1/topics/{topic}")
        changes.setdefault("beat_ms", self.beat_ms)
        return check_settings(replace(Settings(), **changes))


def load(flags: Mapping[str, Any], environ: Mapping[str, str], file: Path | None) -> Config:
    """The configuration in force."""
    return resolve(flags, environ, file)[0]


def resolve(flags: Mapping[str, Any], environ: Mapping[str, str], file: Path | None) -> tuple[Config, dict[str, str]]:
    """The configuration in force, and the origin of each value that is not a default.

    >>> resolve({}, {"TURTLEMQ_ALLOWED_HOSTS": "10.0.0.0/8, ::1"}, None)[1]
    {'allowed_hosts': 'TURTLEMQ_ALLOWED_HOSTS'}
    """
    given: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for name, value, origin in (*_from_file(file), *_from_environment(environ), *_from_flags(flags)):
        given[name], origins[name] = _typed(name, value, origin), origin
    config = Config(**given)
    for name, check in _CHECKS.items():
        try:
            check(config)
        except InvalidArgument as error:
            raise InvalidArgument(f"{origins[name]}: {error}" if name in origins else str(error)) from None
    return config, origins


def _from_file(file: Path | None) -> Iterator[tuple[str, Any, str]]:
    if file is None:
        return
    try:
        given = tomllib.loads(file.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidArgument(f"{file} cannot be read as TOML: {error}") from error
    _refuse_unknown(given, Config, str(file))
    yield from ((name, value, str(file)) for name, value in given.items())


def _from_environment(environ: Mapping[str, str]) -> Iterator[tuple[str, Any, str]]:
    keys = [key for key, text in environ.items() if key.startswith(PREFIX) and not _is_service_variable(key, text)]
    variables = {key.removeprefix(PREFIX).lower(): key for key in keys if key not in NO_SETTINGS}
    _refuse_unknown(variables, Config, "the environment")
    for name, key in variables.items():
        yield name, _parsed(name, environ[key], key), key


def _is_service_variable(key: str, text: str) -> bool:
    """Whether Kubernetes made a variable from a Service.

    >>> _is_service_variable("TURTLEMQ_PORT", "tcp://10.96.0.7:8878"), _is_service_variable("TURTLEMQ_PORT", "8878")
    (True, False)
    """
    return bool(_SERVICE.fullmatch(key) or (key.endswith("_PORT") and _SERVICE_URL.match(text)))


def _parsed(name: str, text: str, key: str) -> Any:
    """The value of a variable: a list has commas, a table is JSON. Numbers and booleans are left as text for `_typed`."""
    if name in ("allowed_hosts", "host_names", "push_hosts"):
        return [one.strip() for one in text.split(",") if one.strip()]
    if name not in ("tokens", "tenants", "cluster", "defaults"):
        return text
    try:
        return json.loads(text)
    except ValueError as error:
        raise InvalidArgument(f"{key} is given as JSON: {error}") from None


def _from_flags(flags: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    yield from ((name, value, f"--{name.replace('_', '-')}") for name, value in flags.items() if value is not None)


def _typed(name: str, value: Any, origin: str) -> Any:
    kind = {field.name: field.type for field in msgspec.structs.fields(Config)}[name]
    try:
        return msgspec.convert(value, kind, strict=not origin.startswith(PREFIX))
    except msgspec.ValidationError as error:
        raise InvalidArgument(f"{origin}: {name}: {error}") from None


def _refuse_unknown(given: Mapping[str, Any], kind: type[Struct], where: str) -> None:
    """Refuse names that are not fields of `kind`, also in nested tables."""
    fields = {field.name: field.type for field in msgspec.structs.fields(kind)}
    for name, value in given.items():
        if name not in fields:
            near = difflib.get_close_matches(name, fields, 1)
            guess = f"; did you mean {near[0]}?" if near else f"; there are: {', '.join(fields)}"
            raise InvalidArgument(f"{where}: unknown setting {name!r}{guess}")
        inner = fields[name]
        if isinstance(inner, type) and issubclass(inner, Struct) and isinstance(value, dict):
            _refuse_unknown(value, inner, f"{where}: {name}")


def _check_tls(config: Config) -> None:
    if bool(config.tls_cert) != bool(config.tls_key):
        raise InvalidArgument("tls_cert and tls_key go together: the files of the certificate (with its chain) and of its key")


def _check_client_rate(config: Config) -> None:
    if 0 < config.client_produce_per_s < RATE_MIN:
        raise InvalidArgument(f"client_produce_per_s is at least {RATE_MIN}, or 0 for no limit")


def _check_held(config: Config) -> None:
    if config.max_held_bytes < 2 * config.max_body_bytes:
        raise InvalidArgument("max_held_bytes is at least twice max_body_bytes: a body is held packed and unpacked")


def _check_push_hosts(config: Config) -> None:
    if config.push_hosts:
        from turtlemq.server.push.hosts import PushHosts

        PushHosts(config.push_hosts)


def _check_shards(config: Config) -> None:
    if config.shards == 1:
        return
    if config.cluster.name:
        raise InvalidArgument("shards is for a server alone; the shards of a cluster are fixed by 'turtlemq cluster init'")
    if config.grpc_port >= 0:
        raise InvalidArgument("grpc_port works with shards = 1 only: a gRPC stream is not passed on to the process of its topic")
    if config.port + config.shards > 65_535:
        raise InvalidArgument(f"each shard has a port of its own behind {config.port}, and there are none above 65535")


def _check_clock(config: Config) -> None:
    if config.virtual_clock and (config.cluster.name or config.cluster.etcd):
        raise InvalidArgument("virtual_clock is for a single server: the nodes of a cluster need clocks that run")
    if config.virtual_clock and config.shards > 1:
        raise InvalidArgument("virtual_clock works with shards = 1 only: several processes would have several clocks")


_CHECKS = {
    "virtual_clock": _check_clock,
    "shards": _check_shards,
    "push_hosts": _check_push_hosts,
    "max_body_bytes": _check_held,
    "allowed_hosts": lambda config: networks_of(config.allowed_hosts),
    "tokens": lambda config: check_tokens(config.tokens),
    "tenants": lambda config: check_tenants(config.tenants),
    "tls_cert": _check_tls,
    "client_produce_per_s": _check_client_rate,
    "cluster": lambda config: check_cluster(config.cluster),
    "defaults": Config.topic_defaults,
}


# Display


def in_force(config: Config, origins: Mapping[str, str]) -> dict[str, tuple[Any, str]]:
    """Every setting with its value and origin, those of tables one by one. Hashes of tokens are hidden.

    >>> in_force(Config(port=1), {"port": "--port"})["port"]
    (1, '--port')
    """
    plain = (name for name in Config.__struct_fields__ if name not in TABLES)
    out = {name: (getattr(config, name), origins.get(name, "default")) for name in plain}
    shown = [{**msgspec.to_builtins(token), "hash": HIDDEN} for token in config.tokens]
    out["tokens"] = shown, out["tokens"][1]
    out["tenants"] = [msgspec.to_builtins(tenant) for tenant in config.tenants], out["tenants"][1]
    given = dict(_leaves(config.defaults))
    settings = config.topic_defaults()
    if config.max_delivery_retries is None:
        out["max_delivery_retries"] = settings.max_attempts - 1, origins.get("defaults", "default")
    if config.retry_delay_ms is None:
        out["retry_delay_ms"] = settings.backoff_base_ms, origins.get("defaults", "default")
    for name in Cluster.__struct_fields__:
        value = getattr(config.cluster, name)
        changed = value != getattr(Cluster(), name)
        out[f"cluster.{name}"] = value, origins.get("cluster", "default") if changed else "default"
    for name, value in _leaves(to_nested(settings)):
        origin = origins["defaults"] if name in given else origins.get(_SHORT_NAMES.get(name, ""), "default")
        out[f"defaults.{name}"] = value, origin
    return out


_SHORT_NAMES = {"max_attempts": "max_delivery_retries", "backoff.base": "retry_delay_ms", "beat": "beat_ms"}


def _leaves(table: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Values of nested tables by their dotted names."""
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value
