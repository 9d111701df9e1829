// Records in a table: what is masked shows its size only.

import { bytes, h, time } from "./dom.js";

function content(text, size) {
  if (size === null) return h("span", { class: "unknown" }, "null");
  if (text === null) return h("span", { class: "unknown", title: "Contents are masked here" }, `•••  ${bytes(size)}`);
  return h("span", { class: "mono" }, text);
}

export function recordLine(record) {
  const headers = record.headers?.map(([name, value]) => `${name}: ${value}`).join("\n");
  return h("tr", { title: headers || null },
    h("td", {}, time(record.timestamp_ms)), h("td", { class: "mono" }, record.position), h("td", {}, record.tag ?? ""),
    h("td", {}, content(record.key, record.key_bytes)), h("td", { class: "wrap" }, content(record.value, record.value_bytes)));
}

/** A table of records; `lines` may be added to its `tBodies[0]`. */
export function recordTable(records, label) {
  return h("div", { class: "scroll", tabIndex: 0, role: "region", "aria-label": label }, h("table", { "aria-label": label },
    h("thead", {}, h("tr", {}, ["Time", "Position", "Tag", "Key", "Value"].map((head) => h("th", { scope: "col" }, head)))),
    h("tbody", {}, records.map(recordLine))));
}

/** A field for the name of a topic, with those there are as proposals. */
export function topicField(topics, value) {
  return h("label", { class: "field" }, "Topic", h("input", { name: "topic", required: true, value: value ?? "", list: "topics", autocomplete: "off" }),
    h("datalist", { id: "topics" }, topics.slice(0, 2000).map((name) => h("option", { value: name }))));
}

/** The fields of a filter, as those of a consumer. */
export function filterFields() {
  const field = (text, name, placeholder) => h("label", { class: "field" }, text, h("input", { name, placeholder, type: "text", autocomplete: "off" }));
  return [field("Tags", "tags", "paid || refunded"), field("Condition on headers", "where", "amount > 100 AND region = 'EU'")];
}
