// Charts as SVG: each says in words what it shows, for those who do not see it.

import { clock, count, duration, h, s } from "./dom.js";

const WIDTH = 640;
const LEFT = 52;
const BOTTOM = 20;

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
    if (run.length) picture.append(s("path", { d: `M${run[0][0]} 24L${run.map((each) => each.join(" ")).join("L")}L${run.at(-1)[0]} 24` }));
    run = [];
  }
  return picture;
}

/** A frame with an axis of time and one of values up to `most`. */
function frame(history, label, most, height, write) {
  const columns = history.words.length;
  const width = (WIDTH - LEFT) / columns;
  const x = (at) => LEFT + at * width;
  const y = (value) => height - (height * Math.min(value, most)) / most;
  const picture = s("svg", { viewBox: `0 -8 ${WIDTH} ${height + BOTTOM + 8}`, class: "chart", role: "img", "aria-label": label });
  for (const part of [0, 0.5, 1]) {
    picture.append(s("line", { x1: LEFT, x2: WIDTH, y1: y(most * part), y2: y(most * part), class: "axis" }));
    picture.append(s("text", { x: LEFT - 6, y: y(most * part) + 4, "text-anchor": "end" }, write(most * part)));
  }
  timeAxis(picture, history, x, height);
  return { picture, x, y, width, columns };
}

function timeAxis(picture, history, x, height) {
  const columns = history.words.length;
  for (let at = 0; at < columns; at += Math.ceil(columns / 6)) {
    picture.append(s("text", { x: x(at), y: height + 15 }, clock(history.first + at * history.minutes)));
  }
}

function round(value) {
  const power = 10 ** Math.floor(Math.log10(Math.max(value, 1)));
  return [1, 2, 5, 10].map((each) => each * power).find((each) => each >= value);
}

export const STAGES = ["sent", "acked", "committed", "fetched", "processed"];

/** Records by stage and column: what falls short of the stage before shows as lighter bars above. */
export function stages(history, picked, pick) {
  const shown = STAGES.filter((stage) => (history.counts[stage] ?? []).some((value) => value !== null));
  const most = round(Math.max(1, ...shown.flatMap((stage) => history.counts[stage].map((value) => value ?? 0))));
  const { picture, x, y, width, columns } = frame(history, "records by stage over time", most, 170, count);
  for (let at = 0; at < columns; at += 1) {
    for (const stage of shown) {
      const value = history.counts[stage][at];
      if (value) picture.append(s("rect", { x: x(at) + width * 0.1, width: width * 0.8, y: y(value), height: 170 - y(value), class: `s${STAGES.indexOf(stage)}` }));
    }
    if (["lost", "corrupt", "doubled"].includes(history.words[at])) picture.append(s("circle", { cx: x(at) + width / 2, cy: -4, r: 3.5, class: "mark" }));
    if (at === picked) picture.append(s("rect", { x: x(at), width, y: 0, height: 170, class: "picked" }));
    const cover = s("rect", { x: x(at), width, y: 0, height: 170, class: "pick" });
    cover.append(s("title", {}, `${clock(history.first + at * history.minutes)}: ${history.words[at] ?? "unknown"}; ` +
      shown.map((stage) => `${stage} ${history.counts[stage][at] ?? "unknown"}`).join(", ")));
    cover.addEventListener("click", () => pick(at === picked ? null : at));
    picture.append(cover);
  }
  return picture;
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
  return h("div", { class: "funnel", role: "table", "aria-label": "records by stage" }, totals.flatMap(([stage, value], at) => {
    const bar = s("svg", { viewBox: "0 0 100 20", preserveAspectRatio: "none", "aria-hidden": "true" });
    if (value !== null) bar.append(s("rect", { width: (100 * value) / most, height: 20, class: `s${at}` }));
    const less = value !== null && before !== null && value < before ? `−${count(before - value)}` : "";
    before = value ?? before;
    return [h("span", {}, stage), bar, h("b", { class: "num" }, value === null ? h("span", { class: "unknown" }, "unknown") : count(value)), h("span", { class: "num note" }, less)];
  }));
}

