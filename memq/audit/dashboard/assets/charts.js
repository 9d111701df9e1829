// Charts. Each can be read column by column, with the pointer or the arrow keys, and says the column in words.

import { clock, count, duration, h, s } from "./dom.js";

const WIDTH = 640;
const LEFT = 52;
const BOTTOM = 20;
const HEAT_ROWS_MAX = 128;
const WRONG = ["lost", "corrupt", "doubled"];
const cursors = new Map();  // by chart: the column that was looked at last
let hovered = "";

/** A small line of the last hour; gaps are what is not known. */
export function spark(values) {
  const most = Math.max(1, ...values.map((value) => value ?? 0));
  const points = values.map((value, at) => [at, value === null ? null : 22 - (20 * value) / most]);
  const picture = s("svg", { viewBox: `0 0 ${Math.max(values.length - 1, 1)} 24`, preserveAspectRatio: "none", class: "spark", role: "img" });
  const known = values.filter((value) => value !== null);
  picture.append(s("title", {}, known.length ? `records by minute: now ${known.at(-1)}, at most ${Math.max(...known)}` : "unknown"));
  let run = [];
  for (const point of [...points, [0, null]]) {
    if (point[1] !== null) { run.push(point); continue; }
    if (run.length === 1) run.push([run[0][0] + 0.5, run[0][1]]);
    if (run.length) {
      const edge = run.map((each) => each.join(" ")).join("L");
      picture.append(s("path", { class: "under", d: `M${run[0][0]} 24L${edge}L${run.at(-1)[0]} 24` }), s("path", { d: `M${edge}` }));
    }
    run = [];
  }
  return picture;
}

/**
 * What makes a picture of columns readable: a line and a box with the numbers of the column under the pointer, or of the
 * one that the arrow keys chose; for those who do not see it, it is a slider that says these numbers. `rows` returns
 * [class, name, text] of a column; `pick` is called with the column that was clicked, or entered.
 */
function plot(name, label, history, picture, rows, { pick, share = LEFT / WIDTH } = {}) {
  const columns = history.words.length;
  const cross = h("div", { class: "cross" });
  const tip = h("div", { class: "tip", "aria-hidden": "true" });
  const box = h("div", { class: "plot", tabIndex: 0, role: "slider", "data-keep": name, "aria-label": label, "aria-valuemin": 0, "aria-valuemax": columns - 1 }, picture, cross, tip);
  let at = Math.min(cursors.get(name) ?? columns - 1, columns - 1);

  function show(column) {
    at = Math.max(0, Math.min(columns - 1, column));
    const place = share + ((1 - share) * (at + 0.5)) / columns;
    const found = rows(at);
    const moment = clock(history.first + at * history.minutes);
    cross.style.left = `${100 * place}%`;
    tip.style.left = place > 0.5 ? "auto" : `calc(${100 * place}% + .7rem)`;
    tip.style.right = place > 0.5 ? `calc(${100 - 100 * place}% + .7rem)` : "auto";
    tip.replaceChildren(h("b", {}, moment), h("dl", {}, found.flatMap(([kind, key, text]) => [h("dt", {}, kind && swatch(kind), key), h("dd", {}, text)])));
    box.setAttribute("aria-valuenow", at);
    box.setAttribute("aria-valuetext", `${moment}: ${found.map(([, key, text]) => `${key} ${text}`).join(", ") || "nothing"}`);
  }

  function look(column) {
    cursors.set(name, column);
    show(column);
  }

  function under(event) {
    const { left, width } = box.getBoundingClientRect();
    return Math.floor((((event.clientX - left) / width - share) / (1 - share)) * columns);
  }

  box.addEventListener("pointermove", (event) => { hovered = name; box.classList.add("looked"); look(under(event)); });
  box.addEventListener("pointerleave", () => { hovered = ""; box.classList.remove("looked"); });
  box.addEventListener("click", (event) => { look(under(event)); pick?.(at); });
  box.addEventListener("keydown", (event) => {
    const next = { ArrowLeft: at - 1, ArrowRight: at + 1, PageUp: at - 10, PageDown: at + 10, Home: 0, End: columns - 1 }[event.key];
    if (next !== undefined) look(next);
    else if (event.key === "Enter" && pick) pick(at);
    else return;
    event.preventDefault();
  });
  if (hovered === name) box.classList.add("looked");
  show(at);
  return box;
}

