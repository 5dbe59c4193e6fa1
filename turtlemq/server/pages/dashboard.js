// The dashboard: asks /v1/status every two seconds and draws it; rates and lateness are differences of two looks.

import { byId, bytes, call, card, count, el, head, say, serving, short, span, sure, svg, theme, tokenForm } from "./common.js";

const EVERY_MS = 2000;
const KEEP = 30; // looks: a minute
const STATES = ["sleep", "ready", "reserve", "history", "dead", "cancelled"];
const SPANS = { "1 h": [1, 60], "24 h": [24, 1800], "7 days": [168, 10800], "90 days": [2160, 129600] };
const looks = []; // {at, totals by topic, lateness}
let chosen = decodeURIComponent(location.hash.slice(1));
let spanName = "24 h";
let busy = false;

// Figures

function quantile(bounds, counts, q) {
  const wanted = q * counts.reduce((a, b) => a + b, 0);
  if (!wanted) return null;
  let seen = 0;
  for (let i = 0; i < bounds.length; i++) {
    if (seen + counts[i] >= wanted) {
      const low = i ? bounds[i - 1] : 0;
      return low + ((bounds[i] - low) * (wanted - seen)) / counts[i];
    }
    seen += counts[i];
  }
  return bounds[bounds.length - 1];
}

// Lateness of the last minute; where nothing came due in it, since the start.
function lateness(now, then) {
  const out = {};
  for (const kind of ["scheduler", "consumer_wait"]) {
    const fresh = then ? now[kind].map((n, i) => n - then[kind][i]) : now[kind];
    const counts = fresh.some((n) => n > 0) && fresh.every((n) => n >= 0) ? fresh : now[kind];
    out[kind] = [quantile(now.bounds_ms, counts, 0.5), quantile(now.bounds_ms, counts, 0.99)];
  }
  return out;
}

function rate(topic, key) {
  if (looks.length < 2) return null;
  const last = looks[looks.length - 1];
  const before = looks[Math.max(0, looks.length - 4)];
  const seconds = (last.at - before.at) / 1000;
  const names = topic === null ? Object.keys(last.totals) : [topic];
  let sum = 0;
  for (const name of names) {
    const now = (last.totals[name] || {})[key] || 0;
    const then = (before.totals[name] || {})[key];
    if (then !== undefined && now >= then) sum += now - then;
  }
  return seconds > 0 ? sum / seconds : null;
}

function remember(status) {
  const totals = {};
  const late = { "": status.lateness };
  for (const topic of status.topics) (totals[topic.topic] = topic.totals), (late[topic.topic] = topic.lateness);
  looks.push({ at: status.now_ms, totals, late });
  if (looks.length > KEEP) looks.shift();
}

// Drawing

const number = (n, kind) => el("td", { class: `n ${kind || ""} ${n ? "" : "zero"}`, title: count(n) }, short(n));
const perSecond = (n) => el("td", { class: `n ${n ? "" : "zero"}` }, n === null ? "–" : `${short(n)}/s`);

function drawCards(status) {
  const sum = (state) => status.topics.reduce((all, topic) => all + topic.states[state], 0);
  const late = lateness(status.lateness, looks.length > 1 ? looks[0].late[""] : null);
  const [p50, p99] = late.scheduler;
  const [w50, w99] = late.consumer_wait;
  byId("cards").replaceChildren(
    card("asleep", short(sum("sleep"))),
    card("ready", short(sum("ready")), `${count(status.long_polls)} long polls wait`),
    card("in flight", short(sum("reserve"))),
    card("dead", short(sum("dead")), "", sum("dead") ? "bad" : ""),
    card("in", rate(null, "produced") === null ? "–" : `${short(rate(null, "produced"))}/s`, "produced"),
    card("out", rate(null, "acked") === null ? "–" : `${short(rate(null, "acked"))}/s`, "acknowledged"),
    card("scheduler lateness", span(p99), `p99; p50 ${span(p50)}`, p99 > 1000 ? "bad" : ""),
    card("consumer wait", span(w99), `p99; p50 ${span(w50)}`),
    card("commit", span(status.commit_p99_ms), `p99; p50 ${span(status.commit_p50_ms)}`),
    card("memory", bytes(status.memory_bytes), `up ${span(status.uptime_s * 1000)}`),
  );
}

