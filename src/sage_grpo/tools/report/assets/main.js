"use strict";

const TABS = [["overview", "Overview", overview], ["gallery", "Gallery", galleryPage], ["steps", "Steps", stepsPage], ["settings", "Settings", settingsPage], ["events", "Events", eventsPage]];
const KEYS = [["1 – 5", "overview, gallery, noise, settings, events"], ["space", "play or pause all clips"], ["← →", "one frame back or on"], ["[ ]", "earlier or later evaluation"], ["j k, ↓ ↑", "next or previous prompt"], ["Enter", "open the prompt, large"], ["w b o", "worst first, best gain, as listed"], ["/", "filter by prompt"], ["d", "light or dark"], ["?", "this help"], ["Esc", "close"]];
let tab = "overview";

function buildTabs() {
  find("#tabs").replaceChildren(...TABS.map(([name, text]) => make("button", { type: "button", role: "tab", id: `tab-${name}`, "aria-controls": name, "aria-selected": "false", onclick: () => showTab(name) }, text)));
}

function fillTab(name) {
  const section = find(`#${name}`);
  if (name === "gallery") dropCards();
  for (let i = charts.length - 1; i >= 0; i -= 1) if (section.contains(charts[i].box)) charts.splice(i, 1);
  section.replaceChildren(...TABS.find(([one]) => one === name)[2]());
  if (name === "gallery") relayout(); else redrawCharts();
  showPlayer();
  hintScrolls();
}

function showTab(name) {
  tab = name;
  for (const [one] of TABS) {
    find(`#${one}`).hidden = one !== name;
    find(`#tab-${one}`).setAttribute("aria-selected", String(one === name));
  }
  if (name !== "gallery") dropCards();
  if (name !== "overview") dropShown();
  fillTab(name);
  scrollTo(0, 0);
  if (location.hash !== `#/${name}`) history.replaceState(null, "", `#/${name}`);
}

// A table that is wider than the page says so.
function hintScrolls() {
  for (const box of document.querySelectorAll(".scroll")) {
    let hint = box.nextElementSibling;
    if (!hint || !hint.classList.contains("more")) {
      hint = make("p", { class: "note more" }, "More columns to the right: scroll the table sideways.");
      box.after(hint);
    }
    hint.hidden = box.scrollWidth <= box.clientWidth + 1;
    if (hint.hidden) box.removeAttribute("tabindex"); else box.tabIndex = 0; // keys scroll what has the focus
  }
}

function theme(next) {
  const wanted = next || memory.get("sage-grpo-theme") || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  document.documentElement.dataset.theme = wanted;
}

function switchTheme() {
  const next = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  memory.set("sage-grpo-theme", next);
  theme(next);
}

function showHelp() {
  find("#help").replaceChildren(make("div", { class: "dialog-head" }, make("h2", {}, "Keys"), make("button", { type: "button", class: "icon", "aria-label": "Close", onclick: () => find("#help").close() }, "✕")),
    make("dl", { class: "keys" }, ...KEYS.flatMap(([key, text]) => [make("dt", {}, make("kbd", {}, key)), make("dd", {}, text)])));
  find("#help").showModal();
}

function moveBy(step) {
  const large = find("#detail").open;
  if (large) {
    const place = G.order.indexOf(detail.index) + step;
    if (place < 0 || place >= G.order.length) return;
    activate(place, false);
    openDetail(G.order[place]);
  } else activate(G.active < 0 ? 0 : G.active + step);
}

const inGallery = {
  " ": toggle, ArrowRight: () => seek(frameNow() + 1), ArrowLeft: () => seek(frameNow() - 1),
  "]": () => setIteration(iterationPlace() + 1), "[": () => setIteration(iterationPlace() - 1),
  j: () => moveBy(1), k: () => moveBy(-1), ArrowDown: () => moveBy(1), ArrowUp: () => moveBy(-1),
  w: () => setSort("worst"), b: () => setSort("best"), o: () => setSort("order"), "/": () => find("#filter").focus(),
  Enter: () => { if (G.active >= 0 && !find("#detail").open) openDetail(G.order[G.active]); },
};

function pressed(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || find("#help").open) return;
  const where = event.target instanceof Element ? event.target : document.body;
  const typing = where.matches("input[type=search], select");
  if (typing) { if (event.key === "Escape") where.blur(); return; }
  if (where.matches("input[type=range]") && event.key.startsWith("Arrow")) return;
  if (where.matches("button") && (event.key === "Enter" || event.key === " ")) return; // it is pressed
  if (event.key === "?") return void showHelp();
  if (event.key === "d") return void switchTheme();
  const place = "12345".indexOf(event.key);
  if (place >= 0 && event.key && !find("#detail").open) return void showTab(TABS[place][0]);
  if (tab !== "gallery" || !D.gallery.entries.length || !(event.key in inGallery)) return;
  event.preventDefault();
  inGallery[event.key]();
}

function showStatus() {
  const status = find("#status");
  status.textContent = D.runs.length === 1 && D.runs[0].iterations ? `${D.runs[0].iteration}/${D.runs[0].iterations} iterations` : `${D.runs.length} runs`;
  status.title = `Made ${D.made} by sage-grpo ${D.version}`;
}

theme();
buildTabs();
showStatus();
find("#theme").addEventListener("click", switchTheme);
find("#help-button").addEventListener("click", showHelp);
find("#detail").addEventListener("close", detailClosed);
document.addEventListener("keydown", pressed);
document.addEventListener("click", (event) => {
  // After a click with the mouse the space bar belongs to the clips again, not to the button.
  const button = event.detail > 0 && event.target instanceof Element ? event.target.closest("nav button, .tools button, .transport button") : null;
  if (button) button.blur();
});
addEventListener("scroll", renderSoon, { passive: true });
let resizing = 0, lastWidth = innerWidth;
addEventListener("resize", () => {
  clearTimeout(resizing);
  resizing = setTimeout(() => { if (innerWidth !== lastWidth) { lastWidth = innerWidth; relayout(); hintScrolls(); } else renderSoon(); }, 120);
});
document.addEventListener("toggle", hintScrolls, true); // what was folded away had no width
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => theme());
const named = () => TABS.map(([name]) => name).find((name) => location.hash === `#/${name}`);
addEventListener("hashchange", () => { if (named() && named() !== tab) showTab(named()); });
showTab(named() || "overview");
requestAnimationFrame(tick);
