// The first view: the whole server in cards, what needs attention, charts, and the topics; with a text in the search field, the
// topics whose names contain it and the messages that have it as their id.

import { bytes, call, count, short, span } from "./common.js";
import { useEffect, useState } from "./standalone.module.js";
import { State, When, html, link, plural, store, usePoll } from "./ui.js";
import { History, Meter } from "./charts.js";

const KEEP = 30; // looks: a minute
const REFUSALS = { RATE_LIMITED: "429: above their rate", OVERLOADED: "429: overloaded", DISK_FULL: "507: the disk is full" };
const looks = []; // {at, whole totals, totals by topic, lateness, rejected}

export function remember(status) {
  const topics = Object.fromEntries(status.topics.map((topic) => [topic.topic, topic.totals]));
  looks.push({ at: status.now_ms, whole: status.totals, topics, late: status.lateness, rejected: status.rejected });
  if (looks.length > KEEP) looks.shift();
}

// Rates are differences of two looks, a few seconds apart.
export function rate(topic, key) {
  const last = looks[looks.length - 1];
  const before = looks[Math.max(0, looks.length - 4)];
  if (!last || last === before) return null;
  const [now, then] = topic === null ? [last.whole, before.whole] : [last.topics[topic], before.topics[topic]];
  if (!now || !then || now[key] < then[key]) return null;
  return (now[key] - then[key]) / ((last.at - before.at) / 1000);
}

const perSecond = (n) => (n === null ? "–" : `${short(n)}/s`);

function quantile(bounds, counts, q) {
  const wanted = q * counts.reduce((a, b) => a + b, 0);
  let seen = 0;
  for (let i = 0; wanted && i < bounds.length; i++) {
    const low = i ? bounds[i - 1] : 0;
    if (seen + counts[i] >= wanted) return low + ((bounds[i] - low) * (wanted - seen)) / counts[i];
    seen += counts[i];
  }
  return wanted ? bounds[bounds.length - 1] : null;
}

// Of the last minute; if nothing came due in it, since the start.
function lateness(kind) {
  const [first, last] = [looks[0].late, looks[looks.length - 1].late];
  const fresh = last[kind].map((n, i) => n - first[kind][i]);
  const counts = fresh.some((n) => n > 0) && fresh.every((n) => n >= 0) ? fresh : last[kind];
  return [quantile(last.bounds_ms, counts, 0.5), quantile(last.bounds_ms, counts, 0.99)];
}

// Requests refused in the last minute, by code.
function refusals() {
  const [first, last] = [looks[0].rejected, looks[looks.length - 1].rejected];
  return Object.keys(REFUSALS).map((code) => [code, (last[code] || 0) - (first[code] || 0)]).filter(([, n]) => n > 0);
}

const memoryIsLow = (status) => status.memory_total_bytes !== null && status.memory_free_bytes < 0.05 * status.memory_total_bytes;
export const diskIsLow = (status) => status.disk_bytes !== null && (status.disk_free_bytes < 0.05 * status.disk_bytes || status.disk_free_bytes < 1 << 30);

const Card = ({ name, value, more, kind }) => html`<div class=${`card ${kind || ""}`}><div class="name">${name}</div><div class="value">${value}</div><div class="quiet">${more || "\u00a0"}</div></div>`;

function Cards({ status }) {
  const { states } = status;
  const [p50, p99] = lateness("scheduler");
  const [w50, w99] = lateness("consumer_wait");
  const low = diskIsLow(status);
  const disk = status.disk_bytes === null ? "" : html`<${Meter} used=${status.disk_bytes - status.disk_free_bytes} of=${status.disk_bytes} bad=${low} />`;
  const memory = status.memory_total_bytes === null ? "" : html`<${Meter} used=${status.memory_total_bytes - status.memory_free_bytes} of=${status.memory_total_bytes} bad=${memoryIsLow(status)} />`;
  return html`<section id="cards" class="cards" aria-label="The whole server">
    <${Card} name="Sleeping" value=${short(states.sleep)} more="not due yet" />
    <${Card} name="Ready" value=${short(states.ready)} more=${`${plural(status.long_polls, "consumer waits", "consumers wait")}`} />
    <${Card} name="In flight" value=${short(states.reserve)} more="under a lease" />
    <${Card} name="Dead" value=${short(states.dead)} more=${states.dead ? "need a look" : "none"} kind=${states.dead ? "bad" : ""} />
    <${Card} name="In" value=${perSecond(rate(null, "produced"))} more="put" />
    <${Card} name="Done" value=${perSecond(rate(null, "acked"))} more="acknowledged" />
    <${Card} name="Scheduler lateness" value=${span(p99)} more=${`p99; p50 ${span(p50)}`} kind=${p99 > 1000 ? "bad" : ""} />
    <${Card} name="Consumers' wait" value=${span(w99)} more=${`p99; p50 ${span(w50)}`} />
    <${Card} name="Free disk" value=${bytes(status.disk_free_bytes)} more=${html`${disk} ${bytes(status.bytes)} here`} kind=${low ? "bad" : ""} />
    <${Card} name="Memory" value=${bytes(status.memory_bytes)} more=${html`${memory} ${bytes(status.memory_free_bytes)} free`} kind=${memoryIsLow(status) ? "bad" : ""} />
  </section>`;
}