/** A frame with an axis of time and one of values up to `most`. */
function frame(history, most, height, write) {
  const columns = history.words.length;
  const width = (WIDTH - LEFT) / columns;
  const x = (at) => LEFT + at * width;
  const y = (value) => height - (height * Math.min(value, most)) / most;
  const picture = s("svg", { viewBox: `0 -8 ${WIDTH} ${height + BOTTOM + 8}`, class: "chart", "aria-hidden": "true" });
  for (const part of [0, 0.5, 1]) {
    picture.append(s("line", { x1: LEFT, x2: WIDTH, y1: y(most * part), y2: y(most * part), class: "axis" }));
    picture.append(s("text", { x: LEFT - 6, y: y(most * part) + 4, "text-anchor": "end" }, write(most * part)));
  }
  for (const at of ticks(columns)) picture.append(s("text", { x: x(at), y: height + 15 }, clock(history.first + at * history.minutes)));
  return { picture, x, y, width };
}

function ticks(columns) {
  return [0, 1, 2, 3, 4, 5].map((part) => Math.ceil(columns / 6) * part).filter((at) => at < columns);
}

function round(value) {
  const power = 10 ** Math.floor(Math.log10(Math.max(value, 1)));
  return [1, 2, 2.5, 4, 5, 8, 10].map((each) => each * power).find((each) => each >= value);
}

export const STAGES = ["sent", "acked", "committed", "fetched", "processed"];
const said = (value) => (value === null || value === undefined ? "unknown" : count(value));

/** Records by stage and column: what falls short of the stage before shows as lighter bars above. */
export function stages(history, picked, pick) {
  const shown = STAGES.filter((stage) => (history.counts[stage] ?? []).some((value) => value !== null));
  const most = round(Math.max(1, ...shown.flatMap((stage) => history.counts[stage].map((value) => value ?? 0))));
  const { picture, x, y, width } = frame(history, most, 170, count);
  history.words.forEach((word, at) => {
    if (at === picked) picture.append(s("rect", { x: x(at), width, y: 0, height: 170, class: "picked" }));
    for (const stage of shown) {
      const value = history.counts[stage][at];
      if (value) picture.append(s("rect", { x: x(at) + width * 0.1, width: width * 0.8, y: y(value), height: 170 - y(value), class: `s${STAGES.indexOf(stage)}` }));
    }
    if (WRONG.includes(word)) picture.append(s("circle", { cx: x(at) + width / 2, cy: -4, r: 3.5, class: "mark" }));
  });
  const rows = (at) => [["", "verdict", history.words[at] ?? "unknown"],
    ...shown.map((stage) => [`s${STAGES.indexOf(stage)}`, stage, said(history.counts[stage][at])]),
    ...WRONG.filter((kind) => history.counts[kind]?.[at]).map((kind) => ["mark", kind, count(history.counts[kind][at])])];
  return plot("stages", "Records by stage over time; Enter shows one column below", history, picture, rows, { pick: (at) => pick(at === picked ? null : at) });
}

/** How many records came to each stage, in one column or in all; the difference to the stage before is named. */
export function funnel(history, picked) {
  const total = (stage) => {
    const values = (history.counts[stage] ?? []).filter((value, at) => value !== null && (picked === null || at === picked));
    return values.length ? values.reduce((sum, value) => sum + value, 0) : null;
  };
  const totals = STAGES.map((stage) => [stage, total(stage)]);
  const most = Math.max(1, ...totals.map(([, value]) => value ?? 0));
  let before = null;
  return h("table", { class: "funnel", "aria-label": "Records by stage" },
    h("thead", { class: "unseen" }, h("tr", {}, ["Stage", "Share", "Records", "Less than before"].map((head) => h("th", { scope: "col" }, head)))),
    h("tbody", {}, totals.map(([stage, value], at) => {
      const bar = s("svg", { viewBox: "0 0 100 20", preserveAspectRatio: "none", "aria-hidden": "true" });
      if (value !== null) bar.append(s("rect", { width: (100 * value) / most, height: 20, rx: 0.6, class: `s${at}` }));
      const less = value !== null && before !== null && value < before ? `−${count(before - value)}` : "";
      before = value ?? before;
      return h("tr", {}, h("th", { scope: "row" }, stage), h("td", { class: "bar-cell" }, bar),
        h("td", { class: "num" }, h("b", {}, value === null ? h("span", { class: "unknown" }, "unknown") : count(value))), h("td", { class: "num note" }, less));
    })));
}

