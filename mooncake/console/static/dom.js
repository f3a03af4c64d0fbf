// SPDX-License-Identifier: Apache-2.0
// Elements and formats. Text is always set as text, never as markup, so no value of the cluster can become code.

export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((one) => one !== null && one !== undefined).map((one) => (one instanceof Node ? one : String(one))));
  return element;
}

const SVG = "http://www.w3.org/2000/svg";
export function s(tag, attributes = {}, text = "") {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text) element.textContent = text;
  return element;
}

export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export const NONE = "–";
const is = (value) => value !== null && value !== undefined && !Number.isNaN(value);

export function count(value) {
  if (!is(value)) return NONE;
  if (Math.abs(value) >= 1e9) return `${(value / 1e9).toPrecision(3)} G`;
  if (Math.abs(value) >= 1e6) return `${(value / 1e6).toPrecision(3)} M`;
  if (Math.abs(value) >= 1e4) return `${(value / 1e3).toPrecision(3)} k`;
  return Number.isInteger(value) ? String(value) : Number(value.toPrecision(3)).toString();
}
export function share(value) {
  if (!is(value)) return NONE;
  const is_round = value === 0 || value === 1 || (value >= 0.1 && value <= 0.99);
  return `${(100 * value).toFixed(is_round ? 0 : 1)} %`;
}
export const number_of = (num, noun) => `${count(num)} ${noun}${num === 1 ? "" : "s"}`;
export function seconds(value) {
  if (!is(value)) return NONE;
  if (value === 0) return "0 s";
  if (value < 0.001) return `${(value * 1e6).toPrecision(3)} µs`;
  if (value < 1) return `${(value * 1e3).toPrecision(3)} ms`;
  if (value < 120) return `${Number(value.toPrecision(3))} s`;
  if (value < 7200) return `${(value / 60).toPrecision(3)} min`;
  return `${(value / 3600).toPrecision(3)} h`;
}
export function bytes(value) {
  if (!is(value)) return NONE;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1000 && unit < units.length - 1) { value /= 1024; unit += 1; }
  return `${Number(value.toPrecision(3))} ${units[unit]}`;
}
export const clock = (value) => (is(value) ? new Date(value * 1000).toLocaleTimeString() : NONE);
export const words = (text) => String(text ?? "").replaceAll("_", " ");

export function card(title, ...children) {
  return h("section", { class: "card" }, h("h2", {}, title), ...children);
}

// A number with its name; `set` changes it.
export function stat(name, hint = "") {
  const value = h("b", {}, NONE);
  const element = h("div", { class: "card stat", title: hint || null }, value, h("span", {}, name));
  return { element, set: (text) => setText(value, text) };
}

export function meter(part, kind = "") {
  const inner = h("i");
  inner.style.width = `${Math.round(1000 * Math.min(1, Math.max(0, part || 0))) / 10}%`;
  return h("div", { class: `meter ${kind}`, role: "img", "aria-label": `${Math.round(100 * (part || 0))} % used` }, inner);
}

export function pill(text) {
  const kind = { ready: "good", alive: "good", finished: "good", down: "bad", failed: "bad", refused: "bad" }[text] || "warn";
  return h("span", { class: `pill ${kind}` }, text);
}
