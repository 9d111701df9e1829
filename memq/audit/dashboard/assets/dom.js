// Elements and words. Values come from topics, keys and errors of anybody: they become text nodes and nothing else.

const SVG = "http://www.w3.org/2000/svg";

// Control, C1 and bidi characters: they hide text, or show it in another order. Line breaks and tabs stay.
const CONTROLS = /[\0-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]/g;

/** Show such characters as escapes; what is no text stays as it is. */
function visible(child) {
  if (typeof child !== "string") return child;
  return child.replace(CONTROLS, (found) => `\\u${found.charCodeAt(0).toString(16).padStart(4, "0")}`);
}

/** Make an element: properties by name (`class`, `on…`, `aria-…`, DOM properties), then children or text. */
export function h(name, properties = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (key === "class") element.className = value;
    else if (key in element && !key.includes("-") && key !== "list") element[key] = key === "title" ? visible(value) : value;
    else element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false).map(visible));
  return element;
}

/** Make an SVG element with attributes. */
export function s(name, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children.map(visible));
  return element;
}

/** What is not known is said, and never looks like a number. */
export function unknown(why = "") {
  return why ? h("span", { class: "unknown", title: why }, `unknown: ${why}`) : h("span", { class: "unknown" }, "unknown");
}

/** Show a value by `write`, or say that it is not known, and why. */
export function known(value, write = String, why = "") {
  return value === null || value === undefined ? unknown(why) : write(value);
}

// Not by Intl.NumberFormat: to make the first one takes longer than all else before the first content.
const grouped = (value) => String(value).replace(/\B(?=(\d{3})+$)/g, ",");
const short = (value) => grouped(Number(value.toPrecision(3)));

export function count(value) {
  return value >= 10_000_000 ? `${short(value / 1_000_000)} M` : grouped(Math.round(value));
}

export function rate(value) {
  if (value >= 1_000_000) return `${short(value / 1_000_000)} M/s`;
  if (value >= 10_000) return `${short(value / 1_000)} k/s`;
  return `${value >= 100 || value === 0 ? Math.round(value) : short(value)}/s`;
}

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) { value /= 1024; unit += 1; }
  return `${short(value)} ${units[unit]}`;
}

export function duration(seconds) {
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 120) return `${short(seconds)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  return `${short(seconds / 3600)} h`;
}

export function time(ms) {
  const moment = new Date(ms);
  const pad = (number, width = 2) => String(number).padStart(width, "0");
  return `${moment.getFullYear()}-${pad(moment.getMonth() + 1)}-${pad(moment.getDate())} ` +
    `${pad(moment.getHours())}:${pad(moment.getMinutes())}:${pad(moment.getSeconds())}`;
}

export function clock(minute) {
  const moment = new Date(minute * 60_000);
  return `${String(moment.getHours()).padStart(2, "0")}:${String(moment.getMinutes()).padStart(2, "0")}`;
}

/** The verdict in one word, coloured by its gravity. */
export function badge(word) {
  return word === null || word === undefined ? unknown() : h("span", { class: `badge ${word.replaceAll(" ", "-")}` }, word);
}

/** A number that is worth a look from afar. */
export function tile(title, value, write, bad) {
  return h("div", { class: `tile${bad ? " bad" : ""}` }, h("dt", {}, title), h("dd", {}, known(value, write)));
}

/** How long ago a time was, by this browser's clock. */
export function ago(ms) {
  return `${duration(Math.max(0, Date.now() - ms) / 1000)} ago`;
}

/** A definition list of pairs; pairs whose value is null or "" are left out. */
export function facts(pairs) {
  return h("dl", { class: "facts" }, pairs
    .filter(([, value]) => value !== null && value !== undefined && value !== "")
    .flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
}

/** Ask the dashboard; what it says against the question is thrown as an Error with its words. */
export async function ask(path, parameters = {}, options = {}) {
  const query = new URLSearchParams(Object.entries(parameters).filter(([, value]) => value !== "" && value !== null && value !== undefined));
  const answer = await fetch(`${path}${query.size ? `?${query}` : ""}`, options);
  const body = await answer.json();
  if (!answer.ok) throw new Error(body.hint ? `${body.error} (${body.hint})` : body.error);
  return body;
}

/** Say in place of a page's content what went wrong. */
export function failure(error) {
  return h("p", { class: "trouble", role: "alert" }, error.message);
}
