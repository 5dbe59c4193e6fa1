"""Close orders that are not paid within 30 minutes.

A message that is due in half an hour is put for each new order, and cancelled when the order is paid. So a message that comes due
belongs to an unpaid order. If the payment arrives in the same second, the database decides: the closing transaction changes open
orders only, and `Dedup` makes it happen once although a message may come twice.

    python examples/order_closer.py --fast
"""

from __future__ import annotations

import argparse
import sqlite3
import tempfile
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from turtlemq.client import Client, Consumer, Dedup, Message, Producer, errors, new_id

TOPIC = "order-closer"


class Shop:
    """The shop's own database."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with self.open() as database:
            database.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, state TEXT)")

    @contextmanager
    def open(self) -> Iterator[sqlite3.Connection]:
        """A connection for one transaction."""
        with closing(sqlite3.connect(self.path, timeout=30)) as database, database:
            yield database

    def place(self, order: int) -> None:
        with self.open() as database:
            database.execute("INSERT INTO orders VALUES (?, 'open')", (order,))

    def pay(self, order: int) -> bool:
        """Mark an order as paid. Returns whether it was still open."""
        with self.open() as database:
            return database.execute("UPDATE orders SET state = 'paid' WHERE id = ? AND state = 'open'", (order,)).rowcount == 1

    def states(self) -> dict[int, str]:
        with self.open() as database:
            return dict(database.execute("SELECT id, state FROM orders"))


def closer(run: str, order: int) -> str:
    """The id of the message that closes an order. `run` makes it unique; a real shop never uses an order number twice."""
    return f"order-{order}-{run}"


def pay(client: Client, shop: Shop, run: str, order: int) -> None:
    """The customer pays: the order must not be closed any more."""
    if not shop.pay(order):
        print(f"order {order}: paid too late, the money goes back")
        return
    print(f"order {order}: paid")
    try:
        client.cancel(TOPIC, closer(run, order))
    except errors.Conflict as conflict:  # it is due already; the handler will find the order paid
        print(f"order {order}: its closer is in state {conflict.state}")


def close(shop: Shop, message: Message) -> None:
    """Handle a due message: close the order if it is still open."""
    order = message.body["order"]
    with shop.open() as database, Dedup(database).once(message) as first:
        closing_it = "UPDATE orders SET state = 'closed' WHERE id = ? AND state = 'open'"
        if first and database.execute(closing_it, (order,)).rowcount:
            print(f"order {order}: closed, the goods go back")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--url", help="address of the server (else TURTLEMQ_URL, else this machine)")
    parser.add_argument("--orders", type=int, default=6, help="how many orders are placed; every third is paid")
    parser.add_argument("--fast", action="store_true", help="one second in place of 30 minutes")
    parser.add_argument("--delay", type=float, help="seconds until an unpaid order is closed, in place of 30 minutes")
    args = parser.parse_args()
    delay = args.delay or (1.0 if args.fast else 1800.0)
    done = threading.Event()

    with tempfile.TemporaryDirectory() as folder, Client(args.url) as client:
        shop = Shop(Path(folder) / "shop.db")
        run = new_id()

        def handle(message: Message) -> None:
            if message.headers.get("run") == run:  # otherwise an earlier, interrupted run has left it
                close(shop, message)
            finish()

        def finish() -> None:
            if "open" not in shop.states().values():
                done.set()

        with Producer(TOPIC, client) as producer:
            for order in range(args.orders):
                shop.place(order)
                producer.put({"order": order}, id=closer(run, order), delay=delay, headers={"run": run})
        print(f"{args.orders} orders placed; they are closed in {delay:g} s")
        with Consumer(TOPIC, handle, client, wait=5, concurrency=1):
            for order in range(0, args.orders, 3):
                pay(client, shop, run, order)
            finish()  # the last open order may be a paid one
            done.wait()
        print(f"at the end: {shop.states()}")


if __name__ == "__main__":
    main()
