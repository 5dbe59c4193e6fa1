// One message in a drawer: body, headers, attempts, timeline and groups, and what can be done with it. A click on an entry of the
// timeline shows the message as it was then.

import { bytes, call, count, span } from "./common.js";
import { useLayoutEffect, useRef, useState } from "./standalone.module.js";
import { Copy, State, When, at, headline, html, operations, serverNow, usePoll } from "./ui.js";
import { cancelMessage, deleteLetters, editBody, putMessage, requeue, reschedule, retryNow } from "./actions.js";
import { bytesOf } from "./message_list.js";

const HEX_MAX = 512;

function hex(data) {
  const lines = [];
  for (let i = 0; i < Math.min(data.length, HEX_MAX); i += 16) {
    const part = [...data.slice(i, i + 16)];
    const codes = part.map((n) => n.toString(16).padStart(2, "0")).join(" ").padEnd(47);
    lines.push(`${i.toString(16).padStart(6, "0")}  ${codes}  ${part.map((n) => (n > 31 && n < 127 ? String.fromCharCode(n) : ".")).join("")}`);
  }
  return lines.join("\n") + (data.length > HEX_MAX ? `\n… ${count(data.length - HEX_MAX)} more bytes` : "");
}

function Body({ message }) {
  if (message.body_base64 !== undefined) {
    const data = bytesOf(message.body_base64);
    return html`<section><h3>Body <span class="quiet">${count(data.length)} bytes, no JSON</span> <${Copy} text=${message.body_base64} label="the body as base64" /></h3><pre class="hex">${hex(data) || "(empty)"}</pre></section>`;
  }
  const text = JSON.stringify(message.body, null, 2);
  return html`<section><h3>Body <span class="quiet">${bytes(new Blob([JSON.stringify(message.body)]).size)} of JSON</span> <${Copy} text=${text} label="the body" /></h3><pre>${text}</pre></section>`;
}

const Headers = ({ headers }) =>
  Object.keys(headers || {}).length > 0 &&
  html`<section><h3>Headers</h3><table class="pairs"><tbody>${Object.entries(headers).map(([name, value]) => html`<tr><th scope="row">${name}</th><td>${value}</td></tr>`)}</tbody></table></section>`;

const OUTCOMES = { acked: "good", failed: "bad", dead: "bad", expired: "bad" };

function Attempts({ attempts }) {
  if (!attempts || !attempts.length) return null;
  const newest = new Map(attempts.map((one) => [one.group, one])); // an earlier one has been followed already
  return html`<section id="attempts"><h3>Attempts</h3><ol class="attempts">${attempts.map((one) => html`<li class=${OUTCOMES[one.outcome] || ""}>
    <div><strong>Attempt ${one.attempt}</strong> <span class=${`pill ${OUTCOMES[one.outcome] || ""}`}>${one.outcome || "under way"}</span> <span class="quiet">${one.group}${one.consumer ? `, ${one.consumer}` : ""}</span></div>
    <div class="quiet"><${When} ms=${one.reserved_ms} plain />${one.ended_ms && one.reserved_ms ? `, ${span(one.ended_ms - one.reserved_ms)}` : ""}${one.next_ms && newest.get(one.group) === one ? html`; next <${When} ms=${one.next_ms} />` : ""}</div>
    ${one.error && html`<pre class="error">${one.error}</pre>`}</li>`)}</ol></section>`;
}

const Timeline = ({ moments, lookAt }) =>
  html`<section id="timeline"><h3>Timeline</h3><ol class="timeline">${moments.map((one) => html`<li class=${one.event}>${one.at_ms > serverNow() ? html`<strong>${one.event}</strong>` : html`<button type="button" title="Show the message as it was then" onclick=${() => lookAt(one.at_ms)}>${one.event}</button>`}${one.group && html` <span class="quiet">${one.group}</span>`}<div class="quiet"><${When} ms=${one.at_ms} /></div>${one.detail && html`<div class="detail">${headline(one.detail)}</div>`}</li>`)}</ol></section>`;

const LABELS = { attempt: "attempts", consumer: "consumer", lease_until_ms: "lease until", due_ms: "due", next_ms: "next attempt", settled_ms: "done", dropped_ms: "died", error: "error" };

function fact(name, value) {
  if (name === "error") return html`<pre class="error">${value}</pre>`;
  return name.endsWith("_ms") ? html`<${When} ms=${value} />` : typeof value === "object" ? JSON.stringify(value) : String(value);
}

// A group that begins after a message counts it as done, but never had it.
const NOT_SEEN = "not seen";
const stateIn = ({ state, summary }) => (state === "history" && summary && summary.startsWith(NOT_SEEN) ? NOT_SEEN : state);

const ORDER = ["dead", "reserve", "ready", "sleep", "history", "cancelled"];
const byState = (groups) => Object.entries(groups).sort(([, a], [, b]) => ORDER.indexOf(a.state) - ORDER.indexOf(b.state));

