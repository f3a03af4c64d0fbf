// SPDX-License-Identifier: Apache-2.0
// The cluster as a map: hosts, instances, segments, tiers; and which requests wait for what.
import { bytes, card, count, h, meter, number_of, pill, seconds, share, words } from "./dom.js";
import { VirtualTable } from "./table.js";
import { act, may_act } from "./app.js";

export class ClusterPage {
  constructor() {
    this.head = h("p", { class: "muted" });
    this.hosts = h("div", { class: "hosts" });
    this.tiers = h("div");
    this.scaling = h("div");
    this.waiting = new VirtualTable("Requests in progress", [
      { name: "request", get: (row) => h("a", { href: `/console/request?id=${encodeURIComponent(row.id)}`, class: "mono" }, String(row.id).slice(0, 18)), key: "id" },
      { name: "waits for", get: (row) => row.what, key: "what" },
      { name: "at", get: (row) => row.instance, key: "instance" },
      { name: "since", get: (row) => seconds(row.seconds), num: true, key: "seconds" },
      { name: "prompt", get: (row) => count(row.tokens), num: true, key: "tokens" },
    ], { empty: "no request is in progress" });
    this.add = h("form", { class: "row", hidden: true, onsubmit: (event) => this.adding(event) },
      h("label", { for: "add-instance" }, "Add an instance"), h("input", { id: "add-instance", placeholder: "host:port", required: true, maxlength: 300 }),
      h("select", { id: "add-type", "aria-label": "Role" }, h("option", {}, "prefill"), h("option", {}, "decode")), h("button", { class: "primary" }, "Add"));
    this.element = h("div", {}, h("h1", {}, "Cluster"), this.head, this.add, this.hosts, h("p", {}),
      h("div", { class: "grid" }, card("Tiers", this.tiers), card("Desired instances", this.scaling)), h("p", {}), card("Who waits for what", this.waiting.element));
  }

  path() { return "/console/cluster.json"; }

  async adding(event) {
    event.preventDefault();
    const [instance, type] = [this.add.querySelector("input").value, this.add.querySelector("select").value];
    await act("add", { instance, type }, `Add ${instance} as a ${type} instance?`);
  }

  update(found) {
    const parts = [`model ${found.model}`, `scheduling ${found.scheduling}`, `conductor ${found.conductor}`, `${found.requests_in_flight} answers in progress`];
    if (found.degraded) parts.push(`degraded: ${found.degraded}`);
    this.head.textContent = parts.join(" · ");
    this.add.hidden = !may_act();
    const focused = document.activeElement?.dataset?.act;
    this.hosts.replaceChildren(...found.hosts.map((host) => card(host.host, host.instances.map(instance), host.segments.map(segment))));
    if (focused) this.hosts.querySelector(`[data-act="${CSS.escape(focused)}"]`)?.focus();
    const tiers = found.tiers.map((one) => h("div", {}, h("div", { class: "row" }, h("b", {}, one.tier), `${bytes(one.allocated_bytes)} of ${bytes(one.size_bytes)}, ${number_of(one.num_objects, "extent")}, ${number_of(one.segments, "segment")}`), meter(one.allocated_bytes / one.size_bytes, "s2")));
    this.tiers.replaceChildren(...(tiers.length ? tiers : [h("p", { class: "muted" }, found.store_trouble || "no segment is mounted")]));
    const scaling = (found.scaling || []).map((one) => h("p", {}, h("b", {}, one.role), `: ${one.serving} serving, ${one.desired || "no number"} desired, load ${Number(one.load).toFixed(2)} `, h("span", { class: "muted" }, one.reason.replace(`${one.role}: `, ""))));
    this.scaling.replaceChildren(...(scaling.length ? scaling : [h("p", { class: "muted" }, "the conductor states none")]));
    this.waiting.set(found.waiting);
  }
}

function instance(row) {
  const waits = Object.entries(row.waiting).filter(([, num]) => num).map(([what, num]) => `${num} in ${what}`).join(", ");
  const actions = may_act() ? h("div", { class: "row" }, ["drain", "remove"].map((action) => h("button", { type: "button", class: "danger", "data-act": `${action} ${row.instance}`,
    onclick: () => act(action, { type: row.role, instance: row.instance }, `${words(action)} ${row.instance}? It gets no more requests, and its answers move.`) }, action))) : null;
  return h("div", { class: `unit ${row.role}` },
    h("div", { class: "row" }, h("b", { class: "mono" }, row.instance), pill(row.health)),
    h("div", { class: "muted" }, `${row.role} · ${number_of(row.num_requests, "request")} · ${count(row.queued_tokens)} tokens queued · ${number_of(row.num_blocks, "block")} known`),
    row.detail && row.health !== "ready" ? h("div", { class: "muted" }, row.detail) : null, waits ? h("div", {}, waits) : null, actions);
}

function segment(row) {
  const state = row.is_draining ? "draining" : row.rests_s ? "resting" : row.state;
  const drain = may_act() && !row.is_draining ? h("button", { type: "button", class: "danger", "data-act": `segment ${row.segment}`,
    onclick: () => act("drain_segment", { segment: row.segment }, `Move all objects of ${row.segment} elsewhere?`) }, "drain") : null;
  return h("div", { class: "unit segment" },
    h("div", { class: "row" }, h("b", { class: "mono" }, row.segment), pill(state)),
    h("div", { class: "muted" }, `${row.tier} · ${number_of(row.num_objects, "extent")} · ${bytes(row.allocated_bytes)} of ${bytes(row.size_bytes)} (${share(row.allocated_bytes / row.size_bytes)})`),
    meter(row.allocated_bytes / row.size_bytes, "s2"), drain);
}
