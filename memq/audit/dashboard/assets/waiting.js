// Records that wait: delayed ones, dead letters of listeners, and those of open transactions; items of queues.

import { all, one } from "./board.js";
import { ago, ask, bytes, count, duration, failure, h, known, time } from "./dom.js";
import { topicLink } from "./overview.js";
import { plainTable } from "./table.js";

const lettersLink = (group) => `#/waiting/${encodeURIComponent(group)}`;
const notYet = () => h("p", { class: "empty" }, "Not known yet.");
const more = (found) => (found.total > found.shown.length ? h("p", { class: "note" }, `the first ${count(found.shown.length)} of ${count(found.total)}`) : "");

export function waitingPage([group]) {
  const [delayed, groups, transactions, items, letters] = Array.from({ length: 5 }, () => h("div"));
  const card = (title, part) => h("section", { class: "card" }, h("h2", {}, title), part);
  let closed = false;

  function showDelayed() {
    const found = one("delayed");
    const sum = () => h("p", { class: "note" }, `${count(found.records)} of ${count(found.total)} topics`);
    delayed.replaceChildren(...(found ? [found.total ? sum() : "", more(found), plainTable("Delayed records", ["Topic", "#Waiting", "#Next due"],
      found.shown.map((row) => [h("a", { href: topicLink(row.topic) }, row.topic), count(row.records), row.next_ms ? time(row.next_ms) : "–"]), "No delayed record waits.")] : [notYet()]));
  }

  function showGroups() {
    const rows = [...all("letters").values()].sort((a, b) => (b.waiting ?? Infinity) - (a.waiting ?? Infinity) || (a.group < b.group ? -1 : 1));
    groups.replaceChildren(plainTable("Dead letters", ["Group", "#Waiting"],
      rows.map((row) => [h("a", { href: lettersLink(row.group) }, row.group), known(row.waiting, count, row.error)]), "No group has dead letters."));
  }

  function showTransactions() {
    const found = one("transactions");
    transactions.replaceChildren(...(found ? [more(found), plainTable("Open transactions", ["Producer", "Group", "State", "#Open for", "#Time-out", "Blocks"],
      found.shown.map((row) => [h("code", {}, row.transactional_id), row.group || "–", row.tries ? `${row.state}, ${count(row.tries)} tries` : row.state, duration(row.open_s), duration(row.timeout_s),
        Object.entries(row.blocks).map(([topic, number]) => `${topic}: ${count(number)}`).join(", ")]), "No transaction is open.")] : [notYet()]));
  }

  function showQueues() {
    const found = one("queues");
    const sum = () => h("p", { class: "note" }, `${count(found.ready)} ready, ${count(found.leased)} leased, ${count(found.delayed)} delayed, ${count(found.dead)} dead in ${count(found.total)} queues`);
    items.replaceChildren(...(found ? [found.total ? sum() : "", more(found), plainTable("Queues", ["Queue", "#Ready", "#Leased", "#Delayed", "#Dead", "#Oldest ready", "#Enqueued/s", "#Leased/s", "#Again/s", "#Acked/s", "#Dead/s"],
      found.shown.map((row) => [row.queue, count(row.ready), count(row.leased), count(row.delayed), count(row.dead), row.oldest_ms ? ago(row.oldest_ms) : "–",
        ...["enqueued", "leased", "redelivered", "acked", "dead"].map((event) => (row.rates[event] || 0).toFixed(1))]), "No queue has items.")] : [notYet()]));
  }

  async function load() {
    letters.replaceChildren(h("p", { class: "note" }, "Reading …"));
    try {
      const page = await ask("/api/letters", { group });
      if (!closed) letters.replaceChildren(...inDetail(page));
    } catch (error) {
      if (!closed) letters.replaceChildren(failure(error));
    }
  }

  if (group) load();
  return {
    title: "Waiting",
    element: h("div", {}, h("div", { class: "head" }, h("h1", {}, "Waiting")), h("div", { class: "grid" }, card("Delayed records", delayed), card("Open transactions", transactions), card("Dead letters", groups), card("Queues", items),
      group ? h("section", { class: "card wide" }, h("h2", {}, `Dead letters of ${group}, the oldest first `, h("button", { type: "button", onclick: load }, "Read again")), letters) : null)),
    update: (kinds) => {
      if (kinds.has("delayed")) showDelayed();
      if (kinds.has("letters")) showGroups();
      if (kinds.has("transactions")) showTransactions();
      if (kinds.has("queues")) showQueues();
    },
    close: () => { closed = true; },
  };
}

function inDetail(page) {
  const content = (text, size) => (text !== null ? h("span", { class: "mono" }, text) : size === null ? "null" : h("span", { class: "note" }, bytes(size)));
  return [
    h("p", { class: "note" }, "To send them back or drop them: ", h("code", {}, `memq dlq redrive ${page.group}`), ", ", h("code", {}, `memq dlq purge ${page.group}`)),
    page.complete ? "" : h("p", { class: "note" }, `Only the first ${count(page.letters.length)} are shown.`),
    plainTable("Letters", ["Position", "State", "#Attempts", "#Since", "Cause", "Topic", "Origin", "Tag", "Key", "Value"], page.letters.map((row) => [
      h("span", { class: "mono" }, row.position), row.state, count(row.attempts), ago(row.dead_ms), row.cause ?? h("span", { class: "note" }, "masked"), h("a", { href: topicLink(row.topic) }, row.topic),
      h("span", { class: "mono" }, row.origin), row.tag ?? "", content(row.key, row.key_bytes), content(row.value, row.value_bytes)]), "No dead letter waits."),
  ];
}
