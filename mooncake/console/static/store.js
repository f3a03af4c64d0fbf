// SPDX-License-Identifier: Apache-2.0
// What the pool holds: tiers, tenants, models, the hottest prefixes and blocks; and one object's story.
import { bytes, card, count, h, meter, NONE, number_of, seconds, share, stat } from "./dom.js";
import { VirtualTable } from "./table.js";
import { act, may_act } from "./app.js";
import { plain } from "./requests.js";

const link = (row) => h("a", { href: `/console/key?key=${encodeURIComponent(row.key)}&tenant=${encodeURIComponent(row.tenant)}`, class: "mono", title: row.key }, shorten(row.key));
const shorten = (key) => (key.length > 44 ? `${key.slice(0, 30)}…${key.slice(-12)}` : key);
const TIERS = ["device", "memory", "ssd"];

export class StorePage {
  constructor() {
    this.stats = Object.fromEntries([["objects", "objects"], ["writing", "being written"], ["used", "in use"], ["full", "full"], ["hits", "hits of lookups"], ["evicted", "evicted"]].map(([name, label]) => [name, stat(label)]));
    this.tiers = h("div");
    this.tenants = h("div", { class: "scroll" });
    this.rows = h("div", { class: "scroll" });
    this.note = h("p", { class: "muted" });
    this.canvas = h("canvas", { class: "cells", height: 120, role: "img" });
    this.cellsNote = h("p", { class: "muted" });
    this.prefixes = new VirtualTable("Hottest prefixes", [
      { name: "uses", get: (row) => count(row.num_uses), num: true, key: "num_uses" },
      { name: "first block", get: link, key: "key" }, { name: "tenant", get: (row) => row.tenant, key: "tenant" },
      { name: "blocks", get: (row) => count(row.num_blocks), num: true, key: "num_blocks" },
      { name: "longest", get: (row) => count(row.longest), num: true, key: "longest" }, { name: "size", get: (row) => bytes(row.size_bytes), num: true, key: "size_bytes" },
    ], { empty: "the pool is empty" });
    const form = h("form", { class: "row", onsubmit: (event) => this.look(event) }, h("label", { for: "key-field" }, "A key"), h("input", { id: "key-field", required: true, maxlength: 1024, placeholder: "kv/…" }),
      h("input", { id: "tenant-field", placeholder: "tenant (default)", "aria-label": "Tenant", maxlength: 255 }), h("button", {}, "Its story"));
    this.element = h("div", {}, h("div", { class: "row" }, h("h1", {}, "Store"), h("span", { class: "spacer" }), form), h("div", { class: "cards" }, Object.values(this.stats).map((one) => one.element)),
      h("div", { class: "grid" }, card("Tiers", this.tiers), card("Tenants", this.tenants)), h("p", {}), card("Blocks, the most used first", this.canvas, this.cellsNote), h("p", {}),
      card("Hottest prefixes", this.prefixes.element, this.note), h("p", {}), card("Contents by tenant, model and tier", this.rows));
    this.canvas_size = new ResizeObserver(() => this.draw());
    this.canvas_size.observe(this.canvas);
  }

  path() { return "/console/store.json"; }
  themed() { this.draw(); }

  look(event) {
    event.preventDefault();
    const [key, tenant] = [...event.target.querySelectorAll("input")].map((one) => encodeURIComponent(one.value));
    history.pushState(null, "", `/console/key?key=${key}&tenant=${tenant}`);
    window.dispatchEvent(new PopStateEvent("popstate"));
  }

  update(found) {
    const { counts, contents } = found;
    this.stats.objects.set(count(found.num_objects));
    this.stats.writing.set(count(found.num_writing));
    this.stats.used.set(bytes(found.allocated_bytes));
    this.stats.full.set(share(found.capacity_bytes ? found.allocated_bytes / found.capacity_bytes : null));
    this.stats.hits.set(share(counts.lookups ? counts.lookup_hits / counts.lookups : null));
    this.stats.evicted.set(count(counts.evicted_objects));
    const tiers = {};
    for (const one of found.segments) {
      const tier = (tiers[one.tier] ??= { size: 0, used: 0, objects: 0, segments: 0 });
      tier.size += one.size_bytes; tier.used += one.allocated_bytes; tier.objects += one.num_objects; tier.segments += 1;
    }
    this.tiers.replaceChildren(...Object.entries(tiers).map(([name, one]) => h("div", {}, h("div", { class: "row" }, h("b", {}, name), `${bytes(one.used)} of ${bytes(one.size)} (${share(one.used / one.size)}), ${number_of(one.objects, "extent")} on ${number_of(one.segments, "segment")}`), meter(one.used / one.size, "s2"))));
    if (!Object.keys(tiers).length) this.tiers.replaceChildren(h("p", { class: "muted" }, "no segment is mounted"));
    this.tenants.replaceChildren(plain(["tenant", "objects", "used", "quota"], found.tenants.map((one) => [one.tenant, count(one.num_objects), bytes(one.used_bytes), one.quota_bytes === null ? "none" : bytes(one.quota_bytes)])));
    this.rows.replaceChildren(plain(["tenant", "model and layout", "tier", "objects", "bytes", "uses"], contents.rows.map((one) => [one.tenant, one.model, one.tier, count(one.num_objects), bytes(one.size_bytes), count(one.num_uses)])));
    this.prefixes.set(contents.prefixes);
    this.note.textContent = `${count(contents.num_read)} of ${count(contents.num_objects)} objects were read, ${seconds(contents.age_s)} ago. A block without a known block before it is a prefix of its own.`;
    this.cells = contents.cells;
    this.draw();
  }

