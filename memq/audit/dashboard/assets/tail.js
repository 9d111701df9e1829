// Records as they come, at a rate that can be read.

import { all } from "./board.js";
import { count, failure, h } from "./dom.js";
import { filterFields, recordLine, recordTable, topicField } from "./records.js";

const LINES = 300;

export function tailPage([topic]) {
  let stream = null;
  let passed = 0;
  const result = h("div");
  const note = h("p", { class: "note", role: "status" }, "");
  const button = h("button", {}, "Start");
  const rate = h("select", { name: "rate" }, [1, 5, 10, 25, 50].map((value) => h("option", { value, selected: value === 10 }, `${value}/s`)));

  function stop(text) {
    stream?.close();
    stream = null;
    button.textContent = "Start";
    note.textContent = text;
  }

  function start(event) {
    event.preventDefault();
    if (stream) { stop("stopped"); return; }
    const asked = new URLSearchParams(new FormData(event.target));
    const holder = recordTable([], "Records as they come");
    const body = holder.querySelector("tbody");
    result.replaceChildren(holder);
    passed = 0;
    button.textContent = "Stop";
    note.textContent = "waiting for records";
    stream = new EventSource(`/api/tail?${asked}`);
    stream.addEventListener("message", ({ data }) => {
      const part = JSON.parse(data);
      passed += part.passed;
      body.prepend(...part.records.map((record) => { const line = recordLine(record); line.classList.add("fresh"); return line; }).reverse());
      while (body.rows.length > LINES) body.lastElementChild.remove();
      note.textContent = `the newest first${passed ? `; ${count(passed)} more came than the rate lets through` : ""}`;
    });
    stream.addEventListener("failed", ({ data }) => { stop(""); result.replaceChildren(failure(new Error(JSON.parse(data).error))); });
    stream.addEventListener("error", () => { if (stream?.readyState === EventSource.CLOSED) stop("the tail was refused: does the topic exist?"); });
  }

  return {
    title: "Tail",
    element: h("div", {}, h("div", { class: "head" }, h("h1", {}, "Tail")), h("div", { class: "card" },
      h("form", { class: "ask", onsubmit: start, "aria-label": "Follow a topic" }, topicField([...all("topic").keys()].sort(), topic), filterFields(), h("label", { class: "field" }, "At most", rate), button)), note, result),
    close: () => stop(""),
  };
}
