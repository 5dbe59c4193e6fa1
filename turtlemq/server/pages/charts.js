// Charts: time series of the last 24 hours (uPlot), and the forecast, whose columns lead to their messages.

import { bytes, call, count, short, span } from "./common.js";
import { useEffect, useLayoutEffect, useRef, useState } from "./standalone.module.js";
import { at, clock, html, link, serverNow, usePoll } from "./ui.js";

const RANGES = { "1 h": 1, "6 h": 6, "24 h": 24 };
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const ofMinute = (column) => (rows) => rows[column].map((n, i) => (rows.seconds[i] >= 1 ? n / rows.seconds[i] : null));
const perSecond = (n) => `${short(n)}/s`;

const RATES = { title: "Messages a second", format: perSecond, lines: [["in", "--green", ofMinute("produced")], ["done", "--out", ofMinute("acked")]] };
const WAITING = { title: "Waiting messages", format: short, lines: [["sleeping", "--green", (rows) => rows.sleep], ["ready", "--out", (rows) => rows.ready]] };
const LATENESS = { title: "Lateness, p99", format: span, lines: [["scheduler", "--green", (rows) => rows.scheduler_p99_ms], ["consumers' wait", "--out", (rows) => rows.consumer_wait_p99_ms]] };

// The theme, so that charts are drawn again in other colours.
function useTheme() {
  const [theme, setTheme] = useState(0);
  useEffect(() => {
    const changed = () => setTheme((n) => n + 1);
    const watch = new MutationObserver(changed);
    watch.observe(document.documentElement, { attributeFilter: ["data-theme"] });
    const system = matchMedia("(prefers-color-scheme: dark)");
    system.addEventListener("change", changed);
    return () => (watch.disconnect(), system.removeEventListener("change", changed));
  }, []);
  return theme;
}

function options(about, width, pointed) {
  const axis = { stroke: colour("--quiet"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false }, font: "12px system-ui, sans-serif" };
  return {
    width,
    height: 170,
    legend: { show: false },
    hooks: { setCursor: [(plot) => pointed(plot.cursor.idx ?? null)] },
    cursor: { y: false, points: { size: 6 }, sync: { key: "history" } },
    scales: { x: { time: true }, y: { range: (_, low, high) => [0, high > 0 ? high * 1.1 : 1] } },
    axes: [{ ...axis, space: 60, size: 28, values: (_, splits) => splits.map((s) => label(s * 1000, 24)) }, { ...axis, size: 62, space: 32, values: (_, splits) => splits.map((n) => about.format(n)) }],
    series: [
      {},
      ...about.lines.map(([label, name]) => ({ label, stroke: colour(name), width: 1.75, fill: `${colour(name)}18`, spanGaps: false, points: { show: (_, __, from, to) => to - from < 3, size: 4 } })),
    ],
  };
}

function Series({ about, rows, hours }) {
  const place = useRef(null);
  const plot = useRef(null);
  const [pointed, setPointed] = useState(null);
  const theme = useTheme();
  const from = (serverNow() - hours * 3600e3) / 1000;
  const first = rows.at_ms.findIndex((ms) => ms / 1000 >= from);
  const cut = (column) => (first < 0 ? [] : column.slice(first));
  const data = [cut(rows.at_ms).map((ms) => ms / 1000), ...about.lines.map(([, , column]) => cut(column(rows)))];
  useLayoutEffect(() => {
    const made = new window.uPlot(options(about, Math.max(200, place.current.clientWidth), setPointed), data, place.current);
    plot.current = made;
    const watch = new ResizeObserver(() => place.current && made.setSize({ width: Math.max(200, place.current.clientWidth), height: 170 }));
    watch.observe(place.current);
    return () => (watch.disconnect(), made.destroy());
  }, [theme]);
  useLayoutEffect(() => {
    plot.current.batch(() => {
      plot.current.setData(data, false);
      plot.current.setScale("x", { min: from, max: serverNow() / 1000 });
    });
  }, [rows, hours, theme]);
  const shown = pointed ?? data[0].length - 1;
  const value = (i) => (data[i + 1][shown] === null || data[i + 1][shown] === undefined ? "–" : about.format(data[i + 1][shown]));
  return html`<section class="panel chart"><div class="row"><h3>${about.title}</h3><span class="quiet when">${pointed === null ? "now" : clock(data[0][shown] * 1000)}</span></div>
    <div class="key">${about.lines.map(([label_, name], i) => html`<span><i style=${{ background: `var(${name})` }}></i>${label_} <strong>${value(i)}</strong></span>`)}</div>
    <div class="plot" ref=${place}></div></section>`;
}

