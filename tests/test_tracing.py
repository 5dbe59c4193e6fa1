"""Tracing: one trace from a producer over the server to the consumer, by OpenTelemetry's SDK and its in-memory exporter."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode, format_span_id, format_trace_id
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from tests.harness import server_process
from tests.harness.server_process import Server, run, running
from turtlemq.client import (
    AsyncClient,
    AsyncConsumer,
    AsyncProducer,
    Client,
    Consumer,
    Message,
    NewMessage,
    Producer,
    otel,
    tracing,
)

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
# A server whose spans go to standard error, one JSON object a line.
TRACED = """
import sys
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor

exporter = ConsoleSpanExporter(out=sys.stderr, formatter=lambda span: "SPAN " + span.to_json(indent=None) + chr(10))
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(exporter))
trace.set_tracer_provider(provider)
from turtlemq.cli import main
main()
"""


@pytest.fixture
def spans() -> Iterator[InMemorySpanExporter]:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    otel.instrument(provider)
    yield exporter
    otel.uninstrument()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that traces."""
    with ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(server_process, "PROGRAM", [sys.executable, "-c", TRACED])
            found = stack.enter_context(running(tmp_path_factory.mktemp("tracing") / "data", TURTLEMQ_TRACING="true"))
        yield found


def named(spans: InMemorySpanExporter, name: str) -> list[ReadableSpan]:
    return [span for span in spans.get_finished_spans() if span.name == name]


def trace_of(span: ReadableSpan) -> str:
    assert span.context is not None
    return format_trace_id(span.context.trace_id)


def of_server(server: Server, name: str) -> list[dict[str, Any]]:
    """Ended spans of the server, by name."""
    lines = [json.loads(line.removeprefix("SPAN ")) for line in server.log.splitlines() if line.startswith("SPAN ")]
    return [span for span in lines if span["name"] == name]


def consume(server: Server, topic: str, fails: bool = False, **options: Any) -> list[Message]:
    """Handle messages until the first batch is done. Returns it."""
    got: list[Message] = []

    def handle(given: Message | list[Message]) -> None:
        got.extend(given if isinstance(given, list) else [given])
        consumer.stop(wait=False)
        if fails:
            raise ValueError("not today")

    consumer = Consumer(topic, handle, url=server.url, **options)
    consumer.run()
    return got


def test_one_trace_leads_from_put_over_server_to_handler(server: Server, spans: InMemorySpanExporter) -> None:
    with Client(server.url) as client:
        client.put("orders", {"close": 17}, id="order-17", headers={"shop": "a"})
    (message,) = consume(server, "orders")
    (sent,), (handled,) = named(spans, "send orders"), named(spans, "process orders")
    assert (sent.kind, handled.kind) == (SpanKind.PRODUCER, SpanKind.CONSUMER)
    assert sent.context is not None
    assert handled.parent is not None
    assert (trace_of(handled), handled.parent.span_id) == (trace_of(sent), sent.context.span_id)
    assert message.headers.keys() == {"shop", "traceparent"}
    assert message.headers["traceparent"].startswith(f"00-{trace_of(sent)}-{format_span_id(sent.context.span_id)}-")
    assert dict(handled.attributes or {}) == {
        "messaging.system": "turtlemq",
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.destination.name": "orders",
        "messaging.message.id": "order-17",
        "messaging.consumer.group.name": "default",
        "turtlemq.attempt": 1,
    }
    (stored,) = of_server(server, "POST /v1/topics/{topic}/messages")
    assert stored["kind"] == "SpanKind.SERVER"
    assert stored["parent_id"] == f"0x{format_span_id(sent.context.span_id)}"
    assert stored["attributes"]["http.response.status_code"] == 201
    assert stored["attributes"]["messaging.destination.name"] == "orders"


def test_a_handler_that_raises_is_an_error_of_its_span(server: Server, spans: InMemorySpanExporter) -> None:
    with Producer("failing", url=server.url) as producer:
        producer.put(b"x").result()
    consume(server, "failing", fails=True)
    (sent,), (handled,) = named(spans, "send failing"), named(spans, "process failing")
    assert trace_of(sent) == trace_of(handled)
    assert handled.status.status_code is StatusCode.ERROR
    assert [event.name for event in handled.events] == ["exception"]