/** Latency as bands: up to p50 a line, up to p90 and p99 lighter. */
export function bands(history, stage) {
  const values = history.latency_ms[stage] ?? [];
  const most = round(Math.max(1, ...values.map((value) => value?.[2] ?? 0)));
  const ms = (value) => duration(value / 1000);
  const { picture, x, y, width } = frame(history, most, 150, ms);
  runs(values).forEach((run) => {
    const middle = ({ at }) => x(at) + width / 2;
    const edge = (quantile, points) => points.map((each) => `${middle(each)} ${y(each.value[quantile])}`).join("L");
    if (run.length === 1) run.push({ at: run[0].at + 0.5, value: run[0].value });
    for (const [low, high, name] of [[1, 2, "band99"], [0, 1, "band90"]]) {
      picture.append(s("path", { class: name, d: `M${edge(high, run)}L${edge(low, [...run].reverse())}Z` }));
    }
    picture.append(s("path", { class: "line", d: `M${edge(0, run)}` }));
  });
  const rows = (at) => [["s2", "p50"], ["band90", "p90"], ["band99", "p99"]].map(([kind, name], number) => [kind, name, values[at] ? ms(values[at][number]) : "unknown"]);
  return plot("latency", `Latency until ${stage} over time: p50, p90 and p99`, history, picture, rows);
}

/** A number over time as a filled line. */
export function line(name, history, values, label, write) {
  const most = round(Math.max(10, ...values.map((value) => value ?? 0)));
  const { picture, x, y, width } = frame(history, most, 150, write);
  const middle = ({ at }) => x(at) + width / 2;
  runs(values).forEach((run) => {
    if (run.length === 1) run.push({ at: run[0].at + 0.5, value: run[0].value });
    const edge = run.map((each) => `${middle(each)} ${y(each.value)}`).join("L");
    picture.append(s("path", { class: "area", d: `M${middle(run[0])} 150L${edge}L${middle(run.at(-1))} 150Z` }), s("path", { class: "line", d: `M${edge}` }));
  });
  return plot(name, label, history, picture, (at) => [["s2", "lag", values[at] === null ? "unknown" : write(values[at])]]);
}

/** Parts of a column of values between what is not known. */
function runs(values) {
  const found = [[]];
  values.forEach((value, at) => {
    if (value === null) found.push([]);
    else found.at(-1).push({ at, value });
  });
  return found.filter((run) => run.length);
}

/**
 * Records by partition and column: the darker the more, red where something is wrong, a frame where nothing is known.
 * It is drawn as pixels: a thousand partitions are a hundred thousand cells. Beyond HEAT_ROWS_MAX a row is of several.
 */
