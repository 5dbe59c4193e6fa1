// The stream of the Hyper Delay Server in Node: schedules a few messages, receives them when they are due, and acknowledges them.
//
//   npm install @grpc/grpc-js @grpc/proto-loader
//   node delay.cjs 127.0.0.1:8879
//
// TURTLEMQ_PROTO is the folder of the protos.
"use strict";
const path = require("node:path");
const grpc = require("@grpc/grpc-js");
const loader = require("@grpc/proto-loader");

const folder = process.env.TURTLEMQ_PROTO || path.join(__dirname, "../../turtlemq/server/grpc/proto");
const options = { keepCase: true, longs: Number, defaults: true, oneofs: true };
const proto = grpc.loadPackageDefinition(loader.loadSync("delay.proto", { ...options, includeDirs: [folder] }));

const COUNT = 3;
const client = new proto.delay.DelayScheduler(process.argv[2], grpc.credentials.createInsecure());
const stream = client.Connect();
let handled = 0;

stream.on("data", (answer) => {
  if (answer.message === "delivery") {
    console.log(`due: ${answer.delivery.payload}`);
    stream.write({ ack: { id: answer.delivery.id } });
    handled += 1;
    if (handled === COUNT) stream.end(); // half-close: the server ends the stream
  } else if (answer.message === "error") {
    console.error(`refused: ${answer.error.code}: ${answer.error.message}`);
  }
});
stream.on("error", (error) => {
  console.error(`${error.code}: ${error.details}`);
  process.exitCode = 1;
});
stream.on("close", () => client.close());

stream.write({ register: { route_key: "calls" } });
for (let n = 0; n < COUNT; n += 1) {
  const fire_at_epoch_ms = Date.now() + 500;
  stream.write({ schedule: { route_key: "calls", fire_at_epoch_ms, payload: Buffer.from(`call ${n}`) } });
}
