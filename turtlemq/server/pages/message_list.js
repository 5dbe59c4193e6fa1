// A page of messages in one state, with filters in the address, pages by cursor, a selection that live updates keep, and keys.

import { call, count } from "./common.js";
import { useEffect, useRef, useState } from "./standalone.module.js";
import { State, When, act, ask, at, fromLocal, html, link, plural, replaceQuery, toLocal, usePoll } from "./ui.js";
import { moveInList } from "./overview.js";

const PAGE = 50;
const STEPS = 5; // pages without a match that are passed over before the user is asked

export function preview(message) {
  if (message.body_base64 !== undefined) return `${bytesOf(message.body_base64).length} bytes`;
  const text = JSON.stringify(message.body);
  return text.length > 160 ? `${text.slice(0, 160)}…` : text;
}

export const bytesOf = (base64) => Uint8Array.from(atob(base64), (one) => one.charCodeAt(0));

// Filters write themselves into the address, so that a view can be shared.
export function Filters({ query, about, children }) {
  const change = (name, value) => replaceQuery({ ...query, [name]: value, message: undefined });
  const [prefix, setPrefix] = useState(query.prefix || "");
  const field = useRef(null);
  useEffect(() => {
    if (document.activeElement !== field.current) setPrefix(query.prefix || "");
  }, [query.prefix]);
  useEffect(() => {
    const timer = setTimeout(() => prefix.trim() !== (query.prefix || "") && change("prefix", prefix.trim()), 300);
    return () => clearTimeout(timer);
  }, [prefix]);
  const times = [["from", `${about} from`], ["to", `${about} to`]];
  const isFiltered = query.prefix || query.from || query.to || query.error !== undefined || query.group;
  const [open] = useState(() => isFiltered || matchMedia("(min-width: 721px)").matches); // a phone has room for the list first
  return html`<details open=${open}><summary>Filters</summary><form class="filters" role="search" aria-label="Filters" onsubmit=${(event) => event.preventDefault()}>
    <label>Id begins with <input name="prefix" ref=${field} type="search" value=${prefix} oninput=${(event) => setPrefix(event.target.value)} autocomplete="off" spellcheck=${false} /></label>
    ${times.map(([name, text]) => html`<label>${text} <input name=${name} type="datetime-local" step="1" value=${toLocal(Number(query[name]))} onchange=${(event) => change(name, fromLocal(event.target.value))} /></label>`)}
    ${children}
    ${isFiltered && html`<button type="button" onclick=${() => (setPrefix(""), replaceQuery({ message: query.message }))}>Clear filters</button>`}
  </form></details>`;
}

// Pages of a listing: the present one is looked at again every few seconds, under the same cursor.
export function usePages(path, filters, items = "messages") {
  const key = JSON.stringify([path, filters]);
  const [place, setPlace] = useState({ key, cursors: [""] });
  const cursors = place.key === key ? place.cursors : [""];
  const ask_ = async () => {
    let cursor = cursors[cursors.length - 1];
    const messages = [];
    for (let step = 0; step < STEPS; step++) {
      const given = Object.entries({ ...filters, limit: PAGE - messages.length, cursor }).filter(([, value]) => value !== undefined && value !== "");
      const page = await call(`${path}?${new URLSearchParams(given)}`);
      messages.push(...page[items]);
      cursor = page.cursor;
      if (cursor === null || messages.length >= PAGE) break;
    }
    return { messages, cursor };
  };
  const [page, error, reload] = usePoll(ask_, [key, cursors], 4000);
  const go = (next) => setPlace({ key, cursors: next });
  return { page, error, reload, number: cursors.length, next: page && page.cursor !== null ? () => go([...cursors, page.cursor]) : null, previous: cursors.length > 1 ? () => go(cursors.slice(0, -1)) : null };
}

export function Pager({ pages }) {
  return html`<div class="row pager">
    <button type="button" disabled=${!pages.previous} onclick=${pages.previous}>← Previous</button>
    <span class="quiet">page ${pages.number}</span>
    <button type="button" disabled=${!pages.next} onclick=${pages.next}>${pages.page && !pages.page.messages.length && pages.next ? "Look further →" : "Next →"}</button>
  </div>`;
}

// The selection: keys of rows; rows that are gone leave it.
export function useSelection(rows, keyOf) {
  const [chosen, setChosen] = useState(new Set());
  const present = new Set(rows.map(keyOf));
  const kept = rows.filter((row) => chosen.has(keyOf(row)));
  const toggle = (key) => setChosen((old) => new Set(old.has(key) ? [...old].filter((one) => one !== key) : [...old, key]));
  const all = () => setChosen(kept.length === rows.length ? new Set() : present);
  return { kept, has: (row) => chosen.has(keyOf(row)), toggle: (row) => toggle(keyOf(row)), all, clear: () => setChosen(new Set()) };
}

