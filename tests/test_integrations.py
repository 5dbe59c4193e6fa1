"""Integrations with the real frameworks: requests put messages; delayed tasks sleep here and run there when they are due."""

from __future__ import annotations

import http.client
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dramatiq
import pytest
from celery.contrib.testing.worker import start_worker
from dramatiq.brokers.redis import RedisBroker
from dramatiq.brokers.stub import StubBroker
from redis import Redis

from benchmarks.peers.common import free_port
from tests.harness.other_queues import redis_server
from tests.harness.server_process import Server, environment, running
from turtlemq.client import Client, Retry
from turtlemq.integrations.celery import TurtleCelery
from turtlemq.integrations.delayed_tasks import DelayedTasks
from turtlemq.integrations.dramatiq import SleepingDelays

PATIENCE_S = 30
WEEK_MS = 7 * 86_400_000


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("integrations") / "data") as found:
        yield found


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with Client(server.url) as found:
        yield found


def until(condition: Callable[[], Any]) -> Any:
    end = time.monotonic() + PATIENCE_S
    while not (found := condition()):
        assert time.monotonic() < end
        time.sleep(0.02)
    return found


@contextmanager
def program(folder: Path, server: Server, *args: str) -> Iterator[subprocess.Popen[str]]:
    """A Python program in a folder, until it ends; SIGTERM must end it well."""
    env = environment(TURTLEMQ_URL=server.url)
    env["PYTHONPATH"] += os.pathsep + str(folder)
    process = subprocess.Popen(
        [sys.executable, *args], cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        yield process
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=PATIENCE_S)
        assert process.returncode in (0, -signal.SIGTERM), out  # uvicorn ends by the signal, after its shutdown
        assert out.count("Traceback") == out.count("event=handler_failed"), out  # of failing handlers, and no others
    finally:
        process.kill()
        process.communicate()


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))


# FastAPI


