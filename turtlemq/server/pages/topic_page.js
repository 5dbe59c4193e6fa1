// One topic: its figures, tabs with its messages by state, its groups and its settings, and the drawer with one message.

import { bytes, call, count, short, span } from "./common.js";
import { useLayoutEffect, useRef } from "./standalone.module.js";
import { WORDS, at, clock, html, link, replaceQuery, serverNow, usePoll } from "./ui.js";
import { PauseButtons, cancelRange, putMessage } from "./actions.js";
import { Forecast, History } from "./charts.js";
import { Clients } from "./clients.js";
import { DeadLetters } from "./dead_letters.js";
import { Groups } from "./groups.js";
import { MessageDrawer } from "./message_drawer.js";
import { MessageList } from "./message_list.js";
import { Replays } from "./replays.js";
import { Schedules } from "./schedules.js";
import { SettingsForm } from "./settings_form.js";

const LISTS = ["sleep", "ready", "reserve", "history", "dead", "cancelled"];

function Tabs({ topic, tab, stats, groups }) {
  const bar = useRef(null);
  useLayoutEffect(() => {
    const [here, frame] = [bar.current.querySelector("[aria-current]"), bar.current]; // on a phone the bar is wider than the screen
    if (here) frame.scrollLeft = here.offsetLeft - frame.offsetLeft - (frame.clientWidth - here.offsetWidth) / 2;
  }, [tab]);
  const tabs = [["overview", "Overview"], ...LISTS.filter((state) => state !== "cancelled" || stats.cancelled).map((state) => [state, WORDS[state], stats[state]]), ["groups", "Groups", Object.keys(groups).length], ["schedules", "Schedules", stats.schedules], ["clients", "Clients"], ["settings", "Settings"]];
  const keys = (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const all = [...event.currentTarget.querySelectorAll("a")];
    const next = all[(all.indexOf(event.target) + step + all.length) % all.length];
    next.focus();
    event.preventDefault();
  };
  return html`<nav class="tabs" ref=${bar} aria-label="Views of the topic" onkeydown=${keys}>
    ${tabs.map(([name, text, n]) => html`<a key=${name} href=${link(topic, name)} aria-current=${name === tab ? "page" : null} class=${name === "dead" && n ? "bad" : ""}>${text}${n === undefined ? "" : html`<span class="badge" title=${count(n)}>${short(n)}</span>`}</a>`)}
  </nav>`;
}

function Figures({ stats, partitions }) {
  const waits = stats.oldest_ready_ms === null ? null : span(Math.max(0, serverNow() - stats.oldest_ready_ms));
  const next = stats.next_due_ms === null ? "–" : stats.next_due_ms <= serverNow() ? "now" : `in ${span(stats.next_due_ms - serverNow())}`;
  const facts = [["Next due", next], ["Oldest ready", waits || "–"], ["On disk", bytes(stats.bytes)], ["Segments", count(stats.segments)], ["Live", `${Math.round(stats.live_ratio * 100)} %`], ["Cancelled", count(stats.cancelled)]];
  if (partitions > 1) facts.push(["Partitions", count(partitions)]);
  if (stats.damaged) facts.push(["Damaged places", count(stats.damaged)]);
  return html`<dl class="facts">${facts.map(([name, value]) => html`<div><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>`;
}

// The goal for lateness: the share in time, how fast the error budget is spent, and what will be late.
function Goal({ slo }) {
  const all = slo.on_time + slo.late;
  const fast = Object.values(slo.burn).some((rate) => rate > 1);
  const burn = Object.entries(slo.burn).map(([window, rate]) => [`Burn rate ${window}`, rate.toFixed(rate < 10 ? 2 : 0)]);
  const facts = [["Goal", `${+(slo.share * 100).toFixed(3)} % within ${span(slo.ms)}`], ["In time", all ? `${((100 * slo.on_time) / all).toFixed(2)} %` : "–"], ["Late and waiting", count(slo.overdue)], ...burn];
  const next = slo.forecast;
  const text = next && (next.late_from_ms === null ? "in time for the next six hours" : `will be late from ${clock(next.late_from_ms)} on, by ${span(next.worst_ms)} at ${clock(next.worst_at_ms)}`);
  return html`<section class="panel" id="goal"><h3>Lateness</h3>
    <dl class="facts">${facts.map(([name, value]) => html`<div key=${name}><dt>${name}</dt><dd class=${fast && name.startsWith("Burn") ? "bad" : ""}>${value}</dd></div>`)}</dl>
    ${next ? html`<p class=${next.late_from_ms === null ? "quiet" : "warning"}>Group ${next.group} handles ${+next.per_s.toPrecision(3)} a second: ${text}.</p>` : html`<p class="quiet">The forecast begins once consumers have been seen at work for a minute.</p>`}
  </section>`;
}

export function TopicPage({ status, where }) {
  const { topic, tab, query } = where;
  const [found, error, reload] = usePoll(() => call(at(topic)), [topic], 2000);
  const row = status && status.topics.find((one) => one.topic === topic);
  const close = () => {
    const { message, ...rest } = query;
    replaceQuery(rest);
    const opener = document.querySelector(`[data-id="${CSS.escape(message)}"] a`);
    if (opener) opener.focus();
  };
  const crumbs = html`<p class="crumbs"><a href="#/">Topics</a> / <span>${topic}</span></p>`;
  if (!found) return html`<main>${crumbs}${error && html`<section class="panel"><h2>${topic}</h2><p class="warning">${error.message}</p></section>`}</main>`;
  const common = { topic, query, groups: Object.keys(found.groups), reload, total: found.stats[tab] };
  const views = {
    overview: () => html`<${Figures} stats=${found.stats} partitions=${found.settings.partitions} /><${Replays} topic=${topic} />${found.slo && html`<${Goal} slo=${found.slo} />`}<${Forecast} topic=${topic} /><${History} topic=${topic} />`,
    groups: () => html`<${Groups} ...${common} stats=${found.groups} row=${row} goal=${found.settings.priority.high_p95_ms} />`,
    schedules: () => html`<${Schedules} ...${common} />`,
    clients: () => html`<${Clients} topic=${topic} />`,
    settings: () => html`<${SettingsForm} topic=${topic} settings=${found.settings} reload=${reload} />`,
    dead: () => html`<${DeadLetters} ...${common} />`,
  };
  const view = views[tab] || (() => html`<${MessageList} key=${tab} state=${LISTS.includes(tab) ? tab : "sleep"} ...${common} />`);
  return html`<main class="topic">
    <div>${crumbs}
      <div class="row title"><h2>${topic}</h2>
        ${found.paused && html`<span class="pill bad">paused</span>`}
        ${row && row.trouble && html`<span class="pill bad" title=${row.trouble}>trouble</span>`}
        <span class="actions">
          ${tab === "sleep" && html`<button type="button" onclick=${() => cancelRange(topic, reload)}>Cancel a range</button>`}
          <${PauseButtons} topic=${topic} paused=${found.paused} reload=${reload} />
          <button type="button" class="primary" onclick=${() => putMessage(topic, {}, reload)}>Put a message</button>
        </span>
      </div>
      <${Tabs} topic=${topic} tab=${tab} stats=${found.stats} groups=${found.groups} />
    </div>
    ${row && row.trouble && html`<p class="warning">${row.trouble}</p>`}
    ${view()}
    ${query.message && html`<${MessageDrawer} key=${query.message} topic=${topic} id=${query.message} close=${close} changed=${reload} />`}
  </main>`;
}
