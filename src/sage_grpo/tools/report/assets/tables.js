"use strict";

function scoreCell(row, part) {
  const score = row.scores[part], gain = row.gains[part];
  const cell = make("td", { class: "number" });
  if (!score) return fill(cell, {}, ["–"]);
  cell.append(number(score.mean));
  if (score.half !== null) cell.append(make("span", { class: "half" }, ` ± ${number(score.half)}`));
  if (gain) {
    const half = gain.half === null ? "" : ` ± ${number(gain.half)}`;
    const sure = gain.half !== null && Math.abs(gain.mean) > gain.half;
    const judged = gain.mean * (D.summary.better[part] ?? 0); // what counts in no reward is neither good nor bad
    const text = `${arrow(gain.mean)} ${signed(gain.mean)}${half}`;
    cell.append(make("span", { class: `gain ${sure && judged ? tone(judged) : sure ? "" : "soft"}`, title: `change from base: mean of ${gain.count} ${gain.of}` }, text));
  }
  return cell;
}

const meaning = (part) => D.summary.meanings[part] || null;
// What a score measures, for a pointer over its name; the list under the table is for everybody else.
const partName = (part) => (meaning(part) ? make("abbr", { title: meaning(part) }, part) : part);

function meanings(parts) {
  const told = parts.filter(meaning);
  if (!told.length) return null;
  return make("details", { class: "small" }, make("summary", {}, "What the scores mean"), make("dl", { class: "keys" }, ...told.flatMap((part) => [make("dt", {}, part), make("dd", {}, meaning(part))])));
}

function summaryTable() {
  const { rows, parts } = D.summary;
  if (!rows.length) return make("p", { class: "card empty" }, "No evaluation yet: held-out prompts (data.eval_prompts) are scored before, during and after training.");
  const main = parts.filter((part) => !part.includes("/") && part !== "Overall");
  const shown = { parts: main };
  const body = make("tbody"), head = make("tr");
  function refill() {
    head.replaceChildren(make("th", { scope: "col" }, "held-out scores"), make("th", { class: "number", scope: "col" }, "iteration"), ...shown.parts.map((part) => make("th", { class: "number", scope: "col" }, partName(part))));
    body.replaceChildren(...rows.map((row) => {
      const paint = row.kind === "base" ? "var(--base)" : colour(row.run);
      return make("tr", { class: row.kind }, make("th", { scope: "row" }, row.kind === "seeds" ? null : dot(paint), row.label), make("td", { class: "number" }, String(row.iteration)), ...shown.parts.map((part) => scoreCell(row, part)));
    }));
  }
  refill();
  const seeds = rows.some((row) => row.kind === "seeds") ? " Rows of several seeds: mean over seeds, interval by Student's t." : "";
  const box = make("div", {}, make("div", { class: "scroll" }, make("table", { class: "sticky", id: "summary" }, make("thead", {}, head), body)),
    make("p", { class: "note" }, "Mean over held-out prompts ± half of the 95% interval. The second line is the change from base, clip by clip with the same prompt and noise; it is gray where its interval includes zero." + seeds));
  box.append(meanings(main) ?? "");
  if (main.length < parts.length) {
    const more = make("button", { type: "button", "aria-pressed": "false", onclick() {
      const all = shown.parts === main;
      shown.parts = all ? parts : main;
      more.setAttribute("aria-pressed", String(all));
      refill();
      hintScrolls();
    } }, "All parts");
    box.append(make("p", {}, more));
  }
  return box;
}

function legend(extra = []) {
  const items = D.runs.map((run, place) => make("button", { type: "button", "aria-pressed": String(!hidden.has(place)), onclick(event) {
    if (hidden.has(place)) hidden.delete(place); else hidden.add(place);
    event.currentTarget.setAttribute("aria-pressed", String(!hidden.has(place)));
    redrawCharts();
  } }, dot(colour(place)), run.name));
  return make("div", { class: "legend" }, ...(items.length > 1 ? items : []), make("span", { class: "spacer" }), ...extra);
}

// A few clips beside the numbers: the first prompts, and the one with the lowest change.
const SHOWN = 3;
let shownClips = [];

function dropShown() {
  for (const cell of shownClips) { cell.close(); cell.remove(); }
  shownClips = [];
}

