"""The pure rules of callbacks: answers, concurrency, circuit breaker, choice, signatures. Any history keeps them."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from standardwebhooks import Webhook
from standardwebhooks.webhooks import WebhookVerificationError

from turtlemq.errors import InvalidArgument
from turtlemq.server.push import policy, signature
from turtlemq.server.push.endpoint import Endpoint, Stored, Terms, file_of, made, read_file
from turtlemq.server.push.policy import CLOSED, FAILURES_MAX, Breaker, Concurrency, Verdict, choose, classify

steady = hypothesis_settings(derandomize=True, deadline=None, max_examples=200, database=None)
SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
Steps = st.lists(st.tuples(st.floats(0, 100), st.booleans()), max_size=80)


# Answers


@pytest.mark.parametrize(
    ("status", "retry_after", "retry", "verdict"),
    [
        (200, None, None, Verdict("acked")),
        (204, "5", "no", Verdict("acked")),
        (299, None, None, Verdict("acked")),
        (301, None, None, Verdict("failed")),
        (400, None, None, Verdict("failed")),
        (422, None, "no", Verdict("refused")),
        (422, None, " NO ", Verdict("refused")),
        (500, None, "yes", Verdict("failed")),
        (500, "5", None, Verdict("failed")),
        (429, None, None, Verdict("throttled")),
        (429, "5", None, Verdict("throttled", 5_000)),
        (503, "99999999", None, Verdict("throttled", 3_600_000)),
        (503, "-5", None, Verdict("throttled")),
        (503, "Thu, 01 Jan 1970 00:00:10 GMT", None, Verdict("throttled", 9_000)),
        (503, "Thu, 01 Jan 1970 00:00:00 GMT", None, Verdict("throttled", 0)),
        (503, None, "no", Verdict("refused")),
        (410, None, None, Verdict("gone", pauses=True)),
        (410, None, "no", Verdict("refused", pauses=True)),
    ],
)
def test_answers(status: int, retry_after: str | None, retry: str | None, verdict: Verdict) -> None:
    assert classify(status, retry_after, retry, now_s=1) == verdict


@steady
@given(st.integers(100, 999), st.none() | st.text(), st.none() | st.text(), st.floats(0, 4e9))
def test_any_answer_has_a_meaning(status: int, retry_after: str | None, retry: str | None, now_s: float) -> None:
    verdict = classify(status, retry_after, retry, now_s)
    assert (verdict.outcome == "acked") == (200 <= status < 300)
    assert verdict.delay_ms is None or 0 <= verdict.delay_ms <= 3_600_000
    assert verdict.outcome in policy.OUTCOMES


@steady
@given(st.binary(max_size=3_000))
def test_an_error_is_the_beginning_of_the_refusal(body: bytes) -> None:
    error = policy.error_of(Verdict("failed"), 500, body)
    assert error.startswith("HTTP 500")
    assert len(error) <= policy.ERROR_BYTES + len("HTTP 500: ")


# Concurrency


@steady
@given(st.integers(1, 64), st.lists(st.booleans(), max_size=300))
def test_concurrency_stays_within_its_bounds(capacity: int, answers: list[bool]) -> None:
    now = Concurrency()
    for good in answers:
        after = now.succeeded(capacity) if good else now.failed()
        assert 1 <= after.limit <= max(capacity, policy.CONCURRENCY_START)
        assert after.limit <= now.limit + 1 if good else after.limit == max(1, now.limit // 2)
        now = after


def test_concurrency_grows_by_one_for_each_full_window() -> None:
    now, limits = Concurrency(), []
    for _ in range(4 + 5 + 6):
        now = now.succeeded(16)
        limits.append(now.limit)
    assert limits == [4, 4, 4, 5, 5, 5, 5, 5, 6, 6, 6, 6, 6, 6, 7]


# Circuit breaker


@steady
@given(Steps)
def test_a_breaker_lets_a_probe_through_in_time_and_no_more(steps: list[tuple[float, bool]]) -> None:
    now, breaker = 0.0, CLOSED
    for pause, good in steps:
        now += pause
        room = breaker.room(limit=8, unacked=0, now_s=now)
        if breaker.is_open:
            assert room == (now >= breaker.until_s)
            assert breaker.room(limit=8, unacked=1, now_s=now) == 0
            assert policy.PAUSE_S <= breaker.pause_s <= policy.PAUSE_S_MAX
        else:
            assert room == 8
        before = breaker
        breaker = breaker.succeeded() if good else breaker.failed(now)
        assert breaker.is_open == (not good and before.failures + 1 >= FAILURES_MAX)


def test_pauses_of_a_breaker_double_up_to_ten_minutes() -> None:
    breaker, now, pauses = CLOSED, 0.0, []
    for _ in range(FAILURES_MAX):
        breaker = breaker.failed(now)
    for _ in range(7):
        pauses.append(breaker.pause_s)
        assert breaker.failed(breaker.until_s - 1) == breaker, "it began before the breaker opened"
        now = breaker.until_s
        breaker = breaker.failed(now)
    assert pauses == [30, 60, 120, 240, 480, 600, 600]
    assert breaker.succeeded() == Breaker()


# Choice


@steady
@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 50)), min_size=2), st.data())
def test_the_choice_is_one_of_two_and_no_busier(loads: list[tuple[int, int]], data: st.DataObject) -> None:
    first, second = (data.draw(st.integers(0, len(loads) - 1)) for _ in range(2))
    chosen = choose(loads, first, second)
    other = second if chosen == first else first
    assert chosen in (first, second)
    assert loads[chosen][0] / loads[chosen][1] <= loads[other][0] / loads[other][1]


# Signatures


def _fields(body: bytes, *secrets: str, id_: str = "t:m", at: datetime | None = None) -> dict[str, str]:
    return signature.signed_fields(secrets, id_, int((at or datetime.now(UTC)).timestamp()), body)


def test_a_fixed_vector_of_the_scheme() -> None:
    body = b'{"test": 2432232314}'
    assert signature.sign([SECRET], "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, body) == (
        "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="
    )


@steady
@given(st.text(), st.integers(0, 1 << 40), st.binary(), st.binary(min_size=24, max_size=64))
def test_a_signature_covers_id_time_and_body(id_: str, at: int, body: bytes, key: bytes) -> None:
    told = signature.webhook_id("t.1", id_)
    assert "." not in told
    assert told.isascii()
    expected = hmac.new(key, told.encode() + b"." + str(at).encode() + b"." + body, hashlib.sha256).digest()
    assert signature.sign([signature.secret_of(key)], told, at, body) == "v1," + base64.b64encode(expected).decode()


@steady
@given(st.binary(min_size=24, max_size=64), st.binary(min_size=24, max_size=64), st.dictionaries(st.text(), st.integers()))
def test_an_independent_verifier_accepts_both_secrets(old: bytes, new: bytes, value: dict[str, int]) -> None:
    body, pair = json.dumps(value).encode(), [signature.secret_of(key) for key in (new, old)]
    for secret in pair:
        assert Webhook(secret).verify(body, _fields(body, *pair)) == value


@pytest.mark.parametrize("change", ["body", "webhook-id", "webhook-timestamp", "webhook-signature"])
def test_an_independent_verifier_refuses_any_change(change: str) -> None:
    body, fields = b'{"a": 1}', _fields(b'{"a": 1}', SECRET)
    if change == "body":
        body = b'{"a": 2}'
    elif change == "webhook-timestamp":
        fields[change] = str(int(fields[change]) + 1)
    elif change == "webhook-id":
        fields[change] += "x"
    else:  # its first letter: some bits of the last one do not count
        version, comma, text = fields[change].partition(",")
        fields[change] = f"{version}{comma}{'B' if text[0] == 'A' else 'A'}{text[1:]}"
    with pytest.raises(WebhookVerificationError):
        Webhook(SECRET).verify(body, fields)


@pytest.mark.parametrize("secret", ["", "whsec_", "MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", "whsec_YWJj", "whsec_?" + "A" * 31])
def test_texts_that_are_no_secret(secret: str) -> None:
    with pytest.raises(InvalidArgument):
        signature.key_of(secret)


@steady
@given(st.dictionaries(st.text(), st.text()))
def test_headers_of_messages_never_break_out_of_their_field(headers: dict[str, str]) -> None:
    for name, value in signature.header_fields(headers).items():
        assert name.startswith("turtlemq-header-")
        assert (name + value).isascii()
        assert (name + value).isprintable()
        assert not set(name) & set(' ()<>@,;:\\"/[]?={}')


# Endpoints


def _endpoint(capacity: int = 8, ttl: int = 0) -> Endpoint:
    terms = Terms("one", "https://hooks.shop.example/", capacity, ttl, 30.0, False)
    return made("t", Stored("default", "one", terms, SECRET, 1_000, verified=True))


def test_an_endpoint_survives_its_file() -> None:
    endpoint = _endpoint()
    endpoint.rotate(signature.secret_of(bytes(32)), 5_000)
    endpoint.paused = True
    (stored,) = read_file(file_of([endpoint]))
    assert stored == endpoint.stored()
    assert made("t", stored).secrets(4_999) == endpoint.secrets(4_999) == [signature.secret_of(bytes(32)), SECRET]
    assert endpoint.secrets(5_000) == [signature.secret_of(bytes(32))]
    assert SECRET not in repr(endpoint)
    assert SECRET not in json.dumps(endpoint.fields())


@steady
@given(st.integers(1, 20), Steps, st.none() | st.integers(0, 20))
def test_an_endpoint_never_has_more_room_than_it_asked_for(
    capacity: int, steps: list[tuple[float, bool]], free: int | None
) -> None:
    endpoint, now = _endpoint(capacity), 0.0
    endpoint.beat(1, free)
    for pause, good in steps:
        now += pause
        room = endpoint.room(now)
        assert room <= min(capacity, capacity if free is None else max(free, 0))
        endpoint.learn(Verdict("acked" if good else "failed"), "", now)
    endpoint.paused = True
    assert endpoint.room(now + 10_000) == 0


def test_a_heartbeat_says_how_much_more_an_endpoint_can_take() -> None:
    endpoint = _endpoint()
    endpoint.unacked = 1
    endpoint.beat(2_000, 2)
    assert (endpoint.beat_ms, endpoint.window, endpoint.room(0)) == (2_000, 3, 2)
    endpoint.beat(3_000, 0)
    assert endpoint.room(0) == 0
    endpoint.beat(4_000, None)
    assert endpoint.room(0) == 3
