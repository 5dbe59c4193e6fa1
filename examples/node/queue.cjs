// The native gRPC service in Node: publishes batches as columns, and subscribes with credit and lists of acks.
//
//   npm install @grpc/grpc-js @grpc/proto-loader
//   node queue.cjs 127.0.0.1:8879 produce orders 5
//   node queue.cjs 127.0.0.1:8879 consume orders 5
//
// TURTLEMQ_TOKEN is the token, TURTLEMQ_PROTO the folder of the protos.
"use strict";
const path = require("node:path");
const grpc = require("@grpc/grpc-js");
const loader = require("@grpc/proto-loader");

const folder = process.env.TURTLEMQ_PROTO || path.join(__dirname, "../../turtlemq/server/grpc/proto");
const options = { keepCase: true, longs: Number, defaults: true, oneofs: true };
const proto = grpc.loadPackageDefinition(loader.loadSync("turtlemq/v1/queue.proto", { ...options, includeDirs: [folder] }));

const [target, command, topic, count] = process.argv.slice(2);
const client = new proto.turtlemq.v1.Queue(target, grpc.credentials.createInsecure());
const metadata = new grpc.Metadata();
if (process.env.TURTLEMQ_TOKEN) metadata.set("authorization", `Bearer ${process.env.TURTLEMQ_TOKEN}`);

function fail(error) {
  console.error(`${error.code}: ${error.details || error.message}`);
  process.exitCode = 1;
  client.close();
}

function produce() {
  const numbers = Array.from({ length: Number(count) }, (_, i) => i + 1);
  const batch = {
    bodies: numbers.map((n) => Buffer.from(JSON.stringify({ close: n }))),
    ids: numbers.map((n) => `order-${n}`), // a repetition is harmless
    delay_ms: [500], // one value: for all
    flags: [4], // the bodies are JSON text
  };
  client.Publish({ topic, batch }, metadata, (error, reply) => {
    if (error) return fail(error);
    console.log(`${reply.ids.length} stored, ${reply.duplicates.length} known before`);
    client.close();
  });
}

function consume() {
  const stream = client.Subscribe(metadata);
  let left = Number(count);
  stream.on("data", (reply) => {
    if (reply.what === "deliveries") {
      const { batch, attempts } = reply.deliveries;
      batch.ids.forEach((id, i) => {
        const attempt = attempts.length === 1 ? attempts[0] : attempts[i]; // one value: for all
        console.log(`${id}, attempt ${attempt}: ${batch.bodies[i]}`);
      });
      stream.write({ acks: { topic: reply.deliveries.topic, ids: batch.ids } });
      stream.write({ credit: { messages: batch.ids.length } });
    } else if (reply.what === "acked") {
      left -= reply.acked.acked;
      if (left <= 0) stream.end();
    } else if (reply.what === "error") {
      console.error(`${reply.error.topic}: ${reply.error.code}: ${reply.error.message}`);
    }
  });
  stream.on("error", fail);
  stream.on("end", () => client.close());
  stream.write({ open: { topics: [topic], client: "queue.cjs", extend: true } });
  stream.write({ credit: { messages: 100 } });
}

({ produce, consume })[command]();