export function heat(history) {
  const numbers = Object.keys(history.heat);
  const each = Math.ceil(numbers.length / HEAT_ROWS_MAX);
  const rows = Array.from({ length: Math.ceil(numbers.length / each) }, (_, at) => numbers.slice(at * each, (at + 1) * each));
  const columns = history.words.length;
  const cells = rows.map((row) => history.words.map((_, at) => {
    const values = row.map((number) => history.heat[number][at]).filter((value) => value !== null);
    return { value: values.length ? values.reduce((sum, value) => sum + value, 0) : null, wrong: row.map((number) => history.marks[number]?.[at]).find(Boolean) };
  }));
  const most = Math.max(1, ...cells.flat().map((cell) => cell.value ?? 0));
  const name = (row) => (row.length > 1 ? `${row[0]}–${row.at(-1)}` : row[0]);
  const column = (at) => {
    const found = rows.map((row, number) => [row, cells[number][at]]).sort(([, a], [, b]) => Boolean(b.wrong) - Boolean(a.wrong));
    const shown = found.slice(0, 8).map(([row, cell]) => [cell.wrong ? "mark" : "", `partition ${name(row)}`, `${said(cell.value)}${cell.wrong ? `, ${cell.wrong}` : ""}`]);
    return found.length > 8 ? [...shown, ["", "and", `${found.length - 8} more`]] : shown;
  };
  return plot("heat", "Records by partition over time", history, painted(rows, cells, most, history, columns, name), column, { share: LEFT / (WIDTH * 2) });
}

function painted(rows, cells, most, history, columns, name) {
  const tall = rows.length > 64 ? 5 : rows.length > 24 ? 10 : 18;
  const [across, down] = [WIDTH * 2, rows.length * tall];
  const width = (across - LEFT) / columns;
  const canvas = h("canvas", { class: "chart", width: across * 2, height: (down + BOTTOM) * 2, "aria-hidden": "true" });
  const pen = canvas.getContext("2d");
  const style = getComputedStyle(document.documentElement);
  const colour = (variable) => style.getPropertyValue(variable).trim();
  const [full, bad, frameColour, soft] = ["--chart", "--bad", "--line", "--soft"].map(colour);
  const gap = tall > 5 ? 1.5 : 0.5;
  pen.scale(2, 2);
  pen.font = "11px system-ui, sans-serif";
  const every = Math.ceil(14 / tall);
  cells.forEach((row, number) => {
    pen.globalAlpha = 1;
    pen.fillStyle = soft;
    pen.textAlign = "right";
    if (number % every === 0) pen.fillText(name(rows[number]), LEFT - 6, number * tall + Math.max(tall * 0.7, 9));
    row.forEach(({ value, wrong }, at) => {
      const place = [LEFT + at * width + gap / 2, number * tall + gap / 2, width - gap, tall - gap];
      pen.globalAlpha = wrong ? 1 : value ? 0.2 + (0.8 * value) / most : 0.6;
      pen.fillStyle = wrong ? bad : value ? full : frameColour;
      pen.strokeStyle = frameColour;
      if (value === null && !wrong) pen.strokeRect(place[0] + 0.5, place[1] + 0.5, place[2] - 1, place[3] - 1);
      else pen.fillRect(...place);
    });
  });
  pen.globalAlpha = 1;
  pen.textAlign = "left";
  pen.fillStyle = soft;
  for (const at of ticks(columns)) pen.fillText(clock(history.first + at * history.minutes), LEFT + at * width, down + 15);
  return canvas;
}

function swatch(name) {
  return s("svg", { viewBox: "0 0 10 10", class: "swatch", "aria-hidden": "true" }, s("rect", { width: 10, height: 10, rx: 2, class: name }));
}

/** What the classes of a chart mean. */
export function legend(pairs) {
  return h("p", { class: "legend" }, pairs.map(([name, text]) => h("span", {}, swatch(name), text)));
}

/** How full something is. */
export function meter(part, label) {
  const picture = s("svg", { viewBox: "0 0 100 8", preserveAspectRatio: "none", class: "meter", role: "img", "aria-label": label });
  picture.append(s("rect", { width: 100 * Math.min(part, 1), height: 8, class: part > 0.9 ? "over" : "full" }));
  return picture;
}

/** Shares of a whole, as one bar: [class, number] each. */
export function shares(parts) {
  const whole = Math.max(1, parts.reduce((sum, [, value]) => sum + value, 0));
  const picture = s("svg", { viewBox: "0 0 100 6", preserveAspectRatio: "none", class: "shares", "aria-hidden": "true" });
  let x = 0;
  for (const [name, value] of parts) {
    picture.append(s("rect", { x, width: (100 * value) / whole, height: 6, class: name }));
    x += (100 * value) / whole;
  }
  return picture;
}
