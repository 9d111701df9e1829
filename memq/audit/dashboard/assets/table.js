// Tables that stay fast with thousands of lines: only the lines in view exist.

import { h } from "./dom.js";

const ROW = 40;  // px, as the style sheet has it
const AROUND = 12;  // lines above and below the view

/**
 * Make a table. Columns: {title, cell(row), key?(row) to sort by, mark?(row), num?}. A cell is drawn anew only when its
 * mark, else its key, is another. `keyOf` names a row, `open` is called with the row that was chosen. Rows with an unknown
 * value sort last, whichever way.
 */
export class Table {
  constructor({ label, columns, keyOf, open, sort = null, descending = false, empty = "Nothing here." }) {
    Object.assign(this, { columns, keyOf, open, sort, descending, label, stop: null, height: 0 });
    this.rows = [];
    this.shown = new Map();
    this.top = h("td", { colSpan: columns.length });
    this.bottom = h("td", { colSpan: columns.length });
    this.body = h("tbody");
    this.heads = columns.map((column, at) => this.#head(column, at));
    this.table = h("table", { class: "virtual", "aria-label": label }, h("thead", {}, h("tr", {}, this.heads)), this.body);
    this.none = h("p", { class: "empty", hidden: true }, empty);
    this.element = h("div", { class: "scroll", onscroll: () => { this.scrolled = this.element.scrollTop; this.#draw(); } }, this.table, this.none);
    this.element.addEventListener("keydown", (event) => this.#key(event));
    this.element.addEventListener("focusin", (event) => { if (event.target.row) { this.stop = this.keyOf(event.target.row); this.#stops(); } });
    // Its height is remembered: to ask for it between two changes makes the browser lay out the page twice.
    new ResizeObserver(([{ contentRect }]) => { this.height = contentRect.height; this.#draw(); }).observe(this.element);
    this.#say();
  }

  /** Show these rows. */
  set(rows) {
    this.rows = rows;
    this.#order();
    this.#draw(true);
  }

  /** What is said where there is no row. */
  say(text) {
    this.none.textContent = text;
  }

  #head(column, at) {
    if (!column.key) return h("th", { class: column.num ? "num" : "", scope: "col" }, column.title);
    const press = () => {
      this.descending = this.sort === at ? !this.descending : Boolean(column.num);
      this.sort = at;
      this.#say();
      this.#order();
      this.element.scrollTop = this.scrolled = 0;
      this.#draw(true);
    };
    return h("th", { class: column.num ? "num" : "", scope: "col" }, h("button", { type: "button", onclick: press }, column.title));
  }

  #say() {
    this.heads.forEach((head, at) => {
      if (!this.columns[at].key) return;
      head.setAttribute("aria-sort", at !== this.sort ? "none" : this.descending ? "descending" : "ascending");
    });
  }

  #order() {
    if (this.sort === null) return;
    const { key } = this.columns[this.sort];
    const way = this.descending ? -1 : 1;
    const keyed = this.rows.map((row) => [key(row), this.keyOf(row), row]);
    keyed.sort(([a, name], [b, other]) => {
      const [lackA, lackB] = [a === null || a === undefined, b === null || b === undefined];
      if (lackA !== lackB) return lackA ? 1 : -1;
      if (!lackA && a !== b) return a < b ? -way : way;
      return name < other ? -1 : name > other ? 1 : 0;
    });
    this.rows = keyed.map(([, , row]) => row);
  }

  #draw(changed = false) {
    const top = this.scrolled ?? 0;
    const first = Math.max(0, Math.floor(top / ROW) - AROUND);
    const end = Math.min(this.rows.length, Math.ceil((top + Math.max(this.height, 0.7 * innerHeight)) / ROW) + AROUND);
    if (!changed && first === this.first && end === this.end) return;
    [this.first, this.end] = [first, end];
    const before = this.shown;
    this.shown = new Map();
    const lines = this.rows.slice(first, end).map((row, at) => {
      const name = this.keyOf(row);
      const old = before.get(name);
      const line = old && old.row === row ? old.line : this.#line(row, old?.line);
      line.setAttribute("aria-rowindex", first + at + 2);
      this.shown.set(name, { row, line });
      return line;
    });
    this.top.style.height = `${first * ROW}px`;
    this.bottom.style.height = `${(this.rows.length - end) * ROW}px`;
    const held = this.body.contains(document.activeElement) ? document.activeElement : null;
    this.body.replaceChildren(h("tr", { class: "space", "aria-hidden": "true" }, this.top), ...lines, h("tr", { class: "space", "aria-hidden": "true" }, this.bottom));
    if (held && held.isConnected) held.focus({ preventScroll: true });
    this.table.setAttribute("aria-rowcount", this.rows.length + 1);
    this.none.hidden = this.rows.length > 0;
    this.#stops();
  }

  /** Let Tab stop at one line, the last that had the focus or the first one: the arrows lead to the others. */
  #stops() {
    if (!this.open) return;
    const lines = [...this.shown.values()].map(({ line }) => line);
    const stop = this.shown.get(this.stop)?.line ?? lines[0];
    for (const line of lines) line.tabIndex = line === stop ? 0 : -1;
  }

  #line(row, line) {
    const marks = this.columns.map((column) => (column.mark ?? column.key)?.(row));
    if (line) {  // the same line with new values keeps the focus
      this.columns.forEach((column, at) => { if (marks[at] === undefined || marks[at] !== line.marks[at]) line.cells[at].replaceChildren(column.cell(row)); });
      Object.assign(line, { row, marks });
      return line;
    }
    line = h("tr", { class: this.open ? "open" : "" }, this.columns.map((column) => h("td", { class: column.num ? "num" : "" }, column.cell(row))));
    Object.assign(line, { row, marks });
    if (this.open) {
      line.addEventListener("click", (event) => { if (!event.target.closest("a, button")) this.open(line.row); });
    }
    return line;
  }

  /** Move the focus to the line that is `step` from the one that has it. */
  move(step) {
    const at = this.rows.findIndex((row) => this.shown.get(this.keyOf(row))?.line === document.activeElement);
    const next = Math.min(Math.max(at < 0 ? Math.round(this.element.scrollTop / ROW) : at + step, 0), this.rows.length - 1);
    if (next < 0) return;
    const above = next * ROW;
    const room = this.element.clientHeight - 2 * ROW;
    if (above < this.element.scrollTop) this.element.scrollTop = above;
    if (above > this.element.scrollTop + room) this.element.scrollTop = above - room;
    this.scrolled = this.element.scrollTop;
    this.#draw();
    this.shown.get(this.keyOf(this.rows[next]))?.line.focus({ preventScroll: true });
  }

  #key(event) {
    if (event.target.tagName !== "TR") return;
    if (event.key === "Enter" && this.open) this.open(event.target.row);
  }
}

/** A small table without sorting: heads and rows of cells; heads that begin with # are of numbers. */
export function plainTable(label, heads, rows, empty) {
  if (!rows.length) return h("p", { class: "empty" }, empty);
  const number = heads.map((head) => head.startsWith("#"));
  return h("div", { class: "scroll", tabIndex: 0, role: "region", "aria-label": label, "data-keep": label }, h("table", { "aria-label": label },
    h("thead", {}, h("tr", {}, heads.map((head, at) => h("th", { scope: "col", class: number[at] ? "num" : "" }, head.replace("#", ""))))),
    h("tbody", {}, rows.map((row) => h("tr", {}, row.map((cell, at) => h("td", { class: number[at] ? "num" : "" }, cell)))))));
}
