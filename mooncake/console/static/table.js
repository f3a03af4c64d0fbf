// SPDX-License-Identifier: Apache-2.0
// A table that holds elements only for the rows in sight, so that thousands of rows stay fluid.
import { h, NONE } from "./dom.js";

const ROW_PX = 34;
const MARGIN_ROWS = 8;

// columns: [{name, get(row) -> text or Node, num, key}], `key` sorts.
export class VirtualTable {
  constructor(label, columns, { empty = "nothing yet" } = {}) {
    this.columns = columns;
    this.rows = [];
    this.sort = null;
    this.empty = empty;
    this.headers = columns.map((column, number) => {
      const inner = column.key
        ? h("button", { type: "button", class: "sort", onclick: () => this.sortBy(number) }, column.name)
        : column.name;
      return h("th", { scope: "col", class: column.num ? "num" : null }, inner);
    });
    this.body = h("tbody");
    this.table = h("table", { "aria-label": label }, h("thead", {}, h("tr", {}, this.headers)), this.body);
    this.element = h("div", { class: "virtual", tabindex: "0", role: "region", "aria-label": `${label}, scrollable` }, this.table);
    this.element.addEventListener("scroll", () => this.draw(), { passive: true });
    new ResizeObserver(() => this.draw()).observe(this.element);
  }

  set(rows) {
    this.rows = this.sorted(rows);
    this.table.setAttribute("aria-rowcount", this.rows.length);
    this.drawn = null;
    this.draw();
  }

  sortBy(number) {
    const ascending = this.sort?.number === number ? !this.sort.ascending : false;
    this.sort = { number, ascending };
    this.headers.forEach((one, at) => one.setAttribute("aria-sort", at === number ? (ascending ? "ascending" : "descending") : "none"));
    this.set(this.rows);
  }

  sorted(rows) {
    if (!this.sort) return rows;
    const { key } = this.columns[this.sort.number];
    const sign = this.sort.ascending ? 1 : -1;
    return [...rows].sort((a, b) => {
      const [x, y] = [a[key] ?? null, b[key] ?? null];
      // A text is neither above nor below a number: rows without a value are compared by that alone.
      if (x === null || y === null) return sign * ((x !== null) - (y !== null));
      return sign * (x < y ? -1 : x > y ? 1 : 0);
    });
  }

  draw() {
    const first = Math.max(0, Math.floor(this.element.scrollTop / ROW_PX) - MARGIN_ROWS);
    const seen = Math.ceil((this.element.clientHeight || 600) / ROW_PX) + 2 * MARGIN_ROWS;
    const end = Math.min(this.rows.length, first + seen);
    if (this.drawn && this.drawn[0] === first && this.drawn[1] === end) return;
    this.drawn = [first, end];
    const focused = document.activeElement?.closest?.("tr")?.dataset.row;
    const wasInside = this.body.contains(document.activeElement);
    const rows = this.rows.slice(first, end).map((row, number) => this.row(row, first + number));
    if (!this.rows.length) rows.push(h("tr", {}, h("td", { colspan: this.columns.length, class: "muted" }, this.empty)));
    this.body.replaceChildren(this.space(first), ...rows, this.space(this.rows.length - end));
    if (wasInside && focused) this.body.querySelector(`tr[data-row="${CSS.escape(focused)}"] a, tr[data-row="${CSS.escape(focused)}"] button`)?.focus({ preventScroll: true });
  }

  row(row, number) {
    const cells = this.columns.map((column) => h("td", { class: column.num ? "num" : column.wrap ? "wrap" : null }, column.get(row) ?? NONE));
    return h("tr", { "data-row": row.id ?? row.key ?? row.session ?? number, "aria-rowindex": number + 2 }, cells);
  }

  space(rows) {
    const element = h("tr", { class: "space", "aria-hidden": "true" });
    element.style.height = `${Math.max(0, rows) * ROW_PX}px`;
    return element;
  }
}
