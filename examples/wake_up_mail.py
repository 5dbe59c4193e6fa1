"""Send a mail to those who have not come back for three days.

Each visit moves one sleeping message three days ahead; a message that wakes up belongs to somebody who stayed away. One message
for each person, however often they come, and nothing to search for.

    python examples/wake_up_mail.py --fast
"""

from __future__ import annotations

import argparse
import asyncio

from turtlemq.client import AsyncClient, AsyncConsumer, Message, errors, new_id

TOPIC = "wake-up-mail"


class Visitors:
    """Who came, and the message that sleeps for each. A real site has this as a column of its table of users."""

    def __init__(self, client: AsyncClient, away: float) -> None:
        self.client, self.away = client, away
        self.sleeper: dict[str, str] = {}

    async def visit(self, name: str) -> None:
        """Somebody is here: the mail is due three days from now."""
        try:
            if name in self.sleeper:
                await self.client.reschedule(TOPIC, self.sleeper[name], delay=self.away)
                print(f"{name} is here again")
                return
        except (errors.Conflict, errors.UnknownMessage):
            pass  # it woke up: a mail was sent, or is just being sent
        self.sleeper[name] = new_id()  # noted before it is put: then it can be put again if that fails
        await self.client.put(TOPIC, {"mail": name}, id=self.sleeper[name], delay=self.away)
        print(f"{name} is here")


async def story(url: str | None, away: float) -> None:
    mailed: list[str] = []
    everybody = asyncio.Event()

    async with AsyncClient(url) as client:
        visitors = Visitors(client, away)

        async def send_mail(message: Message) -> None:
            name = message.body["mail"]
            if visitors.sleeper.get(name) != message.id:
                return  # of a run that was broken off
            print(f"mail to {name}: we miss you!")
            mailed.append(name)
            if {"Ada", "Bert", "Cleo"} <= set(mailed):
                everybody.set()

        async with AsyncConsumer(TOPIC, send_mail, client, wait=5):
            await asyncio.gather(*(visitors.visit(name) for name in ("Ada", "Bert", "Cleo")))
            for _ in range(3):  # Cleo keeps coming, so hers is the last mail
                await asyncio.sleep(away * 0.6)
                await visitors.visit("Cleo")
            await everybody.wait()
    print(f"mailed: {', '.join(mailed)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--url", help="address of the server (else TURTLEMQ_URL, else this machine)")
    parser.add_argument("--fast", action="store_true", help="one second in place of three days")
    args = parser.parse_args()
    asyncio.run(story(args.url, 1.0 if args.fast else 3 * 86_400.0))


if __name__ == "__main__":
    main()
