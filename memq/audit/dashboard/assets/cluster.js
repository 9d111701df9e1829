// The brokers, how full they are, and what the governor would change.

import { all, one } from "./board.js";
import { meter } from "./charts.js";
import { ago, bytes, count, duration, facts, h, known } from "./dom.js";
import { plainTable } from "./table.js";

export function clusterPage() {
  const brokers = h("div", { class: "brokers" });
  const plan = h("section", { class: "card" });
  const clients = h("section", { class: "card" });

  function show() {
    const rows = [...all("broker").values()].sort((a, b) => (a.broker < b.broker ? -1 : 1));
    brokers.replaceChildren(...(rows.length ? rows.map(card) : [h("p", { class: "empty" }, "No broker has answered yet.")]));
    const found = one("plan");
    plan.replaceChildren(h("h2", {}, "Moves that the governor plans"), found ? plainTable("Plan", ["Topic", "#Partition", "From", "To", "Because"],
      found.changes.map((row) => [row.topic, row.partition, row.before || "–", row.after || "–", row.reason]), "The governor plans no move.") : h("p", { class: "empty" }, "Not known yet."),
      ...(found?.notes ?? []).map((note) => h("p", { class: "note" }, note)));
  }

  function showClients() {
    const found = one("clients");
    const silent = found?.silent ? h("span", { class: "badge warn" }, `${count(found.silent)} silent: what they do is unknown`) : null;
    clients.replaceChildren(...[h("h2", {}, "Reporting clients ", found ? h("span", { class: "note" }, `${count(found.total)} `) : null, silent),
      found ? plainTable("Clients", ["Client", "Kind", "Name", "Host", "#Partitions", "#Clock ahead", "Heard", "State"], found.shown.map((row) => [h("code", {}, row.client), row.kind, row.name, row.host,
        count(row.partitions), ahead(row.skew_ms), ago(row.heard_ms), h("span", { class: `badge ${row.silent ? "warn" : "ok"}` }, row.silent ? "silent" : "reports")]), "No client reports.")
        : h("p", { class: "empty" }, one("about")?.audited ? "Not known yet." : "No auditor runs here, so no client reports."),
      found && found.total > found.shown.length ? h("p", { class: "note" }, `and ${count(found.total - found.shown.length)} more`) : null].filter(Boolean));
  }

  return {
    title: "Cluster",
    element: h("div", {}, h("div", { class: "head" }, h("h1", {}, "Cluster")), brokers, plan, clients),
    update: (kinds) => {
      if (kinds.has("broker") || kinds.has("plan")) show();
      if (kinds.has("clients") || kinds.has("about")) showClients();
    },
  };
}

/** By how much a clock is ahead at least: reports take time, so what is behind can't be told from what is slow. */
function ahead(ms) {
  return ms > 0 ? duration(ms / 1000) : "–";
}

/** Brokers have no TLS and no identity, so one that other machines reach is insecure. */
function isLoopback(address) {
  return /^(127\.|localhost:|\[::1\])/.test(address);
}

function card(row) {
  const memory = row.memory_bytes === null ? null : row.memory_bytes / row.memory_bytes_max;
  return h("section", { class: "card", "aria-label": row.broker },
    h("h2", {}, `${row.broker} `, row.governs ? h("span", { class: "badge ok" }, "governor") : null, row.draining ? h("span", { class: "badge warn" }, "draining") : null,
      isLoopback(row.address) ? null : h("span", { class: "badge warn" }, "no encryption, no identity: everybody who reaches it can change all data")),
    facts([
      ["Address", h("code", {}, row.address)],
      ["Zone", row.zone],
      ["Partitions", count(row.partitions)],
      ["Traffic", row.capacity_bytes_s ? [`${bytes(row.bytes_s)}/s of ${bytes(row.capacity_bytes_s)}/s`, meter(row.bytes_s / row.capacity_bytes_s, "traffic of what it is said to bear")] : `${bytes(row.bytes_s)}/s`],
      ["Memory", known(memory, () => [`${bytes(row.memory_bytes)} of ${bytes(row.memory_bytes_max)}`, meter(memory, `memory ${Math.round(memory * 100)} %`)])],
      ["Ring", known(row.ring_batches, (value) => `${count(value)} batches not yet published`)],
      ["Uploads", known(row.uploads, (value) => `${count(value)} in flight`)],
      ["Breaker", known(row.breakers, (stores) => (stores.length ? h("span", { class: "badge bad" }, `open: ${stores.join(", ")}`) : h("span", { class: "badge ok" }, "closed")))],
    ].map(([name, value]) => [name, Array.isArray(value) ? h("div", {}, value) : value])));
}
