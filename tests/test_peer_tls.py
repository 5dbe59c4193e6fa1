"""TLS between replicas: records and files pass, peers without a certificate of the authority do not."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from pathlib import Path

import pytest
from msgspec import convert

from tests.harness.certificates import certificate
from tests.harness.cluster_process import eventually
from tests.harness.etcd_process import MISSING, is_installed, running_etcd
from tests.harness.node_process import NodeHome, running_node
from turtlemq.errors import InvalidArgument
from turtlemq.replica.cluster_init import Shape, init_cluster
from turtlemq.replica.cluster_state import Keys, ShardState, decode
from turtlemq.replica.etcd import Etcd
from turtlemq.replica.link import PLAIN
from turtlemq.server.cluster_config import Cluster
from turtlemq.server.peer_tls import peer_tls


def files_of(folder: Path) -> dict[str, str]:
    folder.mkdir()
    cert, key = map(str, certificate(folder))
    return {"tls_cert": cert, "tls_key": key, "tls_ca": cert}


def test_files_that_are_no_certificates_are_refused(tmp_path: Path) -> None:
    files = files_of(tmp_path / "own")
    assert peer_tls(Cluster()) == PLAIN
    assert peer_tls(convert(files, Cluster)).accepts is not None
    wrong = files["tls_cert"].replace("cert.pem", "locked.pem")
    for change in ({"tls_cert": "missing"}, {"tls_key": files["tls_cert"]}, {"tls_key": wrong}, {"tls_ca": files["tls_key"]}):
        with pytest.raises(InvalidArgument, match="are no certificate, its key and its authority"):
            peer_tls(convert({**files, **change}, Cluster))


def in_sync(endpoint: str) -> set[str]:
    async def read() -> set[str]:
        async with Etcd([endpoint]) as etcd:
            found = (await etcd.get(Keys("prod").state(0))).keys
            state = decode("", found[0].value, ShardState) if found else None
            return set() if state is None else {state.nodes[replica] for replica in state.isr}

    return asyncio.run(read())


@pytest.mark.slow
@pytest.mark.skipif(not is_installed(), reason=MISSING)
def test_only_peers_with_a_certificate_are_served(tmp_path: Path) -> None:
    """Node `b` has a certificate of the cluster, `c` one of another authority, `d` none."""

    async def make(endpoint: str) -> None:
        async with Etcd([endpoint]) as etcd:
            await init_cluster(etcd, "prod", Shape(replicas=4, least=1))

    own, other = files_of(tmp_path / "own"), files_of(tmp_path / "other")
    with ExitStack() as stack:
        endpoint = stack.enter_context(running_etcd(tmp_path))
        asyncio.run(make(endpoint))
        homes = {name: NodeHome(tmp_path / name, name) for name in "abcd"}
        for name, files in (("a", own), ("b", own), ("c", other), ("d", {})):
            homes[name].configure(endpoint, *(f'{key} = "{file}"' for key, file in files.items()), heartbeat_ms=600)
            stack.enter_context(running_node(homes[name], stand_in=False))
            eventually(lambda: in_sync(endpoint) >= {"a"})
        eventually(lambda: in_sync(endpoint) == {"a", "b"})
        eventually(lambda: homes["c"].events("no_leader") and homes["d"].events("no_leader"))
        assert "certificate" in homes["c"].events("no_leader")[0].lower()
        assert in_sync(endpoint) == {"a", "b"}