function drawTopics(status) {
  const rows = status.topics.map((topic) =>
    el(
      "tr",
      { class: topic.topic === chosen ? "chosen" : "", "data-topic": topic.topic },
      el("th", { scope: "row" }, el("a", { href: `#${encodeURIComponent(topic.topic)}` }, topic.topic), topic.trouble ? el("span", { class: "pill bad", title: topic.trouble }, "trouble") : null),
      STATES.map((state) => number(topic.states[state], state === "dead" && topic.states.dead ? "bad" : "")),
      perSecond(rate(topic.topic, "produced")),
      perSecond(rate(topic.topic, "delivered")),
      perSecond(rate(topic.topic, "acked")),
      el("td", { class: "n" }, topic.next_due_ms === null ? "–" : topic.next_due_ms <= status.now_ms ? "now" : `in ${span(topic.next_due_ms - status.now_ms)}`),
      el("td", { class: "n" }, bytes(topic.bytes)),
      el("td", { class: "n" }, count(topic.segments)),
    ),
  );
  const empty = el("tr", {}, el("td", { colspan: 13, class: "quiet" }, "No topic yet. The first message makes one: curl --json '{\"body\": \"hello\", \"delay\": 5}' " + `${location.origin}/v1/topics/hello/messages`));
  byId("topics").replaceChildren(head("topic", ...STATES, "in", "out", "acked", "next due", "on disk", "segments"), el("tbody", {}, rows.length ? rows : empty));
  byId("shown").textContent = status.topics.length < status.topics_total ? `the ${status.topics.length} busiest of ${count(status.topics_total)}` : `${count(status.topics_total)}`;
}

function drawWarnings(status) {
  const said = status.damage.map((one) => el("p", { class: "warning" }, el("strong", {}, `Damage in ${one.topic}: `), `${one.file}, ${count(one.length)} bytes at ${count(one.position)}: ${one.reason}. They are left out; the rest is served.`));
  for (const topic of status.topics) if (topic.trouble) said.push(el("p", { class: "warning" }, el("strong", {}, `${topic.topic}: `), topic.trouble));
  byId("warnings").replaceChildren(...said);
}

function drawTopic(status) {
  const topic = status.topics.find((one) => one.topic === chosen);
  byId("topic").hidden = !topic;
  if (!topic) return;
  byId("topic-name").textContent = topic.topic;
  const waits = topic.oldest_ready_ms === null ? "" : `, the oldest ready for ${span(status.now_ms - topic.oldest_ready_ms)}`;
  byId("topic-figures").textContent = `${count(topic.segments)} segments, ${bytes(topic.bytes)}, ${Math.round(topic.live_ratio * 100)} % of sleeping data live${waits}`;
  const groups = Object.entries(topic.groups).map(([name, group]) =>
    el("tr", {}, el("th", { scope: "row" }, name), ["ready", "reserve", "lag", "delivered", "acked", "failed", "timed_out"].map((key) => number(group[key]))),
  );
  byId("groups").replaceChildren(
    head("group", "ready", "in flight", "lag", "delivered", "acked", "failed", "timed out"),
    el("tbody", {}, groups.length ? groups : el("tr", {}, el("td", { colspan: 8, class: "quiet" }, "No group yet. The first fetch makes one."))),
  );
  const first = looks.find((look) => look.late[topic.topic]);
  const late = lateness(topic.lateness, first && first.late[topic.topic] !== topic.lateness ? first.late[topic.topic] : null);
  byId("lateness").replaceChildren(
    el(
      "table",
      {},
      head("", "p50", "p99", "messages"),
      el("tbody", {}, [["scheduler: due → ready", "scheduler"], ["consumers: ready → fetched", "consumer_wait"]].map(([text, kind]) =>
        el("tr", {}, el("th", { scope: "row" }, text), el("td", { class: "n" }, span(late[kind][0])), el("td", { class: "n" }, span(late[kind][1])), number(topic.lateness[kind].reduce((a, b) => a + b, 0))),
      )),
    ),
    spark(topic.topic),
  );
}

// Produced and acknowledged a second, over the last minute.
function spark(topic) {
  const lines = ["produced", "acked"].map((key) =>
    looks.slice(1).map((look, i) => {
      const now = (look.totals[topic] || {})[key] || 0;
      const then = (looks[i].totals[topic] || {})[key] ?? now;
      return Math.max(0, (now - then) / ((look.at - looks[i].at) / 1000 || 1));
    }),
  );
  const top = Math.max(1, ...lines.flat());
  const points = (line) => line.map((y, i) => `${((i + KEEP - line.length) * 300) / (KEEP - 2)},${58 - (y / top) * 54}`).join(" ");
  return el(
    "figure",
    {},
    svg("svg", { viewBox: "0 0 300 60", class: "spark", role: "img", "aria-label": "rates of the last minute" }, lines.map((line, i) => svg("polyline", { points: points(line), class: i ? "out" : "in" }))),
    el("figcaption", { class: "quiet" }, el("span", { class: "key in" }, "in"), " ", el("span", { class: "key out" }, "acknowledged"), Math.max(0, ...lines.flat()) ? `, up to ${short(top)}/s` : ": nothing in the last minute"),
  );
}

function clock(ms, hours) {
  const at = new Date(ms);
  return hours <= 24 ? at.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" }) : at.toLocaleDateString([], { month: "short", day: "numeric" });
}

