"""Send a mail to users that have not come back for three days.

Each visit reschedules one sleeping message to three days ahead, so a message that comes due belongs to a user that stayed away.
There is one message for each user, and no table to search.

    python examples/wake_up_mail.py --fast
"""

from __future__ import annotations

import argparse
import asyncio

from turtlemq.client import AsyncClient, AsyncConsumer, Message, errors, new_id

TOPIC = "wake-up-mail"


class Visitors:
    """The users, with the id of the sleeping message of each. A real site has this as a column of its table of users."""

    def __init__(self, client: AsyncClient, away: float) -> None:
        self.client, self.away = client, away
        self.sleeper: dict[str, str] = {}

    async def visit(self, name: str) -> None:
        """A user is here: the mail is due three days from now."""
        try:
            if name in self.sleeper:
                await self.client.reschedule(TOPIC, self.sleeper[name], delay=self.away)
                print(f"{name} is here again")
                return
        except (errors.Conflict, errors.UnknownMessage):
            pass  # the message is due: its mail was sent, or is being sent
        self.sleeper[name] = new_id()  # noted before the put, so that a failed put can be repeated
        await self.client.put(TOPIC, {"mail": name}, id=self.sleeper[name], delay=self.away)
        print(f"{name} is here")


async def story(url: str | None, away: float) -> None:
    mailed: list[str] = []
    all_mailed = asyncio.Event()

    async with AsyncClient(url) as client:
        visitors = Visitors(client, away)

        async def send_mail(message: Message) -> None:
            name = message.body["mail"]
            if visitors.sleeper.get(name) != message.id:
                return  # left by an earlier, interrupted run
            print(f"mail to {name}: we miss you!")
            mailed.append(name)
            if {"Ada", "Bert", "Cleo"} <= set(mailed):
                all_mailed.set()

        async with AsyncConsumer(TOPIC, send_mail, client, wait=5):
            await asyncio.gather(*(visitors.visit(name) for name in ("Ada", "Bert", "Cleo")))
            for _ in range(3):  # Cleo keeps coming, so hers is the last mail
                await asyncio.sleep(away * 0.6)
                await visitors.visit("Cleo")
            await all_mailed.wait()
    print(f"mailed: {', '.join(mailed)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--url", help="address of the server (else TURTLEMQ_URL, else this machine)")
    parser.add_argument("--fast", action="store_true", help="one second in place of three days")
    args = parser.parse_args()
    asyncio.run(story(args.url, 1.0 if args.fast else 3 * 86_400.0))


if __name__ == "__main__":
    main()
