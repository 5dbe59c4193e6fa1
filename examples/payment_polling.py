"""Ask a payment provider again and again, with growing pauses, until it knows.

One message for each payment. If the payment is pending, the handler raises `Retry` with the pause before the next attempt. The
message sleeps on the disk of the server meanwhile, so pending payments cost nothing here and survive a restart. After the last
attempt the payment is a dead letter, to be checked by hand.

    python examples/payment_polling.py --fast
"""

from __future__ import annotations

import argparse
import threading

from turtlemq.client import Client, Consumer, Message, NewMessage, Retry, new_id

TOPIC = "payment-polling"
PAUSES_S = (15, 30, 60, 120, 300, 600)  # before the second, third, … attempt


class Provider:
    """A fake provider: it knows a payment after some requests, and never knows others."""

    def __init__(self) -> None:
        self.asked: dict[str, int] = {}

    def state(self, payment: str, known_after: int) -> str:
        self.asked[payment] = self.asked.get(payment, 0) + 1
        return "paid" if self.asked[payment] >= known_after else "pending"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--url", help="address of the server (else TURTLEMQ_URL, else this machine)")
    parser.add_argument("--fast", action="store_true", help="pauses a thousand times shorter")
    args = parser.parse_args()
    pauses = [pause / 1000 if args.fast else float(pause) for pause in PAUSES_S]
    provider, run, done = Provider(), new_id(), threading.Event()
    outcome: dict[str, str] = {}

    def ask(message: Message) -> None:
        payment = message.body["payment"]
        if message.headers.get("run") != run:
            return  # left by an earlier, interrupted run
        state = provider.state(payment, message.body["known_after"])
        print(f"{payment}: {state} at attempt {message.attempt}")
        if state == "pending":
            if message.attempt > len(pauses):
                outcome[payment] = "given up"
            raise Retry(f"still {state}", delay=pauses[min(message.attempt, len(pauses)) - 1])
        outcome[payment] = state

    def handle(message: Message) -> None:
        try:
            ask(message)
        finally:
            if len(outcome) == 3:
                done.set()

    with Client(args.url) as client:
        client.configure(TOPIC, max_attempts=len(pauses) + 1)
        payments = {"card": 1, "transfer": 4, "cheque": 99}
        client.put_many(
            TOPIC,
            [
                NewMessage(
                    body={"payment": name, "known_after": count}, id=f"{name}-{run}", headers={"run": run}, delay=pauses[0]
                )
                for name, count in payments.items()
            ],
        )
        with Consumer(TOPIC, handle, client, wait=5, concurrency=1):
            done.wait()
        print(f"at the end: {outcome}")
        dead = [letter for letter in client.dead(TOPIC) if letter.headers.get("run") == run]
        print(f"for a person to look at: {[(letter.body['payment'], letter.error) for letter in dead]}")


if __name__ == "__main__":
    main()
