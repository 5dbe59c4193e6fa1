// The recurring schedules of a topic: when each fires next and fired last; put, trigger, pause and delete them.

import { call, count, span } from "./common.js";
import { When, act, ask, at, clock, distance, html, link, parsed, replaceQuery, serverNow, usePoll } from "./ui.js";
import { Pager, Table, preview, usePages } from "./message_list.js";

const zoneHere = () => Intl.DateTimeFormat().resolvedOptions().timeZone || "UTC";
const shortly = (seconds) => span(seconds * 1000);

function timing(one) {
  if (one.cron) return html`<code>${one.cron}</code> <span class="quiet">${one.zone}</span>`;
  return one.every ? `every ${shortly(one.every)}` : `after ${one.delays.map(shortly).join(", ")}`;
}

function Next({ one }) {
  if (one.ended_ms !== null) return html`<span class="pill">ended</span>`;
  if (one.paused) return html`<span class="pill bad">paused</span>`;
  return html`<${When} ms=${one.next_ms} />`;
}

// Questions

const number = (text) => (isNaN(text) ? text.trim() : Number(text));
const timesOf = (one) => (one.cron ? one.cron : one.every ? String(one.every) : one.delays ? one.delays.join(", ") : "");

async function putSchedule(topic, given, done) {
  const kind = given.every ? "every" : given.delays ? "delays" : "cron";
  const fields = [
    { name: "name", label: "Name", required: true, value: given.name, hint: "its messages have the ids NAME@TIME" },
    { name: "kind", label: "Fires", options: [["cron", "at the times of a cron expression"], ["every", "at an interval"], ["delays", "after growing delays"]], value: kind },
    { name: "times", label: "When", required: true, value: timesOf(given), placeholder: "0 9 * * MON-FRI", hint: "cron: minute, hour, day, month, weekday; interval: 1h; delays: 1m, 5m, 1h" },
    { name: "zone", label: "Time zone", value: given.zone || zoneHere(), hint: "of a cron expression" },
    { name: "body", label: "Body", type: "text-area", rows: 5, required: true, value: given.body === undefined ? "{}" : JSON.stringify(given.body, null, 2), hint: "JSON; any other text is put as a JSON string" },
    { name: "catch_up", label: "Times missed in an outage", options: [["one", "are made up for by one firing"], ["skip", "are left out"], ["all", "are all fired"]], value: given.catch_up || "one" },
    { name: "overlap", label: "If the last message is not done", options: [["allow", "fire all the same"], ["skip", "leave this time out"]], value: given.overlap || "allow" },
  ];
  const values = await ask({ title: given.name ? `Change ${given.name}` : `Put a schedule into ${topic}`, fields, confirm: "Put" });
  if (!values) return;
  const times = { cron: () => ({ cron: values.times, zone: values.zone.trim() || "UTC" }), every: () => ({ every: number(values.times) }), delays: () => ({ delays: values.times.split(",").map(number) }) };
  const kept = Object.fromEntries(["start_ms", "end_ms", "count", "jitter", "headers", "priority", "ttr"].filter((name) => given[name] !== undefined && given[name] !== null).map((name) => [name, given[name]]));
  const schedule = { ...kept, ...times[values.kind](), body: parsed(values.body), catch_up: values.catch_up, overlap: values.overlap };
  const told = (answer) => [`${answer.name} was ${answer.created ? "put" : "changed"}`, answer.next_ms === null ? "It is paused, or has ended." : `next: ${clock(answer.next_ms)}`];
  if (await act("Put", told, () => call(at(topic, "schedules", values.name.trim()), schedule, "PUT"))) done(values.name.trim());
}

async function trigger(topic, name, done) {
  if (!(await ask({ title: `Trigger ${name} now?`, text: "Its message is put at once; its times stay as they are.", confirm: "Trigger" }))) return;
  await act("Trigger", (answer) => `${answer.id} was put`, () => call(at(topic, "schedules", name, "trigger"), undefined, "POST"));
  done();
}

async function setPaused(topic, one, done) {
  const [verb, text] = one.paused ? ["Resume", "Times that passed in the pause are left out."] : ["Pause", "It fires no more until it is resumed."];
  if (!(await ask({ title: `${verb} ${one.name}?`, text, confirm: verb }))) return;
  await act(verb, (answer) => (answer.paused ? `${one.name} is paused` : `${one.name} goes on`), () => call(at(topic, "schedules", one.name, verb.toLowerCase()), undefined, "POST"));
  done();
}

async function remove(topic, name, done) {
  if (!(await ask({ title: `Delete ${name}?`, text: "It fires no more. Messages that have come due stay.", confirm: "Delete", danger: true }))) return;
  if (await act("Delete", () => `${name} is deleted`, () => call(at(topic, "schedules", name), undefined, "DELETE"))) done();
}

