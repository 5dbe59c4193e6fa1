// The clients to which the server delivers by itself: streams and callbacks, each with its share of the deliveries and its state.

import { call, count } from "./common.js";
import { When, at, html, usePoll } from "./ui.js";

const STATES = { active: "active", pending: "not confirmed", paused: "paused", failing: "failing", leaving: "leaving" };
const TRANSPORTS = { grpc: "gRPC stream", http: "callback" };

export function Clients({ topic }) {
  const [found, error] = usePoll(() => call(`${at(topic)}/clients`), [topic], 2000);
  if (!found) return html`<section class="panel"><p class=${error ? "warning" : "quiet empty"}>${error ? error.message : "…"}</p></section>`;
  const { clients } = found;
  if (!clients.length) return html`<section class="panel"><p class="quiet empty">No client is registered. A gRPC stream registers itself; a URL is registered with <code>turtlemq clients register</code>.</p></section>`;
  const all = clients.reduce((sum, one) => sum + one.unacked, 0);
  const row = (one) => html`<tr key=${`${one.group} ${one.client}`} data-client=${one.client}>
    <td>${one.group}</td><td title=${one.url || one.client}>${one.name || one.client}</td><td>${TRANSPORTS[one.transport]}</td>
    <td><span class="pill ${one.state === "active" ? "" : "bad"}" title=${one.last_error || null}>${STATES[one.state]}</span></td>
    <td><span class="meter"><i style=${{ width: `${Math.min(100, (100 * one.unacked) / Math.max(1, one.window))}%` }}></i></span> ${count(one.unacked)} of ${count(one.window)}</td>
    <td>${all ? `${Math.round((100 * one.unacked) / all)} %` : "–"}</td>
    <td><${When} ms=${one.beat_ms || one.since_ms} /></td></tr>`;
  return html`<section class="panel"><div class="scroll"><table id="clients">
    <thead><tr><th>Group</th><th>Client</th><th>Transport</th><th>State</th><th title="Deliveries without an ack, of those that it may have now.">Unacknowledged</th><th title="Of all deliveries without an ack.">Share</th><th>Last sign of life</th></tr></thead>
    <tbody>${clients.map(row)}</tbody></table></div></section>`;
}
