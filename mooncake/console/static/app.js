// SPDX-License-Identifier: Apache-2.0
// The frame of every page: who the visitor is, which page is open, and its data every two seconds.
import { h, setText } from "./dom.js";
import { OverviewPage } from "./overview.js";
import { ClusterPage } from "./cluster.js";
import { RequestsPage, RequestPage } from "./requests.js";
import { StorePage, KeyPage } from "./store.js";
import { SessionsPage } from "./sessions.js";

const PAGES = {
  overview: ["Overview", OverviewPage], cluster: ["Cluster", ClusterPage], requests: ["Requests", RequestsPage],
  request: [null, RequestPage], store: ["Store", StorePage], sessions: ["Sessions", SessionsPage], key: [null, KeyPage],
};
const PARENTS = { request: "requests", key: "store" };
const EVERY_MS = 2000;
const STATUS_WORDS = { 400: "refused", 403: "refused", 404: "not found", 429: "refused", 502: "not available", 503: "not available", 504: "not available" };
const main = document.getElementById("main");
const live = document.getElementById("live");
const find = (id) => document.getElementById(id);

const state = { session: null, page: null, view: "", is_paused: false, timer: 0, run: 0 };

export async function api(path, { method = "GET", body = null } = {}) {
  const headers = { accept: "application/json" };
  if (body !== null) headers["content-type"] = "application/json";
  if (method !== "GET" && state.session) headers["x-csrf-token"] = state.session.csrf;
  const answer = await fetch(path, { method, headers, body: body === null ? null : JSON.stringify(body), credentials: "same-origin" });
  const found = await answer.json().catch(() => ({}));
  if (!answer.ok) {
    const error = new Error(found.error?.message || `the server answered ${answer.status}`);
    error.status = answer.status;
    throw error;
  }
  return found;
}

export function notice(text, is_bad = false) {
  const element = find("notice");
  element.className = is_bad ? "bad" : "";
  element.textContent = text;
  element.hidden = false;
  clearTimeout(notice.timer);
  notice.timer = setTimeout(() => { element.hidden = true; }, 8000);
}

// Ask first, then act: every change names what it changes.
export async function act(action, fields, question) {
  if (!window.confirm(question)) return false;
  try {
    const { message } = await api(`/console/actions/${action}`, { method: "POST", body: fields });
    notice(message);
    return true;
  } catch (error) {
    notice(error.message, true);
    return false;
  }
}

export const may_act = () => Boolean(state.session?.may_act);

function where() {
  const view = location.pathname.split("/")[2] || "";
  return [PAGES[view] ? view : (state.session?.views[0] || "overview"), new URLSearchParams(location.search)];
}

function open(view, params) {
  clearTimeout(state.timer);
  state.run += 1;
  state.view = view;
  const [title, Page] = PAGES[view];
  state.page = new Page(params);
  main.replaceChildren(state.page.element);
  document.title = `${title || view} - Mooncake console`;
  for (const link of find("nav").children) {
    if (link.dataset.view === (PARENTS[view] || view)) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  refresh(state.run);
}

async function refresh(run) {
  clearTimeout(state.timer);
  const page = state.page;
  try {
    if (page.path && !(document.hidden && page.has_data)) {
      const found = await api(page.path());
      if (run !== state.run) return;
      page.update(found);
      page.has_data = true;
      page.trouble?.remove();
    }
    setLive("live", "live");
  } catch (error) {
    if (run !== state.run) return;
    if (error.status === 401) {
      setLive("lost", "not logged in");
      askKey();
      return;
    }
    if (page.failed) page.failed(error);
    else {
      page.trouble?.remove();
      page.trouble = h("p", { class: "bad", role: "alert" }, error.message);
      main.prepend(page.trouble);
    }
    setLive("lost", STATUS_WORDS[error.status] || (error.status ? "failed" : "no answer"));
  }
  if (run === state.run && !state.is_paused && !page.is_still) state.timer = setTimeout(() => refresh(run), EVERY_MS);
}

function setLive(kind, text) {
  live.dataset.state = state.is_paused ? "paused" : kind;
  setText(live, state.is_paused ? "paused" : text);
}

function drawNavigation() {
  const links = state.session.views.filter((view) => PAGES[view]?.[0]).map((view) => h("a", { href: `/console/${view}`, "data-view": view }, PAGES[view][0]));
  find("nav").replaceChildren(...links);
  find("login").hidden = state.session.visitor !== "reader";
  find("logout").hidden = state.session.visitor === "reader";
  find("logout").title = state.session.name || state.session.visitor;
}

function askKey() {
  const dialog = find("login-dialog");
  if (!dialog.open) dialog.showModal();
  find("login-key").focus();
}

async function begin() {
  try {
    state.session = await api("/console/session.json");
  } catch (error) {
    if (error.status === 401) { setLive("lost", "not logged in"); main.replaceChildren(h("p", {}, "Log in to see this page.")); askKey(); find("login").hidden = false; return; }
    setLive("lost", "no answer");
    main.replaceChildren(h("p", { class: "bad" }, error.message));
    state.timer = setTimeout(begin, EVERY_MS);
    return;
  }
  drawNavigation();
  open(...where());
}

document.addEventListener("click", (event) => {
  const link = event.target.closest?.("a[href^='/console/']");
  if (!link || event.metaKey || event.ctrlKey || event.shiftKey || event.button || link.target || link.href.includes(".json")) return;
  event.preventDefault();
  history.pushState(null, "", link.href);
  open(...where());
  main.focus();
});
window.addEventListener("popstate", () => open(...where()));
document.addEventListener("visibilitychange", () => { if (!document.hidden && state.page && !state.is_paused) refresh(state.run); });

find("pause").addEventListener("click", () => {
  state.is_paused = !state.is_paused;
  find("pause").setAttribute("aria-pressed", String(state.is_paused));
  find("pause").textContent = state.is_paused ? "Go on" : "Pause";
  setLive("live", "live");
  if (!state.is_paused && state.page) refresh(state.run);
});

const prefers = window.matchMedia("(prefers-color-scheme: dark)");
function theme(name) {
  const kept = name ?? localStorage.getItem("mooncake-theme");
  const chosen = kept ?? (prefers.matches ? "dark" : "light");
  document.documentElement.dataset.theme = chosen;
  find("theme").textContent = chosen === "dark" ? "Light" : "Dark";
  find("theme").setAttribute("aria-label", `Use the ${chosen === "dark" ? "light" : "dark"} theme`);
  if (name) localStorage.setItem("mooncake-theme", name);
  state.page?.themed?.();
}
prefers.addEventListener("change", () => theme());
find("theme").addEventListener("click", () => theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
theme();

find("login").addEventListener("click", askKey);
find("login-cancel").addEventListener("click", () => find("login-dialog").close());
find("login-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  const field = find("login-key");
  try {
    await api("/console/session", { method: "POST", body: { key: field.value } });
    field.value = "";
    setText(find("login-error"), "");
    find("login-dialog").close();
    begin();
  } catch (error) {
    setText(find("login-error"), error.message);
  }
});
find("logout").addEventListener("click", async () => {
  await api("/console/session", { method: "DELETE" }).catch(() => null);
  location.reload();
});

begin();
