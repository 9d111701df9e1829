// One topic over time: what came to each stage, how long it took, who is behind, and where the records lie.

import { all } from "./board.js";
import { bands, funnel, heat, legend, line, stages, STAGES } from "./charts.js";
import { ask, badge, bytes, clock, count, duration, failure, h, known, rate, tile, time } from "./dom.js";
import { findingLink, openFindings, sequences } from "./loss.js";
import { plainTable } from "./table.js";

const SPANS = { 60: "1 h", 360: "6 h", 1440: "24 h" };
const LATENCY_STAGES = ["committed", "acked", "sent", "fetched", "processed"];
const REFRESH_MS = { 60: 2000, 360: 5000, 1440: 15_000 };  // a day is much to read
const FINDINGS_SHOWN = 8;

export function topicPage([name]) {
  const state = { name, span: 60, group: undefined, stage: undefined, unit: "records", picked: null, page: null };
  const content = sections(state, { redraw: () => draw(), load: () => load() });
  const body = h("div", {}, h("p", { class: "empty" }, "Loading …"));
  const verdict = h("span");
  const tiles = h("dl", { class: "tiles" });
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
    if (!state.page) return;
    if (content.element.parentNode !== body) body.replaceChildren(content.element);
    const held = document.activeElement?.dataset?.keep;
    content.draw();
    if (held) body.querySelector(`[data-keep="${held}"]`)?.focus({ preventScroll: true });
  }

  addEventListener("themed", draw);
  load();
  return {
    title: name,
    element: h("div", {}, h("div", { class: "head" }, h("h1", {}, name), verdict, h("span", { class: "grow" }), h("span", { class: "switch", role: "group", "aria-label": "How far back" }, spans),
      h("a", { class: "button", href: `#/tail/${encodeURIComponent(name)}` }, "Tail"), h("a", { class: "button", href: `#/search/${encodeURIComponent(name)}` }, "Search")), tiles, body),
    update: (kinds) => {
      if (kinds.has("topic")) {
        const row = all("topic").get(name);
        verdict.replaceChildren(row ? badge(row.word) : "");
        tiles.replaceChildren(...(row ? now(row) : []));
      }
      if (kinds.has("finding")) content.findings();
    },
    close: () => { closed = true; clearTimeout(next); removeEventListener("themed", draw); },
  };
}

function now(row) {
  return [
    tile("Records in", row.records_s, rate),
    tile("Bytes in", row.bytes_s, (value) => `${bytes(value)}/s`),
    tile("Lag", row.lag_records, count),
    tile("Waiting", row.lag_seconds, duration),
    tile("p99 until in the queue", row.p99_ms, (ms) => duration(ms / 1000)),
    tile("Lost", row.lost, count, row.lost > 0),
    tile("Doubled", row.doubled, count, row.doubled > 0),
    tile("Damaged", row.corrupt, count, row.corrupt > 0),
  ];
}

