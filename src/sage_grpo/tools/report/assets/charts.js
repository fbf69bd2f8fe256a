"use strict";

const hidden = new Set(); // runs that the legend switched off
let smoothing = 0;
const charts = [];

function ticks(low, high, count) {
  const span = high - low || Math.abs(high) || 1;
  const raw = span / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw);
  const found = [];
  for (let t = Math.ceil(low / step) * step; t <= high + step * 1e-6; t += step) found.push(Math.abs(t) < step * 1e-6 ? 0 : t);
  return found;
}

function logTicks(low, high) {
  const from = Math.floor(Math.log10(low)), to = Math.ceil(Math.log10(high));
  const every = Math.max(1, Math.ceil((to - from) / 6));
  const inside = (v) => v >= low * 0.999 && v <= high * 1.001;
  const powers = Array.from({ length: to - from + 1 }, (_, i) => 10 ** (from + i));
  const tens = powers.filter((_, i) => i % every === 0).filter(inside);
  if (tens.length > 2) return tens;
  const finer = powers.flatMap((p) => [p, 2 * p, 5 * p]).filter(inside);
  return finer.length > 1 ? finer : ticks(low, high, 4);
}

function smooth(values, amount) {
  // Exponential, without the pull to zero at the start; gaps stay gaps.
  if (!amount) return values;
  let sum = 0, weight = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = amount * sum + (1 - amount) * value;
    weight = amount * weight + (1 - amount);
    return sum / weight;
  });
}

