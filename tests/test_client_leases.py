"""Leases of the Python client: acks and extends name them, late ones are told, and a suspended machine holds nothing."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from tests.harness.client_network import WAIT_S, Shell, server, shell, topic
from tests.harness.server_process import Server
from turtlemq.client import AsyncConsumer, Client, Consumer, Message, NewMessage, clock
from turtlemq.client.consumer_state import AckList, ConsumerOptions, ConsumerState

__all__ = ["server", "shell", "topic"]


# Rules


def leased(id_: str, lease: str, attempt: int = 1) -> Message:
    return Message(id=id_, lease=lease, attempt=attempt, lease_until_ms=1)


def holding(*messages: Message, **options: Any) -> ConsumerState:
    state = ConsumerState(ConsumerOptions("t", **{"ttr": 10.0, "batch": 9, **options}), lambda: 100.0)
    state.add_fetched(messages, 100)
    return state


def test_acks_of_one_fetch_name_its_lease_once() -> None:
    state = holding(leased("a", "L1"), leased("b", "L1"))
    state.finished(state.next_job(101), {"b": "broken"}, 102)
    assert state.take_acks() == [AckList(["a", "-b"], None, "broken", "L1")]


def test_acks_of_several_fetches_name_each_lease() -> None:
    state = holding(leased("a", "L1"), leased("b", "L2"), leased("c", "L1"))
    state.finished(state.next_job(101), {"c": "broken"}, 102)
    assert state.take_acks() == [AckList(["a", "b", "-c"], None, "broken", ["L1", "L2", "L1"])]


def test_acks_for_an_older_server_name_no_lease() -> None:
    state = holding(leased("a", ""), leased("b", ""))
    state.finished(state.next_job(101), {"b": "broken"}, 102)
    assert state.take_acks() == [AckList(["a", "-b"], None, "broken")]
    state = holding(leased("a", ""), leased("b", "L1"))
    assert state.ids_to_extend(105) == ["b"]
    state.extended(["b"], [], 105)
    assert (state.ids_to_extend(105.5), state.leases_of(["a"]), state.leases_of(["b"])) == (["a"], None, ["L1"])
    state.finished(state.next_job(106), {}, 106)
    assert state.take_acks() == [AckList(["b"], lease="L1"), AckList(["a"])], "the server was updated in between"


def test_a_late_failure_is_sent_if_it_names_its_lease() -> None:
    state = holding(leased("a", "L1"), leased("b", ""))
    state.finished(state.next_job(101), {"a": "broken", "b": "broken"}, 120)
    assert state.take_acks() == [AckList(["-a"], None, "broken", "L1")]
    assert state.counts["lost"] == 2


def test_a_message_that_comes_again_has_its_new_lease() -> None:
    state = holding(leased("a", "L1"))
    job = state.next_job(100)
    state.add_fetched([leased("a", "L2", attempt=2)], 120)
    state.finished(job, {}, 121)
    assert state.take_acks() == [AckList(["a"], lease="L2")]


# A real server


def taken_away(server: Server, topic: str) -> str:
    """Another consumer gets the message, since its group was moved back. Returns its lease."""
    server.ok("PUT", f"/v1/topics/{topic}/groups/default", {"start": "earliest"})
    answer = server.ok("POST", f"/v1/topics/{topic}/fetch", {"wait": WAIT_S, "ttr": 600})
    assert len(answer["messages"]) == 1
    return str(answer["lease"])


@pytest.mark.parametrize("outcome", ["handled", "failed"])
@pytest.mark.parametrize("wire", ["json", "bson"])
def test_a_late_consumer_leaves_the_message_to_its_holder(
    server: Server, shell: Shell, topic: str, outcome: str, wire: str
) -> None:
    server.put(topic, {"body": 1, "id": "m"})
    begun, go_on = threading.Event(), threading.Event()

    def handler(message: Message) -> None:
        begun.set()
        assert go_on.wait(WAIT_S)
        if outcome == "failed":
            raise ValueError("too late")

    with shell.consumer(topic, handler, server.url, wire=wire, ttr=600, prefetch=1) as consumer:
        assert begun.wait(WAIT_S)
        lease = taken_away(server, topic)
        go_on.set()
        end = time.monotonic() + WAIT_S
        while not consumer.counts["late"]:
            assert time.monotonic() < end, consumer.counts
            time.sleep(0.01)
    assert consumer.counts["late"] == 1
    assert server.ack(topic, "m", lease=lease) == {"acked": 1, "failed": 0, "dead": 0, "unknown": [], "late": []}


def test_a_consumer_names_leases_when_it_extends(server: Server, shell: Shell, topic: str) -> None:
    server.put(topic, {"body": 1, "id": "m"})
    begun, lost = threading.Event(), threading.Event()
    consumers: list[Consumer | AsyncConsumer] = []

    def handler(message: Message) -> None:
        begun.set()
        end = time.monotonic() + WAIT_S
        while not consumers or consumers[0].holds(message):
            assert time.monotonic() < end
            time.sleep(0.01)
        lost.set()

    with shell.consumer(topic, handler, server.url, ttr=1, prefetch=1) as consumer:
        consumers.append(consumer)
        assert begun.wait(WAIT_S)
        lease = taken_away(server, topic)
        assert lost.wait(WAIT_S), "its extend is late, though the other consumer holds the message"
    view = server.ok("GET", f"/v1/topics/{topic}/messages/m")["groups"]["default"]
    assert view["lease_until_ms"] > (time.time() + 60) * 1000, "the lease of the other consumer is as long as it was"
    assert server.ack(topic, "m", lease=lease)["acked"] == 1


def test_calls_name_leases(server: Server, topic: str) -> None:
    with Client(server.url) as client:
        client.put_many(topic, [NewMessage(body=n, id=f"m{n}") for n in range(4)])
        one, two = client.fetch(topic, max=2, wait=WAIT_S), client.fetch(topic, max=2, wait=WAIT_S, wire="bson")
        leases = [message.lease for message in (*one, *two)]
        assert (leases[0], leases[2]) == (leases[1], leases[3])
        assert leases[0] != leases[2]
        assert client.extend(topic, ["m0", "m2"], 60, lease=leases[0]).late == ["m2"]
        acked = client.ack(topic, ["m0", "-m1", "m2", "m3"], lease=[leases[0], leases[0], leases[0], leases[2]])
        assert (acked.acked, acked.failed, acked.late) == (2, 1, ["m2"])


# A suspended machine


def test_a_lease_is_over_after_the_machine_was_suspended(
    server: Server, shell: Shell, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock of the boot counts the time of a suspend; `time.monotonic` stands still."""
    real, suspended_s = time.clock_gettime, [0.0]

    def clock_gettime(which: int) -> float:
        return real(which) + (suspended_s[0] if which == time.CLOCK_BOOTTIME else 0.0)

    monkeypatch.setattr(time, "clock_gettime", clock_gettime)
    server.put(topic, {"body": 1, "id": "m"})
    consumers: list[Consumer | AsyncConsumer] = []
    seen: list[bool] = []
    ready, done = threading.Event(), threading.Event()

    def handler(message: Message) -> None:
        assert ready.wait(WAIT_S)
        seen.append(consumers[0].holds(message))
        suspended_s[0] = 3_600.0
        seen.append(consumers[0].holds(message))
        done.set()

    with shell.consumer(topic, handler, server.url, ttr=60) as consumer:
        consumers.append(consumer)
        ready.set()
        assert done.wait(WAIT_S)
    assert seen == [True, False]


def test_a_system_without_that_clock_has_a_monotonic_one() -> None:
    assert clock.choose(lambda: 0.0) is time.monotonic

    def missing() -> float:
        raise OSError

    assert clock.choose(missing) is time.monotonic
