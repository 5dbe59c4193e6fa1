"""The table `[cluster]` of the configuration: the node's own name, its peers, and how answers wait for copies.

Without a name there is no cluster, and nothing of replication runs. With one, etcd, the name server, knows the members, and the
nodes elect their leader.

>>> parse_address("node-a:8900"), parse_address("[::1]:8900")
(('node-a', 8900), ('::1', 8900))
"""

from __future__ import annotations

import re
import stat
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta, Struct

from turtlemq.errors import InvalidArgument
from turtlemq.server import logs
from turtlemq.timing import EARLIEST, LATEST, SPARE, check_timing

SECRET_BYTES_MIN = 16
SECRET_BYTES_MAX = 4_096
CLIENT_BUDGET_MS = 30_000  # of a call, by default
LEASE_BEATS = 4  # a lease lasts so many heartbeats at least: one that is late must not cost the office
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")  # of clusters and nodes
_URL = re.compile(r"https?://[^/ ]+/?")


class Cluster(Struct, frozen=True, forbid_unknown_fields=True):
    """The place of a node in its cluster. `name` is empty on a single node."""

    name: Annotated[str, Meta(description="none: a single node")] = ""
    node: Annotated[str, Meta(description="this node")] = ""
    etcd: Annotated[tuple[str, ...], Meta(max_length=9, description="URLs of the members of etcd, the name server")] = ()
    url: Annotated[str, Meta(description="under which clients and other nodes reach this one; by default http://host:port")] = ""
    peer: Annotated[str, Meta(description="host:port for standbys of shard 0; shard N has the port plus N")] = ""
    secret_file: Annotated[str, Meta(description="a file with the secret of the cluster, the same on all nodes")] = ""
    zone: Annotated[str, Meta(max_length=200, description="of this machine, such as a data centre")] = ""
    acks: Annotated[Literal["isr", "local"], Meta(description='"local": answers wait for no standby, and may be lost')] = "isr"
    heartbeat_ms: Annotated[int, Meta(ge=20, le=60_000, description="from the leader to its standbys")] = 600
    lease_s: Annotated[int, Meta(ge=2, le=600, description="of the leader in etcd; at least four heartbeats")] = 3
    lag_max_s: Annotated[
        float, Meta(ge=0.1, le=3_600, description="a copy that is silent or behind for longer is not in sync")
    ] = 3
    ring_bytes: Annotated[
        int, Meta(ge=16 << 20, le=1 << 36, description="of the last changes, kept in memory for standbys that were away")
    ] = 64 << 20
    bulk_mb_per_s: Annotated[
        int, Meta(ge=1, le=100_000, description="to each standby, of sealed segments, beside the changes")
    ] = 50
    max_clock_skew_ms: Annotated[
        int, Meta(ge=1, le=3_600_000, description="a node whose clock differs more from the others does not lead")
    ] = 500
    scrub_mb_per_s: Annotated[
        int, Meta(ge=0, le=100_000, description="of the own files, read day by day to find bytes that have rotted; 0: off")
    ] = 4
    replace_after_s: Annotated[
        int, Meta(ge=1, le=31_536_000, description="copies of a node that is away for longer are made elsewhere")
    ] = 600
    etcd_user: Annotated[str, Meta(description="of this cluster in etcd, if etcd asks for users")] = ""
    etcd_password_file: Annotated[str, Meta(description="a file with the password of that user")] = ""
    etcd_ca: Annotated[str, Meta(description="PEM file: who certifies etcd; by default the authorities of the system")] = ""
    etcd_cert: Annotated[
        str, Meta(description="PEM files of this client's certificate, if etcd asks for one, and of its key")
    ] = ""
    etcd_key: str = ""
    tls_cert: Annotated[str, Meta(description="PEM files of a certificate and its key: TLS between nodes, on all or none")] = ""
    tls_key: str = ""
    tls_ca: Annotated[str, Meta(description="PEM file of the authority that certifies all nodes")] = ""


