"""Server-side request forgery: URLs and resolvers that want callbacks to reach addresses that `push_hosts` does not allow."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from tests.harness.receiver import Reply, receiving
from turtlemq.errors import InvalidArgument
from turtlemq.server.push import sender as sender_module
from turtlemq.server.push.hosts import Address, PushHosts, Refused, is_public, unwrapped
from turtlemq.server.push.sender import NoAnswer, Sender, Unreachable, is_own_address

steady = hypothesis_settings(derandomize=True, deadline=None, max_examples=300, database=None)
SHOP = ("hooks.shop.example", "*.api.example", "other.example:8443")
PUBLIC, METADATA = "93.184.216.34", "169.254.169.254"


def addresses(*texts: str) -> list[Address]:
    return [ipaddress.ip_address(text) for text in texts]


def allows(hosts: PushHosts, url: str, *found: str) -> bool:
    """Whether a URL is allowed, if its host has these addresses."""
    try:
        target = hosts.target(url)
        if target.address is None:
            hosts.check(target, addresses(*found))
    except Refused:
        return False
    return True


@pytest.mark.parametrize(
    "url",
    [
        "https://hooks.shop.example/a?b=c",
        "https://HOOKS.shop.example:443/",
        "https://hooks.shop.example:80/",
        "https://a.b.api.example/",
        "https://other.example:8443/",
    ],
)
def test_named_hosts_with_public_addresses_are_allowed(url: str) -> None:
    assert allows(PushHosts(SHOP), url, PUBLIC, "2a00:1450::1")


@pytest.mark.parametrize(
    "url",
    [
        "http://hooks.shop.example/",  # not encrypted
        "https://hooks.shop.example:22/",
        "https://other.example/",  # named for another port
        "https://shop.example/",
        "https://evilhooks.shop.example/",
        "https://api.example/",  # only the hosts below
        "https://hooks.shop.example.evil.example/",
        "https://user@hooks.shop.example/",
        "https://hooks.shop.example@evil.example/",
        "https://:secret@hooks.shop.example/",
        "https://hooks.shop.example#@evil.example/",
        "https://hooks.shop.example\\@evil.example/",
        "https://hooks.shop.example%2f@evil.example/",
        "https://hooks.shop.example./",
        "https://hooks%2eshop.example/",
        "https://hooks.shop.example:0/",
        "https://hooks.shop.example:99999/",
        "https://hooks.shop.example:443x/",
        "https:///hooks.shop.example",
        "https://",
        "hooks.shop.example",
        "file:///etc/passwd",
        "gopher://hooks.shop.example/",
        "https://hooks.shop.example/\r\nx: y",
        "https://hooks.shop.example/ü",
        "https://ｈooks.shop.example/",
        f"https://{PUBLIC}/",  # no network of it is named
        "https://[2a00:1450::1]/",
    ],
)
def test_urls_beside_the_named_hosts_are_refused(url: str) -> None:
    assert not allows(PushHosts(SHOP), url, PUBLIC)


@pytest.mark.parametrize(
    "host",
    ["127.1", "2130706433", "0x7f000001", "0177.0.0.1", "0x7f.1", "127.0.0.1.", "127.0.0.0x1", "1.2.3.4.5", "::1", "[::1%25lo]"],
)
def test_addresses_in_odd_forms_are_refused(host: str) -> None:
    for hosts in (PushHosts(["0.0.0.0/0:*", "::/0"]), PushHosts(SHOP)):
        assert not allows(hosts, f"https://{host}/", "127.0.0.1")


HOSTILE = [
    "127.0.0.1",
    "10.1.2.3",
    "172.16.0.1",
    "192.168.0.1",
    METADATA,
    "100.64.0.1",
    "0.0.0.0",
    "224.0.0.1",
    "239.1.1.1",
    "240.0.0.1",
    "255.255.255.255",
    "192.0.2.1",
    "198.18.0.1",
    "::",
    "::1",
    "fe80::1",
    "fc00::1",
    "fd12::1",
    "fec0::1",
    "ff02::1",
    "::127.0.0.1",
    "::ffff:0:127.0.0.1",
    "::ffff:127.0.0.1",
    f"::ffff:{METADATA}",
    "2002:7f00:1::",  # 6to4 of 127.0.0.1
    "2002:a9fe:a9fe::1",
    "64:ff9b::7f00:1",  # NAT64 of 127.0.0.1
    "64:ff9b::169.254.169.254",
    "64:ff9b:1::a00:1",
    "2001:0:4136:e378:8000:63bf:3fff:fdd2",  # Teredo
    "2a00:1450::5efe:a00:1",  # ISATAP of 10.0.0.1
    "2001:db8::1",
]


@pytest.mark.parametrize("address", HOSTILE)
def test_no_address_of_a_named_host_may_be_a_private_one(address: str) -> None:
    hosts = PushHosts(SHOP)
    assert not allows(hosts, "https://hooks.shop.example/", address)
    assert not allows(hosts, "https://hooks.shop.example/", PUBLIC, address), "one bad address is enough"
    assert not hosts.may_connect(ipaddress.ip_address(address))
    shown = f"[{address}]" if ":" in address else address
    assert not allows(hosts, f"https://{shown}/")


@steady
@given(st.integers(0, (1 << 128) - 1))
def test_only_global_unicast_of_ipv6_is_public(number: int) -> None:
    address = ipaddress.IPv6Address(number)
    inner = unwrapped(address)
    if is_public(inner):
        assert inner.is_global
        assert not inner.is_multicast
        assert inner.version == 4 or number >> 125 == 1


@pytest.mark.parametrize("wrap", ["::ffff:{}", "64:ff9b::{}"])
@steady
@given(number=st.integers(0, (1 << 32) - 1))
def test_wrapped_addresses_are_as_public_as_the_inner_ones(wrap: str, number: int) -> None:
    inner = ipaddress.IPv4Address(number)
    assert unwrapped(ipaddress.ip_address(wrap.format(inner))) == inner
    assert unwrapped(ipaddress.IPv6Address((0x2002 << 112) | (number << 80))) == inner


def test_named_networks_allow_private_addresses_and_http() -> None:
    hosts = PushHosts(["10.0.0.0/8", "[fd00::/8]:9000", "192.168.1.7:*", "svc.example:81"])
    for url in ("http://10.1.2.3/", "https://10.1.2.3:443/", "http://[fd00::1]:9000/x", "http://192.168.1.7:1/"):
        assert allows(hosts, url), url
    for url in ("http://10.1.2.3:8080/", "http://[fd00::1]/", "http://192.168.1.8/", "http://11.0.0.1/"):
        assert not allows(hosts, url), url
    assert allows(hosts, "http://worker.cluster.local/", "10.1.2.3"), "a name with addresses of a named network alone"
    assert not allows(hosts, "http://worker.cluster.local/", "10.1.2.3", PUBLIC)
    assert not allows(hosts, "https://worker.cluster.local/", PUBLIC)
    assert allows(hosts, "http://svc.example:81/", "10.1.2.3"), "the port of the name, the address of the network"
    assert not allows(hosts, "http://svc.example:81/", PUBLIC)
    assert allows(hosts, "http://[::ffff:10.1.2.3]/")


def test_own_addresses_are_refused_unless_named_and_own_ports_always() -> None:
    own = ipaddress.ip_address(PUBLIC)
    open_ = PushHosts(SHOP, lambda address: address == own, lambda: [8878])
    assert not allows(open_, "https://hooks.shop.example/", PUBLIC)
    assert not open_.may_connect(own)
    named = PushHosts([f"{PUBLIC}:*"], lambda address: address == own, lambda: [8878])
    assert allows(named, f"http://{PUBLIC}:9000/")
    assert not allows(named, f"http://{PUBLIC}:8878/")


def test_addresses_of_this_machine_are_known() -> None:
    assert is_own_address(ipaddress.ip_address("127.0.0.1"))
    assert is_own_address(ipaddress.ip_address("::1"))
    assert is_own_address(ipaddress.ip_address("0.0.0.0"))
    assert not is_own_address(ipaddress.ip_address(PUBLIC))
    for *_, place in socket.getaddrinfo(socket.gethostname(), 1, socket.AF_INET):
        assert is_own_address(ipaddress.ip_address(place[0]))


@pytest.mark.parametrize(
    "entry",
    ["", "*", "http://a.example", "a.example:0", "a.example:70000", "a b", "10.0.0.1/8", "127.1", "*.", "a.*.example", "[x]"],
)
def test_entries_that_are_no_hosts(entry: str) -> None:
    with pytest.raises(InvalidArgument):
        PushHosts([entry])


# Sockets


def run(work: Callable[[Sender], Coroutine[Any, Any, Any]], hosts: PushHosts, answers: list[list[str]]) -> Any:
    """Do something with a sender whose name server gives these answers, one after the other."""

    async def resolve(host: str, port: int) -> list[str]:
        return answers.pop(0) if len(answers) > 1 else answers[0]

    async def all_of_it() -> Any:
        sender = Sender(hosts, resolve)
        try:
            return await work(sender)
        finally:
            await sender.close()

    return asyncio.run(all_of_it())


def test_a_name_server_that_changes_its_answer_gains_nothing() -> None:
    with receiving() as hidden, receiving() as right:
        hosts = PushHosts([f"127.0.0.1:{right.port}", f"rebind.example:{hidden.port}"])
        url = f"http://rebind.example:{hidden.port}/"

        async def work(sender: Sender) -> None:
            await sender.check(f"http://rebind.example:{right.port}/")
            with pytest.raises(Refused):
                await sender.post(url, {}, b"", 5)

        run(work, hosts, [["127.0.0.1"], ["127.0.0.2"]])
        assert hidden.requests == []


def test_a_name_server_that_never_answers_holds_no_registration_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender_module, "CONNECT_S", 0.1)

    async def never(host: str, port: int) -> list[str]:
        await asyncio.Event().wait()
        return []

    async def story() -> None:
        sender = Sender(PushHosts(SHOP), never)
        await sender.check("https://hooks.shop.example/")
        with pytest.raises((Unreachable, NoAnswer)):
            await sender.post("https://hooks.shop.example/", {}, b"", 5)
        await sender.close()

    asyncio.run(story())


def test_the_connection_goes_to_the_address_that_was_checked() -> None:
    with receiving(lambda _: Reply(204)) as receiver:
        hosts = PushHosts([f"127.0.0.0/8:{receiver.port}"])

        async def work(sender: Sender) -> int:
            return (await sender.post(f"http://nowhere.invalid:{receiver.port}/x", {"webhook-id": "t:m"}, b"1", 20)).status

        assert run(work, hosts, [["127.0.0.1"]]) == 204, "the name itself has no address anywhere"
        (request,) = receiver.requests
        assert request.headers["host"] == f"nowhere.invalid:{receiver.port}"


def test_a_redirect_to_the_metadata_service_is_not_followed() -> None:
    with receiving(lambda _: Reply(307, b"", {"Location": f"http://{METADATA}/latest/"})) as receiver:
        hosts = PushHosts(["127.0.0.0/8:*", "169.254.0.0/16:*"])  # even where it could be reached

        async def work(sender: Sender) -> int:
            return (await sender.post(receiver.url, {"webhook-id": "t:m"}, b"1", 20)).status

        assert run(work, hosts, [["127.0.0.1"]]) == 307
        assert len(receiver.requests) == 1


def test_the_socket_itself_is_checked_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    with receiving() as hidden:
        hosts = PushHosts(SHOP)
        monkeypatch.setattr(hosts, "check", lambda *_: None)  # a check that has a hole

        async def work(sender: Sender) -> None:
            with pytest.raises((Refused, Unreachable)):
                await sender.post(f"https://hooks.shop.example:{hidden.port}/", {}, b"", 5)

        run(work, hosts, [["127.0.0.1"]])
        assert hidden.sockets == []


def test_proxies_of_the_environment_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    with receiving() as proxy, receiving() as receiver:
        monkeypatch.setenv("http_proxy", proxy.url)
        monkeypatch.setenv("HTTP_PROXY", proxy.url)

        async def work(sender: Sender) -> int:
            return (await sender.post(receiver.url, {"webhook-id": "t:m"}, b"1", 20)).status

        assert run(work, PushHosts(["127.0.0.0/8:*"]), [["127.0.0.1"]]) == 200
        assert proxy.sockets == []


def test_cookies_are_not_kept() -> None:
    with receiving(lambda _: Reply(200, b"", {"Set-Cookie": "a=b"})) as receiver:

        async def work(sender: Sender) -> None:
            for _ in range(2):
                await sender.post(receiver.url, {"webhook-id": "t:m"}, b"1", 20)

        run(work, PushHosts(["127.0.0.0/8:*"]), [["127.0.0.1"]])
        assert [request.headers.get("cookie") for request in receiver.requests] == [None, None]