/** The parts of the page. They stay; only what is in them is drawn anew, so that a list that is open stays open. */
function sections(state, { redraw, load }) {
  const part = () => h("div");
  const [stagesTitle, funnelTitle] = [h("span"), h("span")];
  const [stagesPart, funnelPart, funnelNote, latencyPart, lagPart, heatPart, findingsPart, groupsPart, partitionsPart, settingsPart] = Array.from({ length: 10 }, part);
  const group = choice("group", "Group", (value) => { state.group = value; load(); });
  const stage = choice("stage", "Stage", (value) => { state.stage = value; redraw(); });
  const unit = choice("unit", "Unit of the lag", (value) => { state.unit = value; redraw(); });
  const card = (title, ...children) => h("section", { class: "card" }, h("h2", {}, title), ...children);
  const legends = legend([...STAGES.map((each, at) => [`s${at}`, each]), ["mark", "something is wrong"]]);
  const groupLabel = h("label", { class: "note" }, "Fetched and processed by group ", group.element);
  const element = h("div", { class: "grid" },
    card(stagesTitle, stagesPart, legends),
    card(funnelTitle, funnelPart, groupLabel, funnelNote),
    card(["Latency until ", stage.element], latencyPart),
    card(["Lag in ", unit.element], lagPart),
    h("section", { class: "card wide" }, h("h2", {}, "Records by partition"), heatPart, legend([["h5", "many"], ["h1", "few"], ["hz", "none"], ["mark", "something is wrong"], ["hn", "unknown"]])),
    h("section", { class: "card wide" }, h("h2", {}, "Open findings"), findingsPart),
    card("Groups", groupsPart),
    card("Partitions", partitionsPart),
    h("section", { class: "card wide" }, h("details", {}, h("summary", {}, "Settings"), settingsPart)));

  function findings() {
    const found = openFindings().filter((each) => each.topic === state.name).sort((a, b) => b.first_seen_ms - a.first_seen_ms);
    const more = found.length > FINDINGS_SHOWN ? h("p", { class: "note" }, h("a", { href: "#/loss" }, `and ${count(found.length - FINDINGS_SHOWN)} more`)) : "";
    findingsPart.replaceChildren(plainTable("Findings of this topic", ["Finding", "#Partition", "#Records", "Producer", "Sequences", "#First seen", "Acknowledged"],
      found.slice(0, FINDINGS_SHOWN).map((each) => [h("a", { href: findingLink(each.id) }, each.kind), each.partition, count(each.records), h("code", {}, each.producer),
        h("span", { class: "mono" }, sequences(each.ranges.slice(0, 3)) + (each.ranges.length > 3 ? " …" : "")), time(each.first_seen_ms), each.acknowledged_by && `by ${each.acknowledged_by}`]),
      "No open finding is known."), more);
  }

  function draw() {
    const { page, picked } = state;
    const { history } = page;
    const read = page.groups ?? [];
    const nobody = page.groups ? "No group reads this topic." : "Not known yet.";
    const column = picked === null ? "the whole time" : clock(history.first + picked * history.minutes);
    stagesTitle.textContent = `Stages by ${history.minutes === 1 ? "minute" : `${history.minutes} minutes`}`;
    stagesPart.replaceChildren(stages(history, picked, (at) => { state.picked = at; redraw(); }));
    funnelTitle.textContent = `From sent to processed, ${column}`;
    funnelPart.replaceChildren(funnel(history, picked));
    group.set(read.map((each) => each.group), page.group);
    groupLabel.hidden = !read.length;
    funnelNote.replaceChildren(read.length ? "" : h("p", { class: "note" }, nobody));
    drawLatency(history);
    drawLag(history, page, nobody);
    heatPart.replaceChildren(Object.keys(history.heat).length ? heat(history) : h("p", { class: "empty" }, "Not known yet."));
    groupsPart.replaceChildren(plainTable("Groups", ["Group", "#Members", "#Lag", "#Bytes", "#Waiting"],
      read.map((row) => [row.group, count(row.members), known(row.lag_records, count, row.error), known(row.lag_bytes, bytes, row.error), known(row.lag_seconds, duration, row.error)]), nobody));
    partitionsPart.replaceChildren(plainTable("Partitions", ["#Partition", "Owner", "#Records so far"],
      page.partitions.map((row) => [row.partition, row.owner || h("span", { class: "badge warn" }, "nobody"), known(row.records, count, row.error)]), "None."));
    settingsPart.replaceChildren(h("p", { class: "note" }, "id ", h("code", {}, page.id)),
      plainTable("Settings", ["Setting", "Value"], Object.entries(page.settings).map(([key, value]) => [h("code", {}, key), String(value)]), "None."));
    findings();
  }

  function drawLatency(history) {
    const there = LATENCY_STAGES.filter((each) => history.latency_ms[each]?.some(Boolean));
    const shown = there.includes(state.stage) ? state.stage : there[0];
    stage.set(there.length ? there : ["acked"], shown);
    latencyPart.replaceChildren(...(there.length ? [bands(history, shown), legend([["s2", "p50"], ["band90", "up to p90"], ["band99", "up to p99"]])]
      : [h("p", { class: "empty" }, "Not known yet: clients report it when the cluster audits.")]));
  }

  function drawLag(history, page, nobody) {
    unit.set(["records", "time"], state.unit);
    const values = state.unit === "time" ? history.lag_ms : history.lag;
    const write = state.unit === "time" ? (ms) => duration(ms / 1000) : count;
    lagPart.replaceChildren(...(values.some((value) => value !== null) ? [line("lag", history, values, `Lag of group ${page.group} over time`, write), legend([["s2", `group ${page.group}`]])]
      : [h("p", { class: "empty" }, page.group ? "Not known yet." : nobody)]));
  }

  return { element, draw, findings };
}

/** A list to choose from that is filled anew only when what can be chosen changes. */
function choice(name, label, chosen) {
  const element = h("select", { "data-keep": name, "aria-label": label, onchange: () => chosen(element.value) });
  let shown = "";
  return {
    element,
    set(values, value) {
      if (shown !== values.join("\n")) {
        shown = values.join("\n");
        element.replaceChildren(...values.map((each) => h("option", { value: each }, each)));
      }
      element.value = value ?? values[0] ?? "";
    },
  };
}
