// Findings: what is lost, doubled or damaged, by name; one of them in detail, and the way down to its bytes.

import { all, one } from "./board.js";
import { ask, bytes, count, facts, failure, h, time } from "./dom.js";
import { topicLink } from "./overview.js";
import { plainTable, Table } from "./table.js";

export const openFindings = () => [...all("finding").values()].filter((finding) => !finding.resolved_ms);
export const findingLink = (id) => `#/loss/${encodeURIComponent(id)}`;
export const objectLink = (key, block) => `#/object?${new URLSearchParams({ key, ...(block === undefined ? {} : { block }) })}`;

/** Sequences for people: first to last, both included. */
export function sequences(ranges) {
  return ranges.map(([first, next]) => (next - first === 1 ? `${first}` : `${first} to ${next - 1}`)).join(", ");
}

function state(finding) {
  if (finding.resolved_ms) return h("span", { class: "badge ok" }, "resolved");
  if (finding.acknowledged_by) return h("span", { class: "badge" }, `seen by ${finding.acknowledged_by}`);
  return h("span", { class: `badge ${finding.grave ? "bad" : "warn"}` }, "open");
}

const COLUMNS = [
  { title: "Finding", key: (row) => row.kind, cell: (row) => h("b", {}, row.kind) },
  { title: "State", mark: (row) => [row.resolved_ms, row.acknowledged_by, row.grave].join(), key: (row) => (row.resolved_ms ? 2 : row.acknowledged_by ? 1 : 0), cell: state },
  { title: "Topic", key: (row) => row.topic, cell: (row) => row.topic },
  { title: "Partition", num: true, key: (row) => row.partition, cell: (row) => row.partition },
  { title: "Records", num: true, key: (row) => row.records, cell: (row) => count(row.records) },
  { title: "Producer", key: (row) => row.producer, cell: (row) => h("code", {}, row.producer) },
  { title: "First seen", key: (row) => row.first_seen_ms, num: true, cell: (row) => time(row.first_seen_ms) },
];

export function lossPage([id]) {
  let chosen = id ?? null;
  const table = new Table({ label: "Findings", columns: COLUMNS, keyOf: (row) => row.id, sort: 6, descending: true, empty: "No finding matches the filter.", open: (row) => { location.hash = findingLink(row.id); } });
  const words = h("input", { type: "search", placeholder: "Topic, producer, object", "aria-label": "Filter findings", oninput: () => show() });
  const held = h("input", { type: "checkbox", checked: !id, onchange: () => show() });
  const detail = h("section", { class: "card", "aria-label": "Finding", "aria-live": "polite" });
  const checked = h("div", { role: "status" });  // what a verification said stays while the finding changes
  let shown = null;
  const note = h("p", { class: "note" });

  function show() {
    const part = words.value.trim().toLowerCase();
    const rows = [...all("finding").values()].filter((row) => (!held.checked || !row.resolved_ms) &&
      [row.topic, row.producer, row.object, row.group, row.kind].some((text) => text.toLowerCase().includes(part)));
    table.set(rows);
    note.textContent = one("about")?.audited === false ? "No auditor runs here: an empty list does not prove that nothing is lost." : "";
    const finding = all("finding").get(chosen);
    if (finding && finding === shown) return;  // its buttons keep the focus
    shown = finding;
    detail.replaceChildren(...(finding ? inDetail(finding, checked) : [h("p", { class: "empty" }, chosen ? "Unknown finding." : "Select a finding to see its details.")]));
  }

  return {
    title: "Findings",
    table,
    element: h("div", {}, h("div", { class: "head" }, h("h1", {}, "Findings"), h("span", { class: "grow" }), h("label", { class: "check" }, held, "open only"), words,
      ...["csv", "json"].map((kind) => h("a", { class: "button", href: `/api/findings?format=${kind}`, download: "", "aria-label": `Export all findings as ${kind.toUpperCase()}` }, kind.toUpperCase()))), note,
      h("div", { class: "split" }, table.element, detail)),
    update: (kinds) => { if (kinds.has("finding") || kinds.has("about")) show(); },
  };
}

