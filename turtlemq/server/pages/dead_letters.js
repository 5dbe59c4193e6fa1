// The dead letters of a topic: how many died of what, and each with its group, attempts and error; requeue and delete one, some or all.

import { call, count } from "./common.js";
import { When, at, headline, html, link, plural, replaceQuery, usePoll } from "./ui.js";
import { deleteLetters, requeue } from "./actions.js";
import { Filters, Order, Pager, Table, preview, usePages, useSelection } from "./message_list.js";

function Causes({ topic, query, changed }) {
  const filter = Object.fromEntries(Object.entries({ group: query.group, from_ms: query.from, to_ms: query.to, prefix: query.prefix }).filter(([, value]) => value));
  const [found] = usePoll(() => call(`${at(topic, "dead", "summary")}?${new URLSearchParams(filter)}`), [topic, filter], 5000);
  if (!found || !found.total) return null;
  const numbers = Object.fromEntries(Object.entries(filter).map(([name, value]) => [name, name.endsWith("_ms") ? Number(value) : value]));
  const buttons = (more, n) => html`<td class="buttons"><button type="button" onclick=${() => requeue(topic, { filter: { ...numbers, ...more } }, `Requeue ${plural(n, "dead letter")}?`, changed)}>Requeue ${count(n)}</button>
    <button type="button" class="danger" onclick=${() => deleteLetters(topic, { filter: { ...numbers, ...more } }, `Delete ${plural(n, "dead letter")}?`, changed)}>Delete</button></td>`;
  const rows = Object.entries(found.errors).slice(0, 12);
  return html`<section class="panel" id="causes"><div class="row"><h3>Of what they died</h3></div>
    <ul class="causes">${rows.map(([error, n]) => html`<li key=${error}>
      <button type="button" class="plain" aria-pressed=${query.error === error} title="Show these" onclick=${() => replaceQuery({ ...query, error: query.error === error ? undefined : error, message: undefined })}><span class="badge bad">${count(n)}</span> <span class="error">${error || "(no reason given)"}</span></button>
      ${buttons({ error }, n)}</li>`)}
      ${rows.length > 1 && html`<li class="all"><span><span class="badge bad">${count(found.total)}</span> in all</span>${buttons({}, found.total)}</li>`}
    </ul></section>`;
}

export function DeadLetters({ topic, query, groups, reload, total }) {
  const pages = usePages(at(topic, "dead"), { from_ms: query.from, to_ms: query.to, prefix: query.prefix, error: query.error, group: query.group, newest: query.order === "oldest" ? undefined : "true" });
  const rows = pages.page ? pages.page.messages : [];
  const keyOf = (row) => `${row.group}/${row.id}`;
  const selection = useSelection(rows, keyOf);
  const changed = () => (selection.clear(), pages.reload(), reload());
  const chosen = selection.kept;
  // The letters of one group have their group in the request; a mixed choice means all letters of these ids.
  const choice = () => {
    const own = [...new Set(chosen.map((row) => row.group))];
    return { ids: [...new Set(chosen.map((row) => row.id))], ...(own.length === 1 ? { group: own[0] } : {}) };
  };
  const columns = [
    ["Id"],
    ["Error", (row) => html`<span class="error" title=${headline(row.error)}>${headline(row.error) || "(no reason given)"}</span>`, "cause"],
    ["Died", (row) => html`<${When} ms=${row.dropped_ms} />`],
    ["Attempts", (row) => count(row.attempts), "n wide"],
    ["Group", (row) => row.group, "wide"],
    ["Body", (row) => html`<code class="preview">${preview(row)}</code>`, "wide body brief"],
  ];
  const filtered = query.prefix || query.from || query.to || query.error !== undefined || query.group;
  const one = (row) => html`<button type="button" onclick=${() => requeue(topic, { ids: [row.id], group: row.group }, `Requeue ${row.id}?`, changed)}>Requeue</button>`;
  return html`<${Causes} topic=${topic} query=${query} changed=${changed} />
    <section class="panel list">
      <${Filters} query=${query} about="Died">${groups.length > 1 && html`<label>Group <select name="group" value=${query.group || ""} onchange=${(event) => replaceQuery({ ...query, group: event.target.value })}><option value="">all</option>${groups.map((name) => html`<option value=${name}>${name}</option>`)}</select></label>`}<${Order} query=${query} /><//>
      ${chosen.length > 0 && html`<div class="row selected"><strong>${plural(chosen.length, "dead letter")} selected</strong>
        <button type="button" class="primary" onclick=${() => requeue(topic, choice(), `Requeue ${plural(chosen.length, "dead letter")}?`, changed)}>Requeue selected</button>
        <button type="button" class="danger" onclick=${() => deleteLetters(topic, choice(), `Delete ${plural(chosen.length, "dead letter")}?`, changed)}>Delete selected</button>
        <button type="button" onclick=${selection.clear}>Clear</button></div>`}
      ${pages.error && html`<p class="warning">${pages.error.message}</p>`}
      ${pages.page && html`<${Table} rows=${rows} columns=${[...columns, ["", one, "wide"]]} selection=${selection} opened=${query.message} keyOf=${keyOf} to=${(row) => link(topic, "dead", { ...query, message: row.id })} empty=${filtered ? "No dead letter matches." : "No dead letters. Good."} />`}
      <${Pager} pages=${pages} />
      ${!filtered && html`<p class="quiet">${count(total)} in all.</p>`}
    </section>`;
}
