// An object as it lies in the store now: fetched again, checked block by block, down to the records of one block.

import { ask, bytes, count, facts, failure, h, time } from "./dom.js";
import { objectLink, sequences } from "./loss.js";
import { recordTable } from "./records.js";
import { Table } from "./table.js";

const COLUMNS = [
  { title: "Block", num: true, key: (row) => row.number, cell: (row) => row.number },
  { title: "Check", key: (row) => (row.error ? 0 : 1), cell: (row) => h("span", { class: `badge ${row.error ? "bad" : "ok"}` }, row.error ? "damaged" : "sound") },
  { title: "Topic", key: (row) => row.topic, cell: (row) => row.topic },
  { title: "Partition", num: true, key: (row) => row.partition, cell: (row) => row.partition },
  { title: "Producer", key: (row) => row.producer, cell: (row) => h("code", {}, row.producer) },
  { title: "Sequences", num: true, key: (row) => row.first, cell: (row) => sequences([[row.first, row.first + row.records]]) },
  { title: "Records", num: true, key: (row) => row.records, cell: (row) => count(row.records) },
  { title: "Bytes", num: true, key: (row) => row.length, cell: (row) => bytes(row.length) },
  { title: "Times", cell: (row) => `${time(row.least_ms)} …` },
];

export function objectPage(_, query) {
  const key = query.get("key") ?? "";
  const chosen = query.get("block");
  const table = new Table({ label: "Blocks", columns: COLUMNS, keyOf: (row) => String(row.number), sort: 0, empty: "The object's index can't be read.", open: (row) => { location.replace(objectLink(key, row.number)); } });
  const about = h("section", { class: "card", "aria-label": "Object" }, h("p", { class: "empty" }, "Fetching and checking …"));
  const block = h("section", { class: "card", "aria-label": "Block", hidden: chosen === null });

  async function load() {
    try {
      const page = await ask("/api/object", { key });
      const damaged = page.blocks.filter((row) => row.error);
      about.replaceChildren(
        h("h2", {}, page.error ? h("span", { class: "badge bad" }, "damaged") : damaged.length ? h("span", { class: "badge bad" }, `${damaged.length} damaged`) : h("span", { class: "badge ok" }, "sound")),
        facts([["Key", h("code", {}, page.key)], ["Store", page.store], ["Size", bytes(page.bytes)], ["Written by", page.broker], ["Written", page.created_ms ? time(page.created_ms) : ""], ["Wrong", page.error]]));
      table.set(page.blocks);
      if (chosen !== null) await loadBlock(Number(chosen), page.blocks.find((row) => row.number === Number(chosen)), 0);
    } catch (error) {
      about.replaceChildren(failure(error));
    }
  }

  async function loadBlock(number, row, first) {
    const page = await ask("/api/block", { key, block: number, first });
    const more = first + page.records.length < page.total;
    block.replaceChildren(...[h("h2", {}, `Block ${number}`), row?.error || page.error ? h("p", { class: "bad-text" }, row?.error || page.error) : null,
      page.records.length ? recordTable(page.records, `Records of block ${number}`) : h("p", { class: "empty" }, "None of its records can be read."),
      h("div", { class: "actions" },
        first > 0 ? h("button", { type: "button", class: "quiet", onclick: () => loadBlock(number, row, Math.max(first - 100, 0)) }, "Before") : null,
        more ? h("button", { type: "button", class: "quiet", onclick: () => loadBlock(number, row, first + 100) }, "Further") : null,
        page.total ? h("span", { class: "note" }, `${first + 1} to ${first + page.records.length} of ${count(page.total)}`) : null)].filter(Boolean));
  }

  load();
  return { title: "Object", table, element: h("div", {}, h("div", { class: "head" }, h("h1", {}, "Object")), about, h("div", { class: "card" }, table.element), block) };
}
