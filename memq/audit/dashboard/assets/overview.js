// All topics: how fast, how far behind, and whether anything is lost.

import { all } from "./board.js";
import { spark } from "./charts.js";
import { badge, bytes, count, duration, h, known, rate } from "./dom.js";
import { Table } from "./table.js";

export const topicLink = (name) => `#/topic/${encodeURIComponent(name)}`;
const wrong = (row) => (row.lost ?? 0) + (row.doubled ?? 0) + (row.corrupt ?? 0);
const grave = (value) => known(value, (number) => (number ? h("span", { class: "bad-text" }, count(number)) : "0"));
const FILTERS = { all: () => true, behind: (row) => row.lag_records > 0, wrong: (row) => wrong(row) > 0 };

const COLUMNS = [
  { title: "Topic", key: (row) => row.name, cell: (row) => h("a", { class: "name", href: topicLink(row.name), title: row.name, tabIndex: -1 }, row.name) },
  { title: "Verdict", key: (row) => row.word, cell: (row) => badge(row.word) },
  { title: "Last hour", cell: (row) => spark(row.spark) },
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
  const table = new Table({
    label: "Topics", columns: COLUMNS, keyOf: (row) => row.name, sort: 0, empty: "No topic fits.",
    open: (row) => { location.hash = topicLink(row.name); },
  });
  const filter = h("input", { type: "search", placeholder: "Filter by name", "aria-label": "Filter topics by name", oninput: () => show() });
  const buttons = Object.entries({ all: "All", behind: "Behind", wrong: "With findings" }).map(([name, text]) =>
    h("button", { type: "button", "aria-pressed": String(name === chosen), onclick: (event) => {
      chosen = name;
      buttons.forEach((button) => button.setAttribute("aria-pressed", String(button === event.target)));
      show();
    } }, text));
  const tiles = h("dl", { class: "tiles" });
  const number = h("span", { class: "note", role: "status" });

  function show() {
    const words = filter.value.trim().toLowerCase();
    const rows = [...all("topic").values()].filter((row) => FILTERS[chosen](row) && row.name.toLowerCase().includes(words));
    table.set(rows);
    number.textContent = `${count(rows.length)} of ${count(all("topic").size)}`;
    tiles.replaceChildren(...summary([...all("topic").values()]));
  }

  return {
    title: "Overview",
    table,
    element: h("div", {}, h("div", { class: "head" }, h("h1", {}, "Topics"), number, h("span", { class: "grow" }), h("span", { class: "switch", role: "group", "aria-label": "Which topics" }, buttons), filter), tiles, table.element),
    update: (kinds) => { if (kinds.has("topic") || kinds.has("about")) show(); },
  };
}

function summary(rows) {
  const sum = (name) => {
    const values = rows.map((row) => row[name]).filter((value) => value !== null);
    return values.length ? values.reduce((total, value) => total + value, 0) : null;
  };
  const most = (name) => {
    const values = rows.map((row) => row[name]).filter((value) => value !== null);
    return values.length ? Math.max(...values) : null;
  };
  const tile = (title, value, write, bad) => h("div", { class: `tile${bad ? " bad" : ""}` }, h("dt", {}, title), h("dd", {}, known(value, write)));
  return [
    tile("Topics", rows.length, count),
    tile("Records in", sum("records_s"), rate),
    tile("Bytes in", sum("bytes_s"), (value) => `${bytes(value)}/s`),
    tile("Greatest lag", most("lag_records"), count),
    tile("Lost", sum("lost"), count, sum("lost") > 0),
    tile("Doubled", sum("doubled"), count, sum("doubled") > 0),
    tile("Damaged", sum("corrupt"), count, sum("corrupt") > 0),
  ];
}
