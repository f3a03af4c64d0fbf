// SPDX-License-Identifier: Apache-2.0
// The latest requests; one request as a waterfall with its explanation; and what would have been otherwise.
import { card, clock, count, h, NONE, pill, seconds, share, words } from "./dom.js";
import { VirtualTable } from "./table.js";
import { api } from "./app.js";

export class RequestsPage {
  constructor(params) {
    this.filter = h("input", { type: "search", "aria-label": "Filter", placeholder: "filter by id, session, client, state", value: params.get("q") || "", oninput: () => this.draw() });
    this.count = h("span", { class: "muted" });
    this.table = new VirtualTable("Requests", [
      { name: "id", get: (row) => h("a", { href: `/console/request?id=${encodeURIComponent(row.id)}`, class: "mono" }, String(row.id).slice(0, 22)), key: "id" },
      { name: "state", get: (row) => (row.state || row.status ? pill(String(row.state ?? row.status)) : NONE), key: "state" },
      { name: "start", get: (row) => clock(row.start), key: "start" },
      { name: "TTFT", get: (row) => seconds(row.ttft_s), num: true, key: "ttft_s" },
      { name: "latency", get: (row) => seconds(row.latency_s), num: true, key: "latency_s" },
      { name: "prompt", get: (row) => count(row.prompt_tokens), num: true, key: "prompt_tokens" },
      { name: "cached", get: (row) => count(row.cached_tokens), num: true, key: "cached_tokens" },
      { name: "output", get: (row) => count(row.output_tokens), num: true, key: "output_tokens" },
      { name: "session", get: (row) => (row.session ? String(row.session).slice(0, 24) : NONE), key: "session" },
      { name: "client", get: (row) => row.client || row.tenant || NONE, key: "client" },
    ], { empty: "no request is remembered" });
    this.rows = [];
    this.element = h("div", {}, h("div", { class: "row" }, h("h1", {}, "Requests"), this.filter, this.count), h("section", { class: "card" }, this.table.element));
  }

  path() { return "/console/requests.json"; }

  update(found) {
    this.rows = found.requests;
    this.draw();
  }

  draw() {
    const text = this.filter.value.toLowerCase();
    const rows = text ? this.rows.filter((row) => [row.id, row.session, row.client, row.tenant, row.state].some((one) => String(one ?? "").toLowerCase().includes(text))) : this.rows;
    this.count.textContent = `${rows.length} of the latest ${this.rows.length}`;
    this.table.set(rows);
  }
}

export class RequestPage {
  constructor(params) {
    this.id = params.get("id") || "";
    this.fall = h("div");
    this.facts = h("div");
    this.candidates = h("div", { class: "scroll" });
    this.blocks = h("div", { class: "scroll" });
    this.left = h("div");
    this.result = h("div", { "aria-live": "polite" });
    const buttons = [["twice the memory", { memory: 2 }], ["one more decode instance", { decode: 1 }], ["random placement", { policy: "random" }], ["least loaded first", { policy: "load" }]]
      .map(([text, change]) => h("button", { type: "button", onclick: () => this.ask(text, change) }, text));
    this.rest = h("div", { hidden: true }, h("div", { class: "grid" }, card("Decision", this.facts), card("What if, on the last minutes' recording", h("div", { class: "row" }, buttons), this.result)), h("p", {}),
      h("div", { class: "grid" }, card("Candidates", this.candidates), card("Blocks of the prompt", this.blocks, this.left)));
    this.element = h("div", {}, h("h1", {}, "Request ", h("span", { class: "mono" }, this.id)), card("Waterfall", this.fall), h("p", {}),
      this.rest);
  }

  path() { return `/console/request.json?id=${encodeURIComponent(this.id)}`; }

  failed(error) { this.fall.replaceChildren(h("p", { class: "bad" }, error.message)); }

  update(found) {
    const prompt = found.prompts[0];
    this.rest.hidden = false;
    this.fall.replaceChildren(prompt?.state === "refused" && !found.waterfall.spans.length ? h("p", { class: "muted" }, "it was refused before any phase began") : waterfall(found.waterfall));
    this.is_still = !prompt || !["prefill", "decode"].includes(prompt.state);
    if (!prompt) { this.facts.replaceChildren(h("p", { class: "muted" }, "the conductor no longer remembers it")); return; }
    const actual = prompt.actual, predicted = prompt.prediction || {};
    const rows = [["queue", predicted.queue_s, actual.queue_s], ["load", predicted.fetch_s, actual.load_s], ["prefill", predicted.prefill_s, actual.prefill_s], ["TTFT", predicted.ttft_s, actual.ttft_s], ["TBT", predicted.tbt_s, actual.tbt_s]];
    this.facts.replaceChildren(...[
      h("p", {}, pill(prompt.state), ` ${prompt.num_tokens} tokens, policy ${prompt.policy || NONE}: ${prompt.reason}`),
      prompt.state === "refused" ? null : h("p", {}, `prefill at ${prompt.prefill || NONE}, decode at ${prompt.decode || NONE}`, prompt.degraded ? `; degraded: ${prompt.degraded}` : ""),
      prompt.admission ? h("p", {}, `admission ${prompt.admission.rule}: ${words(prompt.admission.code)}${prompt.admission.is_audited ? ", served as a check of the rejection" : ""}${prompt.reason.includes(prompt.admission.reason) ? "" : `; ${prompt.admission.reason}`}`) : null,
      prompt.state === "refused" ? null : h("p", {}, `${actual.cached_tokens} tokens cached there, ${actual.loaded_tokens} loaded from elsewhere, hit rate ${share((actual.cached_tokens + actual.loaded_tokens) / Math.max(1, prompt.num_tokens))}`),
      plain(["", "predicted", "measured"], rows.map(([name, before, after]) => [name, seconds(before), after ? seconds(after) : NONE]))].filter(Boolean));
    this.left.replaceChildren(...departed(found.misses?.[0]));
    this.candidates.replaceChildren(plain(["instance", "score", "queue", "fetch", "prefill", "cached", ""], prompt.candidates.map((one) => one.why_not
      ? [one.instance, NONE, NONE, NONE, NONE, NONE, one.why_not]
      : [one.instance, ...["score_s", "queue_s", "fetch_s", "prefill_s"].map((name) => seconds(one[name])), count(one.cached_tokens), one.instance === (prompt.prefill || prompt.decode) ? "chosen" : ""])));
    this.blocks.replaceChildren(plain(["blocks", "verdict", "where", "rule", "before"], prompt.blocks.slice(0, 200).map((one) => [one.num > 1 ? `${one.first} to ${one.first + one.num - 1}` : one.first, words(one.verdict), one.where, one.rule, one.seconds_before ? seconds(one.seconds_before) : ""])));
  }

