"""Doors of a server over real connections: allowed addresses, TLS, and warnings of an open server."""

from __future__ import annotations

import json
import socket
import ssl
from pathlib import Path
from typing import Any

import pytest

from tests.harness.certificates import certificate
from tests.harness.guarded_server import SECRETS, TOKENS, bearer, narrow, server
from tests.harness.server_process import Server, run, running
from turtlemq.errors import InvalidArgument
from turtlemq.server.auth import Auth, Token, client_network, hash_of
from turtlemq.server.config import load
from turtlemq.server.listen import tls_of

__all__ = ["narrow", "server"]


# Addresses


def test_only_allowed_hosts_are_served(server: Server) -> None:
    for source, status in (("127.0.0.1", 200), ("127.0.0.5", 200), ("127.0.0.2", 403)):
        assert server.call("GET", "/docs", source=source).status == status
        assert server.call("GET", "/v1/topics", headers=bearer("root"), source=source).status == status
    refused = server.call("POST", "/v1/topics/orders/messages", {"body": 1}, headers=bearer("root"), source="127.0.0.2")
    assert (refused.status, refused.code) == (403, "HOST_NOT_ALLOWED")
    assert "127.0.0.2" in refused.json["error"]["message"]


def test_health_checks_are_answered_to_every_address(server: Server) -> None:
    for path in ("/healthz", "/readyz"):
        assert server.call("GET", path, source="127.0.0.2").status == 200
    for method, path in (("POST", "/readyz"), ("GET", "/healthz/x"), ("GET", "/readyz%2F..%2Fv1/topics"), ("GET", "/")):
        assert server.call(method, path, source="127.0.0.2").status in (403, 405), path


def test_the_machine_itself_is_always_served(tmp_path: Path) -> None:
    with running(tmp_path / "data", TURTLEMQ_ALLOWED_HOSTS="172.16.0.0/12") as server:
        assert server.call("GET", "/v1/topics", source="127.0.0.1").status == 200
        assert server.call("GET", "/v1/topics", source="127.0.0.2").status == 403


@pytest.mark.parametrize(
    ("hosts", "yes", "no"),
    [
        (None, ["127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1"], ["10.0.0.1", "::2", "::ffff:10.0.0.1", "", "x"]),
        ("10.0.0.0/8,fe80::/10", ["10.1.2.3", "::ffff:10.1.2.3", "fe80::1%eth0"], ["127.0.0.2", "11.0.0.1", "fec0::1"]),
        ("*", ["1.2.3.4", "2001:db8::1", "127.0.0.1"], ["", "nobody"]),
        ("192.0.2.7, 2001:db8::/32", ["192.0.2.7", "2001:db8:1::1", "127.0.0.1", "::1"], ["192.0.2.8", "::2"]),
    ],
)
def test_hosts_from_the_environment(hosts: str | None, yes: list[str], no: list[str]) -> None:
    found = Auth(load({}, {} if hosts is None else {"TURTLEMQ_ALLOWED_HOSTS": hosts}, None).allowed_hosts)
    assert [host for host in yes if not found.allows(host)] == []
    assert [host for host in no if found.allows(host)] == []


@pytest.mark.parametrize("hosts", ["localhost", "10.0.0.1/8", "", "1.2.3", "10.0.0.0/33", "**"])
def test_hosts_that_are_none(hosts: str) -> None:
    with pytest.raises(InvalidArgument, match="TURTLEMQ_ALLOWED_HOSTS: allowed_hosts"):
        load({}, {"TURTLEMQ_ALLOWED_HOSTS": hosts}, None)


def test_who_is_not_allowed_in_cannot_hold_the_door_open(server: Server) -> None:
    with socket.create_connection(("127.0.0.1", server.port), 20, ("127.0.0.2", 0)) as idle:
        assert idle.recv(1) == b"", "closed, without a word from either side"


def test_a_page_of_a_foreign_domain_reads_nothing(narrow: Server) -> None:
    for host, status in (("evil.example", 403), (f"evil.example:{narrow.port}", 403), ("localhost", 200), ("127.0.0.1", 200)):
        answer = narrow.call("GET", "/v1/topics", headers={"Host": host})
        assert (answer.status, answer.status == 403 and answer.code) == (status, status == 403 and "FORBIDDEN")


def hosts_served(server: Server, source: str | None) -> list[str]:
    """Which of these names in the Host header, as a browser sends it, are answered."""
    hosts = ("evil.example", f"evil.example:{server.port}", "mq.shop.example", "10.0.0.7", "[fd00::7]:80", "queue", "a.localhost")
    return [host for host in hosts if server.call("GET", "/v1/topics", headers={"Host": host}, source=source).status == 200]


@pytest.mark.parametrize("source", ["127.0.0.1", "127.0.0.2"])
def test_a_browser_of_an_allowed_host_is_no_way_in(tmp_path: Path, source: str) -> None:
    own = ["10.0.0.7", "[fd00::7]:80", "queue", "a.localhost"]
    with running(tmp_path / "data", TURTLEMQ_ALLOWED_HOSTS="*") as server:
        assert hosts_served(server, source) == own
        page = {"Host": "evil.example", "Origin": "http://evil.example"}
        refused = server.call("POST", "/v1/topics/t/messages", {"body": 1}, headers=page, source=source)
        assert (refused.status, refused.code) == (403, "FORBIDDEN")
        assert "host_names" in refused.json["error"]["message"]
    with running(tmp_path / "data", TURTLEMQ_ALLOWED_HOSTS="*", TURTLEMQ_HOST_NAMES="MQ.shop.example") as server:
        assert hosts_served(server, source) == ["mq.shop.example", *own]
    with running(tmp_path / "data", TURTLEMQ_ALLOWED_HOSTS="*", TURTLEMQ_HOST_NAMES="*") as server:
        assert "evil.example" in hosts_served(server, source)


