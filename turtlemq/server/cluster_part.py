"""The part of a server that knows its cluster: the keys of the name server, the role of this replica, its leader, the handover.

Handlers use `service.cluster`, which is None on a single node. `replica_process` fills it and changes its role.
"""

from __future__ import annotations

import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

from turtlemq.errors import InvalidArgument, Unavailable
from turtlemq.replica.cluster_state import BadValue, Keys
from turtlemq.replica.cluster_view import ClusterView, ShardKeys
from turtlemq.replica.etcd import Etcd
from turtlemq.replica.member import Member
from turtlemq.replica.member_events import State
from turtlemq.replica.names_view import NamesView
from turtlemq.replica.shard_view import lead_of
from turtlemq.replica.topology import Topology
from turtlemq.server import logs
from turtlemq.server.cluster_config import Cluster
from turtlemq.server.config import Config
from turtlemq.shards import shard_of

if TYPE_CHECKING:
    from turtlemq.replica.lead import Lead
    from turtlemq.replica.standby import Standby

Role = Literal["leader", "standby", "spare", "starting"]


def connect(options: Cluster) -> Etcd:
    """A connection to the name server. Raises `InvalidArgument` for files that cannot be used."""
    tls = None
    try:
        password = Path(options.etcd_password_file).read_text("utf-8").strip() if options.etcd_user else ""
        if any(url.startswith("https://") for url in options.etcd):
            tls = ssl.create_default_context(cafile=options.etcd_ca or None)
            if options.etcd_cert:
                tls.load_cert_chain(options.etcd_cert, options.etcd_key)
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"files for etcd in [cluster] cannot be used: {error}") from None
    return Etcd(options.etcd, user=options.etcd_user, password=password, tls=tls)


def public_url(config: Config) -> str:
    """The URL of this node for clients and other nodes. Raises `InvalidArgument` if it is not told."""
    if config.cluster.url:
        return config.cluster.url.rstrip("/")
    if config.host in ("0.0.0.0", "::") or not config.port:
        raise InvalidArgument("cluster.url is missing: the URL under which clients and other nodes reach this one")
    host = f"[{config.host}]" if ":" in config.host else config.host
    return f"{'https' if config.tls_cert else 'http'}://{host}:{config.port}"


def grpc_address(config: Config) -> str:
    """Where this node listens for gRPC, for clients and other nodes, as host:port; empty if it does not. Raises `InvalidArgument`
    if the port is not told."""
    if config.grpc_port < 0:
        return ""
    if not config.grpc_port:
        raise InvalidArgument("grpc_port is 0, and other nodes of the cluster must know it: give it a number")
    host = urlsplit(public_url(config)).hostname or ""
    return f"{f'[{host}]' if ':' in host else host}:{config.grpc_port}"


async def _no_handover(_: str) -> None:
    raise Unavailable("this process does not lead yet. Try again in a moment.")


class ClusterPart:
    """A replica of one shard in its cluster, as requests see it. All methods run on the event loop."""

    def __init__(self, options: Cluster, shard: int, etcd: Etcd, view: NamesView, shards: int = 1) -> None:
        """`shards`: how many the cluster has, as the supervisor knows it."""
        self.options, self.shard, self.shards, self.etcd, self.view = options, shard, shards, etcd, view
        self.keys = Keys(options.name)
        self.member: Member | None = None  # the state machine of this replica; None: this node keeps no copy
        self.standby: Standby | None = None  # while this replica follows
        self.lead: Lead | None = None  # while this replica leads
        self.refusal = ""  # why this copy does not follow the leader: an operator has to look at it
        self._topology = Topology.of({}, 0)
        self._topology_keys: object = None  # from which it was made
        self._decoded = ClusterView(self.keys, shards={shard: ShardKeys()})
        self._decoded_keys: object = None
        self.hand_over: Callable[[str], Awaitable[None]] = _no_handover  # set by the process that leads

    @property
    def role(self) -> Role:
        """The role of this process. A spare is a node that should have no copy of the shard."""
        if self.member is not None and self.member.state is State.LEAD:
            return "leader"
        wanted = self.decoded().shard(self.shard).wanted
        if wanted and self.options.node not in wanted:
            return "spare"
        return "starting" if self.standby is None or self.standby.link is None else "standby"

    def has(self, topic: str) -> bool:
        """Whether a topic lives in the shard of this replica."""
        return self.shards == 1 or shard_of(topic, self.shards) == self.shard

    def leader_url(self) -> str | None:
        """The URL of the shard's leader; None if there is none. It may be this process."""
        lead = lead_of(self.view.keys, self.keys, self.shard)
        return None if lead is None else lead.url

    def topology(self) -> Topology:
        """Nodes and leaders of the whole cluster, as the name server was seen last."""
        if self._topology_keys is not self.view.keys:
            self._topology_keys = self.view.keys
            self._topology = Topology.of(self.view.keys, self.view.revision)
        return self._topology

    def decoded(self) -> ClusterView:
        """All keys of the cluster. While one of a shard cannot be read, those of before count: a mistake in etcd must not end a
        leader."""
        if self._decoded_keys is not self.view.keys:
            self._decoded_keys = self.view.keys
            try:
                self._decoded = ClusterView.of(self.keys, self.view.keys)
            except BadValue as error:
                logs.error("name_server_unreadable", error=error)
        return self._decoded

    async def handover(self, node: str) -> None:
        """Let another node lead. Returns when it does. Raises `TurtleError` if that node is not in sync, or this one does not
        lead; nothing has changed then."""
        await self.hand_over(node)
