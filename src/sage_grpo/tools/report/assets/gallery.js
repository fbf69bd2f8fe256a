"use strict";
// Thousands of entries, but only the cards on the screen exist.

const G = { filter: "", sort: "order", part: 0, run: 0, iteration: null, order: [], active: -1, live: new Map(), layout: null, timers: new Map() };
const HEAD = 52, CAPTION = 36, GAP = 14;

function folded(text) {
  return text.normalize("NFKC").toLocaleLowerCase();
}

const iterations = () => D.gallery.iterations;
const current = () => (G.iteration === null ? iterations()[iterations().length - 1] ?? 0 : G.iteration);

// The last evaluation of a run up to the one that the slider stands at: [iteration, clip, scores].
function cellOf(entry, run, until = current()) {
  let found = null;
  for (const cell of entry.runs[run]) if (cell[0] <= until) found = cell;
  return found;
}

const baseOf = (entry, run) => entry.base[D.gallery.bases.findIndex((members) => members.includes(run))];

function gainOf(entry, run = G.run) {
  const before = baseOf(entry, run), after = cellOf(entry, run);
  const old = before ? before[2][G.part] : null, now = after ? after[2][G.part] : null;
  return old === null || old === undefined || now === null || now === undefined ? null : now - old;
}

const judge = (gain) => tone(gain * (D.summary.better[D.gallery.parts[G.part]] ?? 0));

// Columns of a card: a base for each kind of base model, then the runs.
function columns(entry) {
  const several = D.gallery.bases.length > 1;
  const bases = D.gallery.bases.map((members, place) => ({ name: several ? `base of ${D.runs[members[0]].name}` : "base", paint: "var(--base)", cell: entry.base[place], gain: null }));
  const runs = D.runs.map((run, place) => ({ name: run.name, paint: colour(place), cell: cellOf(entry, place), gain: gainOf(entry, place) }));
  return [...bases, ...runs];
}

function arrange() {
  const words = folded(G.filter).split(/\s+/).filter(Boolean);
  const entries = D.gallery.entries;
  const order = [];
  for (let i = 0; i < entries.length; i += 1) {
    const text = folded(entries[i].prompt);
    if (words.every((word) => text.includes(word))) order.push(i);
  }
  if (G.sort !== "order") {
    const sign = G.sort === "worst" ? 1 : -1;
    const gains = new Map(order.map((i) => [i, gainOf(entries[i])]));
    order.sort((a, b) => {
      const x = gains.get(a), y = gains.get(b);
      if (x === null || y === null) return (x === null) - (y === null) || a - b; // what cannot be compared comes last
      return sign * (x - y) || a - b;
    });
  }
  const kept = G.order[G.active];
  G.order = order;
  G.active = kept === undefined ? -1 : order.indexOf(kept);
}

function measure() {
  const list = find("#list");
  const width = list.clientWidth, count = D.gallery.bases.length + D.runs.length;
  const lines = Math.ceil(count / Math.max(1, Math.floor((width - 26 + 8) / 108)));
  const across = Math.ceil(count / lines);
  const { width: w, height: h } = D.gallery.size;
  const least = w > 1.2 * h ? 200 : 138; // wide clips need more of the screen
  const perRow = Math.max(1, Math.floor((width + GAP) / (across * (least + 8) + 18 + GAP)));
  const card = (width - GAP * (perRow - 1)) / perRow;
  const cell = (card - 26 - 8 * (across - 1)) / across;
  const video = Math.round((cell * h) / w);
  const height = HEAD + lines * (video + CAPTION) + (lines - 1) * 8 + 22;
  G.layout = { perRow, card, height, video, across };
  list.style.height = `${Math.ceil(G.order.length / perRow) * (height + GAP)}px`;
}

// Clips are muted until one is asked for: several at once would be noise.
function hearNode(video) {
  return make("button", { type: "button", class: "hear", title: "Sound", "aria-label": "Sound of this clip", "aria-pressed": "false", onclick({ currentTarget }) {
    const wanted = video.muted;
    for (const other of document.querySelectorAll("video")) other.muted = true;
    for (const other of document.querySelectorAll(".hear")) other.setAttribute("aria-pressed", "false");
    video.muted = !wanted;
    currentTarget.setAttribute("aria-pressed", String(wanted));
  } }, "♪");
}