// A chart of lines [{name, run, x, y, error?, dash?, marks?}]: hover, touch or arrow keys show the values of all of them.
function lineChart({ title, lines, xName, log = false, controls = [], smoothed = false, fromZero = false, dodge = false, xRange = null, note = "" }) {
  const svg = draw("svg", { role: "img", tabindex: "0", "aria-label": `${title}. Arrow keys show values.` });
  const tip = make("div", { class: "tip", hidden: true, "aria-live": "polite" });
  const box = make("div", { class: "chart card" }, make("div", { class: "head" }, make("h3", {}, title), ...controls), svg, tip);
  if (note) box.append(make("p", { class: "note" }, note));
  const state = { at: null };

  function redraw() {
    const width = Math.max(260, svg.clientWidth || box.clientWidth - 28 || 420), height = 230;
    const pad = { left: 58, right: 14, top: 12, bottom: 38 };
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.setAttribute("height", height);
    svg.replaceChildren();
    const shown = lines().filter((line) => !hidden.has(line.run) && line.x.length);
    const use = log && typeof log === "function" ? log() : log;
    const ok = (value) => value !== null && (!use || value > 0);
    const all = shown.flatMap((line) => line.y.flatMap((y, i) => (ok(y) ? (line.error && line.error[i] ? [y - line.error[i], y + line.error[i]] : [y]) : [])));
    if (!all.length) {
      svg.append(draw("text", { x: width / 2, y: height / 2, "text-anchor": "middle" }, "nothing recorded" + (use ? " that a log scale can show" : "")));
      state.points = null;
      return;
    }
    let low = Math.min(...all), high = Math.max(...all);
    if (use) { low = Math.max(low, 1e-300); if (low === high) { low /= 2; high *= 2; } }
    else {
      if (fromZero) low = Math.min(0, low);
      const room = (high - low || Math.abs(high) || 1) * 0.06;
      low -= fromZero && low === 0 ? 0 : room; high += room;
    }
    const xs = [...new Set(shown.flatMap((line) => line.x))].sort((a, b) => a - b);
    const [least, most] = xRange ? xRange() : [xs[0], xs[xs.length - 1]];
    const left = dodge ? least - 0.5 : least, right = dodge ? most + 0.5 : most === least ? least + 1 : most;
    const px = (x) => pad.left + ((x - left) / (right - left)) * (width - pad.left - pad.right);
    const scale = use ? Math.log10 : (v) => v;
    const py = (y) => pad.top + (1 - (scale(y) - scale(low)) / (scale(high) - scale(low))) * (height - pad.top - pad.bottom);
    for (const t of use ? logTicks(low, high) : ticks(low, high, 5)) {
      svg.append(draw("line", { class: "gridline", x1: pad.left, x2: width - pad.right, y1: py(t), y2: py(t) }));
      svg.append(draw("text", { x: pad.left - 7, y: py(t) + 4, "text-anchor": "end" }, tickText(t)));
    }
    for (const t of ticks(left, right, Math.max(3, width / 110)).filter(Number.isInteger)) {
      svg.append(draw("text", { x: px(t), y: height - pad.bottom + 17, "text-anchor": "middle" }, String(t)));
    }
    svg.append(draw("line", { class: "axis", x1: pad.left, x2: width - pad.right, y1: height - pad.bottom, y2: height - pad.bottom }));
    svg.append(draw("text", { x: width - pad.right, y: height - 4, "text-anchor": "end" }, xName));
    const points = shown.map((line) => ({ line, y: smoothed ? smooth(line.y, smoothing) : line.y }));
    for (const [order, { line, y }] of points.entries()) {
      // Side by side, so that equal values of two runs are both seen.
      const aside = dodge ? (order - (points.length - 1) / 2) * Math.min(9, (width - 80) / (right - left) / (points.length + 1)) : 0;
      const dx = (x) => px(x) + aside;
      if (line.error) band(svg, line, y, dx, py, ok, low);
      if (smoothed && smoothing) path(svg, line, line.y, dx, py, ok, { opacity: 0.25, width: 1 });
      if (!dodge) path(svg, line, y, dx, py, ok, { opacity: 1, width: 2 });
      const few = line.x.length <= 40;
      line.x.forEach((x, i) => {
        if (!ok(y[i])) return;
        if (dodge && line.marks) svg.append(draw("line", { x1: dx(x), x2: dx(x), y1: height - pad.bottom, y2: py(y[i]), stroke: line.paint, "stroke-width": 2, opacity: 0.35 }));
        if (few || line.marks) svg.append(draw("circle", { cx: dx(x), cy: py(y[i]), r: line.marks ? 4.5 : 2.6, fill: line.hollow ? "var(--card)" : line.paint, stroke: line.paint, "stroke-width": line.marks ? 2 : 0 }));
      });
    }
    Object.assign(state, { points, xs, px, py, ok, width, height, pad, rule: null });
    if (state.at !== null) show(state.at);
  }

  function show(x) {
    if (!state.points) return;
    state.at = x;
    if (state.rule) state.rule.remove();
    state.rule = draw("g", {}, draw("line", { class: "rule", x1: state.px(x), x2: state.px(x), y1: state.pad.top, y2: state.height - state.pad.bottom }));
    const rows = [];
    for (const { line, y } of state.points) {
      const i = line.x.indexOf(x);
      if (i < 0 || !state.ok(y[i])) continue;
      if (!dodge) state.rule.append(draw("circle", { cx: state.px(x), cy: state.py(y[i]), r: 4.5, fill: line.paint, stroke: "var(--card)", "stroke-width": 1.5 }));
      const raw = smoothed && smoothing ? ` (raw ${number(line.y[i])})` : "";
      const error = line.error && line.error[i] ? ` ± ${number(line.error[i])}` : "";
      rows.push(make("div", {}, dot(line.paint), make("span", {}, line.name), make("b", {}, number(y[i]) + error), make("span", { class: "soft" }, raw)));
      if (line.extra) rows.push(make("div", { class: "soft" }, line.extra(i)));
    }
    svg.append(state.rule);
    tip.replaceChildren(make("div", { class: "soft" }, `${xName} ${number(x, 0)}`), ...rows);
    tip.hidden = !rows.length;
    const outer = box.getBoundingClientRect(), inner = svg.getBoundingClientRect();
    const spot = (state.px(x) / state.width) * inner.width + inner.left - outer.left;
    tip.style.top = `${inner.top - outer.top + 6}px`;
    tip.style.left = spot > box.clientWidth / 2 ? "" : `${spot + 12}px`;
    tip.style.right = spot > box.clientWidth / 2 ? `${box.clientWidth - spot + 12}px` : "";
  }

  function hide() {
    state.at = null;
    tip.hidden = true;
    if (state.rule) state.rule.remove();
  }

  svg.addEventListener("pointermove", (event) => {
    if (!state.points) return;
    const spot = ((event.clientX - svg.getBoundingClientRect().left) / svg.clientWidth) * state.width;
    show(state.xs.reduce((best, x) => (Math.abs(state.px(x) - spot) < Math.abs(state.px(best) - spot) ? x : best)));
  });
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("blur", hide);
  svg.addEventListener("keydown", (event) => {
    if (!state.points || !["ArrowLeft", "ArrowRight"].includes(event.key)) return;
    event.preventDefault();
    event.stopPropagation();
    const step = event.key === "ArrowRight" ? 1 : -1;
    const i = state.at === null ? (step > 0 ? 0 : state.xs.length - 1) : state.xs.indexOf(state.at) + step;
    show(state.xs[Math.max(0, Math.min(state.xs.length - 1, i))]);
  });
  new ResizeObserver(redraw).observe(box);
  charts.push({ box, redraw });
  return box;
}