// Views

function Details({ topic, name, query, changed }) {
  const [one, error, reload] = usePoll(() => call(at(topic, "schedules", name)), [topic, name], 2000);
  const [coming, , again] = usePoll(() => call(`${at(topic, "schedules", name, "next")}?count=10`), [topic, name, one && one.next_ms, one && one.paused], 10000);
  const close = () => replaceQuery({ ...query, schedule: undefined });
  const done = () => (reload(), again(), changed());
  if (!one) return html`<section class="panel" id="schedule"><p class=${error ? "warning" : "quiet empty"}>${error ? error.message : "…"}</p></section>`;
  const fired = one.count === null ? count(one.fired) : `${count(one.fired)} of ${count(one.count)}`;
  const facts = [["Fires", timing(one)], ["Next", html`<${Next} one=${one} />`], ["Newest firing", one.last_ms === null ? "–" : html`<a href=${link(topic, "schedules", { ...query, message: `${name}@${one.last_ms}` })}><${When} ms=${one.last_ms} /></a>`], ["Fired", fired]];
  facts.push(["Missed times", { one: "one firing", skip: "left out", all: "all fired" }[one.catch_up]], ["Overlap", one.overlap === "skip" ? "left out" : "allowed"]);
  if (one.jitter) facts.push(["Jitter", shortly(one.jitter)]);
  if (one.start_ms !== null) facts.push(["Not before", html`<${When} ms=${one.start_ms} plain />`]);
  if (one.end_ms !== null) facts.push(["Not after", html`<${When} ms=${one.end_ms} plain />`]);
  return html`<section class="panel" id="schedule"><div class="row"><h3>${name}</h3>
      <span class="actions"><button type="button" onclick=${() => trigger(topic, name, done)}>Trigger</button>
        <button type="button" onclick=${() => setPaused(topic, one, done)}>${one.paused ? "Resume" : "Pause"}</button>
        ${one.body_base64 === undefined && html`<button type="button" onclick=${() => putSchedule(topic, one, done)}>Change</button>`}
        <button type="button" class="danger" onclick=${() => remove(topic, name, () => (close(), changed()))}>Delete</button>
        <button type="button" class="icon" aria-label="Close" onclick=${close}>✕</button></span></div>
    <dl class="facts">${facts.map(([label, value]) => html`<div><dt>${label}</dt><dd>${value}</dd></div>`)}</dl>
    <h4>Next times${one.paused && one.ended_ms === null ? ", if it was resumed now" : ""} <span class="quiet">as clocks show them in ${zoneHere()}</span></h4>
    ${coming && coming.next_ms.length ? html`<ol class="times">${coming.next_ms.map((ms) => html`<li key=${ms}><time datetime=${new Date(ms).toISOString()}>${clock(ms)}</time> <span class="quiet">${distance(ms, serverNow())}</span></li>`)}</ol>` : html`<p class="quiet">${coming ? "None." : "…"}</p>`}
    <h4>Body</h4><pre>${one.body_base64 === undefined ? JSON.stringify(one.body, null, 2) : preview(one)}</pre></section>`;
}

export function Schedules({ topic, query, reload, total }) {
  const pages = usePages(at(topic, "schedules"), {}, "schedules");
  const rows = (pages.page ? pages.page.messages : []).map((one) => ({ ...one, id: one.name }));
  const changed = () => (pages.reload(), reload());
  const opened = (name) => (changed(), replaceQuery({ ...query, schedule: name }));
  const columns = [
    ["Name"],
    ["Fires", timing],
    ["Next", (one) => html`<${Next} one=${one} />`],
    ["Newest firing", (one) => html`<${When} ms=${one.last_ms} />`, "wide"],
    ["Fired", (one) => count(one.fired), "n wide"],
    ["Body", (one) => html`<code class="preview">${preview(one)}</code>`, "wide body"],
  ];
  return html`<div class="row"><span class="quiet">A schedule puts a message at each of its times, under the id NAME@TIME.</span><span class="actions"><button type="button" onclick=${() => putSchedule(topic, {}, opened)}>Put a schedule</button></span></div>
    ${query.schedule && html`<${Details} key=${query.schedule} topic=${topic} name=${query.schedule} query=${query} changed=${changed} />`}
    <section class="panel list">
      ${pages.error && html`<p class="warning">${pages.error.message}</p>`}
      ${pages.page && html`<${Table} rows=${rows} columns=${columns} selection=${null} opened=${query.schedule} keyOf=${(one) => one.name} to=${(one) => link(topic, "schedules", { ...query, schedule: one.name })} empty="No schedule yet." />`}
      <${Pager} pages=${pages} />
      <p class="quiet">${count(total)} in all.</p>
    </section>`;
}