function drawForecast(found, hours) {
  const top = Math.max(1, ...found.counts);
  const width = 640 / found.counts.length;
  const bars = found.counts.map((n, i) => {
    const high = n ? Math.max(2, (n / top) * 150) : 0;
    const from = found.from_ms + i * found.bucket_ms;
    const text = `${new Date(from).toLocaleString()}: ${count(n)}`;
    return svg("g", { class: "bar" }, svg("rect", { class: "back", x: i * width, y: 0, width, height: 160 }), svg("rect", { class: "front", x: i * width + 0.5, y: 160 - high, width: Math.max(1, width - 1), height: high, "data-count": n }), svg("title", {}, text));
  });
  const marks = [0, 0.25, 0.5, 0.75, 1].map((part) => {
    const at = found.from_ms + part * found.counts.length * found.bucket_ms;
    return svg("text", { x: part * 640, y: 176, "text-anchor": part === 0 ? "start" : part === 1 ? "end" : "middle" }, clock(at, hours));
  });
  const total = found.counts.reduce((a, b) => a + b, 0);
  byId("forecast").replaceChildren(
    svg("svg", { viewBox: "0 0 640 182", class: "chart", role: "img", "aria-label": `${count(total)} messages come due` }, bars, svg("line", { x1: 0, x2: 640, y1: 160.5, y2: 160.5 }), marks),
    el("p", { class: "quiet" }, `${count(total)} in this time, at most ${count(top === 1 && !total ? 0 : top)} in ${span(found.bucket_ms)}; ${count(found.overdue)} overdue, ${count(found.beyond)} later`),
  );
}

function drawDead(found, name) {
  const rows = Object.entries(found.errors).slice(0, 20).map(([error, n]) =>
    el(
      "tr",
      {},
      el("th", { scope: "row", class: "error" }, error || "(no reason given)"),
      number(n),
      el("td", {}, sure("Requeue", `Requeue ${count(n)}?`, () => act(name, "requeue", { error })), " ", sure("Delete", `Delete ${count(n)}?`, () => act(name, "delete", { error }), "bad")),
    ),
  );
  const all = found.total
    ? el("p", { class: "row" }, `${count(found.total)} in all`, sure("Requeue all", `Requeue ${count(found.total)}?`, () => act(name, "requeue", {})), sure("Delete all", `Delete ${count(found.total)}?`, () => act(name, "delete", {}), "bad"))
    : el("p", { class: "quiet" }, "None.");
  byId("dead").replaceChildren(rows.length ? el("table", {}, head("error", "messages", ""), el("tbody", {}, rows)) : "", all);
}

// A button that asks back before it does anything.
async function act(topic, what, filter) {
  try {
    await call(`/v1/topics/${encodeURIComponent(topic)}/dead/${what}`, { filter });
  } catch (error) {
    say(error);
  }
  shownDead = "";
  await look();
}

// Asking

let shownDead = "";
let shownForecast = 0;

async function look() {
  if (busy) return;
  busy = true;
  try {
    const wanted = byId("filter").value.trim();
    const status = await call(`/v1/status?limit=100&q=${encodeURIComponent(wanted)}`);
    remember(status);
    serving();
    byId("version").textContent = `version ${status.version}`;
    byId("foot").textContent = `${count(status.requests)} requests, ${count(Object.values(status.rejected).reduce((a, b) => a + b, 0))} refused.`;
    drawWarnings(status);
    drawCards(status);
    drawTopics(status);
    drawTopic(status);
    await details(status);
  } catch (error) {
    say(error);
  } finally {
    busy = false;
  }
}

// The chart and the dead letters of the chosen topic: only when they may have changed, since they cost more than figures.
async function details(status) {
  const topic = status.topics.find((one) => one.topic === chosen);
  if (!topic) return;
  const path = `/v1/topics/${encodeURIComponent(chosen)}`;
  const deadMark = `${chosen} ${topic.states.dead} ${topic.totals.dead_requeued}`;
  if (deadMark !== shownDead && !document.querySelector("#dead .asking")) {
    shownDead = deadMark;
    drawDead(await call(`${path}/dead/summary`), chosen);
  }
  if (Date.now() - shownForecast > 9000) {
    shownForecast = Date.now();
    const [hours, bucket] = SPANS[spanName];
    drawForecast(await call(`${path}/forecast?bucket=${bucket}&hours=${hours}`), hours);
  }
}

function again() {
  shownDead = "";
  shownForecast = 0;
  look();
}

function tabs() {
  byId("spans").replaceChildren(...Object.keys(SPANS).map((name) => el("button", { type: "button", class: name === spanName ? "chosen" : "", onclick: () => ((spanName = name), tabs(), again()) }, name)));
}

theme(byId("theme"));
tabs();
tokenForm(again);
byId("filter").addEventListener("input", again);
addEventListener("hashchange", () => {
  chosen = decodeURIComponent(location.hash.slice(1));
  byId("topic").hidden = true;
  again();
});
setInterval(() => document.hidden || look(), EVERY_MS);
look();
