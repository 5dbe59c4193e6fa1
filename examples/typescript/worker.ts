// A producer and a consumer for TurtleMQ in TypeScript: Node 18 or newer, no packages. docs/OTHER-LANGUAGES.md explains the rules.
//
//   node worker.js produce orders 3        three messages, due in one second
//   node worker.js consume orders          until SIGTERM or Ctrl-C; TTR=30 and WORK=0 are seconds of a lease and of the work

import { setTimeout as sleep } from "node:timers/promises";

interface Message { id: string; body: { number: number; fails?: number }; attempt: number }
interface Batch { messages: Message[]; lease?: string }
interface Settled { unknown: string[]; late?: string[] }

const [, , verb, topic = "orders", count = "1"] = process.argv;
const base = `${process.env.TURTLEMQ_URL ?? "http://127.0.0.1:8878"}/v1/topics/${topic}`;
const token = process.env.TURTLEMQ_TOKEN;
const ttr = Number(process.env.TTR ?? 30);
const work = Number(process.env.WORK ?? 0);

// One request. A lost connection, 429 and 503 are tried again with growing pauses; any other refusal is an error of this program.
async function call<T>(path: string, body: unknown, signal?: AbortSignal): Promise<T> {
  const headers = { "Content-Type": "application/json", ...(token ? { Authorization: `Bearer ${token}` } : {}) };
  for (let pause = 100; ; pause = Math.min(2 * pause, 5_000)) {
    const answer = await ask(`${base}/${path}`, { method: "POST", headers, body: JSON.stringify(body), signal });
    if (answer && answer.status < 300) return JSON.parse(answer.text) as T;
    if (answer && ![429, 502, 503, 504].includes(answer.status)) throw new Error(answer.text);
    signal?.throwIfAborted();
    await sleep(pause * (0.5 + Math.random() / 2), undefined, { signal });
  }
}

async function ask(url: string, request: RequestInit): Promise<{ status: number; text: string } | undefined> {
  try {
    const answer = await fetch(url, request);
    return { status: answer.status, text: await answer.text() };
  } catch {
    return undefined; // the connection was lost
  }
}

// Ids of the producer's own make a retry safe: an id is stored once.
async function produce(): Promise<void> {
  const messages = Array.from({ length: Number(count) }, (_, i) => ({ id: `order-${i}`, body: { number: i }, delay: 1 }));
  const stored = await call<{ created: number; duplicates: number }>("messages", { messages });
  console.log(`${stored.created} created, ${stored.duplicates} duplicates`);
}

async function handle(message: Message): Promise<void> {
  await sleep(work * 1000); // your work
  if (message.attempt <= (message.body.fails ?? 0)) throw new Error("not yet");
}

async function consume(): Promise<void> {
  const stop = new AbortController();
  for (const name of ["SIGTERM", "SIGINT"]) process.on(name, () => stop.abort());
  while (!stop.signal.aborted) {
    try {
      const batch = await call<Batch>("fetch", { max: 10, wait: 20, ttr }, stop.signal); // a stop ends the long poll
      await handleAll(batch); // a stop lets the messages in hand finish
    } catch (error) {
      if (!stop.signal.aborted) throw error;
    }
  }
  console.log("stopped");
}

// Handles a batch, and extends the leases of all its messages that are not settled, three times in each lease.
async function handleAll({ messages, lease }: Batch): Promise<void> {
  const held = new Set(messages.map((message) => message.id));
  const extend = async () => {
    const { unknown, late = [] } = await call<Settled>("extend", { ids: [...held], ttr, lease });
    for (const id of [...unknown, ...late]) held.delete(id); // lost: another consumer may have it
  };
  const timer = setInterval(() => void extend().catch((error) => console.error(error.message)), (ttr * 1000) / 3);
  try {
    for (const message of messages) {
      const error = await handle(message).then(() => "", (problem: Error) => problem.message);
      const ack = error ? { acks: [`-${message.id}`], lease, error } : { acks: [message.id], lease };
      const { late = [] } = await call<Settled>("ack", ack);
      held.delete(message.id);
      console.log(`${error ? "failed" : "handled"} ${message.id} attempt ${message.attempt}${late.length ? " too late" : ""}`);
    }
  } finally {
    clearInterval(timer);
  }
}

await (verb === "produce" ? produce() : consume());
