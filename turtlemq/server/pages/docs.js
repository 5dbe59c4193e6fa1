// The interface, drawn from /openapi.json: what each operation takes and answers, with a curl command and a form that sends it.

import { byId, call, el, theme, tokenForm } from "./common.js";
import { tryIt } from "./try_it.js";

let spec;

const follow = (schema) => (schema && schema.$ref ? schema.$ref.slice(2).split("/").reduce((at, part) => at[part], spec) : schema || {});
const nameOf = (schema) => (schema.$ref ? schema.$ref.split("/").pop() : "");
const json = (value) => JSON.stringify(value, null, 2);
const anchor = (name) => el("a", { href: `#schema-${name}` }, name);

// `code` in a text becomes code; everything else stays text.
const prose = (text) => String(text || "").split("`").map((part, i) => (i % 2 ? el("code", {}, part) : part));

function typeOf(schema) {
  if (!schema) return ["any"];
  if (schema.$ref) return [anchor(nameOf(schema))];
  if (schema.anyOf || schema.oneOf || schema.allOf) {
    return (schema.anyOf || schema.oneOf || schema.allOf).flatMap((one, i) => (i ? [" | ", ...typeOf(one)] : typeOf(one)));
  }
  if (schema.enum) return [schema.enum.map((one) => JSON.stringify(one)).join(" | ")];
  if (schema.type === "array") return ["[", ...typeOf(schema.items), ", …]"];
  if (schema.type === "object" && schema.additionalProperties) return ["{name: ", ...typeOf(schema.additionalProperties), "}"];
  if (schema.type === "object" && schema.properties) return ["{", Object.entries(schema.properties).flatMap(([name, one], i) => [i ? ", " : "", `${name}: `, ...typeOf(one)]), "}"];
  return [schema.contentEncoding || schema.format || schema.type || "any"];
}

function limits(schema) {
  const said = [];
  const low = schema.minimum ?? schema.exclusiveMinimum;
  if (low !== undefined) said.push(`${schema.exclusiveMinimum === undefined ? "≥" : ">"} ${low}`);
  if (schema.maximum !== undefined) said.push(`≤ ${schema.maximum}`);
  if (schema.maxLength !== undefined) said.push(`at most ${schema.maxLength} characters`);
  if (schema.default !== undefined && schema.default !== null) said.push(`default ${JSON.stringify(schema.default)}`);
  return said.join(", ");
}

function fields(schema) {
  const found = follow(schema);
  const needed = new Set(found.required || []);
  const rows = Object.entries(found.properties || {}).map(([name, one]) =>
    el("tr", {}, el("td", {}, el("code", {}, name), needed.has(name) ? " *" : ""), el("td", {}, typeOf(one)), el("td", {}, prose(one.description), " ", el("span", { class: "quiet" }, limits(one)))),
  );
  return rows.length ? el("table", {}, el("tbody", {}, rows)) : null;
}

function bodyOf(operation) {
  if (!operation.requestBody) return null;
  const kinds = Object.entries(operation.requestBody.content);
  return [
    el("h3", {}, "Body"),
    kinds.map(([kind, content]) => [el("p", {}, el("code", {}, kind), ": ", content.schema.description ? prose(content.schema.description) : typeOf(content.schema)), content.schema.$ref ? fields(content.schema) : null]),
  ];
}

function answersOf(operation) {
  return [
    el("h3", {}, "Answers"),
    el("table", {}, el("tbody", {}, Object.entries(operation.responses).map(([status, given]) => {
      const answer = follow(given);
      const kinds = Object.entries(answer.content || {});
      const example = kinds.length && Number(status) < 300 ? kinds[0][1].example : undefined;
      const what = Number(status) < 300 ? kinds.map(([kind, content], i) => [i ? ", or " : "", content.schema.$ref ? typeOf(content.schema) : el("code", {}, kind)]) : prose(answer.description);
      return el("tr", {}, el("td", {}, el("code", {}, status)), el("td", {}, what, example === undefined ? null : el("pre", {}, json(example))));
    }))),
  ];
}

function parametersOf(operation) {
  const given = (operation.parameters || []).filter((one) => one.in === "query");
  if (!given.length) return null;
  return [el("h3", {}, "Query"), el("table", {}, el("tbody", {}, given.map((one) => el("tr", {}, el("td", {}, el("code", {}, one.name)), el("td", {}, typeOf(one.schema)), el("td", {}, prose(one.description), " ", el("span", { class: "quiet" }, limits(one.schema)))))))];
}

function article(path, method, operation) {
  return el(
    "article",
    { class: "panel", id: operation.operationId },
    el("div", { class: "row" }, el("span", { class: `method ${method}` }, method.toUpperCase()), el("code", {}, path)),
    el("h2", {}, operation.summary),
    operation.description ? el("p", {}, prose(operation.description)) : null,
    tryIt(method.toUpperCase(), path, operation),
    parametersOf(operation),
    bodyOf(operation),
    el("details", {}, el("summary", {}, "Answers: ", Object.keys(operation.responses).join(", ")), answersOf(operation)),
  );
}

function draw() {
  byId("version").textContent = `version ${spec.info.version}`;
  byId("about").replaceChildren(el("h2", {}, "About"), ...spec.info.description.split("\n\n").map((text) => el("p", {}, prose(text))));
  const all = Object.entries(spec.paths).flatMap(([path, methods]) => Object.entries(methods).map(([method, operation]) => [path, method, operation]));
  byId("operations").replaceChildren(...spec.tags.flatMap(({ name }) => [el("h2", {}, name), ...all.filter(([, , operation]) => operation.tags[0] === name).map((one) => article(...one))]));
  const listed = spec.tags.map(({ name }) => [el("h3", {}, name), all.filter(([, , operation]) => operation.tags[0] === name).map(([, , operation]) => el("a", { href: `#${operation.operationId}` }, operation.summary))]);
  byId("contents").replaceChildren(...listed.flat(2), el("h3", {}, "Types"), el("a", { href: "#schemas" }, "All of them"));
  byId("schemas").replaceChildren(
    el("h2", {}, "Types"),
    ...Object.entries(spec.components.schemas).map(([name, schema]) => el("article", { id: `schema-${name}` }, el("h3", {}, name), el("p", { class: "quiet" }, prose(schema.description)), fields(schema))),
  );
  if (location.hash) document.getElementById(decodeURIComponent(location.hash.slice(1)))?.scrollIntoView();
}

theme(byId("theme"));
tokenForm(() => byId("token").blur());
call("/openapi.json").then((found) => ((spec = found), draw())).catch((error) => (byId("about").textContent = `No answer: ${error.message}`));