function Warnings({ status }) {
  const said = status.damage.map((one) => [`Damage in ${one.topic}`, `${one.file}, ${count(one.length)} bytes at ${count(one.position)}: ${one.reason}. They are left out; the rest is served.`]);
  for (const topic of status.topics) if (topic.trouble) said.push([topic.topic, topic.trouble]);
  if (diskIsLow(status)) said.push(["The disk is nearly full", `${bytes(status.disk_free_bytes)} of ${bytes(status.disk_bytes)} are free. When nothing is left, puts are refused (507); consumers go on.`]);
  if (memoryIsLow(status)) said.push(["The memory is nearly used up", `${bytes(status.memory_free_bytes)} of ${bytes(status.memory_total_bytes)} are free on the server's machine, or in its container; the server has ${bytes(status.memory_bytes)}. When nothing is left, the system ends programs.`]);
  for (const [code, n] of refusals()) said.push([`${plural(n, "request")} refused in the last minute`, `${REFUSALS[code]} (${code})`]);
  return html`<section id="warnings" aria-live="polite">${said.map(([title, text]) => html`<p class="warning"><strong>${title}:</strong> ${text}</p>`)}</section>`;
}

const Number_ = ({ n, kind }) => html`<td class=${`n ${kind || ""} ${n ? "" : "zero"}`} title=${count(n)}>${short(n)}</td>`;
const COLUMNS = [["Sleeping"], ["Ready"], ["In flight"], ["Done", "wide"], ["Dead"], ["In/s", "wide"], ["Done/s", "wide"], ["Next due", "wide"], ["On disk", "wide"]];

function Row({ topic, now }) {
  const { states } = topic;
  const next = topic.next_due_ms === null ? "–" : topic.next_due_ms <= now ? "now" : `in ${span(topic.next_due_ms - now)}`;
  return html`<tr data-topic=${topic.topic}>
    <th scope="row"><a href=${link(topic.topic)}>${topic.topic}</a>${topic.trouble && html`<span class="pill bad" title=${topic.trouble}>trouble</span>`}</th>
    <${Number_} n=${states.sleep} /><${Number_} n=${states.ready} /><${Number_} n=${states.reserve} /><${Number_} n=${states.history} kind="wide" />
    <td class=${`n ${states.dead ? "bad" : "zero"}`} title=${count(states.dead)}>${states.dead ? html`<a href=${link(topic.topic, "dead")}>${short(states.dead)}</a>` : 0}</td>
    ${["produced", "acked"].map((key) => html`<td class=${`n wide ${rate(topic.topic, key) ? "" : "zero"}`}>${short(rate(topic.topic, key))}</td>`)}
    <td class="n wide">${next}</td><td class="n wide">${bytes(topic.bytes)}</td>
  </tr>`;
}

// Arrow keys move between the links of a list.
export function moveInList(event) {
  const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  if (!step || !event.target.closest("tbody, .results")) return;
  const all = [...event.currentTarget.querySelectorAll("tbody th a, .results a")];
  const here = all.findIndex((one) => one === event.target || (event.target.closest("tr") && event.target.closest("tr").contains(one)));
  const next = all[here + step];
  event.preventDefault();
  if (next) next.focus();
  else if (step < 0) document.getElementById("search").focus();
}

