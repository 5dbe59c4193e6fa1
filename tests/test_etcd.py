"""The client of etcd against a real one: keys, transactions, leases, watches, several endpoints, passwords, TLS."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.certificates import certificate
from tests.harness.etcd_process import MISSING, free_port, is_installed, running_etcd
from turtlemq.replica.etcd import (
    Compacted,
    Etcd,
    EtcdError,
    InDoubt,
    LeaseGone,
    Refused,
    Unreachable,
    create_revision_is,
    delete,
    mod_revision_is,
    put,
    read,
)

pytestmark = [pytest.mark.skipif(not is_installed(), reason=MISSING), pytest.mark.slow]


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running_etcd(tmp_path_factory.mktemp("etcd")) as found:
        yield found


def test_keys_are_written_read_and_deleted(endpoint: str) -> None:
    async def story() -> None:
        async with Etcd([endpoint]) as etcd:
            assert (await etcd.get("/k/a")).keys == []
            revision = await etcd.put("/k/a", b"\x00one")
            await etcd.put("/k/b", b"two")
            await etcd.put("/l", b"three")
            found = await etcd.get("/k/", prefix=True)
            assert [(key.key, key.value, key.lease) for key in found.keys] == [("/k/a", b"\x00one", 0), ("/k/b", b"two", 0)]
            assert (found.keys[0].create_revision, found.keys[0].mod_revision, found.revision) == (
                revision,
                revision,
                revision + 2,
            )
            assert [await etcd.delete("/k/a"), await etcd.delete("/k/a")] == [True, False]

    asyncio.run(story())


def test_a_transaction_compares_and_tells_the_present_value(endpoint: str) -> None:
    async def story() -> None:
        async with Etcd([endpoint]) as etcd:
            first = await etcd.transact(
                [mod_revision_is("/t", 0), create_revision_is("/u", 0)], [put("/t", b"1"), put("/u", b"1")]
            )
            assert first.succeeded
            late = await etcd.transact([mod_revision_is("/t", 0)], [put("/t", b"2")], [read("/t")])
            assert not late.succeeded
            assert [(key.value, key.mod_revision) for key in late.found] == [(b"1", first.revision)]
            assert (await etcd.transact([mod_revision_is("/t", first.revision)], [delete("/u"), put("/t", b"3")])).succeeded
            assert [key.value for key in (await etcd.get("/t")).keys] == [b"3"]
            assert (await etcd.get("/u")).keys == []

    asyncio.run(story())


def test_keys_go_with_their_lease(endpoint: str) -> None:
    async def story() -> None:
        async with Etcd([endpoint]) as etcd:
            lease = await etcd.grant(60)
            await etcd.transact([], [put("/lead", b"a", lease)])
            assert [key.lease for key in (await etcd.get("/lead")).keys] == [lease]
            assert await etcd.keep_alive(lease)
            await etcd.revoke(lease)
            await etcd.revoke(lease)
            assert (await etcd.get("/lead")).keys == []
            assert not await etcd.keep_alive(lease)
            with pytest.raises(LeaseGone, match="lease not found"):
                await etcd.transact([], [put("/lead", b"a", lease), put("/state", b"a")])
            assert (await etcd.get("/state")).keys == [], "the transaction was refused as a whole"

    asyncio.run(story())


def test_a_watch_tells_every_change_in_order(endpoint: str) -> None:
    async def story() -> None:
        async with Etcd([endpoint]) as etcd:
            revision = await etcd.put("/w/a", b"1")
            await etcd.put("/w/b", b"2")
            seen: list[tuple[str, bytes, int]] = []
            changed = asyncio.Event()

            async def listen() -> None:
                async for change in etcd.watch("/w/", revision, prefix=True):
                    seen.extend((key.key, key.value, key.create_revision) for key in change.keys)
                    if len(seen) == 3:
                        changed.set()

            listener = asyncio.create_task(listen())
            await asyncio.sleep(0.2)
            await etcd.delete("/w/a")
            await asyncio.wait_for(changed.wait(), 10)
            assert seen == [("/w/a", b"1", revision), ("/w/b", b"2", revision + 1), ("/w/a", b"", 0)]
            listener.cancel()

    asyncio.run(story())


def test_a_watch_of_forgotten_revisions_says_so(tmp_path: Path) -> None:
    async def story(endpoint: str) -> None:
        async with Etcd([endpoint]) as etcd:
            await etcd.put("/c", b"1")
            newest = await etcd.put("/c", b"2")
            await etcd._ask("kv/compaction", {"revision": str(newest)})
            with pytest.raises(Compacted):
                async for _ in etcd.watch("/c", 1):
                    pass

    with running_etcd(tmp_path) as endpoint:
        asyncio.run(story(endpoint))


def test_another_endpoint_is_asked_if_one_is_gone(endpoint: str) -> None:
    async def story() -> None:
        gone = f"http://127.0.0.1:{free_port()}"
        async with Etcd([gone, endpoint]) as etcd:
            assert await etcd.put("/e", b"1") > 0
            assert len((await etcd.get("/e")).keys) == 1
        async with Etcd([gone]) as etcd:
            with pytest.raises(Unreachable, match="no endpoint of etcd answers kv/put"):
                await etcd.put("/e", b"1")
        with pytest.raises(EtcdError):
            Etcd([])

    asyncio.run(story())


def test_a_change_without_an_answer_is_in_doubt() -> None:
    async def story(port: int) -> None:
        async with Etcd([f"http://127.0.0.1:{port}"], timeout_s=0.2) as etcd:
            with pytest.raises(InDoubt):
                await etcd.put("/e", b"1")
            with pytest.raises(Unreachable):
                await etcd.get("/e")

    with socket.create_server(("127.0.0.1", 0)) as silent:
        asyncio.run(story(silent.getsockname()[1]))


def test_an_end_of_etcd_ends_the_watch(tmp_path: Path) -> None:
    async def story() -> None:
        with running_etcd(tmp_path) as endpoint:
            etcd = Etcd([endpoint])
            watch = asyncio.create_task(anext(change async for change in etcd.watch("/w", 1) if change.keys))
            await asyncio.sleep(0.3)
        with pytest.raises(Unreachable, match="has ended"):
            await watch
        await etcd.close()

    asyncio.run(story())


def test_passwords_are_exchanged_for_tokens_that_may_end(tmp_path: Path) -> None:
    async def story() -> None:
        with running_etcd(tmp_path) as endpoint:
            async with Etcd([endpoint]) as root:
                await root._ask("auth/user/add", {"name": "root", "password": "secret"})
                await root._ask("auth/role/add", {"name": "root"})
                await root._ask("auth/user/grant", {"user": "root", "role": "root"})
                await root._ask("auth/enable", {})
                with pytest.raises(Refused):
                    await root.put("/p", b"1")
            async with Etcd([endpoint], user="root", password="wrong") as stranger:
                with pytest.raises(Refused, match="does not accept user 'root'"):
                    await stranger.put("/p", b"1")
            async with Etcd([endpoint], user="root", password="secret") as etcd:
                await etcd.put("/p", b"1")
                etcd._token = "forgotten.1"
                assert [key.value for key in (await etcd.get("/p")).keys] == [b"1"]

    asyncio.run(story())


def test_tls_checks_the_certificate(tmp_path: Path) -> None:
    async def story() -> None:
        cert, key = certificate(tmp_path)
        with running_etcd(tmp_path, (cert, key)) as endpoint:
            async with Etcd([endpoint], tls=ssl.create_default_context(cafile=str(cert))) as etcd:
                assert await etcd.put("/s", b"1") > 0
            async with Etcd([endpoint]) as careful:
                with pytest.raises(Unreachable, match="certificate"):
                    await careful.put("/s", b"2")

    asyncio.run(story())
