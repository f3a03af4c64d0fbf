// SPDX-License-Identifier: Apache-2.0
// Hit rate, savings, latencies, SLOs, rejections: now and over the last half hour.
import { card, count, h, seconds, share, stat, words } from "./dom.js";
import { LineChart } from "./charts.js";

const CARDS = [
  ["hit_rate", "hit rate", share, "tokens of prompts that were not computed again"],
  ["saved_tokens", "tokens saved", count, "mooncake_gateway_tokens_total{kind=\"cached\"}"],
  ["saved_seconds", "seconds saved (estimate)", seconds, "mooncake_console_saved_seconds_total"],
  ["prompt_tokens", "prompt tokens", count, "mooncake_gateway_tokens_total{kind=\"prompt\"}"],
  ["output_tokens", "output tokens", count, "mooncake_gateway_tokens_total{kind=\"output\"}"],
  ["ttft_p50_s", "TTFT, median", seconds, ""], ["ttft_p95_s", "TTFT, 95 %", seconds, ""],
  ["tbt_p95_s", "TBT, 95 %", seconds, ""],
  ["slo_ttft", "TTFT SLO met", share, "of answers whose request set one"],
  ["slo_tbt", "TBT SLO met", share, "of answers whose request set one"],
  ["in_flight", "in progress", count, "mooncake_gateway_requests_in_flight"],
  ["requests", "requests", count, ""],
  ["rejected", "rejected", count, ""],
];

export class OverviewPage {
  constructor() {
    this.stats = {};
    this.cards = h("div", { class: "cards" });
    this.span = h("select", { "aria-label": "Time shown", id: "span" }, [["60", "1 min"], ["300", "5 min"], ["1800", "30 min"]].map(([value, text]) => h("option", { value, selected: value === "300" }, text)));
    this.charts = [
      [new LineChart("Hit rate", [{ name: "hit_rate", label: "of prompt tokens" }], share, { top: 1 }), ["hit_rate"]],
      [new LineChart("Tokens per second", [{ name: "prompt_tokens_per_s", label: "prompt" }, { name: "cached_tokens_per_s", label: "cached" }, { name: "output_tokens_per_s", label: "output" }], count)],
      [new LineChart("TTFT", [{ name: "ttft_p50_s", label: "median" }, { name: "ttft_p95_s", label: "95 %" }], seconds)],
      [new LineChart("TBT", [{ name: "tbt_p50_s", label: "median" }, { name: "tbt_p95_s", label: "95 %" }], seconds)],
      [new LineChart("Seconds of prefill saved", [{ name: "saved_seconds", label: "in each interval" }], seconds)],
      [new LineChart("SLO attainment", [{ name: "slo_ttft", label: "TTFT" }, { name: "slo_tbt", label: "TBT" }], share, { top: 1 })],
      [new LineChart("Answers in progress, and refused", [{ name: "in_flight", label: "in progress" }, { name: "refused", label: "refused (429, 503)" }], count)],
    ].map(([chart]) => chart);
    this.rejected = h("div");
    this.misses = h("div");
        this.grid = h("div", { class: "grid" }, this.charts.map((one) => one.element), card("Rejected requests, by reason", this.rejected), card("Why tokens missed", this.misses));
    this.element = h("div", {}, h("div", { class: "row" }, h("h1", {}, "Overview"), h("span", { class: "spacer" }), this.span), this.cards, this.grid);
  }

  path() {
    return `/console/overview.json?seconds=${this.span.value}`;
  }

  update(found) {
    for (const [name, label, format, hint] of CARDS) {
      if (!(name in found.cards)) continue;
      if (!this.stats[name]) {
        this.stats[name] = stat(label, hint);
        this.cards.append(this.stats[name].element);
      }
      this.stats[name].set(format(found.cards[name]));
    }
    for (const chart of this.charts) chart.element.hidden = !found.series;
    if (found.series) for (const chart of this.charts) chart.set(found.at, found.series);
    this.rejected.replaceChildren(bars(found.rejected, "no request was rejected"));
    this.misses.replaceChildren(missed(found.misses));
  }
}

export function missed(found) {
  if (found === null || found === undefined) return h("p", { class: "muted" }, "not available: this gateway does not sum the causes of misses");
  return bars(found, "no miss was recorded");
}

function bars(values, empty) {
  const rows = Object.entries(values || {}).filter(([, value]) => value > 0).sort((a, b) => b[1] - a[1]).slice(0, 12);
  if (!rows.length) return h("p", { class: "muted" }, empty);
  const most = rows[0][1];
  return h("div", { class: "fall" }, rows.flatMap(([name, value]) => {
    const bar = h("div", { class: "bar prefill" });
    bar.style.width = `${(100 * value) / most}%`;
    return [h("span", { class: "name", title: name }, words(name)), h("div", { class: "track" }, bar), h("span", {}, count(value))];
  }));
}
