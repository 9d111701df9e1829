// All topics: verdicts, rates, lag and findings.

import { all, one } from "./board.js";
import { shares, spark } from "./charts.js";
import { badge, bytes, count, duration, h, known, rate, tile } from "./dom.js";
import { Table } from "./table.js";

export const topicLink = (name) => `#/topic/${encodeURIComponent(name)}`;
const wrong = (row) => (row.lost ?? 0) + (row.doubled ?? 0) + (row.corrupt ?? 0);
const grave = (value) => known(value, (number) => (number ? h("span", { class: "bad-text" }, count(number)) : "0"));
const FILTERS = { all: () => true, behind: (row) => row.lag_records > 0, wrong: (row) => wrong(row) > 0 };
const WORDS = ["lost", "corrupt", "doubled", "unknown", "in flight", "late", "ok"];

const COLUMNS = [
  { title: "Topic", key: (row) => row.name, cell: (row) => h("a", { class: "name", href: topicLink(row.name), title: row.name, tabIndex: -1 }, row.name) },
  { title: "Verdict", key: (row) => row.word && WORDS.indexOf(row.word), cell: (row) => badge(row.word) },
  { title: "Last hour", mark: (row) => row.spark.join(), cell: (row) => spark(row.spark) },
  { title: "Records", num: true, key: (row) => row.records_s, cell: (row) => known(row.records_s, rate) },
  { title: "Bytes", num: true, key: (row) => row.bytes_s, cell: (row) => known(row.bytes_s, (value) => `${bytes(value)}/s`) },
  { title: "Lag", num: true, key: (row) => row.lag_records, cell: (row) => known(row.lag_records, count) },
  { title: "Waiting", num: true, key: (row) => row.lag_seconds, cell: (row) => known(row.lag_seconds, duration) },
  { title: "Lost", num: true, key: (row) => row.lost, cell: (row) => grave(row.lost) },
  { title: "Doubled", num: true, key: (row) => row.doubled, cell: (row) => grave(row.doubled) },
  { title: "Damaged", num: true, key: (row) => row.corrupt, cell: (row) => grave(row.corrupt) },
  { title: "p99", num: true, key: (row) => row.p99_ms, cell: (row) => known(row.p99_ms, (ms) => duration(ms / 1000)) },
];

export function overviewPage() {
  let chosen = "all";
  let word = null;
  const table = new Table({
    label: "Topics", columns: COLUMNS, keyOf: (row) => row.name, sort: 0,
    open: (row) => { location.hash = topicLink(row.name); },
  });
  const filter = h("input", { type: "search", placeholder: "Filter by name", "aria-label": "Filter topics by name", oninput: () => show() });
  const buttons = Object.entries({ all: "All", behind: "Behind", wrong: "With findings" }).map(([name, text]) =>
    h("button", { type: "button", "aria-pressed": String(name === chosen), onclick: (event) => {
      chosen = name;
      buttons.forEach((button) => button.setAttribute("aria-pressed", String(button === event.target)));
      show();
    } }, text));
  const chips = new Map(WORDS.map((each) => [each, h("button", { type: "button", class: `chip ${each.replace(" ", "-")}`, "aria-pressed": "false", onclick: () => {
    word = word === each ? null : each;
    for (const [name, chip] of chips) chip.setAttribute("aria-pressed", String(name === word));
    show();
  } })]));
  const bar = h("div");
  const verdicts = h("div", { class: "verdicts", role: "group", "aria-label": "Topics by verdict" }, bar, h("div", { class: "chips" }, [...chips.values()]));
  const tiles = h("dl", { class: "tiles" });
  const number = h("span", { class: "note", role: "status" });

  function show() {
    const words = filter.value.trim().toLowerCase();
    const every = [...all("topic").values()];
    const rows = every.filter((row) => FILTERS[chosen](row) && (!word || (row.word ?? "unknown") === word) && row.name.toLowerCase().includes(words));
    table.say(every.length ? "No topic matches." : one("about")?.cluster ? "No topic exists yet. Create one with: memq topic create NAME" : "Waiting for a broker's answer.");
    table.set(rows);
    number.textContent = `${count(rows.length)} of ${count(every.length)}`;
    tiles.replaceChildren(...summary(every));
    const counts = WORDS.map((each) => [each, every.filter((row) => (row.word ?? "unknown") === each).length]);
    bar.replaceChildren(shares(counts.map(([each, value]) => [`w-${each.replace(" ", "-")}`, value])));
    for (const [each, value] of counts) {
      chips.get(each).textContent = `${count(value)} ${each}`;
      chips.get(each).hidden = value === 0 && word !== each;
    }
    verdicts.hidden = every.length === 0;
  }

  return {
    title: "Overview",
    table,
    element: h("div", {}, h("div", { class: "head" }, h("h1", {}, "Topics"), number, h("span", { class: "grow" }), h("span", { class: "switch", role: "group", "aria-label": "Which topics" }, buttons), filter), tiles, verdicts, table.element),
    update: (kinds) => { if (kinds.has("topic") || kinds.has("about")) show(); },
  };
}

function summary(rows) {
  const values = (name) => rows.map((row) => row[name]).filter((value) => value !== null);
  const sum = (name) => (values(name).length ? values(name).reduce((total, value) => total + value, 0) : null);
  const most = (name) => (values(name).length ? Math.max(...values(name)) : null);
  return [
    tile("Topics", rows.length, count),
    tile("Records in", sum("records_s"), rate),
    tile("Bytes in", sum("bytes_s"), (value) => `${bytes(value)}/s`),
    tile("Greatest lag", most("lag_records"), count),
    tile("Longest wait", most("lag_seconds"), duration),
    tile("Lost", sum("lost"), count, sum("lost") > 0),
    tile("Doubled", sum("doubled"), count, sum("doubled") > 0),
    tile("Damaged", sum("corrupt"), count, sum("corrupt") > 0),
  ];
}
