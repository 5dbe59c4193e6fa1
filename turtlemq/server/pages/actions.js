// Everything that changes something on the server. Each action asks first, and tells the outcome in the server's own words.

import { call, count } from "./common.js";
import { act, ask, at, clock, fromLocal, html, operations, parsed, serverNow, toLocal } from "./ui.js";

// Messages of a topic

export async function putMessage(topic, given, done) {
  const fields = [
    { name: "id", label: "Id", placeholder: "empty: the server makes one", value: given.id },
    { name: "body", label: "Body", type: "text-area", rows: 8, required: true, value: given.body ?? "{}", hint: "JSON; any other text is put as a JSON string" },
    { name: "delay", label: "Delay", placeholder: "now", hint: "seconds, or 90s, 15m, 2h, 3d" },
    { name: "priority", label: "Priority", options: [["normal", "normal"], ["high", "high"], ["low", "low"]], value: given.priority || "normal" },
  ];
  const values = await ask({ title: `Put a message into ${topic}`, fields, confirm: "Put" });
  if (!values) return;
  const message = { body: parsed(values.body), priority: values.priority };
  if (values.id.trim()) message.id = values.id.trim();
  if (values.delay.trim()) message.delay = isNaN(values.delay) ? values.delay.trim() : Number(values.delay);
  const told = (answer) => (answer.created ? [`${answer.ids[0]} was put`, "It is on disk."] : [`${answer.ids[0]} was not stored again`, "The topic knows this id already; the first message stays."]);
  if (await act("Put", told, () => call(at(topic, "messages"), message))) done();
}

// A range of due times is cancelled without listing its messages.
export async function cancelRange(topic, done) {
  const fields = [
    { name: "from", label: "Due from", type: "datetime-local", step: 1, required: true },
    { name: "to", label: "Due to", type: "datetime-local", step: 1, required: true },
  ];
  const values = await ask({ title: `Cancel all sleeping messages of ${topic} in a range?`, text: "This cannot be undone.", fields, confirm: "Cancel them", danger: true });
  if (!values) return;
  const range = { due_from_ms: fromLocal(values.from), due_to_ms: fromLocal(values.to) };
  if (await act("Cancel", (answer) => `${count(answer.cancelled)} cancelled`, () => call(at(topic, "cancel"), range))) done();
}

// One message

export async function cancelMessage(topic, id, done) {
  if (!(await ask({ title: `Cancel ${id}?`, text: "It will not be delivered. This cannot be undone.", confirm: "Cancel it", danger: true }))) return;
  await act("Cancel", () => `${id} is cancelled`, () => call(at(topic, "messages", id), undefined, "DELETE"));
  done();
}

export async function reschedule(topic, id, dueMs, done) {
  const fields = [{ name: "due", label: "Due", type: "datetime-local", step: 1, required: true, value: toLocal(dueMs), hint: "in the time zone of this browser" }];
  const values = await ask({ title: `Reschedule ${id}`, fields, confirm: "Reschedule" });
  if (!values) return;
  await act("Reschedule", (answer) => [`${id} is rescheduled`, `due ${clock(answer.due_ms)}`], () => call(at(topic, "messages", id), { due_ms: fromLocal(values.due) }, "PATCH"));
  done();
}

export async function editBody(topic, id, body, done) {
  const fields = [{ name: "body", label: "Body", type: "text-area", rows: 14, required: true, value: JSON.stringify(body, null, 2), hint: "JSON; any other text is stored as a JSON string" }];
  const values = await ask({ title: `Edit ${id}`, fields, confirm: "Save" });
  if (!values) return;
  await act("Edit", () => `${id} is edited`, () => call(at(topic, "messages", id), { body: parsed(values.body) }, "PATCH"));
  done();
}

export async function retryNow(topic, id, group, done) {
  if (!(await ask({ title: `Retry ${id} now?`, text: `The next consumer of group ${group} gets it.`, confirm: "Retry now" }))) return;
  await act("Retry", (answer) => `${id} is ${answer.outcome}`, () => call(at(topic, "messages", id, "retry"), { group }));
  done();
}

// Groups

