"""TLS of callbacks and of the gRPC port: certificates are checked, and renewed ones are used without a restart."""

from __future__ import annotations

import os
import ssl
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.harness.certificates import certificate
from tests.harness.cluster_process import eventually
from tests.harness.grpc_process import grpc_running
from tests.harness.receiver import receiving
from tests.harness.server_process import PATIENCE_S, Server, running
from turtlemq.server.grpc.messages import message

Check, Health = message("grpc.health.v1.HealthCheckRequest"), message("grpc.health.v1.HealthCheckResponse")
LOOPBACK: dict[str, Any] = {"TURTLEMQ_PUSH_HOSTS": "127.0.0.0/8:*"}
CLIENTS = "/v1/topics/t/groups/default/clients"


def hook(server: Server) -> dict[str, Any]:
    found: dict[str, Any] = server.ok("GET", f"{CLIENTS}/hook")
    return found


@pytest.mark.parametrize("is_trusted", [True, False])
def test_a_callback_over_https_needs_a_certificate_that_is_trusted(tmp_path: Path, is_trusted: bool) -> None:
    cert, key = certificate(tmp_path)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(cert, key)
    trust: dict[str, Any] = {"SSL_CERT_FILE": str(cert)} if is_trusted else {}
    with running(tmp_path / "data", **LOOPBACK, **trust) as server, receiving(tls=tls) as receiver:
        answer = server.ok("POST", CLIENTS, {"url": receiver.url, "name": "hook"})
        receiver.secrets.append(answer["secret"])
        server.put("t", {"id": "m", "body": 1})
        if is_trusted:
            eventually(lambda: receiver.ids == ["m"])
            eventually(lambda: server.ok("GET", "/v1/topics/t")["stats"]["history"] == 1)
        else:
            eventually(
                lambda: "certificate" in hook(server)["last_error"].lower() or "no connection" in hook(server)["last_error"]
            )
            assert hook(server)["state"] == "pending"
            assert receiver.requests == receiver.challenges == []
        assert receiver.broken == []


def test_the_grpc_port_uses_a_renewed_certificate(tmp_path: Path) -> None:
    (tmp_path / "tls").mkdir()
    (tmp_path / "next").mkdir()
    cert, key = certificate(tmp_path / "tls")
    trust = ssl.create_default_context(cafile=str(cert))
    files: dict[str, Any] = {"TURTLEMQ_TLS_CERT": str(cert), "TURTLEMQ_TLS_KEY": str(key)}
    with grpc_running(tmp_path / "data", tls=trust, **files) as (server, port):

        def channel() -> grpc.Channel:
            return grpc.secure_channel(f"127.0.0.1:{port}", grpc.ssl_channel_credentials(cert.read_bytes()))

        def status(kept: grpc.Channel) -> int:
            check = kept.unary_unary("/grpc.health.v1.Health/Check", Check.SerializeToString, Health.FromString)
            return int(check(Check(), timeout=PATIENCE_S, wait_for_ready=True).status)

        with channel() as before:
            assert status(before) == 1
            new_cert, new_key = certificate(tmp_path / "next")
            os.replace(new_cert, cert)
            os.replace(new_key, key)
            eventually(lambda: "event=reloaded" in server.log)
            with channel() as after:
                assert status(after) == 1
            assert status(before) == 1, "an open connection goes on"
