// BullMQ as an application uses it: a line of JSON in is a call, a line out is its answer.
//
//   node worker.js PORT LEASE_MS
//   in   [call, client, verb, argument]      out  [call, result] or [call, null, error]
//
// Each client has connections of its own: a Queue to add with, a Worker to take and complete with by hand.
"use strict";

const readline = require("node:readline");
const { Queue, Worker } = require("bullmq");

const [port, leaseMs] = process.argv.slice(2).map(Number);
const connection = { host: "127.0.0.1", port, maxRetriesPerRequest: null };
const WINDOW_MAX = 1024;
const sleep = (ms) => new Promise((wake) => setTimeout(wake, ms));

class Client {
  constructor(number) {
    this.token = `client ${number}`;
    this.queue = new Queue("bench", { connection });
    this.worker = new Worker("bench", null, { connection, autorun: false, lockDuration: leaseMs, drainDelay: 1 });
    this.jobs = new Map(); // taken and not yet completed, by id
    this.waiting = null; // a blocking call that outlived its fetch: it must be asked again, or its job is forgotten
    this.window = 1; // calls on the way at once: each that finds nothing costs as much as one that does
  }

  async open() {
    await Promise.all([this.queue.waitUntilReady(), this.worker.waitUntilReady()]);
  }

  async put(messages) {
    const timestamp = Date.now();
    const jobs = messages.map(([id, due, body]) => ({
      name: "m",
      data: [due, body],
      opts: { jobId: id, timestamp, delay: Math.max(0, due - timestamp), removeOnComplete: true },
    }));
    await this.queue.addBulk(jobs);
  }

  async fetch([count, waitMs]) {
    const first = await this.first(waitMs);
    const found = first ? [first] : [];
    while (found.length && found.length < count) {
      const asked = Math.min(this.window, count - found.length);
      const more = await Promise.all(Array.from({ length: asked }, () => this.worker.getNextJob(this.token, { block: false })));
      const got = more.filter(Boolean);
      found.push(...got);
      if (got.length < asked) {
        this.window = Math.max(1, got.length);
        break;
      }
      this.window = Math.min(2 * this.window, WINDOW_MAX);
    }
    for (const job of found) this.jobs.set(job.id, job);
    return found.map((job) => [job.id, job.data[0]]);
  }

  async first(waitMs) {
    const end = Date.now() + waitMs;
    if (!this.waiting) {
      const job = await this.worker.getNextJob(this.token, { block: false });
      if (job || waitMs === 0) return job;
    }
    for (;;) {
      this.waiting ??= this.worker.getNextJob(this.token);
      const left = Math.max(0, end - Date.now());
      const answer = await Promise.race([this.waiting.then((job) => ({ job })), sleep(left)]);
      if (answer) this.waiting = null;
      if (answer?.job || Date.now() >= end) return answer?.job;
    }
  }

  async ack(ids) {
    const jobs = ids.map((id) => this.jobs.get(id));
    ids.forEach((id) => this.jobs.delete(id));
    await Promise.all(jobs.map((job) => job.moveToCompleted(null, this.token, false)));
  }

  async cancel(id) {
    // `remove` says 1 for a job that never was, too.
    return (await this.queue.getJob(id)) !== undefined && (await this.queue.remove(id)) === 1;
  }

  async close() {
    await Promise.all([this.queue.close(), this.worker.close(true)]);
  }
}

const clients = new Map();

async function serve(client, verb, argument) {
  if (!clients.has(client)) clients.set(client, new Client(client));
  return clients.get(client)[verb](argument);
}

readline.createInterface({ input: process.stdin }).on("line", (line) => {
  const [call, ...asked] = JSON.parse(line);
  serve(...asked).then(
    (result) => process.stdout.write(JSON.stringify([call, result ?? null]) + "\n"),
    (error) => process.stdout.write(JSON.stringify([call, null, String(error)]) + "\n"),
  );
});
