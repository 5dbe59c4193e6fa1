// What all pages need: elements without HTML strings (so nothing a producer sent can become markup), calls, the token, the theme.

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat(Infinity)) {
    if (child !== null && child !== undefined) node.append(child instanceof Node ? child : String(child));
  }
  return node;
}

export const el = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
export const byId = (id) => document.getElementById(id);

export const token = {
  get: () => sessionStorage.getItem("turtlemq-token") || "",
  set: (value) => (value ? sessionStorage.setItem("turtlemq-token", value) : sessionStorage.removeItem("turtlemq-token")),
};

export class Refused extends Error {
  constructor(status, error) {
    super(error.message || `status ${status}`);
    this.status = status;
    this.code = error.code || "";
    this.details = error;
  }
}

export async function call(path, body, method) {
  const headers = {};
  if (token.get()) headers.Authorization = `Bearer ${token.get()}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const sent = { headers, cache: "no-store", signal: AbortSignal.timeout(15000) };
  if (body !== undefined) Object.assign(sent, { method: "POST", body: JSON.stringify(body) });
  if (method) sent.method = method;
  const response = await fetch(path.replace(/^\//, ""), sent); // relative: a proxy may serve the pages under a prefix
  const answer = await response.json().catch(() => ({}));
  if (!response.ok) throw new Refused(response.status, answer.error || {});
  return answer;
}

export function useStoredTheme() {
  const stored = localStorage.getItem("turtlemq-theme");
  if (stored) document.documentElement.dataset.theme = stored;
}

export function otherTheme() {
  const system = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  const next = (document.documentElement.dataset.theme || system) === "dark" ? "light" : "dark";
  document.documentElement.dataset.theme = next;
  localStorage.setItem("turtlemq-theme", next);
}

export function theme(button) {
  useStoredTheme();
  button.addEventListener("click", otherTheme);
}

export const count = (n) => (n === null || n === undefined ? "–" : Number(n).toLocaleString("en-US"));

export function short(n) {
  if (n === null || n === undefined) return "–";
  for (const [unit, size] of [["G", 1e9], ["M", 1e6], ["k", 1e4]]) {
    if (Math.abs(n) >= size) return `${(n / (unit === "k" ? 1e3 : size)).toFixed(1)}${unit}`;
  }
  return count(Math.round(n * 10) / 10);
}

export function bytes(n) {
  if (n === null || n === undefined) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let i = 0;
  while (n >= 1024 && i < units.length - 1) (n /= 1024), i++;
  return `${n >= 100 || i === 0 ? Math.round(n) : n.toFixed(1)} ${units[i]}`;
}

export function span(ms) {
  if (ms === null || ms === undefined) return "–";
  if (ms < 1000) return `${ms < 10 ? Math.round(ms * 10) / 10 : Math.round(ms)} ms`;
  const s = ms / 1000;
  if (s < 120) return `${s < 10 ? s.toFixed(1) : Math.round(s)} s`;
  if (s < 7200) return `${Math.round(s / 60)} min`;
  if (s < 172800) return `${Math.round(s / 3600)} h`;
  return `${Math.round(s / 86400)} days`;
}

// Parts of pages

// Names of columns; those of numbers begin with "#", and stand on the right as the numbers do.
export const head = (...names) => el("thead", {}, el("tr", {}, names.map((name) => el("th", { scope: "col", class: name.startsWith("#") ? "n" : "" }, name.replace("#", "")))));
export const card = (name, value, more, kind) =>
  el("div", { class: `card ${kind || ""}` }, el("div", { class: "name" }, name), el("div", { class: "value" }, value), el("div", { class: "quiet" }, more || "\u00a0"));

// A button that asks before it does something.
export function sure(text, question, work, kind) {
  let asked = false;
  const button = el("button", { type: "button", class: kind || "", onclick: async () => {
    if (!asked) {
      asked = true;
      button.textContent = question;
      button.classList.add("asking");
      setTimeout(() => ((asked = false), (button.textContent = text), button.classList.remove("asking")), 5000);
      return;
    }
    button.disabled = true;
    button.classList.remove("asking");
    await work();
  } }, text);
  return button;
}

// The state of the server, in the head of a page.
export function serving() {
  byId("state").className = "pill good";
  byId("state").textContent = "serving";
  byId("state").title = "";
  byId("token-form").classList.remove("wanted");
}

export function say(error) {
  const denied = error instanceof Refused && (error.status === 401 || error.status === 403);
  const state = byId("state");
  state.className = "pill bad";
  state.textContent = denied ? (error.status === 401 ? "needs a token" : "not allowed") : error instanceof Refused ? error.code || `status ${error.status}` : "no answer";
  state.title = error.message;
  byId("token-form").classList.toggle("wanted", denied);
}

export function tokenForm(changed) {
  byId("token").value = token.get();
  byId("token-form").addEventListener("submit", (event) => {
    event.preventDefault();
    token.set(byId("token").value.trim());
    changed();
  });
}
