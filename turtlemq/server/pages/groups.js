// The groups of a topic: what waits for each, what they did since the start, replay and pause.

import { count, short } from "./common.js";
import { When, html, link, operations } from "./ui.js";
import { PauseButtons, dropGroup, newGroup, replay } from "./actions.js";

const SINCE = [["delivered", "Delivered"], ["acked", "Done"], ["failed", "Failed"], ["timed_out", "Timed out"]];

export function Groups({ topic, stats, row, reload, goal }) {
  operations.use();
  const names = Object.keys(stats).sort();
  const since = (name, key) => (row && row.groups[name] ? count(row.groups[name][key]) : "–");
  const card = (name) => {
    const one = stats[name];
    const now = [["Ready", one.ready, link(topic, "ready")], ["In flight", one.reserve, link(topic, "reserve")], ["Done", one.history, link(topic, "history")], ["Dead", one.dead, link(topic, "dead", { group: name })]];
    return html`<section class="panel group" key=${name} data-group=${name}>
      <div class="row"><h3>${name}</h3>${one.paused && html`<span class="pill bad">paused</span>`}${one.preempting && html`<span class="pill" title="Messages of high priority waited too long: low and normal give way.">high first</span>`}
        <span class="actions"><${PauseButtons} topic=${topic} group=${name} paused=${one.paused} reload=${reload} />
          <button type="button" onclick=${() => replay(topic, name, reload)}>Replay …</button>
          <button type="button" class="danger" onclick=${() => dropGroup(topic, name, reload)}>Delete</button></span></div>
      <dl class="facts">${now.map(([text, n, to]) => html`<div><dt>${text}</dt><dd><a class=${text === "Dead" && n ? "bad" : ""} href=${to} title=${count(n)}>${short(n)}</a></dd></div>`)}
        <div><dt title="From the oldest message that is not settled to the newest: what a replay from there would pass over.">Unsettled</dt><dd>${count(one.lag)}</dd></div>
        ${goal > 0 && html`<div><dt title="The weight of high priority in each fetch, raised while its messages wait longer than the topic's goal.">Weight of high</dt><dd>${one.high_weight.toFixed(1)}</dd></div>`}
        ${SINCE.map(([key, text]) => html`<div class="since"><dt>${text} since start</dt><dd>${since(name, key)}</dd></div>`)}
        <div class="since"><dt>Last change</dt><dd><${When} ms=${one.changed_ms} /></dd></div></dl>
    </section>`;
  };
  return html`<div class="row"><span class="quiet">Each group gets every message once; consumers of one group share them.</span><span class="actions"><button type="button" onclick=${() => newGroup(topic, reload)}>New group</button></span></div>
    ${names.length ? names.map(card) : html`<section class="panel"><p class="quiet empty">No group yet. The first fetch makes one.</p></section>`}`;
}