  async ask(text, change) {
    this.result.replaceChildren(h("p", { class: "muted" }, `simulating: ${text}`));
    try {
      this.result.replaceChildren(predicted(text, await api("/console/what_if.json", { method: "POST", body: change })));
    } catch (error) {
      this.result.replaceChildren(h("p", { class: "bad" }, error.message));
    }
  }
}

// Where the prompt left the one most like it; the text there is in no answer of the console.
function departed(found) {
  const left = found?.left_sibling;
  if (!left) return [];
  const other = h("a", { href: `/console/request?id=${encodeURIComponent(left.sibling || "")}`, class: "mono" }, String(left.sibling || "").slice(0, 22));
  return [h("p", {}, `It left its nearest sibling `, other, ` at ${left.unit === "characters" ? "character" : "token"} ${left.offset}: ${words(left.kind)}, ${count(left.lost_tokens)} tokens lost.`, left.rule ? ` A hygiene rule ${left.rule} would avoid it; mooncake explain shows it whole.` : "")];
}

export function waterfall(found) {
  if (!found.spans.length) return h("p", { class: "muted" }, "no phase has been measured yet");
  const end = Math.max(...found.spans.map((one) => one.end_s)) || 1;
  const rows = found.spans.flatMap((one) => {
    const bar = h("div", { class: `bar ${one.phase}` });
    bar.style.left = `${(100 * one.start_s) / end}%`;
    bar.style.width = `${(100 * (one.end_s - one.start_s)) / end}%`;
    const expected = one.predicted_s ? `; predicted ${seconds(one.predicted_s)}` : "";
    const text = `${one.name}${one.where ? ` at ${one.where}` : ""}: from ${seconds(one.start_s)} to ${seconds(one.end_s)}${expected}`;
    return [h("span", { class: `name d${Math.min(4, one.depth)}`, title: text }, one.name, one.where ? h("span", { class: "where" }, ` ${one.where}`) : null),
      h("div", { class: "track", role: "img", "aria-label": text, title: text }, bar), h("span", {}, seconds(one.end_s - one.start_s))];
  });
  const source = { trace: "from the request's trace", explanation: "durations from the conductor's explanation, in their order" }[found.source];
  return h("div", {}, h("div", { class: "fall" }, rows), h("p", { class: "muted" }, source));
}

export function predicted(text, found) {
  if (!found.is_available) return h("p", { class: "muted" }, `not available: ${found.message}`);
  const has_effect = found.rows.some((row) => row.effect);
  const names = has_effect ? ["", "expected", "change, 90 % interval"] : ["", "as it was", "expected"];
  const rows = found.rows.map((row) => [words(row.name), ...(has_effect ? [shown(row.after, row.name), change(row.effect)] : [shown(row.before, row.name), shown(row.after, row.name)])]);
  return h("div", {}, h("p", {}, h("b", {}, text)), rows.length ? plain(names, rows) : h("p", { class: "muted" }, "no quantity was predicted"), found.notes.map((note) => h("p", { class: "muted" }, note)));
}

// A relative change, for hit rates a difference: both in percent.
function change(effect) {
  if (!effect) return NONE;
  const percent = (value) => `${value >= 0 ? "+" : "−"}${Math.abs(100 * value).toFixed(1)} %`;
  return `${percent(effect.value)} (${percent(effect.low)} to ${percent(effect.high)})`;
}

function shown(value, name = "") {
  const one = value && typeof value === "object" ? value.mean ?? value.p50 ?? value.value : value;
  if (typeof one !== "number") return NONE;
  if (/rate|share|hit/.test(name)) return share(one);
  return /_per_s$/.test(name) || !/_s|ttft|tbt|seconds/.test(name) ? count(one) : seconds(one);
}

export function plain(names, rows) {
  return h("table", {}, h("thead", {}, h("tr", {}, names.map((name) => h("th", { scope: "col" }, name)))), h("tbody", {}, rows.map((row) => h("tr", {}, row.map((cell) => h("td", {}, cell ?? ""))))));
}