export async function replay(topic, group, done) {
  const fields = [
    { name: "start", label: "From", options: [["time", "a time"], ["earliest", "the oldest kept message"], ["latest", "the end: nothing that is ready now"]], value: "time" },
    { name: "at", label: "Time", type: "datetime-local", step: 1, value: toLocal(serverNow() - 3600e3), hint: "messages that became ready then or later come again" },
  ];
  const values = await ask({ title: `Replay group ${group}`, text: "The group is moved: messages behind its new place are delivered again, done ones as well, and its leases and retries end.", fields, confirm: "Move the group", danger: true });
  if (!values) return;
  const start = values.start === "time" ? { ready_ms: fromLocal(values.at) } : values.start;
  await act("Replay", (answer) => [`${group} was moved`, `${count(answer.stats.ready)} ready for it now`], () => call(at(topic, "groups", group), { start }, "PUT"));
  done();
}

export async function newGroup(topic, done) {
  const fields = [
    { name: "name", label: "Name", required: true },
    { name: "start", label: "It begins with", options: [["earliest", "the oldest kept message"], ["latest", "messages that become ready from now on"]], value: "earliest" },
  ];
  const values = await ask({ title: `A new group of ${topic}`, fields, confirm: "Make it" });
  if (!values) return;
  await act("New group", (answer) => `${answer.group} was made`, () => call(at(topic, "groups", values.name.trim()), { start: values.start }, "PUT"));
  done();
}

export async function dropGroup(topic, group, done) {
  if (!(await ask({ title: `Delete group ${group}?`, text: "Its place, leases and retries are forgotten. Its dead letters stay.", confirm: "Delete the group", danger: true }))) return;
  await act("Delete", () => `${group} is deleted`, () => call(at(topic, "groups", group), undefined, "DELETE"));
  done();
}

function usePause(topic, group, reload) {
  const known = operations.use();
  const place = group ? at(topic, "groups", group) : at(topic);
  const pattern = group ? "POST /v1/topics/{topic}/groups/{group}/pause" : "POST /v1/topics/{topic}/pause";
  if (!known.has(pattern)) return null;
  const name = group ? `group ${group}` : topic;
  return async (pause) => {
    const text = pause ? "Fetches get no messages until it is resumed. Puts, acks and leases go on." : "Consumers get messages again.";
    if (!(await ask({ title: `${pause ? "Pause" : "Resume"} ${name}?`, text, confirm: pause ? "Pause" : "Resume" }))) return;
    await act(pause ? "Pause" : "Resume", (answer) => (answer.paused ? `${name} is paused` : `${name} goes on`), () => call(`${place}/${pause ? "pause" : "resume"}`, {}));
    reload();
  };
}

export function PauseButtons({ topic, group, paused, reload }) {
  const change = usePause(topic, group, reload);
  if (!change) return null;
  if (paused === undefined) return html`<button type="button" onclick=${() => change(true)}>Pause</button><button type="button" onclick=${() => change(false)}>Resume</button>`;
  return html`<button type="button" onclick=${() => change(!paused)}>${paused ? "Resume" : "Pause"}</button>`;
}

// Dead letters

// Requeue letters: `choice` is {ids, group?} or {filter}.
export async function requeue(topic, choice, title, done) {
  const fields = [
    { name: "delay", label: "Due in", placeholder: "now", hint: "seconds, or 90s, 15m, 2h" },
    ...(choice.ids && choice.ids.length === 1 ? [] : [{ name: "per_s", label: "At most a second", type: "number", min: 0.001, step: "any", placeholder: "all at once", hint: "a rate protects the consumers" }]),
  ];
  const values = await ask({ title, text: "They sleep again for their group, and their attempts are counted from 1.", fields, confirm: "Requeue" });
  if (!values) return;
  const body = { ...choice };
  if (values.delay) body.delay = isNaN(values.delay) ? values.delay.trim() : Number(values.delay);
  if (values.per_s) body.per_s = Number(values.per_s);
  const told = (answer) => [`${count(answer.requeued)} requeued`, answer.unknown.length ? `no dead letter any more: ${answer.unknown.join(", ")}` : ""];
  if (await act("Requeue", told, () => call(at(topic, "dead", "requeue"), body))) done();
}

export async function deleteLetters(topic, choice, title, done) {
  if (!(await ask({ title, text: "They are gone for good. This cannot be undone.", confirm: "Delete", danger: true }))) return;
  if (await act("Delete", (answer) => `${count(answer.deleted)} deleted`, () => call(at(topic, "dead", "delete"), choice))) done();
}