const tickText = (t) => (Math.abs(t) >= 1e4 || (t !== 0 && Math.abs(t) < 1e-3) ? t.toExponential(0) : String(+t.toPrecision(4)));

function band(svg, line, y, px, py, ok, low) {
  const there = line.x.map((x, i) => [x, y[i], line.error[i] || 0]).filter(([, value]) => ok(value));
  const upper = there.map(([x, value, error]) => `${px(x).toFixed(1)} ${py(value + error).toFixed(1)}`);
  const lower = there.map(([x, value, error]) => `${px(x).toFixed(1)} ${py(Math.max(low, value - error)).toFixed(1)}`).reverse();
  if (there.length > 1) svg.append(draw("path", { d: `M${[...upper, ...lower].join("L")}Z`, fill: line.paint, opacity: 0.12 }));
}

function path(svg, line, y, px, py, ok, { opacity, width }) {
  let steps = "", pen = "M";
  line.x.forEach((x, i) => {
    if (!ok(y[i])) { pen = "M"; return; }
    steps += `${pen}${px(x).toFixed(1)} ${py(y[i]).toFixed(1)}`;
    pen = "L";
  });
  svg.append(draw("path", { d: steps, fill: "none", stroke: line.paint, "stroke-width": width, opacity, "stroke-dasharray": line.dash || null, "stroke-linejoin": "round" }));
}

function redrawCharts() {
  for (const chart of charts) if (chart.box.isConnected) chart.redraw();
}

// A chart of one metric of all runs, chosen from a list.
function metricChart({ title, table, prefix, preferred, log, errors = null, note = "" }) {
  const names = () => [...new Set(D.runs.flatMap((run) => Object.keys(run[table].values)))].filter((name) => prefix.some((p) => name.startsWith(p))).sort();
  const chosen = { name: null, log };
  const fresh = () => { chosen.name = preferred.find((name) => names().includes(name) && D.runs.some((run) => (run[table].values[name] || []).some((v) => v !== null && v !== 0))) || names()[0] || ""; };
  fresh();
  const select = options(make("select", { "aria-label": `${title}: metric` }), names().map((name) => [name, name]), chosen.name);
  const toggle = make("button", { type: "button", "aria-pressed": String(!!log), title: "Logarithmic scale" }, "log");
  const lines = () => D.runs.map((run, place) => ({
    name: run.name, run: place, paint: colour(place), dash: dash(place), x: run[table].iteration, y: run[table].values[chosen.name] || run[table].iteration.map(() => null),
    error: errors && chosen.name === "eval/total" ? (run[table].values["eval/total_stderr"] || []).map((v) => (v === null ? null : 1.96 * v)) : null,
  }));
  const every = Math.max(1, ...D.runs.map((run) => run[table].every));
  const means = every > 1 ? ` Each point is the mean of up to ${every} iterations.` : "";
  const box = lineChart({ title, lines, xName: "iteration", log: () => chosen.log, smoothed: table === "steps", controls: [select, toggle], note: note + means });
  select.addEventListener("change", () => { chosen.name = select.value; redrawCharts(); });
  toggle.addEventListener("click", () => { chosen.log = !chosen.log; toggle.setAttribute("aria-pressed", String(chosen.log)); redrawCharts(); });
  return box;
}