def test_a_batch_links_the_traces_of_its_messages(server: Server, spans: InMemorySpanExporter) -> None:
    with Client(server.url) as client:
        client.put_many("many", [b"a", NewMessage(body=1, headers={"traceparent": TRACEPARENT})])
    messages = consume(server, "many", batch=2)
    (sent,), (handled,) = named(spans, "send many"), named(spans, "process many")
    assert messages[1].headers == {"traceparent": TRACEPARENT}, "the application's own context stays"
    assert {format_trace_id(link.context.trace_id) for link in handled.links} == {trace_of(sent), TRACEPARENT[3:35]}
    assert (handled.attributes or {})["messaging.batch.message_count"] == 2


def test_asyncio_carries_contexts_as_well(server: Server, spans: InMemorySpanExporter) -> None:
    async def story() -> None:
        async with AsyncClient(server.url) as client:
            await client.put("aio", 1)
            await client.put_many("aio", [2])
            async with AsyncProducer("aio", client) as producer:
                await (await producer.put(3))

            async def handle(message: Message) -> None:
                if len(named(spans, "process aio")) == 2:
                    await consumer.stop(wait=False)

            consumer = AsyncConsumer("aio", handle, client, concurrency=1)
            await consumer.run()

    asyncio.run(story())
    handled = named(spans, "process aio")
    assert {trace_of(span) for span in handled} == {trace_of(span) for span in named(spans, "send aio")}
    assert len(handled) == 3


def test_buckets_of_durations_name_a_trace_as_exemplar(server: Server) -> None:
    server.call("GET", "/healthz", headers={"traceparent": TRACEPARENT})
    answer = server.call("GET", "/metrics", headers={"Accept": "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"})
    assert answer.headers["Content-Type"] == "application/openmetrics-text; version=1.0.0; charset=utf-8"
    parsed = text_string_to_metric_families(answer.data.decode())  # type: ignore[no-untyped-call]
    families = {family.name: family for family in parsed}
    assert families["turtlemq_requests"].type == "counter"
    buckets = [one for one in families["turtlemq_request_seconds"].samples if one.labels["route"] == "/healthz"]
    traces = {one.exemplar.labels["trace_id"]: float(one.labels["le"]) for one in buckets if one.exemplar}
    assert TRACEPARENT[3:35] in traces
    assert all(one.exemplar.value <= float(one.labels["le"]) for one in buckets if one.exemplar)


def test_the_server_puts_the_context_of_a_request_into_its_messages(server: Server) -> None:
    given = {"messages": [{"body": 1}, {"body": 2, "headers": {"traceparent": "own"}}]}
    server.ok(
        "POST", "/v1/topics/plain/messages", given, headers={"traceparent": TRACEPARENT, "Content-Type": "application/json"}
    )
    first, second = server.fetch("plain", wait=5)
    assert first["headers"]["traceparent"].startswith(TRACEPARENT[:36])
    assert first["headers"]["traceparent"] != TRACEPARENT, "it is the context of the server's own span"
    assert second["headers"] == {"traceparent": "own"}


def test_without_tracing_messages_and_answers_are_as_before(tmp_path: Path) -> None:
    assert tracing.active is None
    with running(tmp_path / "data") as quiet, Client(quiet.url) as client:
        client.put("orders", 1)
        quiet.ok("POST", "/v1/topics/orders/messages", {"body": 2}, headers={"traceparent": TRACEPARENT})
        assert [message.headers for message in client.fetch("orders", max=2, wait=5)] == [{}, {}]


def test_a_server_without_opentelemetry_says_what_is_missing(tmp_path: Path) -> None:
    hidden = tmp_path / "opentelemetry"
    hidden.mkdir()
    (hidden / "__init__.py").write_text("raise ImportError")
    program: Sequence[str] = ("serve", "--data", str(tmp_path / "data"), "--port", "0")
    done = run(*program, TURTLEMQ_TRACING="true", PYTHONPATH=f"{tmp_path}:{server_process.ROOT}")
    assert done.returncode != 0
    assert "turtlemq[otel]" in done.stderr