// A message has a state in each group: all that differ are named.
const States = ({ message }) => [...new Set(Object.keys(message.groups).length ? byState(message.groups).map(([, one]) => stateIn(one)).filter((state, i, all) => state !== NOT_SEEN || all.length === 1) : [message.state])].map((state) => html`<${State} key=${state} of=${state} />`);

function GroupStates({ groups, buttons }) {
  if (!Object.keys(groups).length) return null;
  return html`<section id="groups-of-message"><h3>Groups</h3>${byState(groups).map(([name, { state, summary, ...rest }]) => html`<div class="group-state" data-group=${name} key=${name}>
    <div class="row"><strong>${name}</strong><${State} of=${stateIn({ state, summary })} /><span class="quiet summary">${summary}</span><span class="actions">${buttons(name, state, rest)}</span></div>
    <dl>${Object.entries(rest).filter(([key, value]) => value !== null && value !== "" && !(key === "attempt" && !value)).map(([key, value]) => html`<div class=${key}><dt>${LABELS[key] || key.replace(/_ms$/, "").replaceAll("_", " ")}</dt><dd>${fact(key, value)}</dd></div>`)}</dl>
  </div>`)}</section>`;
}

function Facts({ message }) {
  const facts = [["Due", html`<${When} ms=${message.due_ms} />`], ["Created", html`<${When} ms=${message.created_ms} />`], ["Attempts", count(message.attempt)], ["Priority", message.priority]];
  if (message.ttr) facts.push(["Time to run", `${message.ttr} s`]);
  if (message.expires_ms) facts.push(["Expires", html`<${When} ms=${message.expires_ms} />`]);
  return html`<dl class="facts">${facts.map(([name, value]) => html`<div><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>`;
}

export function MessageDrawer({ topic, id, close, changed }) {
  const [moment, lookAt] = useState(null);
  const [message, error, reload] = usePoll(() => call(at(topic, "messages", id) + (moment === null ? "" : `?at_ms=${moment}`)), [topic, id, moment], moment === null ? 3000 : 600_000);
  const known = operations.use();
  const heading = useRef(null);
  const [opener] = useState(() => document.activeElement);
  const leave = () => {
    close();
    if (opener && opener.isConnected) opener.focus();
  };
  useLayoutEffect(() => heading.current.focus(), []);
  useLayoutEffect(() => {
    const keys = (event) => event.key === "Escape" && !document.querySelector("dialog[open]") && leave();
    addEventListener("keydown", keys);
    return () => removeEventListener("keydown", keys);
  });
  const done = () => (reload(), changed());
  const canRetry = known.has("POST /v1/topics/{topic}/messages/{id}/retry");
  const buttons = (group, state, rest) => moment === null && [
    canRetry && (state === "dead" || ((state === "sleep" || state === "ready") && rest.attempt > 0)) && html`<button type="button" class="primary" onclick=${() => retryNow(topic, id, group, done)}>Retry now</button>`,
    state === "dead" && html`<button type="button" class=${canRetry ? "" : "primary"} onclick=${() => requeue(topic, { ids: [id], group }, `Requeue ${id}?`, done)}>Requeue</button>`,
    state === "dead" && html`<button type="button" class="danger" onclick=${() => deleteLetters(topic, { ids: [id], group }, `Delete the dead letter ${id}?`, done)}>Delete</button>`,
  ];
  const asleep = message && message.state === "sleep";
  const copy = () => putMessage(topic, { body: JSON.stringify(message.body, null, 2), priority: message.priority }, done);
  return html`<aside class="drawer" aria-labelledby="drawer-title">
    <div class="drawer-head"><div><p class="crumbs">${topic}</p><h2 id="drawer-title" tabindex="-1" ref=${heading}>${id} <${Copy} text=${id} label="the id" /></h2></div>
      ${message && html`<${States} message=${message} />`}<button type="button" class="icon" aria-label="Close" title="Close (Escape)" onclick=${leave}>✕</button></div>
    ${moment !== null && html`<p class="moment row" role="status">As it was at <${When} ms=${moment} plain /> <button type="button" onclick=${() => lookAt(null)}>Back to now</button></p>`}
    ${error && html`<p class="warning">${error.message}</p>`}
    ${message && html`<div class="drawer-body">
      ${moment === null && html`<div class="row actions-of-message">
        ${asleep && html`<button type="button" onclick=${() => reschedule(topic, id, message.due_ms, done)}>Reschedule</button>`}
        ${asleep && message.body !== undefined && html`<button type="button" onclick=${() => editBody(topic, id, message.body, done)}>Edit body</button>`}
        ${message.body !== undefined && html`<button type="button" onclick=${copy}>Put a copy</button>`}
        ${["sleep", "ready"].includes(message.state) && html`<button type="button" class="danger" onclick=${() => cancelMessage(topic, id, done)}>Cancel</button>`}
      </div>`}
      <${Facts} message=${message} />
      <${GroupStates} groups=${message.groups} buttons=${buttons} />
      <${Attempts} attempts=${message.attempts} />
      <${Body} message=${message} /><${Headers} headers=${message.headers} /><${Timeline} moments=${message.timeline} lookAt=${lookAt} />
    </div>`}
  </aside>`;
}