  // One cell per block on one canvas: ten thousand blocks are one element.
  draw() {
    if (!this.cells) return;
    const { uses, tier } = this.cells, width = this.canvas.clientWidth || 600, ratio = window.devicePixelRatio || 1;
    const size = uses.length > 4000 ? 6 : uses.length > 1000 ? 9 : 14, columns = Math.max(1, Math.floor(width / size));
    const height = Math.max(size, Math.ceil(uses.length / columns) * size);
    this.canvas.width = width * ratio;
    this.canvas.height = height * ratio;
    this.canvas.style.height = `${height}px`;
    const brush = this.canvas.getContext("2d"), style = getComputedStyle(document.documentElement);
    const colours = ["--s3", "--s1", "--s2", "--s5"].map((name) => style.getPropertyValue(name).trim());
    const most = Math.log1p(uses[0] || 1);
    brush.scale(ratio, ratio);
    uses.forEach((num, number) => {
      brush.globalAlpha = 0.25 + 0.75 * (most ? Math.log1p(num) / most : 0);
      brush.fillStyle = colours[Math.min(3, tier[number])];
      brush.fillRect((number % columns) * size, Math.floor(number / columns) * size, size - 1, size - 1);
    });
    const by = TIERS.map((name, number) => [name, tier.filter((one) => one === number).length]).filter(([, num]) => num);
    this.canvas.setAttribute("aria-label", `${uses.length} blocks; ${by.map(([name, num]) => `${num} in ${name}`).join(", ")}; the most used has ${uses[0] ?? 0} uses`);
    this.canvas.dataset.blocks = uses.length;
    this.cellsNote.textContent = `${count(uses.length)} blocks: ${by.map(([name, num]) => `${count(num)} in ${name}`).join(", ") || NONE}. The stronger the colour, the more uses.`;
  }
}

export class KeyPage {
  constructor(params) {
    this.key = params.get("key") || "";
    this.tenant = params.get("tenant") || "";
    this.facts = h("div");
    this.story = h("ol", { class: "story mono" });
    this.element = h("div", {}, h("h1", {}, "Object"), h("p", { class: "mono wrap" }, this.key), card("Now", this.facts), h("p", {}), card("Story", this.story), h("p", {}, h("a", { href: "/console/store" }, "Back to the store")));
  }

  path() { return `/console/key.json?key=${encodeURIComponent(this.key)}&tenant=${encodeURIComponent(this.tenant)}`; }

  failed(error) { this.facts.replaceChildren(h("p", { class: "bad" }, error.message)); }

  update(found) {
    const one = found.object;
    const fields = { key: this.key, tenant: this.tenant };
    this.facts.replaceChildren(one === null ? h("p", { class: "muted" }, "there is no such object now") : h("div", {},
      h("p", {}, `${bytes(one.size_bytes)}, ${number_of(one.num_uses, "use")}, leased for ${seconds(one.leased_s)}, ${one.pinned_s === null ? "pinned hard" : one.pinned_s ? `pinned for ${seconds(one.pinned_s)}` : "not pinned"}${one.is_writing ? ", being written" : ""}`),
      one.parent ? h("p", {}, "after ", h("a", { href: `/console/key?key=${encodeURIComponent(one.parent)}&tenant=${encodeURIComponent(this.tenant)}`, class: "mono" }, shorten(one.parent))) : null,
      h("div", { class: "scroll" }, plain(["replica on", "tier", "state"], one.replicas.map((replica) => [replica.segment, replica.tier, `${replica.is_complete ? "complete" : "being written"}${replica.is_alive ? "" : ", its node does not answer"}`]))),
      may_act() ? h("div", { class: "row" }, h("button", { type: "button", onclick: () => act("pin", fields, `Pin ${this.key} until it is unpinned?`) }, "Pin"), h("button", { type: "button", onclick: () => act("unpin", fields, `Allow the eviction of ${this.key} again?`) }, "Unpin")) : null));
    this.story.replaceChildren(...(found.story.length ? found.story.map((line) => h("li", {}, line)) : [h("li", { class: "muted" }, "no history is kept")]));
  }
}
