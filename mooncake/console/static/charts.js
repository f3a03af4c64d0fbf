// SPDX-License-Identifier: Apache-2.0
// Lines over time. A chart takes the keyboard (arrow keys move the cross), and its data is a table as well.
import { h, s, setText, NONE } from "./dom.js";

const HEIGHT = 190;
const LEFT = 54, RIGHT = 10, TOP = 8, BOTTOM = 20;

export class LineChart {
  // series: [{name, label}], format: value -> text, top: fixed upper end of the axis.
  constructor(title, series, format, { top = null } = {}) {
    this.series = series;
    this.format = format;
    this.top = top;
    this.at = [];
    this.values = {};
    this.cross = null;
    this.svg = s("svg", { role: "img", tabindex: "0", "aria-label": title });
    this.legend = h("div", { class: "legend" });
    this.labels = series.map((one, number) => {
      const value = h("span", {});
      this.legend.append(h("span", {}, h("i", { class: `c${number + 1}` }), `${one.label} `, value));
      return value;
    });
    this.table = h("div", { class: "scroll" });
    this.details = h("details", { ontoggle: () => this.drawTable() }, h("summary", { class: "muted" }, "Data"), this.table);
    this.title = title;
    this.element = h("section", { class: "card chart" }, h("h2", {}, title), this.svg, this.legend, this.details);
    this.svg.addEventListener("pointermove", (event) => this.point(event.offsetX));
    this.svg.addEventListener("pointerleave", () => { this.cross = null; this.draw(); });
    this.svg.addEventListener("keydown", (event) => this.key(event));
    this.svg.addEventListener("blur", () => { this.cross = null; this.draw(); });
    new ResizeObserver(() => this.draw()).observe(this.svg);
  }

  set(at, values) {
    this.at = at;
    this.values = values;
    this.draw();
    if (this.details.open) this.drawTable();
  }

  get latest() {
    return this.series.map((one) => [...(this.values[one.name] || [])].reverse().find((value) => value !== null) ?? null);
  }

  point(x) {
    const share = (x - LEFT) / Math.max(1, this.svg.clientWidth - LEFT - RIGHT);
    this.cross = Math.round(Math.min(1, Math.max(0, share)) * (this.at.length - 1));
    this.draw();
  }

  key(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1, Home: -1e9, End: 1e9 }[event.key];
    if (step === undefined || !this.at.length) return;
    event.preventDefault();
    this.cross = Math.min(this.at.length - 1, Math.max(0, (this.cross ?? this.at.length - 1) + step));
    this.draw();
  }

  draw() {
    const width = this.svg.clientWidth || 400;
    const all = this.series.flatMap((one) => this.values[one.name] || []).filter((value) => value !== null);
    const top = this.top ?? niceTop(Math.max(0, ...all));
    const num = this.at.length;
    const began = this.at[0], span = num > 1 ? this.at[num - 1] - began : 1;
    const x = (number) => LEFT + ((this.at[number] - began) / (span || 1)) * (width - LEFT - RIGHT);
    const y = (value) => TOP + (1 - value / top) * (HEIGHT - TOP - BOTTOM);
    const parts = [];
    for (const level of [0, 0.5, 1]) {
      parts.push(s("line", { class: "tick", x1: LEFT, x2: width - RIGHT, y1: y(level * top), y2: y(level * top) }));
      parts.push(s("text", { x: LEFT - 6, y: y(level * top) + 4, "text-anchor": "end" }, this.format(level * top)));
    }
    if (num > 1) {
      const ago = Math.round(span);
      parts.push(s("text", { x: LEFT, y: HEIGHT - 4 }, ago >= 120 ? `${Math.round(ago / 60)} min ago` : `${ago} s ago`));
      parts.push(s("text", { x: width - RIGHT, y: HEIGHT - 4, "text-anchor": "end" }, "now"));
    }
    this.series.forEach((one, number) => {
      const values = this.values[one.name] || [];
      parts.push(s("path", { class: `l${number + 1}`, d: line(values, x, y, top) }));
      // A value without neighbours is no line: mark it.
      values.forEach((value, at) => {
        if (value !== null && (values[at - 1] ?? null) === null && (values[at + 1] ?? null) === null)
          parts.push(s("circle", { class: `l${number + 1}`, cx: x(at), cy: y(Math.min(value, top)), r: 2.5 }));
      });
    });
    const shown = this.cross === null || this.cross >= num ? null : this.cross;
    if (shown !== null) parts.push(s("line", { class: "cross", x1: x(shown), x2: x(shown), y1: TOP, y2: HEIGHT - BOTTOM }));
    this.svg.replaceChildren(...parts);
    const latest = this.latest;
    this.series.forEach((one, number) => {
      const value = shown === null ? latest[number] : (this.values[one.name] || [])[shown];
      setText(this.labels[number], value === null || value === undefined ? NONE : this.format(value));
      this.labels[number].dataset.value = latest[number] ?? "";
    });
    const when = shown === null ? "latest" : `${Math.round(this.at[num - 1] - this.at[shown])} s ago`;
    const read = this.series.map((one, number) => `${one.label} ${this.labels[number].textContent}`).join(", ");
    this.svg.setAttribute("aria-label", `${this.title}, ${when}: ${read}`);
  }

  drawTable() {
    if (!this.details.open) return;
    const last = this.at[this.at.length - 1];
    const rows = this.at.map((at, number) => h("tr", {}, h("td", {}, `${Math.round(last - at)} s ago`), this.series.map((one) => {
      const value = (this.values[one.name] || [])[number];
      return h("td", { class: "num" }, value === null || value === undefined ? NONE : this.format(value));
    })));
    const head = h("tr", {}, h("th", {}, "when"), this.series.map((one) => h("th", { class: "num" }, one.label)));
    this.table.replaceChildren(h("table", {}, h("thead", {}, head), h("tbody", {}, rows.reverse().slice(0, 60))));
  }
}

function line(values, x, y, top) {
  let path = "", is_down = false;
  values.forEach((value, number) => {
    if (value === null || value === undefined) { is_down = false; return; }
    path += `${is_down ? "L" : "M"}${x(number).toFixed(1)} ${y(Math.min(value, top)).toFixed(1)}`;
    is_down = true;
  });
  return path;
}

function niceTop(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((one) => one * power).find((one) => one >= value);
}