def post(port: int, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    try:
        connection.request("POST", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def test_a_request_of_fastapi_puts_a_message(server: Server, client: Client, tmp_path: Path) -> None:
    write(
        tmp_path / "shop.py",
        """
        from contextlib import asynccontextmanager
        from typing import Annotated
        from fastapi import Depends, FastAPI, Request
        from turtlemq.client import AsyncClient
        from turtlemq.integrations.starlette import turtlemq_client, turtlemq_lifespan

        @asynccontextmanager
        async def lifespan(app):
            yield {"greeting": "hello"}
            print("inner lifespan ended")

        app = FastAPI(lifespan=turtlemq_lifespan(lifespan))

        @app.post("/orders/{number}")
        async def order(number: int, request: Request, queue: Annotated[AsyncClient, Depends(turtlemq_client)]) -> str:
            assert request.state.greeting == "hello"
            return await queue.put("fastapi", {"close": number}, id=f"order-{number}", delay=1800)

        """,
    )
    port = free_port()
    with program(tmp_path, server, "-m", "uvicorn", "shop:app", "--port", str(port)) as process:
        until(lambda: _answers(port) or process.poll() is not None)
        assert post(port, "/orders/17") == (200, '"order-17"')
        assert post(port, "/orders/17")[0] == 200
        assert client.stats("fastapi").sleep == 1
        assert client.get("fastapi", "order-17").value == {"close": 17}


def _answers(port: int) -> bool:
    try:
        return post(port, "/none")[0] == 404
    except OSError:
        return False


def test_an_application_without_a_client_is_told_so() -> None:
    from starlette.requests import Request

    from turtlemq.integrations.starlette import turtlemq_client

    with pytest.raises(RuntimeError, match="turtlemq_lifespan"):
        turtlemq_client(Request({"type": "http", "state": {}}))


# Django


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project of Django with a view that puts and a handler that writes to the database."""
    folder = tmp_path_factory.mktemp("django")
    write(
        folder / "settings.py",
        f"""
        import os
        SECRET_KEY = "test"
        INSTALLED_APPS = ["turtlemq.integrations.django", "shop"]
        ROOT_URLCONF = "shop.urls"
        ALLOWED_HOSTS = ["*"]
        DATABASES = {{"default": {{"ENGINE": "django.db.backends.sqlite3", "NAME": "{folder}/db.sqlite3", "CONN_MAX_AGE": 0}}}}
        TURTLEMQ = {{"url": os.environ["TURTLEMQ_URL"], "timeout": 10}}
        """,
    )
    write(folder / "shop/__init__.py", "")
    write(
        folder / "shop/models.py",
        """
        from django.db import models

        class Order(models.Model):
            state = models.CharField(max_length=20, default="open")
        """,
    )
    write(
        folder / "shop/urls.py",
        """
        from django.db import transaction
        from django.http import HttpResponse
        from django.urls import path
        from shop.models import Order
        from turtlemq.integrations.django.producer import put_on_commit

        def order(request, fails):
            try:
                with transaction.atomic():
                    order = Order.objects.create()
                    put_on_commit("django", {"close": order.pk}, id=f"order-{order.pk}", delay=0.5)
                    if fails:
                        raise ValueError("the order is rolled back")
            except ValueError:
                return HttpResponse(status=409)
            return HttpResponse(order.pk)

        urlpatterns = [path("orders/<int:fails>", order)]
        """,
    )
    write(
        folder / "shop/handlers.py",
        """
        from shop.models import Order

        def close(message):
            if message.attempt == 1:
                raise RuntimeError("not yet")
            Order.objects.filter(pk=message.body["close"]).update(state="closed")
        """,
    )
    return folder


def django(folder: Path, server: Server, code: str) -> str:
    """Run statements in the project."""
    head = "import os, django; os.environ['DJANGO_SETTINGS_MODULE'] = 'settings'; django.setup()\n"
    env = environment(TURTLEMQ_URL=server.url)
    env["PYTHONPATH"] += os.pathsep + str(folder)
    done = subprocess.run(
        [sys.executable, "-c", head + textwrap.dedent(code)], cwd=folder, env=env, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_view_of_django_puts_and_a_command_consumes(server: Server, client: Client, project: Path) -> None:
    client.configure("django", backoff={"base": 0.1})
    answers = """
        from django.core.management import call_command
        from django.test import Client
        call_command("migrate", run_syncdb=True, verbosity=0)
        print([Client().post(f"/orders/{fails}").status_code for fails in (0, 1, 0)])
    """
    assert django(project, server, answers) == "[200, 409, 200]\n"
    assert [client.get("django", f"order-{number}").value for number in (1, 2)] == [{"close": 1}, {"close": 2}]
    command = ("turtlemq_consume", "django", "shop.handlers.close", "--concurrency", "2")
    with program(project, server, "-m", "django", *command, "--settings", "settings"):
        until(lambda: client.stats("django").history == 2)
    states = "from shop.models import Order; print(*Order.objects.values_list('state', flat=True))"
    assert django(project, server, states) == "closed closed\n"


def test_an_unknown_handler_of_django_is_told(server: Server, project: Path) -> None:
    code = """
        from django.core.management import call_command
        from django.core.management.base import CommandError
        for words in (["t", "shop.none.here"], ["bad/name", "shop.handlers.close"]):
            try:
                call_command("turtlemq_consume", *words)
            except CommandError as error:
                print(error)
    """
    said = django(project, server, code).splitlines()
    assert "shop.none" in said[0]
    assert "bad/name" in said[1]


# Celery


@pytest.fixture
def celery(server: Server, request: pytest.FixtureRequest) -> Iterator[TurtleCelery]:
    topic = request.node.name.replace("[", "-").replace("]", "")
    app = TurtleCelery(
        "shop", broker="memory://", backend="cache+memory://", turtlemq=DelayedTasks(topic, url=server.url, min_delay=0.1)
    )
    polling = {"polling_interval": 0.02}
    app.conf.update(task_default_queue=topic, worker_hijack_root_logger=False, broker_transport_options=polling)
    yield app
    app.turtlemq.client.close()
    app.close()


@contextmanager
def working(app: TurtleCelery) -> Iterator[None]:
    """A worker and a relay."""
    with start_worker(app, pool="solo", perform_ping_check=False, shutdown_timeout=PATIENCE_S), app.relay():
        yield


@pytest.mark.slow
def test_tasks_with_a_countdown_sleep_here_and_run_in_celery(celery: TurtleCelery, client: Client) -> None:
    ran: list[Any] = []

    def close(self: Any, order: int, *, why: str) -> str:
        ran.append((order, why, time.time(), self.request.id, self.request.eta))
        return f"closed {order}"

    task = celery.task(bind=True)(close)
    topic = celery.turtlemq.topic
    with working(celery):
        before = time.time()
        result = task.apply_async((17,), {"why": "unpaid"}, countdown=0.7)
        kept = task.apply_async((18,), {"why": "later"}, countdown=3600, task_id="order-18")
        assert {found.id for found in client.browse(topic)} == {result.id, "order-18"}
        assert celery.turtlemq.cancel("order-18")
        assert not celery.turtlemq.cancel("order-18")
        assert kept.state == "PENDING"
        now = task.apply_async((19,), {"why": "now"})
        assert now.get(timeout=PATIENCE_S) == "closed 19"
        assert result.get(timeout=PATIENCE_S) == "closed 17"
    ((order, why, at_s, id_, eta),) = [run for run in ran if run[0] == 17]
    assert (order, why, id_, eta) == (17, "unpaid", result.id, None)
    assert at_s >= before + 0.7
    assert len(ran) == 2


@pytest.mark.slow
def test_a_retry_with_a_countdown_sleeps_and_keeps_its_callbacks(celery: TurtleCelery, client: Client) -> None:
    attempts: list[int] = []
    called: list[Any] = []

    def ask(self: Any) -> str:
        attempts.append(self.request.retries)
        if self.request.retries < 2:
            raise self.retry(countdown=0.2)
        return "paid"

    def note(answer: str) -> None:
        called.append(answer)

    task, callback = celery.task(bind=True, max_retries=5)(ask), celery.task(note)
    with working(celery):
        result = task.apply_async(countdown=0.2, link=callback.s(), expires=3600)
        assert result.get(timeout=PATIENCE_S) == "paid"
        until(lambda: called == ["paid"])
    assert attempts == [0, 1, 2]
    assert client.stats(celery.turtlemq.topic).history == 3


def test_a_format_that_celery_does_not_accept_is_refused(celery: TurtleCelery, client: Client) -> None:
    topic = celery.turtlemq.topic
    client.configure(topic, max_attempts=1)
    headers = {"content-type": "application/x-python-serialize", "content-encoding": "binary"}
    client.put(topic, b"\x80\x04N.", headers=headers)
    with celery.relay():
        (letter,) = until(lambda: list(client.dead(topic)))
    assert "untrusted content of type pickle" in letter.error


def test_an_id_that_was_used_is_put_under_another(server: Server, client: Client) -> None:
    tasks = DelayedTasks("used", client)
    ids = [tasks.put("task", b"x", 4 * 10**12, {}) for _ in range(3)]
    assert ids[0] == "task"
    assert len(set(ids)) == 3
    assert client.stats("used").sleep == 3


# dramatiq


class SleepingStub(SleepingDelays, StubBroker):
    """A broker in memory."""


class SleepingRedis(SleepingDelays, RedisBroker):
    """A broker as applications have it."""


def test_delayed_messages_sleep_here_and_run_in_dramatiq(server: Server, client: Client, tmp_path: Path) -> None:
    with redis_server(tmp_path) as url:
        broker = SleepingRedis(url=url, turtlemq=DelayedTasks("dramatiq", client, min_delay=0.1))
        ran: list[tuple[int, float]] = []

        def close(order: int) -> None:
            ran.append((order, time.time()))

        actor = dramatiq.actor(broker=broker)(close)
        worker = dramatiq.Worker(broker, worker_timeout=50, worker_threads=1)
        worker.start()
        try:
            before = time.time()
            with broker.relay():
                actor.send_with_options(args=(17,), delay=600)
                far = actor.send_with_options(args=(18,), delay=8 * WEEK_MS)  # RedisBroker alone refuses more than a week
                actor.send(19)
                until(lambda: len(ran) == 2)
            assert [order for order, _ in ran] == [19, 17]
            assert ran[1][1] >= before + 0.6
            assert client.get("dramatiq", far.message_id).state == "sleep"
            assert client.get("dramatiq", far.message_id).headers["dramatiq-actor"] == "close"
        finally:
            worker.stop()
            broker.close()


def test_retries_of_dramatiq_sleep_here(server: Server, client: Client) -> None:
    broker = SleepingStub(turtlemq=DelayedTasks("retries", client, min_delay=0.01))
    attempts: list[float] = []

    def ask() -> None:
        attempts.append(time.time())
        if len(attempts) < 3:
            raise Retry("not yet")

    actor = dramatiq.actor(broker=broker, min_backoff=100, max_backoff=200)(ask)
    worker = dramatiq.Worker(broker, worker_timeout=50, worker_threads=1)
    worker.start()
    try:
        with broker.relay():
            actor.send()
            until(lambda: len(attempts) == 3)
    finally:
        worker.stop()
        broker.close()
    assert client.stats("retries").history == 2


# The programs of the relays


def test_the_relay_of_dramatiq_is_a_program(server: Server, client: Client, tmp_path: Path) -> None:
    write(
        tmp_path / "tasks.py",
        """
        import os
        import dramatiq
        from dramatiq.brokers.redis import RedisBroker
        from turtlemq.integrations.dramatiq import SleepingDelays

        class Broker(SleepingDelays, RedisBroker): ...

        broker = Broker(url=open("redis.url").read())
        """,
    )
    with redis_server(tmp_path) as url, Redis.from_url(url) as redis:
        (tmp_path / "redis.url").write_text(url)
        broker = SleepingRedis(url=url, turtlemq=DelayedTasks("dramatiq-delayed", client, min_delay=0))
        dramatiq.actor(broker=broker, actor_name="close")(print).send_with_options(args=(17,), delay=1)
        with program(tmp_path, server, "-m", "turtlemq.integrations.dramatiq", "tasks:broker"):
            until(lambda: redis.llen("dramatiq:default") == 1)
            until(lambda: client.stats("dramatiq-delayed").history == 1)
        broker.close()


def test_the_relay_of_celery_is_a_program(server: Server, client: Client, tmp_path: Path) -> None:
    write(
        tmp_path / "tasks.py",
        """
        from turtlemq.integrations.celery import TurtleCelery

        app = TurtleCelery("shop", broker="filesystem://")
        app.conf.broker_transport_options = {"data_folder_out": "out", "data_folder_in": "out", "control_folder": "control"}
        """,
    )
    (tmp_path / "out").mkdir()
    app = TurtleCelery("shop", turtlemq=DelayedTasks("celery-eta", client, min_delay=0))
    app.send_task("tasks.close", (17,), countdown=0.1)
    with program(tmp_path, server, "-m", "turtlemq.integrations.celery", "tasks:app"):
        (file,) = until(lambda: list((tmp_path / "out").glob("*.celery.msg")))
    assert "tasks.close" in file.read_text()


def test_a_relay_without_an_object_is_wrong_use(server: Server, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "turtlemq.integrations.dramatiq", "tasks"]
    done = subprocess.run(words, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "MODULE:NAME" in done.stderr
