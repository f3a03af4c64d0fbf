// SPDX-License-Identifier: Apache-2.0
// The latest requests by session: which conversations reuse what they computed before.
import { clock, count, h, meter, NONE, number_of, seconds, share } from "./dom.js";
import { VirtualTable } from "./table.js";

export class SessionsPage {
  constructor() {
    this.note = h("p", { class: "muted" });
    this.table = new VirtualTable("Sessions", [
      { name: "session", get: (row) => (row.session ? h("a", { href: `/console/requests?q=${encodeURIComponent(row.session)}`, class: "mono" }, row.session.slice(0, 40)) : "without a session"), key: "session" },
      { name: "client", get: (row) => row.client || NONE, key: "client" },
      { name: "requests", get: (row) => count(row.requests), num: true, key: "requests" },
      { name: "in progress", get: (row) => count(row.in_progress), num: true, key: "in_progress" },
      { name: "hit rate", get: (row) => h("div", {}, share(row.hit_rate), meter(row.hit_rate, "s3")), key: "hit_rate" },
      { name: "prompt", get: (row) => count(row.prompt_tokens), num: true, key: "prompt_tokens" },
      { name: "cached", get: (row) => count(row.cached_tokens), num: true, key: "cached_tokens" },
      { name: "output", get: (row) => count(row.output_tokens), num: true, key: "output_tokens" },
      { name: "mean TTFT", get: (row) => seconds(row.mean_ttft_s), num: true, key: "mean_ttft_s" },
      { name: "last", get: (row) => clock(row.last_start), key: "last_start" },
    ], { empty: "no request is remembered" });
    this.element = h("div", {}, h("h1", {}, "Sessions"), this.note, h("section", { class: "card" }, this.table.element));
  }

  path() { return "/console/sessions.json"; }

  update(found) {
    this.note.textContent = `${number_of(found.num_sessions, "session")} in the latest ${number_of(found.num_requests, "request")}`;
    this.table.set(found.sessions);
  }
}