function Topics({ shown, query }) {
  const first = `curl --json '{"body": "hello", "delay": 5}' ${new URL("v1/topics/hello/messages", location.href)}`;
  const empty = query ? html`No topic matches “${query}”.` : html`No topic yet. The first message makes one: <code>${first}</code>`;
  const some = shown.topics.length < shown.topics_total ? `the ${shown.topics.length} busiest of ${count(shown.topics_total)}` : plural(shown.topics_total, "topic");
  return html`<section class="panel" onkeydown=${moveInList}>
    <div class="row"><h2>Topics</h2><span id="shown" class="quiet">${query ? `${some} with “${query}”` : some}</span></div>
    <div class="scroll"><table id="topics">
      <thead><tr><th scope="col">Topic</th>${COLUMNS.map(([name, kind]) => html`<th scope="col" class=${`n ${kind || ""}`}>${name}</th>`)}</tr></thead>
      <tbody>${shown.topics.length ? shown.topics.map((topic) => html`<${Row} key=${topic.topic} topic=${topic} now=${shown.now_ms} />`) : html`<tr><td colspan="10" class="quiet empty">${empty}</td></tr>`}</tbody>
    </table></div>
  </section>`;
}

function Tenants() {
  const [found] = usePoll(() => call("v1/tenants"), [], 4000);
  if (!found) return null;
  const columns = ["Weight", "In", "Out", "In flight", "Held", "Refused"];
  const sum = (counts) => Object.values(counts).reduce((a, b) => a + b, 0);
  const most = (n, limit) => (limit ? `${short(n)} of ${short(limit)}` : short(n));
  return html`<section class="panel">
    <div class="row"><h2>Tenants</h2><span class="quiet">shares of the server, since its start</span></div>
    <div class="scroll"><table id="tenants">
      <thead><tr><th scope="col">Tenant</th>${columns.map((name) => html`<th scope="col" class="n">${name}</th>`)}</tr></thead>
      <tbody>${found.tenants.map((one) => html`<tr key=${one.name}>
        <th scope="row" title=${one.topics.join(", ")}>${one.name}</th><td class="n">${one.weight}</td>
        <${Number_} n=${one.produced} /><${Number_} n=${one.delivered} />
        <td class="n">${most(one.in_flight, one.max_in_flight)}</td><td class="n">${bytes(one.held_bytes)}</td>
        <td class=${`n ${sum(one.refused) ? "bad" : "zero"}`} title=${Object.entries(one.refused).map(([limit, n]) => `${limit}: ${n}`).join(", ")}>${short(sum(one.refused))}</td>
      </tr>`)}</tbody>
    </table></div>
  </section>`;
}

// The text for which Enter was pressed before it was found: if it is the id of one message, that opens.
export const entered = store("");

function Found({ id }) {
  const [found, error] = usePoll(() => call(`v1/find?id=${encodeURIComponent(id)}`), [id], 5000);
  const only = found && found.found.length === 1 && entered.get() === id ? found.found[0] : null;
  useEffect(() => {
    if (!only) return;
    entered.set("");
    location.hash = link(only.topic, "overview", { message: only.id });
  }, [only]);
  if (!found && !error) return html`<section id="found" class="panel"><p class="quiet">Looking for a message “${id}” in all topics …</p></section>`;
  if (error || !found.found.length) return html`<section id="found" class="panel"><p class="quiet">${error && error.status !== 400 ? error.message : `No message has the id “${id}”.`}</p></section>`;
  return html`<section id="found" class="panel" onkeydown=${moveInList}>
    <div class="row"><h2>${plural(found.found.length, "message")} with this id</h2></div>
    <ul class="results">${found.found.map((one) => html`<li key=${one.topic}><a href=${link(one.topic, "overview", { message: one.id })}><strong>${one.id}</strong> in ${one.topic}</a> <${State} of=${one.state} /> ${one.next_ms === null ? html`<${When} ms=${one.due_ms} />` : html`next attempt <${When} ms=${one.next_ms} />`}</li>`)}</ul>
  </section>`;
}

// A text, once it has not changed for a moment.
function useSettled(text, ms) {
  const [settled, setSettled] = useState(text);
  useEffect(() => {
    const timer = setTimeout(() => setSettled(text), ms);
    return () => clearTimeout(timer);
  }, [text]);
  return settled;
}

export function Overview({ status, query }) {
  const wanted = useSettled(query, 200);
  const [filtered] = usePoll(() => (wanted ? call(`v1/status?limit=100&q=${encodeURIComponent(wanted)}`) : Promise.resolve(null)), [wanted], 4000);
  if (!status) return html`<main></main>`;
  const shown = query && wanted ? filtered : status;
  return html`<main>
    <${Warnings} status=${status} />
    ${query && wanted && html`<${Found} id=${wanted} />`}
    <${Cards} status=${status} />
    ${shown && html`<${Topics} shown=${shown} query=${query && wanted} />`}
    ${!query && status.tenants > 0 && html`<${Tenants} />`}
    ${!query && html`<${History} topic=${null} />`}
  </main>`;
}