function someClips() {
  dropShown();
  const entries = D.gallery.entries, has = (cell) => cell && cell[1] !== null;
  const both = entries.filter((entry) => has(baseOf(entry, G.run)) && has(cellOf(entry, G.run)));
  if (!both.length) return [];
  const lowest = both.reduce((least, entry) => (gainOf(entry) !== null && (least === null || gainOf(entry) < gainOf(least)) ? entry : least), null);
  const chosen = both.filter((entry, place) => place < SHOWN || entry === lowest);
  const size = `aspect-ratio:${D.gallery.size.width}/${D.gallery.size.height}`;
  const cards = chosen.map((entry) => {
    const cells = columns(entry).map((column) => { const cell = cellNode(column, size); cell.show(column); return cell; });
    shownClips.push(...cells);
    return make("article", { class: "card some-card" }, make("p", { dir: "auto" }, make("b", {}, entry === lowest ? "lowest change: " : ""), entry.prompt), make("div", { class: "cells", style: `grid-template-columns:repeat(${Math.min(cells.length, 3)},minmax(0,1fr))` }, ...cells));
  });
  const all = make("button", { type: "button", onclick: () => showTab("gallery") }, `All ${entries.length} prompts in the gallery`);
  return [make("h2", {}, "Clips"), make("p", { class: "note" }, "The same prompt and initial noise in every column; the figure is the total and its change."),
    make("div", { class: "some" }, ...cards), make("p", { class: "transport" }, playerControls()[0], all)];
}

function verdict() {
  const lines = D.verdict.flatMap((told) => told.map((text, place) => make("p", { class: place ? "soft" : "" }, text)));
  return lines.length ? [make("div", { class: "card verdict" }, ...lines)] : [];
}

// Where workers or older weights sampled.
function crewSection() {
  if (!D.runs.some((run) => Object.keys(run.steps.values).some((name) => name.startsWith("crew/")))) return [];
  return [make("h2", {}, "Workers"), make("div", { class: "charts" },
    metricChart({ title: "Workers over time", table: "steps", prefix: ["crew/"], preferred: ["crew/waited_s", "crew/staleness"], log: false, note: "crew/busy_s adds up all workers' seconds; crew/gap is the largest difference of a log-probability from its replay." }))];
}

// A method without a KL and with one update a rollout, whose ratios are all 1, has nothing to show there but its loss.
function leashChart() {
  const moves = ["kl/total", "kl/position", "kl/velocity", "ratio/std"].some((name) => D.runs.some((run) => (run.steps.values[name] || []).some(Boolean)));
  if (!moves) return metricChart({ title: "Loss", table: "steps", prefix: ["loss/"], preferred: ["loss/policy"], log: false });
  return metricChart({ title: "KL and ratio", table: "steps", prefix: ["kl/", "ratio/", "loss/", "anchor/"], preferred: ["kl/position", "kl/total", "ratio/std", "kl/lambda"], log: true, note: "In nats per latent dimension; kl/lambda is the coefficient." });
}

function overview() {
  const range = make("input", { type: "range", min: "0", max: "0.95", step: "0.05", value: String(smoothing), id: "smoothing", "aria-label": "Smoothing of curves" });
  const value = make("output", {}, smoothing.toFixed(2));
  range.addEventListener("input", () => { smoothing = +range.value; value.textContent = smoothing.toFixed(2); redrawCharts(); });
  const nodes = [...verdict(), make("h2", {}, "Scores"), summaryTable(), ...someClips(), make("h2", {}, "Curves"), legend([make("label", { class: "small" }, "smoothing", range, value)])];
  nodes.push(make("div", { class: "charts" },
    metricChart({ title: "Held-out score", table: "evaluations", prefix: ["eval/"], preferred: ["eval/total"], log: false, errors: true, note: "Deterministic sampler, fixed seeds. Shaded: 95% interval over prompts." }),
    metricChart({ title: "Rollout reward", table: "steps", prefix: ["reward/", "advantage/"], preferred: ["reward/total"], log: false, note: "Of the exploring policy, on training prompts." }),
    leashChart(),
    metricChart({ title: "Gradient", table: "steps", prefix: ["gradient/", "optimizer/", "time/"], preferred: ["gradient/norm"], log: false, note: "Norm before clipping; time/ is in seconds." })));
  nodes.push(...crewSection());
  return nodes;
}

