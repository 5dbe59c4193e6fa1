// Parts that all views of the dashboard share: routes, polling, toasts, questions, words and times.

import { Refused, call, count, span, token } from "./common.js";
import { html, useEffect, useLayoutEffect, useRef, useState } from "./standalone.module.js";

export { html };

// One word for each state: docs/GLOSSARY.md
export const WORDS = { sleep: "Sleeping", ready: "Ready", reserve: "In flight", history: "Done", dead: "Dead", cancelled: "Cancelled", "not seen": "Not seen" };
export const word = (state) => WORDS[state] || state;
export const State = ({ of, note }) => html`<span class=${`state ${of}`}>${word(of)}${note ? ` · ${note}` : ""}</span>`;

// A value that several components look at.

export function store(value) {
  const listeners = new Set();
  return {
    get: () => value,
    set: (next) => {
      value = next;
      for (const listener of [...listeners]) listener(value);
    },
    use: () => {
      const [, draw] = useState(0);
      useLayoutEffect(() => {
        const changed = () => draw((n) => n + 1);
        listeners.add(changed);
        return () => listeners.delete(changed);
      }, []);
      return value;
    },
  };
}

// Routes: #/, #/t/TOPIC/TAB?…

export function parse(hash) {
  const [path, query] = hash.replace(/^#/, "").split("?");
  const parts = path.split("/").filter(Boolean).map(decodeURIComponent);
  const asked = Object.fromEntries(new URLSearchParams(query || ""));
  if (parts.length && parts[0] !== "t") return { topic: parts[0], tab: "overview", query: asked }; // links of former versions: #TOPIC
  return { topic: parts[1] || null, tab: parts[2] || "overview", query: asked };
}

export function link(topic, tab, query) {
  const given = Object.entries(query || {}).filter(([, value]) => value !== undefined && value !== null && value !== "");
  const path = topic === null ? "#/" : `#/t/${encodeURIComponent(topic)}${tab && tab !== "overview" ? `/${tab}` : ""}`;
  return given.length ? `${path}?${new URLSearchParams(given)}` : path;
}

export const route = store(parse(location.hash));
addEventListener("hashchange", () => route.set(parse(location.hash)));

// Another query of the present view, without a new entry in the history of the browser.
export function replaceQuery(query) {
  const { topic, tab } = route.get();
  history.replaceState(null, "", link(topic, tab, query));
  route.set(parse(location.hash));
}

// Calls

export const session = store({ needed: false, refused: "", trouble: "" });

export function failed(error) {
  const now = session.get();
  if (error instanceof Refused && error.status === 401) session.set({ needed: true, refused: token.get() ? error.message : "", trouble: "" });
  else if (error instanceof Refused && error.status !== 503) session.set({ ...now, trouble: "" });
  else session.set({ ...now, trouble: error instanceof Refused ? error.message : "The server does not answer." });
}

export const at = (topic, ...rest) => ["v1/topics", encodeURIComponent(topic), ...rest.map(encodeURIComponent)].join("/");

// Ask now, again when `deps` change, and every so many ms while the page is visible. An answer that is no longer wanted is dropped.
export function usePoll(ask, deps, everyMs) {
  const [found, setFound] = useState({ data: null, error: null, of: null });
  const wanted = useRef(0);
  const key = JSON.stringify(deps);
  const look = useRef(null);
  look.current = async () => {
    const mine = ++wanted.current;
    try {
      const data = await ask();
      if (mine === wanted.current) setFound({ data, error: null, of: key });
    } catch (error) {
      failed(error);
      if (mine === wanted.current) setFound((old) => ({ data: old.of === key ? old.data : null, error, of: key }));
    }
  };
  useEffect(() => {
    look.current();
    const timer = everyMs && setInterval(() => document.hidden || session.get().needed || look.current(), everyMs);
    return () => {
      wanted.current++;
      clearInterval(timer);
    };
  }, [key, everyMs]);
  const fresh = found.of === key;
  return [fresh ? found.data : null, fresh ? found.error : null, () => look.current()];
}

export const operations = store(new Set());

// Which operations this server has: buttons for others are not shown.
export async function learnOperations() {
  const document_ = await call("openapi.json");
  operations.set(new Set(Object.entries(document_.paths).flatMap(([path, methods]) => Object.keys(methods).map((method) => `${method.toUpperCase()} ${path}`))));
}

// Toasts stay until they are closed, or four newer ones have come.

export const toasts = store([]);
let toastCount = 0;

export function toast(kind, title, text) {
  toasts.set([...toasts.get().slice(-3), { key: ++toastCount, kind, title, text }]);
}

export function Toasts() {
  const close = (key) => toasts.set(toasts.get().filter((one) => one.key !== key));
  return html`<section id="toasts" aria-live="polite" aria-label="Messages">
    ${toasts.use().map((one) => html`<div key=${one.key} class=${`toast ${one.kind}`} role=${one.kind === "bad" ? "alert" : "status"}>
      <div><strong>${one.title}</strong>${one.text && html`<p>${one.text}</p>`}</div>
      <button type="button" class="icon" aria-label="Close" onclick=${() => close(one.key)}>✕</button>
    </div>`)}
  </section>`;
}

// Do something on the server and tell the outcome: `done` makes the text from the answer.
export async function act(what, done, work) {
  try {
    const answer = await work();
    const [title, text] = [].concat(done(answer));
    toast("good", title, text);
    return answer;
  } catch (error) {
    failed(error);
    toast("bad", `${what} failed`, error instanceof Refused ? `${error.message}${error.code ? ` (${error.code})` : ""}` : String(error.message || error));
    return null;
  }
}

// Questions: a modal dialog with fields; the browser keeps the focus in it, and Escape closes it.

const question = store(null);

export const ask = (asked) => new Promise((answer) => question.set({ ...asked, answer }));

export function Question() {
  const asked = question.use();
  const dialog = useRef(null);
  const [values, setValues] = useState({});
  useLayoutEffect(() => {
    if (!asked) return;
    setValues(Object.fromEntries((asked.fields || []).map((field) => [field.name, field.value ?? ""])));
    if (!dialog.current.open) dialog.current.showModal();
  }, [asked]);
  if (!asked) return null;
  const end = (answer) => {
    dialog.current.close();
    question.set(null);
    asked.answer(answer);
  };
  const input = (field) => {
    const given = { id: `ask-${field.name}`, name: field.name, required: field.required, value: values[field.name] ?? "", oninput: (event) => setValues((old) => ({ ...old, [field.name]: event.target.value })) };
    if (field.options) return html`<select ...${given}>${field.options.map(([value, text]) => html`<option value=${value}>${text}</option>`)}</select>`;
    if (field.type === "text-area") return html`<textarea rows=${field.rows || 6} spellcheck=${false} ...${given}></textarea>`;
    return html`<input type=${field.type || "text"} step=${field.step} min=${field.min} placeholder=${field.placeholder} autocomplete="off" ...${given} />`;
  };
  return html`<dialog ref=${dialog} class="question" aria-labelledby="question-title" oncancel=${(event) => (event.preventDefault(), end(null))}>
    <form onsubmit=${(event) => (event.preventDefault(), end(values))}>
      <h2 id="question-title">${asked.title}</h2>
      ${asked.text && html`<p>${asked.text}</p>`}
      ${(asked.fields || []).map((field) => html`<label for=${`ask-${field.name}`}>${field.label}${input(field)}${field.hint && html`<small class="quiet">${field.hint}</small>`}</label>`)}
      <div class="buttons">
        <button type="button" onclick=${() => end(null)}>Keep as it is</button>
        <button type="submit" class=${asked.danger ? "primary danger" : "primary"}>${asked.confirm}</button>
      </div>
    </form>
  </dialog>`;
}

// A body as it was typed: JSON, or else text.
export function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return text;
  }
}

