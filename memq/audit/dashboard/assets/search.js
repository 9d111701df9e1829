// Records by key, tags, headers and time.

import { all } from "./board.js";
import { ask, count, failure, h } from "./dom.js";
import { filterFields, recordTable, topicField } from "./records.js";

export function searchPage([topic]) {
  const result = h("div", { "aria-live": "polite" });
  const button = h("button", {}, "Search");
  const field = (text, name, type = "text", properties = {}) => h("label", { class: "field" }, text, h("input", { name, type, autocomplete: "off", ...properties }));

  async function search(event) {
    event.preventDefault();
    const asked = new FormData(event.target);
    const moment = (name) => (asked.get(name) ? new Date(asked.get(name)).getTime() : "");
    button.disabled = true;
    result.replaceChildren(h("p", { class: "empty" }, "Reading …"));
    try {
      const found = await ask("/api/search", { topic: asked.get("topic"), key: asked.get("key"), tags: asked.get("tags"), where: asked.get("where"), first_ms: moment("first"), end_ms: moment("end") });
      const end = found.complete ? "" : `; there may be more: ${found.why}`;
      result.replaceChildren(h("p", { class: "note", role: "status" }, `${count(found.records.length)} found in ${count(found.searched)} records${end}`),
        found.records.length ? recordTable(found.records, "Records") : h("p", { class: "empty" }, "No record matches."));
    } catch (error) {
      result.replaceChildren(failure(error));
    }
    button.disabled = false;
  }

  return {
    title: "Search",
    element: h("div", {}, h("div", { class: "head" }, h("h1", {}, "Search")), h("div", { class: "card" },
      h("form", { class: "ask", onsubmit: search, "aria-label": "Search records" }, topicField([...all("topic").keys()].sort(), topic), field("Key (0x… for bytes)", "key"), filterFields(),
        field("From", "first", "datetime-local", { step: 1 }), field("Before", "end", "datetime-local", { step: 1 }), button)), result),
  };
}
