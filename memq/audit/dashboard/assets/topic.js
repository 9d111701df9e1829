// One topic over time: what came to each stage, how long it took, who is behind, and where the records lie.

import { all } from "./board.js";
import { bands, funnel, heat, legend, line, stages, STAGES } from "./charts.js";
import { ask, badge, bytes, clock, count, duration, failure, h, known } from "./dom.js";
import { plainTable } from "./table.js";

const SPANS = { 60: "1 h", 360: "6 h", 1440: "24 h" };
const LATENCY_STAGES = ["committed", "acked", "sent", "fetched", "processed"];
const REFRESH_MS = { 60: 2000, 360: 5000, 1440: 15_000 };  // a day is much to read

export function topicPage([name]) {
  const state = { span: 60, group: undefined, stage: undefined, picked: null, page: null };
  const body = h("div", {}, h("p", { class: "empty" }, "Loading …"));
  const verdict = h("span");
  const spans = Object.entries(SPANS).map(([span, text]) => h("button", { type: "button", "aria-pressed": String(Number(span) === state.span), onclick: (event) => {
    state.span = Number(span);
    state.picked = null;
    spans.forEach((button) => button.setAttribute("aria-pressed", String(button === event.target)));
    load();
  } }, text));
  let closed = false;
  let next = null;
  let loading = 0;

  async function load() {
    const asked = (loading += 1);
    clearTimeout(next);
    try {
      const page = await ask(`/api/topics/${encodeURIComponent(name)}`, { span: state.span, group: state.group });
      if (closed || asked !== loading) return;
      state.page = page;
      draw();
    } catch (error) {
      if (!closed && asked === loading) body.replaceChildren(failure(error));
    }
    if (!closed && asked === loading) next = setTimeout(load, REFRESH_MS[state.span]);
  }

  function draw() {
    const held = document.activeElement?.dataset?.keep;
    body.replaceChildren(...content(state, { redraw: draw, load }));
    if (held) body.querySelector(`[data-keep="${held}"]`)?.focus();
  }

  load();
  return {
    title: name,
    element: h("div", {}, h("div", { class: "head" }, h("h1", {}, name), verdict, h("span", { class: "grow" }), h("span", { class: "switch", role: "group", "aria-label": "How far back" }, spans),
      h("a", { href: `#/tail/${encodeURIComponent(name)}` }, "Tail"), h("a", { href: `#/search/${encodeURIComponent(name)}` }, "Search")), body),
    update: (kinds) => {
      const row = all("topic").get(name);
      if (kinds.has("topic")) verdict.replaceChildren(row ? badge(row.word) : "");
    },
    close: () => { closed = true; clearTimeout(next); },
  };
}

function content(state, { redraw, load }) {
  const { page, picked } = state;
  const { history } = page;
  const read = page.groups ?? [];
  const nobody = page.groups ? "No group reads this topic." : "Not known yet.";
  const column = picked === null ? "the whole time" : clock(history.first + picked * history.minutes);
  const groups = h("select", { "data-keep": "group", "aria-label": "Group", onchange: (event) => { state.group = event.target.value; load(); } },
    read.map(({ group }) => h("option", { value: group, selected: group === page.group }, group)));
  return [
    h("div", { class: "grid" },
      h("section", { class: "card" }, h("h2", {}, `Stages by ${history.minutes === 1 ? "minute" : `${history.minutes} minutes`}`),
        stages(history, picked, (at) => { state.picked = at; redraw(); }),
        legend([...STAGES.map((stage, at) => [`s${at}`, stage]), ["mark", "something is wrong"]])),
      h("section", { class: "card" }, h("h2", {}, `From sent to processed, ${column}`), funnel(history, picked),
        read.length ? h("p", { class: "note" }, h("label", {}, "Fetched and processed by group ", groups)) : h("p", { class: "note" }, nobody)),
      h("section", { class: "card" }, ...latency(state, redraw)),
      h("section", { class: "card" }, h("h2", {}, `Lag in records${page.group ? ` of ${page.group}` : ""}`),
        history.lag.some((value) => value !== null) ? line(history, history.lag, "lag in records over time") : h("p", { class: "empty" }, page.group ? "Not known yet." : nobody)),
      h("section", { class: "card wide" }, h("h2", {}, "Records by partition"), heat(history)),
      h("section", { class: "card" }, h("h2", {}, "Groups"), plainTable("Groups", ["Group", "#Members", "#Lag", "#Bytes", "#Waiting"],
        read.map((row) => [row.group, count(row.members), count(row.lag_records), bytes(row.lag_bytes), duration(row.lag_seconds)]), nobody)),
      h("section", { class: "card" }, h("h2", {}, "Partitions"), plainTable("Partitions", ["#Partition", "Owner", "#Records so far"],
        page.partitions.map((row) => [row.partition, row.owner || h("span", { class: "badge warn" }, "nobody"), known(row.records, count)]), "None.")),
      h("section", { class: "card wide" }, h("details", {}, h("summary", {}, "Settings"), h("p", { class: "note" }, "id ", h("code", {}, page.id)),
        plainTable("Settings", ["Setting", "Value"], Object.entries(page.settings).map(([key, value]) => [h("code", {}, key), String(value)]), "None.")))),
  ];
}

function latency(state, redraw) {
  const { history } = state.page;
  const there = LATENCY_STAGES.filter((stage) => history.latency_ms[stage]?.some(Boolean));
  if (!there.length) return [h("h2", {}, "Latency"), h("p", { class: "empty" }, "Not known yet: clients report it when the cluster audits.")];
  const stage = there.includes(state.stage) ? state.stage : there[0];
  const choice = h("select", { "data-keep": "stage", "aria-label": "Until which stage", onchange: (event) => { state.stage = event.target.value; redraw(); } },
    there.map((each) => h("option", { value: each, selected: each === stage }, each)));
  return [h("h2", {}, "Latency until ", choice), bands(history, stage), legend([["s2", "p50"], ["band90", "up to p90"], ["band99", "up to p99"]])];
}