function inDetail(finding, checked) {
  const said = h("div", { role: "status" });
  const acknowledge = async (event) => {
    event.target.disabled = true;
    try {
      await ask(`/api/findings/${encodeURIComponent(finding.id)}/acknowledge`, {}, { method: "POST", headers: { "Content-Type": "application/json" }, body: "{}" });
    } catch (error) {
      said.replaceChildren(failure(error));
      event.target.disabled = false;
    }
  };
  const verify = async (event) => {
    event.target.disabled = true;
    checked.replaceChildren(h("p", { class: "note" }, "Fetching and checking …"));
    try {
      checked.replaceChildren(...verified(await ask(`/api/findings/${encodeURIComponent(finding.id)}/verify`)));
    } catch (error) {
      checked.replaceChildren(failure(error));
    }
    event.target.disabled = false;
  };
  return [
    h("h2", {}, `${finding.kind}: ${count(finding.records)} ${finding.records === 1 ? "record" : "records"} `, state(finding)),
    h("p", {}, finding.cause),
    facts([
      ["Topic", h("a", { href: topicLink(finding.topic) }, finding.topic)],
      ["Partition", String(finding.partition)],
      ["Group", finding.group],
      ["Stage", finding.stage],
      ["Minute", time(finding.minute * 60_000)],
      ["Producer", finding.producer && h("code", {}, finding.producer)],
      ["Sequences", finding.ranges.length ? h("span", { class: "mono" }, sequences(finding.ranges)) : ""],
      ["Object", finding.object && h("a", { href: objectLink(finding.object, finding.block), class: "mono" }, finding.object)],
      ["Block", finding.object ? String(finding.block) : ""],
      ["Pointer", finding.offset >= 0 ? String(finding.offset) : ""],
      ["First seen", time(finding.first_seen_ms)],
      ["Resolved", finding.resolved_ms ? time(finding.resolved_ms) : ""],
      ["Acknowledged", finding.acknowledged_by ? `by ${finding.acknowledged_by}, ${time(finding.acknowledged_ms)}` : ""],
      ["Id", h("code", {}, finding.id)],
    ]),
    h("div", { class: "actions" },
      finding.offset >= 0 ? h("button", { type: "button", onclick: verify }, "Verify") : h("span", { class: "note" }, "No pointer has these records, so no object can be verified."),
      finding.object ? h("a", { class: "button", href: objectLink(finding.object, finding.block) }, "Open the object") : null,
      one("about")?.acknowledge && !finding.acknowledged_by && !finding.resolved_ms ? h("button", { type: "button", onclick: acknowledge }, "Acknowledge") : null),
    said,
    checked,
  ];
}

/** What a verification says: the batch as it lies in the store now, block by block. */
function verified(told) {
  const word = !told.object ? ["warn", "not there"] : told.sound ? ["ok", "sound"] : ["bad", `${count(told.damaged)} damaged`];
  return [
    h("h3", {}, "Fetched again and checked ", h("span", { class: `badge ${word[0]}` }, word[1])),
    h("p", {}, told.says),
    h("p", { class: "note" }, `${bytes(told.object_bytes)} read through ${told.through}`),
    ...told.faults.slice(0, 20).map((fault) => h("p", { class: "note" }, fault)),
    told.blocks.length ? plainTable("Blocks of the batch", ["#Block", "Check", "Producer", "Sequences", "Named"], told.blocks.slice(0, 200).map((block) => [
      block.number < 0 ? "–" : block.number,
      block.cause ? h("span", { class: "badge bad", title: block.cause }, "damaged") : h("span", { class: "badge ok" }, "sound"),
      h("code", {}, block.producer), h("span", { class: "mono" }, sequences([[block.first, block.next]])), block.named ? "yes" : ""]), "") : "",
  ];
}
