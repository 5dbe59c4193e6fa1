"""Send a mail to users that have not come back for three days.

Each visit puts the same id again with `if_exists="replace"`: the timer of that user starts anew, whether it sleeps, was mailed
or was never there. So a message that comes due belongs to a user that stayed away, and no table of timers is needed.

    python examples/wake_up_mail.py --fast
"""

from __future__ import annotations

import argparse
import asyncio

from turtlemq.client import AsyncClient, AsyncConsumer, Message, errors

TOPIC = "wake-up-mail"


async def visit(client: AsyncClient, name: str, away: float) -> None:
    """A user is here: the mail is due three days from now."""
    try:
        put = await client.put(TOPIC, {"mail": name}, id=f"wake-up-{name}", delay=away, if_exists="replace")
    except errors.Conflict:
        print(f"{name} is here, just while the mail is being sent")  # the next visit starts the timer again
        return
    print(f"{name} is here" if put.created else f"{name} is here again")


async def story(url: str | None, away: float) -> None:
    mailed: list[str] = []
    all_mailed = asyncio.Event()

    async def send_mail(message: Message) -> None:
        name = message.body["mail"]
        print(f"mail to {name}: we miss you!")
        mailed.append(name)
        if {"Ada", "Bert", "Cleo"} <= set(mailed):
            all_mailed.set()

    async with AsyncClient(url) as client:
        await asyncio.gather(*(visit(client, name, away) for name in ("Ada", "Bert", "Cleo")))
        async with AsyncConsumer(TOPIC, send_mail, client, wait=5):
            for _ in range(3):  # Cleo keeps coming, so hers is the last mail
                await asyncio.sleep(away * 0.6)
                await visit(client, "Cleo", away)
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