function stepsPage() {
  const graded = D.runs.some((run) => Object.keys(run.stepwise).length), noisy = D.runs.some((run) => run.noise);
  if (!graded && !noisy) return [make("p", { class: "card empty" }, "No step has been trained yet.")];
  const nodes = [make("h2", {}, "Noise and gradient by denoising step"), legend()];
  const lines = (kind, extra) => () => D.runs.flatMap((run, place) => (run.stepwise[kind] ? [{ name: `${run.name}, ${kind}`, run: place, paint: colour(place), x: run.stepwise[kind].map((s) => s[0]), y: run.stepwise[kind].map((s) => s[1]), marks: true, ...extra }] : []));
  const noise = (pick, extra = {}) => () => D.runs.flatMap((run, place) => (run.noise ? [{ name: run.name, run: place, paint: colour(place), dash: dash(place), x: run.noise.rows.map((r) => r.step), y: run.noise.rows.map(pick), ...extra }] : []));
  const reach = () => [0, Math.max(1, ...D.runs.map((run) => Math.max(run.noise ? run.noise.rows.length - 1 : 0, ...Object.values(run.stepwise).flatMap((steps) => steps.map((s) => s[0])))))];
  const charts = [];
  if (noisy) charts.push(
    lineChart({ title: "Noise level σ", lines: noise((r) => r.sigma, { marks: true }), xName: "step", fromZero: true, dodge: true, note: "At the start of every step, from noise (1) to data (0)." }),
    lineChart({ title: "Noise injected per step (std)", lines: () => noise((r) => (r.std > 0 ? r.std : null), { marks: true })().map((line) => ({ ...line, extra: (i) => `σ ${number(D.runs[line.run].noise.rows[i].sigma)}, ${(100 * D.runs[line.run].noise.rows[i].share).toFixed(0)}% of all variance` })), xName: "step", fromZero: true, dodge: true, note: "Steps without a mark are deterministic." }),
    lineChart({ title: "Sensitivity |b| / std", lines: noise((r) => r.sensitivity, { marks: true }), xName: "step", log: true, dodge: true, note: "Size of the gradient of a log-probability, by the kernel alone; the equalizer divides it out." }));
  if (graded) charts.push(lineChart({ title: "Gradient norm by step", lines: () => [...lines("raw", { hollow: true })(), ...lines("sent", {})()], xName: "step", log: true, dodge: true, xRange: reach, note: "At the velocity, mean over iterations. Hollow: before the equalizer; filled: as sent into the network." }));
  nodes.push(make("div", { class: "charts" }, ...charts));
  for (const [place, run] of D.runs.entries()) {
    if (!run.noise) continue;
    const n = run.noise, eta = n.eta === null ? "" : `, η = ${number(n.eta)}`;
    nodes.push(make("h2", {}, dot(colour(place)), `${run.name}: ${n.kernel}${eta}`),
      make("p", { class: "note" }, `Variance left off the data manifold ${number(n.off_manifold_variance)} (0 is right), along it ${number(n.on_manifold_variance)} (1 is right), at most ${number(n.peak_excess)} times the noise that the network was trained for.` + (n.moves ? " The exploring steps change during training; shown is the first group of the run's start." : "")),
      ...n.warnings.map((text) => make("p", { class: "note" }, `⚠ ${text}`)));
  }
  return nodes;
}

// A long key breaks after its dots and underscores, not within words.
const breakable = (key) => key.split(/(?<=[._\]])/).flatMap((piece) => [piece, make("wbr")]);
const plain = (value) => (value === undefined ? "–" : value === null ? "none" : typeof value === "object" ? JSON.stringify(value) : String(value));

function settingsPage() {
  const nodes = [];
  const headings = () => make("tr", {}, make("th", { scope: "col" }, "setting"), ...D.runs.map((run, place) => make("th", { scope: "col" }, dot(colour(place)), run.name)));
  if (D.runs.length > 1) {
    nodes.push(make("h2", {}, "What differs"));
    if (D.differs.length) nodes.push(make("div", { class: "scroll" }, make("table", { class: "sticky", id: "differs" }, make("thead", {}, headings()), make("tbody", {}, ...D.differs.map((row) => make("tr", {}, make("th", { scope: "row", class: "key" }, ...breakable(row.key)), ...row.values.map((value) => make("td", { class: "key" }, plain(value)))))))));
    else nodes.push(make("p", { class: "card empty" }, "Nothing: these runs have the same settings."));
  }
  const keys = [...new Set(D.runs.flatMap((run) => Object.keys(run.settings)))];
  const table = make("div", { class: "scroll" }, make("table", { class: "sticky" }, make("thead", {}, headings()), make("tbody", {}, ...keys.map((key) => make("tr", {}, make("th", { scope: "row", class: "key" }, ...breakable(key)), ...D.runs.map((run) => make("td", { class: "key" }, plain(run.settings[key]))))))));
  nodes.push(make("details", { open: D.runs.length === 1 }, make("summary", {}, `All ${keys.length} settings`), table));
  return nodes;
}

function eventsPage() {
  const rows = D.runs.flatMap((run, place) => run.events.map((event) => ({ ...event, run: place })));
  rows.sort((a, b) => (a.time ?? 0) - (b.time ?? 0) || a.iteration - b.iteration);
  if (!rows.length) return [make("p", { class: "card empty" }, "No events: no resumes, failed rewards or interventions.")];
  const when = (time) => (time === null ? "" : new Date(time * 1000).toLocaleString());
  const table = make("table", { id: "event-table" }, make("thead", {}, make("tr", {}, ...["run", "iteration", "what", "", "when"].map((text) => make("th", { scope: "col" }, text)))),
    make("tbody", {}, ...rows.map((event) => make("tr", {}, make("td", {}, dot(colour(event.run)), D.runs[event.run].name), make("td", { class: "number" }, String(event.iteration)), make("td", {}, make("span", { class: `tag ${/^[a-z]+$/.test(event.kind) ? event.kind : ""}` }, event.kind)), make("td", { style: "width:60%" }, event.text), make("td", { class: "soft small" }, when(event.time))))));
  return [make("h2", {}, "What happened"), make("div", { class: "scroll" }, table)];
}