def check_cluster(cluster: Cluster) -> None:
    """Raise `InvalidArgument` for a table that does not describe a node."""
    if not cluster.name:
        if cluster != Cluster():
            raise InvalidArgument("cluster.name is missing: give the cluster a name, or leave the whole table out")
        return
    for key in ("name", "node"):
        if not NAME.fullmatch(getattr(cluster, key)):
            raise InvalidArgument(f"cluster.{key} is 1 to 64 of A-Z a-z 0-9 . _ -, not {getattr(cluster, key)!r:.220}")
    if not cluster.secret_file:
        raise InvalidArgument("cluster.secret_file is missing: put the same 16 or more random bytes into a file on every node")
    if not cluster.etcd:
        raise InvalidArgument("cluster.etcd is missing: the URLs of the members of etcd, the name server of the cluster")
    _check_address("peer", cluster.peer, "on which other nodes find this one")
    _check_name_server(cluster)


def _check_name_server(cluster: Cluster) -> None:
    timing_hints(cluster)
    for url in cluster.etcd:
        _check_url("etcd", url)
    if cluster.url:
        _check_url("url", cluster.url)
    if 1000 * cluster.lease_s < LEASE_BEATS * cluster.heartbeat_ms:
        raise InvalidArgument(f"cluster.lease_s is at least {LEASE_BEATS} heartbeats of {cluster.heartbeat_ms} ms")
    if bool(cluster.etcd_user) != bool(cluster.etcd_password_file):
        raise InvalidArgument("cluster.etcd_user and cluster.etcd_password_file go together")
    if bool(cluster.etcd_cert) != bool(cluster.etcd_key):
        raise InvalidArgument("cluster.etcd_cert and cluster.etcd_key go together")
    if len({bool(cluster.tls_cert), bool(cluster.tls_key), bool(cluster.tls_ca)}) > 1:
        raise InvalidArgument("cluster.tls_cert, cluster.tls_key and cluster.tls_ca go together")


def timing_hints(cluster: Cluster) -> list[str]:
    """Check heartbeats against the time until another node runs for leader (2.5 to 5 of them), and that and the lease against the
    time that clients wait. Raises `InvalidArgument`; returns warnings."""
    beat_ms = cluster.heartbeat_ms
    hints = check_timing(beat_ms, (EARLIEST * beat_ms, LATEST * beat_ms), CLIENT_BUDGET_MS)
    if not hints and SPARE * 1000 * cluster.lease_s > CLIENT_BUDGET_MS:
        hints = [f"a leader that is gone is replaced after its lease of {cluster.lease_s} s; clients wait for 30 s"]
    return hints


def _check_url(key: str, url: str) -> None:
    if not _URL.fullmatch(url):
        raise InvalidArgument(f"cluster.{key} is http://host:port or https://host:port, not {url!r:.300}")


def _check_address(key: str, text: str, what: str) -> None:
    try:
        parse_address(text)
    except ValueError:
        raise InvalidArgument(f"cluster.{key} is the address {what}, as host:port, not {text!r:.300}") from None


def parse_address(text: str) -> tuple[str, int]:
    """Host and port. Raises `ValueError`."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") if host.startswith("[") else host
    if not host or (":" in host and not text.startswith("[")) or not port.isascii() or not port.isdigit() or int(port) > 65_535:
        raise ValueError(text)
    return host, int(port)


def warn_if_readable(file: str) -> None:
    """Warn in the log if other users of this machine can read or change the secret of the cluster. Requires: it can be read."""
    mode = stat.S_IMODE(Path(file).stat().st_mode)
    if mode & stat.S_IRWXO:
        hint = "other users can read or change it: chmod 600, or 640 for a group, and make another if they are not trusted"
        logs.warning("secret_not_private", file=file, mode=f"{mode:04o}", hint=hint)


def read_secret(file: str) -> bytes:
    """The secret of the cluster, without white space at its ends. Raises `InvalidArgument` for a file that has none."""
    try:
        with Path(file).open("rb") as opened:
            secret = opened.read(SECRET_BYTES_MAX + 1).strip()
    except OSError as error:
        raise InvalidArgument(f"cluster.secret_file: {file} cannot be read: {error.strerror or error}") from None
    if not SECRET_BYTES_MIN <= len(secret) <= SECRET_BYTES_MAX:
        raise InvalidArgument(
            f"cluster.secret_file: {file} holds {len(secret)} bytes; {SECRET_BYTES_MIN} to {SECRET_BYTES_MAX} make a secret"
        )
    return secret
