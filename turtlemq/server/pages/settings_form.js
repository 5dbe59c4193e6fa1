// The settings of a topic as a form. Only changed ones are sent, after a question that lists them.

import { call } from "./common.js";
import { useEffect, useState } from "./standalone.module.js";
import { act, ask, at, html } from "./ui.js";

const isSection = (value) => value !== null && typeof value === "object";
const titles = { backoff: "Back-off", retention: "Retention", dead: "Dead letters", rate: "Rates", priority: "Priorities", preempt: "Pre-emption", lateness_slo: "Goal for lateness" };

function flat(settings) {
  return Object.fromEntries(Object.entries(settings).flatMap(([name, value]) => (isSection(value) ? Object.entries(value).map(([key, one]) => [`${name}.${key}`, one]) : [[name, value]])));
}

function nested(changes) {
  const out = {};
  for (const [path, value] of Object.entries(changes)) {
    const [name, key] = path.split(".");
    if (key === undefined) out[name] = value;
    else out[name] = { ...out[name], [key]: value };
  }
  return out;
}

// Texts, limits and words of each setting, from the description of the interface.
async function describeAll() {
  const { components } = await call("openapi.json");
  const schemas = components.schemas;
  const follow = (one) => (one && one.$ref ? schemas[one.$ref.split("/").pop()] : one || {});
  const known = {};
  for (const [name, one] of Object.entries(follow(schemas.Settings || schemas.TopicSettings).properties || {})) {
    const found = follow(one.allOf ? one.allOf[0] : one);
    if (found.properties) for (const [key, inner] of Object.entries(found.properties)) known[`${name}.${key}`] = follow(inner);
    else known[name] = found;
  }
  return known;
}

const prose = (text) => String(text || "").split("`").map((part, i) => (i % 2 ? html`<code>${part}</code>` : part));

export function SettingsForm({ topic, settings, reload }) {
  const now = flat(settings);
  const [edited, setEdited] = useState({});
  const [known, setKnown] = useState({});
  useEffect(() => void describeAll().then(setKnown, () => {}), []);
  const changes = Object.entries(edited).filter(([path, value]) => String(value) !== String(now[path]));
  const save = async (event) => {
    event.preventDefault();
    const text = changes.map(([path, value]) => `${path}: ${now[path]} → ${value}`).join("; ");
    if (!(await ask({ title: `Change ${changes.length === 1 ? "a setting" : `${changes.length} settings`} of ${topic}?`, text, confirm: "Save" }))) return;
    const typed = Object.fromEntries(changes.map(([path, value]) => [path, typeof now[path] === "number" ? Number(value) : value]));
    if (await act("Save", () => ["Settings saved", text], () => call(at(topic), nested(typed), "PUT"))) setEdited({});
    reload();
  };
  const field = (path) => {
    const about = known[path] || {};
    const given = { id: `set-${path}`, name: path, value: edited[path] ?? now[path], oninput: (event) => setEdited((old) => ({ ...old, [path]: event.target.value })) };
    const input = about.enum ? html`<select ...${given}>${about.enum.map((one) => html`<option value=${one}>${one}</option>`)}</select>` : html`<input type=${typeof now[path] === "number" ? "number" : "text"} step="any" required ...${given} />`;
    const is = changes.some(([one]) => one === path);
    return html`<div class=${`setting ${is ? "changed" : ""}`} key=${path}><label for=${`set-${path}`}><code>${path.split(".").pop()}</code></label>${input}<small class="quiet">${prose(about.description)}</small></div>`;
  };
  const plain = Object.keys(now).filter((path) => !path.includes("."));
  const sections = [...new Set(Object.keys(now).filter((path) => path.includes(".")).map((path) => path.split(".")[0]))];
  return html`<form class="panel settings" onsubmit=${save}>
    <fieldset><legend>Topic</legend>${plain.map(field)}</fieldset>
    ${sections.map((name) => html`<fieldset key=${name}><legend>${titles[name] || name}</legend>${Object.keys(now).filter((path) => path.startsWith(`${name}.`)).map(field)}</fieldset>`)}
    <div class="row save"><button type="submit" class="primary" disabled=${!changes.length}>Save</button><button type="button" disabled=${!changes.length} onclick=${() => setEdited({})}>Undo</button><span class="quiet">${changes.length ? `${changes.length} changed` : "Times are seconds, unless the name says otherwise."}</span></div>
  </form>`;
}
