// The dashboard: its frame. It looks at /v1/status every two seconds, shows the view that the address names, and asks for a token
// if the server does.

import { call, count, otherTheme, span, token, useStoredTheme } from "./common.js";
import { render, useEffect, useRef, useState } from "./standalone.module.js";
import { Question, Toasts, failed, html, learnClock, learnOperations, link, replaceQuery, route, session, usePoll } from "./ui.js";
import { Overview, entered, remember } from "./overview.js";
import { TopicPage } from "./topic_page.js";

const EVERY_MS = 2000;

async function look() {
  const status = await call("v1/status?limit=100");
  learnClock(status.now_ms);
  remember(status);
  if (session.get().trouble || session.get().needed) session.set({ needed: false, refused: "", trouble: "" });
  return status;
}

// Metrics need the token too, which a plain link does not send.
async function showMetrics(event) {
  if (!token.get()) return;
  event.preventDefault();
  const window_ = open("", "_blank");
  const answer = await fetch("metrics", { headers: { Authorization: `Bearer ${token.get()}` } });
  window_.location = URL.createObjectURL(new Blob([await answer.text()], { type: "text/plain" }));
}

// One field for both: it filters the topics while one types, and looks the text up as an id in all topics.
function Search({ query }) {
  const field = useRef(null);
  const [text, setText] = useState(query || "");
  useEffect(() => {
    if (document.activeElement !== field.current) setText(query || ""); // else the user types, and the address follows
  }, [query]);
  useEffect(() => {
    const focus = (event) => {
      if (event.key !== "/" || event.target.closest("input, textarea, select, dialog")) return;
      event.preventDefault();
      field.current.focus();
    };
    addEventListener("keydown", focus);
    return () => removeEventListener("keydown", focus);
  }, []);
  const typed = (event) => {
    const wanted = event.target.value.trim();
    entered.set("");
    setText(event.target.value);
    if (route.get().topic === null) replaceQuery({ q: wanted });
    else location.hash = link(null, null, { q: wanted });
  };
  // What is shown may be the answer to an earlier text.
  const open = (wanted) => {
    const messages = [...document.querySelectorAll("#found a")].filter((one) => one.querySelector("strong").textContent === wanted);
    const topics = [...document.querySelectorAll("#topics tbody th a")].filter((one) => one.textContent.includes(wanted));
    if (messages.length) messages[0].click();
    else if (topics.length === 1 && wanted) topics[0].click();
    else entered.set(wanted);
  };
  const keys = (event) => {
    if (event.key === "ArrowDown") {
      const first = document.querySelector("#found a, #topics tbody a");
      if (first) first.focus();
      event.preventDefault();
    }
    if (event.key === "Enter") {
      open(text.trim());
      event.preventDefault();
    }
    if (event.key === "Escape" && text) typed({ target: { value: "" } });
  };
  return html`<div class="search" role="search">
    <input id="search" ref=${field} type="search" value=${text} oninput=${typed} onkeydown=${keys} placeholder="Message id, or part of a topic's name" aria-label="Find a message by its id, or topics by name" autocomplete="off" spellcheck=${false} />
    <kbd aria-hidden="true">/</kbd>
  </div>`;
}

function Header({ status, where }) {
  const { needed, trouble } = session.use();
  const [state, kind] = needed ? ["needs a token", "bad"] : trouble ? ["no answer", "bad"] : status ? ["serving", "good"] : ["connecting", ""];
  const signOut = () => (token.set(""), session.set({ needed: true, refused: "", trouble: "" }));
  return html`<header class="top">
    <a class="brand" href="#/"><img src="pages/turtle.svg" alt="" width="30" height="30" /><h1>TurtleMQ</h1></a>
    <span id="state" class=${`pill ${kind}`} role="status" title=${trouble || (status ? `version ${status.version}` : "")}>${state}</span>
    ${!needed && html`<${Search} query=${where.topic === null ? where.query.q : ""} />`}
    <nav aria-label="Pages">
      <a href="cluster">Cluster</a>
      <a href="docs">Interface</a>
      <a href="metrics" target="_blank" rel="noopener" onclick=${showMetrics}>Metrics</a>
      ${token.get() && !needed && html`<button type="button" onclick=${signOut}>Sign out</button>`}
      <button id="theme" type="button" class="icon" title="Light or dark" aria-label="Light or dark" onclick=${otherTheme}>◐</button>
    </nav>
  </header>`;
}

function Login({ again }) {
  const { refused } = session.use();
  const [busy, setBusy] = useState(false);
  const enter = async (event) => {
    event.preventDefault();
    token.set(new FormData(event.target).get("token").trim());
    setBusy(true);
    await again();
    setBusy(false);
  };
  return html`<main class="middle"><form id="login" class="panel" onsubmit=${enter} autocomplete="off">
    <img src="pages/turtle.svg" alt="" width="56" height="56" />
    <h2>Sign in</h2>
    <p class="quiet">This server needs a token. It stays in this tab, and is forgotten when the tab is closed.</p>
    ${refused && html`<p class="warning" role="alert"><strong>This token was not accepted.</strong> ${refused}</p>`}
    <label for="token">Token</label>
    <input id="token" name="token" type="password" required autofocus placeholder="tmq_…" autocomplete="off" spellcheck=${false} />
    <button type="submit" class="primary" disabled=${busy}>${busy ? "One moment …" : "Sign in"}</button>
    <p class="quiet">An operator makes one with <code>turtlemq token NAME</code>.</p>
  </form></main>`;
}

function App() {
  const where = route.use();
  const { needed, trouble } = session.use();
  const [status, , again] = usePoll(look, [], EVERY_MS);
  useEffect(() => void (needed || learnOperations().catch(failed)), [needed]);
  useEffect(() => {
    document.title = where.topic === null ? "TurtleMQ" : `${where.topic} · TurtleMQ`;
  }, [where.topic]);
  const view = needed ? html`<${Login} again=${again} />` : where.topic === null ? html`<${Overview} status=${status} query=${where.query.q || ""} />` : html`<${TopicPage} key=${where.topic} status=${status} where=${where} />`;
  return html`
    <${Header} status=${status} where=${where} />
    ${trouble && html`<p class="banner" role="alert">${trouble} The figures below are old; the page tries again.</p>`}
    ${view}
    <footer class="quiet">${status && !needed && `Version ${status.version}, up ${span(status.uptime_s * 1000)}, ${count(status.requests)} requests, commit p99 ${status.commit_p99_ms ?? "–"} ms. Figures since the server started, rates of the last seconds.`}</footer>
    <${Toasts} /><${Question} />`;
}

useStoredTheme();
render(html`<${App} />`, document.getElementById("app"));