def test_host_names_do_not_matter_with_tokens_or_tls() -> None:
    """A page of another site knows no token, and its name is not in the certificate."""
    for auth, allowed in ((Auth(("*",)), False), (Auth(("*",), tls=True), True), (Auth(("*",), TOKENS.values()), True)):
        assert auth.answers_to("evil.example") is allowed
    assert Auth(("*",)).answers_to(""), "HTTP/1.0, which no browser speaks"


def test_one_client_is_an_address_or_a_network_of_ipv6() -> None:
    assert client_network("10.0.0.1") == client_network("::ffff:10.0.0.1") != client_network("10.0.0.2")
    assert client_network("2001:db8::1") == client_network("2001:db8::ffff:1") != client_network("2001:db8:0:1::1")


# TLS


@pytest.mark.slow
def test_tls_and_the_command_line_over_it(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    trust = ssl.create_default_context(cafile=str(cert))
    token = Token("me", hash_of(SECRETS["root"]), ("produce", "consume"))
    tokens = json.dumps([{"name": "me", "hash": token.hash, "rights": token.rights}])
    files: dict[str, Any] = {"TURTLEMQ_TLS_CERT": str(cert), "TURTLEMQ_TLS_KEY": str(key), "TURTLEMQ_TOKENS": tokens}
    with running(tmp_path / "data", tls=trust, **files) as server:
        assert server.call("POST", "/v1/topics/t/messages", {"body": 1}, headers=bearer("root")).status == 201
        old = ssl.create_default_context(cafile=str(cert))
        old.set_ciphers("ALL:@SECLEVEL=0")
        with pytest.warns(DeprecationWarning, match="deprecated"):
            old.minimum_version, old.maximum_version = ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1
        for context in (old, ssl.create_default_context()):  # too old, and not trusting it
            with pytest.raises(ssl.SSLError), socket.create_connection(("127.0.0.1", server.port), 10) as plain:
                context.wrap_socket(plain, server_hostname="127.0.0.1")
        with socket.create_connection(("127.0.0.1", server.port), 10) as plain:
            plain.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b"HTTP" not in plain.recv(100)
        given = {"TURTLEMQ_URL": server.url, "TURTLEMQ_CACERT": str(cert), "TURTLEMQ_TOKEN": SECRETS["root"]}
        assert run("put", "t", "2", **given).returncode == 0
        options = ("--cacert", str(cert), "--token", SECRETS["root"], "--url", server.url)
        fetched = run("fetch", "t", "--json", *options)
        assert [json.loads(line)["body"] for line in fetched.stdout.splitlines()] == [1, 2]
        refused = run("put", "t", "3", TURTLEMQ_URL=server.url, TURTLEMQ_CACERT=str(cert))
        assert refused.returncode == 1
        assert "UNAUTHENTICATED" in refused.stderr
        untrusted = run("put", "t", "3", TURTLEMQ_URL=server.url)
        assert untrusted.returncode == 1
        assert "certificate" in untrusted.stderr
        assert "event=tokens_in_the_clear" not in server.log


def test_tls_files_that_do_not_work_are_named(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    (tmp_path / "other").mkdir()
    _, other = certificate(tmp_path / "other")
    for first, second, said in (
        (cert, tmp_path / "nothing.pem", "nothing.pem cannot be read"),
        (tmp_path, key, "cannot be read"),
        (cert, other, "no certificate and its key"),
        (key, key, "no certificate and its key"),
        (cert, tmp_path / "locked.pem", "password"),
        (cert, "", "go together"),
    ):
        with pytest.raises(InvalidArgument, match=said):
            tls_of(load({}, {"TURTLEMQ_TLS_CERT": str(first), "TURTLEMQ_TLS_KEY": str(second)}, None))
    done = run("serve", "--data", str(tmp_path / "data"), TURTLEMQ_TLS_CERT=str(cert), TURTLEMQ_TLS_KEY=str(other))
    assert (done.returncode, "no certificate and its key" in done.stderr, "Traceback" in done.stderr) == (2, True, False)


# Open doors


def test_an_open_server_without_tokens_warns(tmp_path: Path) -> None:
    with running(tmp_path / "data", "--host", "0.0.0.0", TURTLEMQ_ALLOWED_HOSTS="127.0.0.0/8,10.0.0.0/8") as server:
        assert server.log.count("!!  ") >= 4
        assert "asks for no token" in server.log
        assert "10.0.0.0/8" in server.log
        assert "event=open_to_all" in server.log


def test_with_tokens_it_warns_of_plain_text_only(tmp_path: Path) -> None:
    tokens = json.dumps([{"name": "me", "hash": TOKENS["root"].hash, "rights": ["admin"]}])
    with running(tmp_path / "data", "--host", "0.0.0.0", TURTLEMQ_ALLOWED_HOSTS="*", TURTLEMQ_TOKENS=tokens) as server:
        assert "!!" not in server.log
        assert "event=tokens_in_the_clear" in server.log
