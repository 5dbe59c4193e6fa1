// Try-it of the interface page: a form for one operation, that sends the request with the token of this tab and shows the answer.

import { el, sure, token } from "./common.js";

const SHOWN_CHARACTERS_MAX = 100_000;

function field(parameter) {
  const choices = parameter.schema.enum;
  const attributes = { name: parameter.name, "aria-label": parameter.name, placeholder: parameter.in === "query" ? "not sent" : "" };
  const input = choices
    ? el("select", attributes, ["", ...choices].map((choice) => el("option", { value: choice }, choice || "not sent")))
    : el("input", attributes);
  if (parameter.in === "path") input.value = parameter.example;
  return [parameter, input];
}

// A request as method, path with query, and text of the body, from the inputs of a form.
function requestOf(method, path, fields, body) {
  let target = path;
  const query = new URLSearchParams();
  for (const [parameter, input] of fields) {
    if (parameter.in === "path") target = target.replace(`{${parameter.name}}`, encodeURIComponent(input.value));
    else if (input.value !== "") query.set(parameter.name, input.value);
  }
  return { method, target: String(query) ? `${target}?${query}` : target, body: body && body.value.trim() };
}

const quoted = (text) => `'${text.replaceAll("'", `'\\''`)}'`;

export function curl({ method, target, body }) {
  const parts = ["curl"];
  if (method !== "GET" && !(method === "POST" && body)) parts.push(`-X ${method}`);
  if (body) parts.push(`--json ${quoted(body)}`);
  const url = `${new URL(".", location.href).href.replace(/\/$/, "")}${target}`;
  parts.push(/[&?']/.test(url) ? quoted(url) : url);
  return parts.join(" ");
}

async function send({ method, target, body }, answer) {
  const headers = body ? { "Content-Type": "application/json" } : {};
  if (token.get()) headers.Authorization = `Bearer ${token.get()}`;
  answer.replaceChildren(el("p", { class: "quiet" }, "Sent; waiting for the answer …"));
  const begun = performance.now();
  try {
    const given = await fetch(target.replace(/^\//, ""), { method, headers, body: body || undefined, cache: "no-store" });
    const text = await given.text();
    const took = `${Math.round(performance.now() - begun)} ms, request ${given.headers.get("X-Request-Id") || "–"}`;
    const status = el("span", { class: `pill ${given.ok ? "good" : "bad"}` }, `${given.status} ${given.statusText}`);
    answer.replaceChildren(el("p", {}, status, " ", el("span", { class: "quiet" }, took)), el("pre", {}, pretty(text)));
  } catch (error) {
    answer.replaceChildren(el("p", {}, el("span", { class: "pill bad" }, "no answer"), ` ${error.message}`));
  }
}

function pretty(text) {
  let shown = text;
  try {
    shown = JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    // not JSON: as it is
  }
  return shown.length > SHOWN_CHARACTERS_MAX ? `${shown.slice(0, SHOWN_CHARACTERS_MAX)}\n… ${shown.length} characters in all` : shown;
}

function copyButton(text) {
  const button = el("button", { type: "button", onclick: async () => {
    await navigator.clipboard.writeText(text());
    button.textContent = "Copied";
    setTimeout(() => (button.textContent = "Copy"), 2000);
  } }, "Copy");
  return button;
}

// The command line of an operation, and a form that opens beneath it. Changes of the form change the command line.
export function tryIt(method, path, operation) {
  const fields = (operation.parameters || []).filter((one) => one.in !== "header").map(field);
  const example = operation.requestBody?.content["application/json"]?.example;
  const body = example === undefined ? null : el("textarea", { name: "body", "aria-label": "body", rows: 6, spellcheck: "false" }, JSON.stringify(example));
  const request = () => requestOf(method, path, fields, body);
  const line = el("pre", { class: "curl" }, curl(request()));
  const answer = el("div", { class: "answer", "aria-live": "polite" });
  const form = el(
    "form",
    { oninput: () => (line.textContent = curl(request())), onsubmit: (event) => event.preventDefault() },
    fields.map(([parameter, input]) => el("label", {}, el("code", {}, parameter.name), input)),
    body,
    el("div", {}, sendButton(method, () => send(request(), answer))),
    answer,
  );
  return [el("div", { class: "command" }, line, copyButton(() => line.textContent)), el("details", { class: "try" }, el("summary", {}, "Try it"), form)];
}

// A request that deletes asks first, each time.
function sendButton(method, work) {
  if (method !== "DELETE") return el("button", { type: "button", onclick: work }, "Send");
  const button = sure("Send", "Really delete?", () => work().then(() => button.replaceWith(sendButton(method, work))), "bad");
  return button;
}