// The last 24 hours, of a topic or of the whole server. Only rows that are new, and the minute that has not ended, are asked for again.
export function History({ topic }) {
  const [hours, setHours] = useState(24);
  const known = useRef({ of: undefined, rows: null });
  const [rows, error] = usePoll(async () => {
    const old = known.current.of === topic ? known.current.rows : null;
    const ended = old && old.at_ms.length > 1 ? old.at_ms[old.at_ms.length - 2] : 0;
    const path = topic === null ? "v1/status/history" : at(topic, "history");
    const fresh = await call(`${path}?after_ms=${ended}`);
    const kept = old ? old.at_ms.filter((ms) => ms <= ended).length : 0;
    const joined = Object.fromEntries(Object.keys(fresh).map((name) => [name, [...(old ? old[name].slice(0, kept) : []), ...fresh[name]].slice(-1441)]));
    known.current = { of: topic, rows: joined };
    return joined;
  }, [topic], 15000);
  if (error && !rows) return error.status === 403 ? null : html`<p class="quiet">${error.message}</p>`;
  if (!rows) return html`<div class="charts"></div>`;
  if (!rows.at_ms.length) return html`<p class="quiet">Charts of a new topic begin within a minute; only the 50 busiest topics have them.</p>`;
  return html`<section aria-label="The last 24 hours">
    <div class="row"><h2>Over time</h2><span class="segments">${Object.entries(RANGES).map(([name, n]) => html`<button type="button" aria-pressed=${n === hours} onclick=${() => setHours(n)}>${name}</button>`)}</span>
      <span class="quiet">by the minute, since the server started</span></div>
    <div class="charts">${[RATES, WAITING, LATENESS].map((about) => html`<${Series} key=${about.title} about=${about} rows=${rows} hours=${hours} />`)}</div>
  </section>`;
}

const SPANS = { "1 h": [1, 60], "24 h": [24, 1800], "7 days": [168, 10800], "90 days": [2160, 129600] };

function label(ms, hours) {
  const then = new Date(ms);
  return hours <= 24 ? then.toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit" }) : then.toLocaleDateString("en-GB", { month: "short", day: "numeric" });
}

// The last round time of this length, in the zone of the reader.
function roundStart(length) {
  const ahead = -new Date(serverNow()).getTimezoneOffset() * 60e3;
  return Math.floor((serverNow() + ahead) / length) * length - ahead;
}

// Four columns, at equal distances, below which their time is written: it is a round one there.
const marksOf = (columns) => [0, 1, 2, 3].map((n) => n * Math.ceil(columns / 4 - 0.5));

const SPREADS = { none: 0, "1 min": 60, "10 min": 600, "1 h": 3600 };

// How much comes due when, as it is, or as it would be with a spread. Columns begin on round times of the chosen length, and each is a link to its messages.
export function Forecast({ topic }) {
  const [name, setName] = useState("24 h");
  const [hours, bucket] = SPANS[name];
  const [spread, setSpread] = useState("none");
  const isSpread = spread !== "none";
  const [answer] = usePoll(() => call(`${at(topic, "forecast")}?bucket=${bucket}&hours=${hours + bucket / 3600}&from_ms=${roundStart(bucket * 1000)}&what_if_spread=${SPREADS[spread]}`), [topic, name, spread], 10000);
  const found = answer && { ...answer, ...answer.what_if };
  const before = answer ? Math.max(0, ...answer.counts) : 0;
  const top = found ? Math.max(1, before, ...found.counts) : 1;
  const most = found ? Math.max(0, ...found.counts) : 0;
  const total = found ? found.counts.reduce((a, b) => a + b, 0) : 0;
  const to = (i) => link(topic, "sleep", { from: found.from_ms + i * found.bucket_ms, to: found.from_ms + (i + 1) * found.bucket_ms - 1 });
  return html`<section class="panel" id="forecast">
    <div class="row"><h3>Coming due</h3><span class="segments">${Object.keys(SPANS).map((one) => html`<button type="button" aria-pressed=${one === name} onclick=${() => setName(one)}>${one}</button>`)}</span>
      <label class="quiet">as it would be with a spread of <select id="spread" value=${spread} onchange=${(event) => setSpread(event.target.value)}>${Object.keys(SPREADS).map((one) => html`<option value=${one}>${one}</option>`)}</select></label></div>
    ${found && html`<div class="bars" role="group" aria-label=${`${count(total)} messages come due`}>
        ${found.counts.map((n, i) => {
          const text = `${clock(found.from_ms + i * found.bucket_ms)}: ${count(n)}`;
          const height = (m) => ({ height: `${m ? Math.max(2, (m / top) * 100) : 0}%` });
          const bar = html`${isSpread && answer.counts[i] > 0 && html`<i class="before" style=${height(answer.counts[i])}></i>`}<i style=${height(n)}></i>`;
          return n ? html`<a key=${i} href=${to(i)} title=${text} aria-label=${text} data-count=${n}>${bar}</a>` : html`<span key=${i} title=${text} data-count="0">${bar}</span>`;
        })}
      </div>
      <div class="marks quiet">${marksOf(found.counts.length).map((i) => html`<span style=${{ left: `${(100 * i) / found.counts.length}%` }}>${label(found.from_ms + i * found.bucket_ms, hours)}</span>`)}</div>
      <p class="quiet">${count(total)} in this time, at most ${count(most)} in ${span(found.bucket_ms)}${isSpread ? ` instead of ${count(before)}` : ""}; ${count(found.overdue)} overdue, ${count(found.beyond)} later. A column leads to its messages.${isSpread && SPREADS[spread] < bucket ? " This spread is shorter than a column: a shorter time shows it better." : ""}</p>`}
  </section>`;
}

export const Meter = ({ used, of, bad }) => html`<span class=${`meter ${bad ? "bad" : ""}`} title=${`${bytes(used)} of ${bytes(of)}`}><i style=${{ width: `${Math.min(100, (100 * used) / of)}%` }}></i></span>`;