function cellNode(column, size, hear = true) {
  const caption = make("figcaption");
  const holder = make("div");
  const figure = make("figure", { class: "cell" }, holder, caption);
  let video = null;
  figure.show = (next, load = true) => {
    const clip = next.cell ? next.cell[1] : null;
    if (clip === null || clip === undefined) {
      if (video) { releaseClip(video); video = null; }
      holder.replaceChildren(make("div", { class: "none", style: size }, next.cell ? "clip not kept" : "not evaluated yet"));
    } else {
      if (!video) {
        video = make("video", { playsinline: true, preload: "auto", style: size, "aria-label": `clip of ${next.name}`, class: D.gallery.size.width < 160 ? "small" : "" });
        video.muted = true;
        video.disablePictureInPicture = true;
        holder.replaceChildren(video, ...(hear && D.gallery.size.sound ? [hearNode(video)] : []));
      }
      if (load) setClip(video, clip);
    }
    const score = next.cell ? next.cell[2][G.part] : null;
    const change = next.gain === null ? null : make("span", { class: judge(next.gain) }, ` ${arrow(next.gain)} ${signed(next.gain)}`);
    caption.replaceChildren(make("span", { class: "who", title: next.name }, dot(next.paint), make("span", {}, next.name)), make("span", {}, number(score)), change ?? "");
  };
  figure.close = () => { if (video) releaseClip(video); };
  figure.show(column, false);
  return figure;
}

function cardNode(place) {
  const index = G.order[place], entry = D.gallery.entries[index], layout = G.layout;
  const cells = columns(entry).map((column) => cellNode(column, `height:${layout.video}px`));
  const badge = make("span", { class: "badge" });
  const node = make("article", { class: "clip-card card", role: "listitem", tabindex: "-1", "data-entry": String(index), "aria-setsize": String(G.order.length) },
    make("div", { class: "clip-head" }, make("button", { type: "button", title: entry.prompt, dir: "auto", onclick() { activate(Number(node.dataset.place)); openDetail(index); } }, entry.prompt), badge),
    make("div", { class: "cells", style: `grid-template-columns:repeat(${layout.across},minmax(0,1fr))` }, ...cells));
  node.refresh = (load = true) => {
    const gain = gainOf(entry);
    badge.className = `badge ${gain === null ? "soft" : judge(gain)}`;
    badge.textContent = gain === null ? "" : `${arrow(gain)} ${signed(gain)}`;
    columns(entry).forEach((column, i) => cells[i].show(column, load));
  };
  node.close = () => { cells.forEach((cell) => cell.close()); node.remove(); };
  node.refresh(false);
  return node;
}

function put(node, place) {
  const { perRow, card, height } = G.layout;
  node.dataset.place = String(place);
  node.setAttribute("aria-posinset", String(place + 1));
  node.style.cssText = `width:${card}px;height:${height}px;left:${(place % perRow) * (card + GAP)}px;top:${Math.floor(place / perRow) * (height + GAP)}px`;
  node.classList.toggle("active", place === G.active);
}

// Make the cards that can be seen (and one row around them) exist, and no others.
function renderCards() {
  const list = find("#list");
  if (!list || find("#gallery").hidden || !G.layout) return;
  const top = -list.getBoundingClientRect().top, step = G.layout.height + GAP;
  const first = Math.max(0, Math.floor(top / step) - 1) * G.layout.perRow;
  const last = Math.min(G.order.length, (Math.ceil((top + innerHeight) / step) + 1) * G.layout.perRow);
  const wanted = new Map();
  for (let place = first; place < last; place += 1) wanted.set(G.order[place], place);
  for (const [index, node] of G.live) {
    if (!wanted.has(index)) { clearTimeout(G.timers.get(index)); G.timers.delete(index); node.close(); G.live.delete(index); }
  }
  for (const [index, place] of wanted) {
    if (!G.live.has(index)) {
      const node = cardNode(place);
      G.live.set(index, node);
      list.append(node);
      // Not while it only flies by.
      G.timers.set(index, setTimeout(() => { if (G.live.get(index) === node && !find("#detail").open) node.refresh(); }, 60));
    }
    put(G.live.get(index), place);
  }
  const all = D.gallery.entries.length;
  find("#count").textContent = G.order.length === all ? `${all} prompts` : `${G.order.length} of ${all} prompts`;
  find("#nothing").hidden = G.order.length > 0;
}

let waiting = false;
function renderSoon() {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => { waiting = false; renderCards(); });
}

function dropCards() {
  for (const node of G.live.values()) node.close();
  G.live.clear();
}

function relayout() {
  if (!find("#list") || find("#gallery").hidden) return;
  arrange();
  measure();
  dropCards();
  renderCards();
}

