"use strict";
// One prompt, large: base and runs in sync, every score, and the way there.

const detail = { index: -1, cells: [], film: [] };
const FILM = 10;

function openDetail(index) {
  const dialog = find("#detail");
  for (const node of G.live.values()) for (const video of node.querySelectorAll("video")) leave(video);
  closeCells();
  detail.index = index;
  const entry = D.gallery.entries[index];
  const step = (by) => { const place = G.order.indexOf(index) + by; if (place >= 0 && place < G.order.length) { activate(place, false); openDetail(G.order[place]); } };
  detail.cells = columns(entry).map((column) => cellNode(column, `aspect-ratio:${D.gallery.size.width}/${D.gallery.size.height};max-height:46vh`));
  detail.cells.forEach((cell, i) => cell.show(columns(entry)[i]));
  const head = make("div", { class: "dialog-head" }, make("h2", { dir: "auto" }, entry.prompt),
    make("button", { type: "button", class: "icon", title: "Previous (k)", "aria-label": "Previous prompt", onclick: () => step(-1) }, "↑"),
    make("button", { type: "button", class: "icon", title: "Next (j)", "aria-label": "Next prompt", onclick: () => step(1) }, "↓"),
    make("button", { type: "button", class: "icon", title: "Close (Esc)", "aria-label": "Close", onclick: () => dialog.close() }, "✕"));
  const tools = make("div", { class: "transport inside" }, ...playerControls(), ...(iterations().length > 1 ? [evaluationSlider()] : []));
  dialog.replaceChildren(head, tools, make("div", { class: "big" }, ...detail.cells), ...filmstrip(entry), make("div", { id: "parts", class: "scroll" }), make("p", { class: "note" }, `Initial noise ${entry.noise}: the same in every column.`));
  partsTable(entry);
  showPlayer();
  if (!dialog.open) dialog.showModal();
}

function filmstrip(entry) {
  const cells = entry.runs[G.run].filter((cell) => cell[1] !== null);
  detail.film = [];
  if (cells.length < 2) return [];
  const picks = cells.length <= FILM ? cells : Array.from({ length: FILM }, (_, i) => cells[Math.round((i * (cells.length - 1)) / (FILM - 1))]);
  const base = baseOf(entry, G.run);
  const all = base && base[1] !== null ? [base, ...picks] : picks;
  const buttons = all.map((cell) => {
    const name = cell[0] ? `iteration ${cell[0]}` : "base";
    const figure = cellNode({ name, paint: cell[0] ? colour(G.run) : "var(--base)", cell, gain: null }, `aspect-ratio:${D.gallery.size.width}/${D.gallery.size.height}`, false);
    figure.show({ name, paint: cell[0] ? colour(G.run) : "var(--base)", cell, gain: null });
    detail.film.push(figure);
    return make("button", { type: "button", title: name, onclick: () => { if (cell[0]) setIteration(iterations().indexOf(cell[0])); } }, figure);
  });
  return [make("h3", {}, `${D.runs[G.run].name} through training`), make("div", { class: "film" }, ...buttons)];
}

function partsTable(entry) {
  const shown = columns(entry);
  const rows = D.gallery.parts.map((part, i) => make("tr", {}, make("th", { scope: "row" }, partName(part)), ...shown.map((column) => make("td", { class: "number" }, number(column.cell ? column.cell[2][i] : null)))));
  find("#parts").replaceChildren(make("table", { class: "sticky" }, make("thead", {}, make("tr", {}, make("th", { scope: "col" }, "score"), ...shown.map((column) => make("th", { class: "number", scope: "col" }, dot(column.paint), column.name)))), make("tbody", {}, ...rows)));
}

function refreshDetail() {
  if (!find("#detail").open) return;
  const entry = D.gallery.entries[detail.index];
  columns(entry).forEach((column, i) => detail.cells[i].show(column));
  partsTable(entry);
}

function closeCells() {
  for (const cell of [...detail.cells, ...detail.film]) cell.close();
  detail.cells = [];
  detail.film = [];
}

function detailClosed() {
  closeCells();
  find("#detail").replaceChildren();
  const index = detail.index;
  detail.index = -1;
  for (const node of G.live.values()) { for (const video of node.querySelectorAll("video")) if (video.dataset.clip) follow(video); node.refresh(); }
  showPlayer();
  const node = G.live.get(index);
  if (node) node.focus({ preventScroll: true });
}