export const Check = ({ label, checked, change }) => html`<td class="check"><input type="checkbox" aria-label=${label} checked=${checked} onchange=${change} /></td>`;

export function Table({ rows, columns, selection, opened, keyOf, to, empty }) {
  const head = selection && html`<th class="check" scope="col"><input type="checkbox" aria-label="Select all of this page" checked=${rows.length > 0 && selection.kept.length === rows.length} onchange=${selection.all} /></th>`;
  const open = (row) => (event) => event.target.closest("a, input, button") || (location.hash = to(row));
  return html`<div class="scroll" onkeydown=${moveInList}><table class="messages">
    <thead><tr>${head}${columns.map(([name, , kind]) => html`<th scope="col" class=${kind || ""}>${name}</th>`)}</tr></thead>
    <tbody>${rows.length
      ? rows.map((row) => html`<tr key=${keyOf(row)} data-id=${row.id} class=${row.id === opened ? "chosen" : ""} onclick=${open(row)}>
          ${selection && html`<${Check} label=${`Select ${row.id}`} checked=${selection.has(row)} change=${() => selection.toggle(row)} />`}
          <th scope="row"><a href=${to(row)}>${row.id}</a></th>
          ${columns.slice(1).map(([, cell, kind]) => html`<td class=${kind || ""}>${cell(row)}</td>`)}
        </tr>`)
      : html`<tr><td class="quiet empty" colspan=${columns.length + 1}>${empty}</td></tr>`}</tbody>
  </table></div>`;
}

const EMPTY = { sleep: "No message sleeps.", ready: "No message is ready.", reserve: "No message is in flight.", history: "No message is done yet.", cancelled: "No message was cancelled." };

function columnsOf(state) {
  const note = (row) => html`${row.group && html`<${State} of=${row.state} note=${row.group} />`} ${row.priority !== "normal" && html`<span class="pill">${row.priority}</span>`}`;
  return [["Id"], [state === "sleep" ? "Due" : "Was due", (row) => html`<${When} ms=${row.due_ms} />`], ["Created", (row) => html`<${When} ms=${row.created_ms} plain />`, "wide"], ["", note, "wide"], ["Body", (row) => html`<code class="preview">${preview(row)}</code>`, "wide body"]];
}

export function Order({ query }) {
  const change = (event) => replaceQuery({ ...query, order: event.target.value === "oldest" ? "oldest" : undefined });
  return html`<label>Order <select name="order" value=${query.order === "oldest" ? "oldest" : "newest"} onchange=${change}><option value="newest">newest first</option><option value="oldest">oldest first</option></select></label>`;
}

export function MessageList({ topic, state, query, reload, total }) {
  const newest = state !== "sleep" && query.order !== "oldest";
  const filters = { state, from_ms: query.from, to_ms: query.to, prefix: query.prefix, newest: newest ? "true" : undefined };
  const pages = usePages(at(topic, "messages"), filters);
  const rows = pages.page ? pages.page.messages : [];
  const keyOf = (row) => `${row.group || ""}/${row.id}`;
  const selection = useSelection(rows, keyOf);
  const canCancel = state === "sleep" || state === "ready";
  const cancel = async () => {
    const ids = [...new Set(selection.kept.map((row) => row.id))];
    if (!(await ask({ title: `Cancel ${plural(ids.length, "message")}?`, text: "They will not be delivered. This cannot be undone.", confirm: "Cancel them", danger: true }))) return;
    const told = (answer) => [`${count(answer.cancelled)} cancelled`, Object.keys(answer.missed).length ? `not these: ${Object.entries(answer.missed).map(([id, why]) => `${id} (${why})`).join(", ")}` : ""];
    if (await act("Cancel", told, () => call(at(topic, "cancel"), { ids }))) selection.clear();
    pages.reload();
    reload();
  };
  const filtered = query.prefix || query.from || query.to;
  const none = pages.next ? "None so far: there is more to look through." : filtered ? "No message matches." : EMPTY[state];
  return html`<section class="panel list">
    <${Filters} query=${query} about="Due">${state !== "sleep" && html`<${Order} query=${query} />`}<//>
    ${canCancel && selection.kept.length > 0 && html`<div class="row selected"><strong>${plural(selection.kept.length, "message")} selected</strong><button type="button" class="danger" onclick=${cancel}>Cancel selected</button><button type="button" onclick=${selection.clear}>Clear</button></div>`}
    ${pages.error && html`<p class="warning">${pages.error.message}</p>`}
    ${pages.page && html`<${Table} rows=${rows} columns=${columnsOf(state)} selection=${canCancel ? selection : null} opened=${query.message} keyOf=${keyOf} to=${(row) => link(topic, state, { ...query, message: row.id })} empty=${none} />`}
    <${Pager} pages=${pages} />
    ${!filtered && total !== undefined && html`<p class="quiet">${count(total)} in all${state === "ready" || state === "history" ? ", over all groups" : ""}.</p>`}
  </section>`;
}
