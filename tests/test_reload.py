"""Reload of tokens and certificates: on SIGHUP and when files change, on open connections, and never by a bad file."""

from __future__ import annotations

import http.client
import json
import os
import signal
import ssl
from pathlib import Path

from tests.harness.certificates import certificate
from tests.harness.cluster_process import eventually
from tests.harness.server_process import PATIENCE_S, Server, running
from turtlemq.server.auth import Auth, Token, hash_of, new_token

OLD, NEW = new_token(), new_token()


def configure(file: Path, more: str = "", **tokens: str) -> None:
    """Write a configuration, as a whole."""
    entries = [
        f'[[tokens]]\nname = {json.dumps(name)}\nhash = {json.dumps(hash_of(secret))}\nrights = ["admin"]\n'
        for name, secret in tokens.items()
    ]
    new = file.with_suffix(".new")
    new.write_text(more + "".join(entries))
    new.replace(file)


def status(server: Server, secret: str) -> int:
    return server.call("GET", "/v1/topics", headers={"Authorization": f"Bearer {secret}"}).status


def test_tokens_change_on_open_connections_but_not_by_bad_files(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    configure(file, old=OLD)
    with running(tmp_path / "data", "--config", str(file)) as server:
        kept = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
        kept.connect()
        mine = kept.sock

        def asked() -> int:
            kept.request("GET", "/v1/topics", headers={"Authorization": f"Bearer {OLD}"})
            answer = kept.getresponse()
            answer.read()
            return answer.status

        assert (asked(), status(server, NEW)) == (200, 401)
        configure(file, old=OLD, new=NEW)
        eventually(lambda: status(server, NEW) == 200)
        for text in ("tokens = 5", '[[tokens]]\nname = "x"', "", "not toml"):
            failures = server.log.count("event=reload_failed")
            file.write_text(text)
            server.process.send_signal(signal.SIGHUP)
            eventually(lambda before=failures: server.log.count("event=reload_failed") > before)  # type: ignore[misc]
            assert (asked(), status(server, NEW), server.call("GET", "/v1/topics").status) == (200, 200, 401)
        configure(file, "max_topics = 7\n", new=NEW)
        eventually(lambda: asked() == 401)
        assert kept.sock is mine, "the connection was not dropped"
        assert status(server, NEW) == 200
        eventually(lambda: "needs_restart=max_topics" in server.log)  # the line comes after the tokens
        kept.close()


def test_sighup_reloads_without_a_change(tmp_path: Path) -> None:
    with running(tmp_path / "data") as server:
        server.process.send_signal(signal.SIGHUP)
        eventually(lambda: "event=reloaded" in server.log)
        assert server.call("GET", "/readyz").status == 200


def test_a_renewed_certificate_is_for_new_connections(tmp_path: Path) -> None:
    (tmp_path / "tls").mkdir()
    (tmp_path / "next").mkdir()
    cert, key = certificate(tmp_path / "tls")
    trust = ssl.create_default_context(cafile=str(cert))
    with running(tmp_path / "data", tls=trust, TURTLEMQ_TLS_CERT=str(cert), TURTLEMQ_TLS_KEY=str(key)) as server:
        kept = http.client.HTTPSConnection("127.0.0.1", server.port, timeout=PATIENCE_S, context=trust)
        kept.connect()
        mine = kept.sock
        new_cert, new_key = certificate(tmp_path / "next")
        os.replace(new_cert, cert)  # for a moment it does not fit the key
        eventually(lambda: "event=reload_failed" in server.log)
        assert server.call("GET", "/readyz").status == 200, "the old one is in force"
        os.replace(new_key, key)
        server.tls = ssl.create_default_context(cafile=str(cert))
        eventually(lambda: "event=reloaded" in server.log)
        assert server.call("GET", "/readyz").status == 200
        kept.request("GET", "/readyz")
        assert kept.getresponse().status == 200
        assert kept.sock is mine, "the connection was not dropped"
        kept.close()


def test_a_removed_token_loses_its_rights_within_a_request() -> None:
    token = Token("a", hash_of(OLD), ("admin",))
    auth = Auth(tokens=[token])
    assert auth._has_right(token, "t", ("admin",))
    auth.use([Token("b", hash_of(NEW), ("admin",))])
    assert not auth._has_right(token, "t", ("admin",))
    assert auth.identify(f"Bearer {NEW}").name == "b"