// Times

export const clock = (ms) => new Date(ms).toLocaleString("en-GB", { day: "2-digit", month: "short", year: "numeric", hour: "2-digit", minute: "2-digit", second: "2-digit" });
const iso = (ms) => new Date(ms).toISOString();
export const distance = (ms, now) => (Math.abs(ms - now) < 500 ? "now" : ms > now ? `in ${span(ms - now)}` : `${span(now - ms)} ago`);

// The difference of the server's clock and this one's.
let skew = 0;
export const learnClock = (serverMs) => (skew = Math.abs(serverMs - Date.now()) > 2000 ? serverMs - Date.now() : 0);
export const serverNow = () => Date.now() + skew;

export const When = ({ ms, plain }) =>
  ms === null || ms === undefined ? "–" : html`<time datetime=${iso(ms)} title=${iso(ms)}>${clock(ms)}${plain ? "" : html` <span class="quiet">${distance(ms, serverNow())}</span>`}</time>`;

// A field of type datetime-local has local time without a zone.
export const toLocal = (ms) => (ms ? new Date(ms - new Date(ms).getTimezoneOffset() * 60000).toISOString().slice(0, 19) : "");
export const fromLocal = (text) => (text ? new Date(text).getTime() : "");

// The line of an error that names its cause, as `headline` in turtlemq/errors.py.
export function headline(error) {
  const lines = error.split("\n");
  return (lines[0].startsWith("Traceback (most recent call last)") && lines.slice(1).findLast((line) => /^\S/.test(line))) || lines[0];
}

export const plural = (n, one, many) => `${count(n)} ${n === 1 ? one : many || `${one}s`}`;

export function Copy({ text, label }) {
  const [done, setDone] = useState(false);
  const copy = async () => {
    await navigator.clipboard.writeText(text).then(() => setDone(true), () => toast("bad", "Not copied", "The browser does not allow it on this address."));
    setTimeout(() => setDone(false), 1500);
  };
  return html`<button type="button" class="icon copy" title=${`Copy ${label}`} aria-label=${`Copy ${label}`} onclick=${copy}>${done ? "copied" : "copy"}</button>`;
}
