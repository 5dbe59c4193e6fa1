"""TLS between the replicas of a cluster: each side shows a certificate of the cluster's own authority.

Names in certificates are not compared with addresses: nodes may be known by numbers only, and a node proves with the cluster's
secret that it is one.
"""

from __future__ import annotations

import ssl

from turtlemq.errors import InvalidArgument
from turtlemq.replica.link import PLAIN, PeerTls
from turtlemq.server.cluster_config import Cluster


def peer_tls(options: Cluster) -> PeerTls:
    """The contexts of a node as leader and as standby. Raises `InvalidArgument` for files that cannot be used."""
    if not options.tls_cert:
        return PLAIN
    try:
        return PeerTls(_context(options, ssl.PROTOCOL_TLS_SERVER), _context(options, ssl.PROTOCOL_TLS_CLIENT))
    except (OSError, ValueError) as error:  # an SSLError is an OSError
        raise InvalidArgument(
            f"cluster.tls_cert {options.tls_cert}, tls_key {options.tls_key} and tls_ca {options.tls_ca} are no certificate, "
            f"its key and its authority, as PEM: {error}"
        ) from None


def _context(options: Cluster, side: int) -> ssl.SSLContext:
    context = ssl.SSLContext(side)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(options.tls_ca)
    context.load_cert_chain(options.tls_cert, options.tls_key, password="")  # one with a password is refused, not asked for
    return context
