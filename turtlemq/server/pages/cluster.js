// The page of the cluster: asks for the topology and the leader's view of all copies every two seconds, and draws them.

import { byId, bytes, call, card, count, el, head, say, serving, span, sure, theme, tokenForm } from "./common.js";

const EVERY_MS = 2000;
let busy = false;

const cell = (text, kind) => el("td", { class: kind || "" }, text);
const asking = () => document.querySelector("button.asking");

async function act(path, body, method) {
  try {
    await call(path, body, method);
  } catch (error) {
    byId("warnings").replaceChildren(el("p", { class: "warning" }, error.message));
    return;
  }
  await look();
}

function progress(made) {
  if (!made) return "";
  const part = made.bytes_total ? made.bytes_done / made.bytes_total : 0;
  return [el("progress", { max: 1, value: part }), ` ${bytes(made.bytes_done)} of ${bytes(made.bytes_total)}`];
}

function drawCards(topology, shards) {
  const places = topology.leaders;
  const led = places.filter((place) => place.node !== null).length;
  const least = Math.min(...places.map((place) => place.isr.length));
  const others = shards.flatMap((shard) => shard.copies.slice(1));
  const lag = Math.max(0, ...others.map((copy) => copy.lag_s));
  const made = others.filter((copy) => copy.copying);
  const done = made.reduce((sum, copy) => sum + copy.copying.bytes_done, 0);
  const total = made.reduce((sum, copy) => sum + copy.copying.bytes_total, 0);
  byId("cards").replaceChildren(
    card("nodes", count(Object.keys(topology.nodes).length), `${topology.replicas} copies wanted`),
    card("leader", places.map((place) => place.node || "none").join(", "), places.map((place) => `epoch ${place.epoch}`).join(", "), led < places.length ? "bad" : ""),
    card("in sync", `${least} of ${topology.replicas}`, `at least ${topology.min_isr} to write`, least < topology.replicas ? "bad" : ""),
    card("largest lag", span(lag * 1000), "of a copy", lag > 1 ? "bad" : ""),
    card("being copied", made.length ? `${Math.floor(total ? (100 * done) / total : 0)} %` : "–", made.length ? `${bytes(done)} of ${bytes(total)}` : "no copy"),
  );
}

function drawCopies(topology, shards) {
  const rows = shards.flatMap((shard) =>
    shard.copies.map((copy, i) =>
      el(
        "tr",
        { "data-node": copy.node },
        el("th", { scope: "row" }, copy.node, i ? null : el("span", { class: "pill" }, "leader")),
        cell(String(shard.shard), "n"),
        cell(copy.state, copy.state === "away" ? "bad" : ""),
        cell(copy.in_sync ? "yes" : "no", copy.in_sync ? "" : "bad"),
        cell(count(copy.lsn), "n"),
        cell(bytes(copy.lag_bytes), "n"),
        cell(span(copy.lag_s * 1000), `n ${copy.lag_s > 1 ? "bad" : ""}`),
        cell(copy.clock_skew_ms === null ? "–" : `${copy.clock_skew_ms > 0 ? "+" : ""}${copy.clock_skew_ms} ms`, "n"),
        el("td", {}, progress(copy.copying)),
        el("td", {}, copy.state === "in sync" ? sure("Let it lead", `Let ${copy.node} lead?`, () => act(`/v1/cluster/shards/${shard.shard}/handover`, { to: copy.node })) : null),
      ),
    ),
  );
  const missing = topology.leaders.filter((place) => !shards.some((shard) => shard.shard === place.shard));
  const lines = missing.map((place) => el("tr", {}, el("td", { colspan: 10, class: "bad" }, `Shard ${place.shard} has no leader. In sync: ${place.isr.join(", ") || "none"}.`)));
  byId("copies").replaceChildren(head("node", "#shard", "state", "in sync", "#record", "#lag", "#behind for", "#clock", "copied", ""), el("tbody", {}, rows, lines));
}

function drawNodes(topology) {
  const rows = Object.entries(topology.nodes).map(([name, node]) => {
    const path = `/v1/cluster/nodes/${encodeURIComponent(name)}/drain`;
    const leads = topology.leaders.filter((place) => place.node === name).map((place) => place.shard);
    const button = node.drain ? sure("Undrain", `Let ${name} lead again?`, () => act(path, undefined, "DELETE")) : sure("Drain", `Let ${name} lead nothing?`, () => act(path, {}));
    return el(
      "tr",
      { "data-node": name },
      el("th", { scope: "row" }, el("a", { href: `${node.url}/cluster` }, name), node.drain ? el("span", { class: "pill bad" }, "drained") : null),
      cell(leads.length ? `shard ${leads.join(", ")}` : "–"),
      cell(node.zone || "–"),
      cell(node.version || "–"),
      cell(bytes(node.free_bytes), "n"),
      el("td", {}, button),
    );
  });
  const wanted = [...new Set(topology.leaders.flatMap((place) => place.want))].filter((name) => !topology.nodes[name]);
  const gone = wanted.map((name) => el("tr", { "data-node": name }, el("th", { scope: "row" }, name, el("span", { class: "pill bad" }, "gone")), el("td", { colspan: 5, class: "bad" }, "its supervisor is not there")));
  byId("nodes").replaceChildren(head("node", "leads", "zone", "version", "#free disk", ""), el("tbody", {}, rows, gone));
}

function warnings(topology, own, shards) {
  const said = [...(topology.problems || [])];
  for (const place of topology.leaders) {
    if (place.node === null) said.push(`Shard ${place.shard} has no leader.`);
    else if (place.isr.length < topology.replicas) said.push(`Shard ${place.shard}: ${place.isr.length} of ${topology.replicas} copies are in sync.`);
  }
  for (const shard of shards) for (const copy of shard.copies) if (copy.in_sync && copy.lag_s > 1) said.push(`The copy of ${copy.node} is behind by ${bytes(copy.lag_bytes)}.`);
  if (!own.name_server) said.push("The name server does not answer this node.");
  if (own.why) said.push(`${own.node}: ${own.why}`);
  byId("warnings").replaceChildren(...said.map((text) => el("p", { class: "warning" }, text)));
}

// A shard without a leader is missing in the answer.
async function leaderViews(topology) {
  const led = topology.leaders.filter((place) => place.node !== null);
  const views = await Promise.allSettled(led.map((place) => call(`/v1/cluster/shards/${place.shard}`)));
  return views.filter((view) => view.status === "fulfilled").map((view) => view.value);
}

async function look() {
  if (busy || asking()) return;
  busy = true;
  try {
    const own = await call("/v1/cluster/replica");
    byId("single").hidden = own.role !== "single";
    byId("cluster").hidden = own.role === "single";
    byId("node").textContent = own.node || "this server";
    if (own.role !== "single") {
      const topology = await call("/v1/cluster");
      const shards = await leaderViews(topology);
      byId("name").textContent = `${topology.cluster}, revision ${topology.revision}`;
      byId("foot").textContent = `It is a ${own.role}${own.state ? `: ${own.state}` : ""}.`;
      warnings(topology, own, shards);
      drawCards(topology, shards);
      drawCopies(topology, shards);
      drawNodes(topology);
    }
    serving();
  } catch (error) {
    say(error);
  } finally {
    busy = false;
  }
}

theme(byId("theme"));
tokenForm(look);
setInterval(() => document.hidden || look(), EVERY_MS);
look();