/** Latency as bands: up to p50 a line, up to p90 and p99 lighter. */
export function bands(history, stage) {
  const values = history.latency_ms[stage] ?? [];
  const most = round(Math.max(1, ...values.map((value) => value?.[2] ?? 0)));
  const { picture, x, y, width } = frame(history, `latency until ${stage}, quantiles`, most, 150, (ms) => duration(ms / 1000));
  runs(values).forEach((run) => {
    const middle = ({ at }) => x(at) + width / 2;
    const edge = (quantile, points) => points.map((each) => `${middle(each)} ${y(each.value[quantile])}`).join("L");
    if (run.length === 1) run.push({ at: run[0].at + 0.5, value: run[0].value });
    for (const [low, high, name] of [[1, 2, "band99"], [0, 1, "band90"]]) {
      picture.append(s("path", { class: name, d: `M${edge(high, run)}L${edge(low, [...run].reverse())}Z` }));
    }
    picture.append(s("path", { class: "line", d: `M${edge(0, run)}` }));
  });
  values.forEach((value, at) => value && picture.append(hover(x(at), width, 150,
    `${clock(history.first + at * history.minutes)}: p50 ${duration(value[0] / 1000)}, p90 ${duration(value[1] / 1000)}, p99 ${duration(value[2] / 1000)}`)));
  return picture;
}

/** A number over time as a filled line. */
export function line(history, values, label) {
  const most = round(Math.max(10, ...values.map((value) => value ?? 0)));
  const { picture, x, y, width } = frame(history, label, most, 150, count);
  runs(values).forEach((run) => {
    if (run.length === 1) run.push({ at: run[0].at + 0.5, value: run[0].value });
    const points = run.map(({ at, value }) => `${x(at) + width / 2} ${y(value)}`).join("L");
    picture.append(s("path", { class: "area", d: `M${x(run[0].at) + width / 2} 150L${points}L${x(run.at(-1).at) + width / 2} 150Z` }));
    picture.append(s("path", { class: "line", d: `M${points}` }));
  });
  values.forEach((value, at) => value !== null && picture.append(hover(x(at), width, 150, `${clock(history.first + at * history.minutes)}: ${count(value)}`)));
  return picture;
}

function hover(x, width, height, text) {
  const cover = s("rect", { x, width, y: 0, height, class: "pick" });
  cover.append(s("title", {}, text));
  return cover;
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

/** Records by partition and column: the darker the more; a frame where nothing is known. */
export function heat(history) {
  const partitions = Object.keys(history.heat);
  const most = Math.max(1, ...Object.values(history.heat).flat().map((value) => value ?? 0));
  const row = partitions.length > 24 ? 10 : 18;
  const height = partitions.length * row;
  const width = (WIDTH * 2 - LEFT) / history.words.length;
  const x = (at) => LEFT + at * width;
  const picture = s("svg", { viewBox: `0 0 ${WIDTH * 2} ${height + BOTTOM}`, class: "chart", role: "img", "aria-label": "records by partition over time" });
  partitions.forEach((partition, number) => {
    if (row > 10 || number % 4 === 0) picture.append(s("text", { x: LEFT - 6, y: number * row + row * 0.7, "text-anchor": "end" }, partition));
    history.heat[partition].forEach((value, at) => {
      const level = value === null ? "n" : value === 0 ? 0 : Math.ceil((5 * value) / most);
      const cell = s("rect", { x: x(at) + 0.75, y: number * row + 0.75, width: width - 1.5, height: row - 1.5, rx: 2, class: `h${level}` });
      cell.append(s("title", {}, `partition ${partition}, ${clock(history.first + at * history.minutes)}: ${value === null ? "unknown" : count(value)}`));
      picture.append(cell);
    });
  });
  timeAxis(picture, history, x, height);
  return picture;
}

/** What the classes of a chart mean. */
export function legend(pairs) {
  return h("p", { class: "legend" }, pairs.map(([name, text]) => h("span", {}, s("svg", { viewBox: "0 0 10 10", "aria-hidden": "true" }, s("rect", { width: 10, height: 10, rx: 2, class: name })), text)));
}

/** How full something is. */
export function meter(part, label) {
  const picture = s("svg", { viewBox: "0 0 100 8", preserveAspectRatio: "none", class: "meter", role: "img", "aria-label": label });
  picture.append(s("rect", { width: 100 * Math.min(part, 1), height: 8, class: part > 0.9 ? "over" : "full" }));
  return picture;
}
