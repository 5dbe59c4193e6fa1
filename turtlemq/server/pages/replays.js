// Replays of a topic into other topics: those that run, with their progress, and the newest that have ended.

import { call, count } from "./common.js";
import { When, act, at, html, operations, usePoll } from "./ui.js";

const SHOWN = 5;

export function Replays({ topic }) {
  const known = operations.use().has("GET /v1/topics/{topic}/replays");
  const [found, , reload] = usePoll(() => (known ? call(at(topic, "replays")) : { replays: [] }), [topic, known], 2000);
  const rows = found ? found.replays.slice(-SHOWN).reverse() : [];
  if (!rows.length) return null;
  const cancel = async (one) => (await act("Cancel", () => `The replay into ${one.into} is ended`, () => call(at(topic, "replays", one.id), undefined, "DELETE"))) && reload();
  return html`<section class="panel"><h3>Replays</h3><div class="scroll"><table id="replays">
    <thead><tr><th>Into</th><th>State</th><th>Looked at</th><th>Copied</th><th>Begun</th><th></th></tr></thead>
    <tbody>${rows.map((one) => html`<tr key=${one.id} data-replay=${one.id}><td>${one.into}</td>
      <td><span class="pill ${["failed", "interrupted"].includes(one.state) ? "bad" : ""}" title=${one.error || null}>${one.state}</span></td>
      <td><span class="meter"><i style=${{ width: `${(100 * one.scanned) / Math.max(1, one.total)}%` }}></i></span> ${count(one.scanned)} of ${count(one.total)}</td>
      <td>${count(one.copied)}</td><td><${When} ms=${one.started_ms} /></td>
      <td>${one.state === "running" && html`<button type="button" class="danger" onclick=${() => cancel(one)}>Cancel</button>`}</td></tr>`)}</tbody></table></div></section>`;
}