function reorder() {
  arrange();
  measure();
  if (scrollY > listTop()) scrollTo(0, listTop());
  renderCards();
}

const listTop = () => find("#list").getBoundingClientRect().top + scrollY - find(".tools").offsetHeight - find("#top").offsetHeight - 12;

function setSort(sort) {
  G.sort = sort;
  for (const button of document.querySelectorAll("#sorts button")) button.setAttribute("aria-pressed", String(button.dataset.sort === sort));
  G.active = -1;
  reorder();
}

function setIteration(place) {
  const all = iterations();
  if (!all.length) return;
  const bounded = Math.max(0, Math.min(all.length - 1, place));
  G.iteration = bounded === all.length - 1 ? null : all[bounded]; // at the end it stays with a run that goes on
  for (const input of document.querySelectorAll("input.evaluation")) input.value = String(bounded);
  for (const output of document.querySelectorAll("output.evaluation")) output.textContent = `iteration ${current()}`;
  if (G.sort !== "order") { arrange(); measure(); }
  for (const node of G.live.values()) node.refresh(!find("#detail").open);
  renderCards();
  refreshDetail();
}

const iterationPlace = () => iterations().indexOf(current());

function evaluationSlider() {
  const input = make("input", { type: "range", class: "evaluation", min: "0", max: String(Math.max(0, iterations().length - 1)), value: String(iterationPlace()), "aria-label": "Evaluation during training" });
  input.addEventListener("input", () => setIteration(+input.value));
  return make("label", { class: "slide small" }, "training", input, make("output", { class: "evaluation" }, `iteration ${current()}`));
}

function activate(place, focus = true) {
  if (!G.order.length) return;
  G.active = Math.max(0, Math.min(G.order.length - 1, place));
  const top = listTop() + Math.floor(G.active / G.layout.perRow) * (G.layout.height + GAP);
  const low = scrollY + 0, high = scrollY + innerHeight - G.layout.height - find(".tools").offsetHeight - find("#top").offsetHeight - 24;
  if (top < low || top > high) scrollTo(0, Math.max(0, top));
  renderCards();
  const node = G.live.get(G.order[G.active]);
  if (focus && node && !find("#detail").open) node.focus({ preventScroll: true });
}

function galleryPage() {
  if (!D.gallery.entries.length) return [make("p", { class: "card empty" }, "No clips yet: a run keeps held-out clips at every evaluation (evaluate.show, within keep.video_megabytes).")];
  const search = make("input", { type: "search", id: "filter", placeholder: "Filter prompts  ( / )", value: G.filter, "aria-label": "Filter by prompt text" });
  search.addEventListener("input", () => { G.filter = search.value; G.active = -1; reorder(); });
  const sorts = [["order", "As listed"], ["best", "Best gain"], ["worst", "Worst first"]].map(([sort, text]) => make("button", { type: "button", "data-sort": sort, "aria-pressed": String(G.sort === sort), onclick: () => setSort(sort) }, text));
  const tools = [search, make("span", { class: "group", id: "sorts", role: "group", "aria-label": "Order" }, ...sorts)];
  const part = options(make("select", { id: "part", "aria-label": "Score" }), D.gallery.parts.map((name, i) => [i, name]), G.part);
  part.addEventListener("change", () => { G.part = +part.value; for (const node of G.live.values()) node.refresh(); reorder(); });
  if (D.gallery.parts.length) tools.push(make("label", { class: "small" }, make("span", { class: "wide" }, "score"), part));
  if (D.runs.length > 1) {
    const run = options(make("select", { id: "run", "aria-label": "Gain of which run" }), D.runs.map((one, i) => [i, one.name]), G.run);
    run.addEventListener("change", () => { G.run = +run.value; for (const node of G.live.values()) node.refresh(); reorder(); });
    tools.push(make("label", { class: "small" }, make("span", { class: "wide" }, "gain of"), run));
  }
  tools.push(make("span", { id: "count", class: "soft small", role: "status" }));
  tools.push(make("div", { class: "transport" }, ...playerControls(), ...(iterations().length > 1 ? [evaluationSlider()] : [])));
  const without = D.gallery.without ? [make("p", { class: "note" }, `${D.gallery.without} more held-out prompts were scored without keeping a clip (evaluate.show).`)] : [];
  return [make("div", { class: "tools" }, ...tools), make("p", { id: "nothing", class: "card empty", hidden: true }, "No prompt has these words."), make("div", { id: "list", role: "list" }), ...without];
}
