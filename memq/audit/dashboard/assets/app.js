// The frame around the pages: which one is shown, the theme, the keyboard, and whether the stream lives.

import { listen, listenLink, one, open } from "./board.js";
import { clusterPage } from "./cluster.js";
import { lossPage, openFindings } from "./loss.js";
import { objectPage } from "./object.js";
import { overviewPage } from "./overview.js";
import { searchPage } from "./search.js";
import { tailPage } from "./tail.js";
import { topicPage } from "./topic.js";
import { waitingPage } from "./waiting.js";

const PAGES = { "": ["overview", overviewPage], topic: ["overview", topicPage], loss: ["loss", lossPage], object: ["loss", objectPage], cluster: ["cluster", clusterPage], search: ["search", searchPage], tail: ["tail", tailPage], waiting: ["waiting", waitingPage] };
const KEYS = { 1: "#/", 2: "#/loss", 3: "#/cluster", 4: "#/search", 5: "#/tail", 6: "#/waiting" };
const THEMES = ["auto", "light", "dark"];
const $ = (id) => document.getElementById(id);
const main = $("main");
const dark = matchMedia("(prefers-color-scheme: dark)");
let shown = null;

/** Show the page that the address names: #/name/part/part?key=value; each part is encoded. */
function route(event) {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const [name, ...parts] = path.split("/").map(decodeURIComponent);
  const [tab, make] = PAGES[name] ?? PAGES[""];
  shown?.close?.();
  shown = make(parts, new URLSearchParams(query ?? ""));
  main.replaceChildren(shown.element);
  for (const link of document.querySelectorAll("nav a")) {
    if (link.dataset.page === tab) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  title();
  shown.update?.(new Set(["topic", "group", "finding", "broker", "plan", "clients", "about", "delayed", "letters", "transactions", "queues"]));
  if (event) {
    scrollTo(0, 0);
    const heading = main.querySelector("h1");
    if (heading) { heading.tabIndex = -1; heading.focus({ preventScroll: true }); }
  }
}

/** Set the title of the page, with the number of open grave findings: a tab in the background shows it, too. */
function title() {
  const open = openFindings().filter((finding) => finding.grave && !finding.acknowledged_by).length;
  const text = `${open ? `(${open}) ` : ""}${shown?.title ?? ""} · memq`;
  if (document.title !== text) document.title = text;
}

function theme() {
  const chosen = localStorage.getItem("theme") ?? "auto";
  document.documentElement.dataset.theme = chosen === "auto" ? (dark.matches ? "dark" : "light") : chosen;
  $("theme").textContent = { auto: "Auto", light: "Light", dark: "Dark" }[chosen];
  $("theme").setAttribute("aria-label", `Theme: ${chosen}`);
  dispatchEvent(new Event("themed"));
}

function nextTheme() {
  const chosen = localStorage.getItem("theme") ?? "auto";
  localStorage.setItem("theme", THEMES[(THEMES.indexOf(chosen) + 1) % THEMES.length]);
  theme();
}

function key(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || $("help").open) return;
  const writing = ["INPUT", "SELECT", "TEXTAREA"].includes(event.target.tagName);
  if (event.key === "Escape") {
    if (writing) event.target.blur();
    else if (location.hash.split("/").length > 2) history.back();
    return;
  }
  if (writing) return;
  const step = { j: 1, ArrowDown: 1, k: -1, ArrowUp: -1 }[event.key];
  if (KEYS[event.key]) location.hash = KEYS[event.key];
  else if (event.key === "t") nextTheme();
  else if (event.key === "?") $("help").showModal();
  else if (event.key === "/") main.querySelector("input, select")?.focus();
  else if (step && shown?.table) shown.table.move(step);
  else return;
  event.preventDefault();
}

function link() {
  const live = $("link").classList.contains("live");
  $("link").textContent = live ? ["live", one("about")?.cluster].filter(Boolean).join(" · ") : "reconnecting";
}

function frame(kinds) {
  const about = one("about");
  if (about) {
    link();
    $("trouble").textContent = about.trouble;
    $("trouble").hidden = !about.trouble;
  }
  if (kinds.has("finding")) {
    const number = openFindings().filter((finding) => finding.grave).length;
    $("open-findings").textContent = number;
    $("open-findings").hidden = number === 0;
    $("open-findings").setAttribute("aria-label", `${number} open`);
    title();
  }
  shown?.update?.(kinds);
}

theme();
dark.addEventListener("change", theme);
$("theme").addEventListener("click", nextTheme);
$("keys").addEventListener("click", () => $("help").showModal());
addEventListener("hashchange", route);
addEventListener("keydown", key);
listen(frame);
listenLink((live) => {
  $("link").classList.toggle("live", live);
  link();
});
open();  // before the page is made: the answer comes meanwhile
route();
