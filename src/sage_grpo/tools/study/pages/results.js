// The results page: draws what the server computed, and nothing else.
"use strict";

const token = location.hash.slice(1);
const $ = (id) => document.getElementById(id);
const percent = (value, digits = 1) => (value === null ? "–" : `${(100 * value).toFixed(digits)}%`);

function make(tag, properties = {}, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  return node;
}

async function get(path) {
  const response = await fetch(path, { headers: { Authorization: `Bearer ${token}` }, cache: "no-store", credentials: "omit" });
  if (!response.ok) throw Object.assign(new Error(), { status: response.status });
  return response;
}

function notice(text) {
  $("notice").textContent = text;
  $("notice").hidden = !text;
}

/** Wins, ties and losses as one bar, with the win rate and its interval. */
function pair(row) {
  const total = row.wins + row.ties + row.losses;
  const parts = [["win", row.wins], ["tie", row.ties], ["loss", row.losses]].filter(([, count]) => count);
  const bar = make("div", { className: "stack" }, ...parts.map(([kind, count]) => {
    const part = make("span", { className: kind, textContent: count / total > 0.045 ? count : "" });
    part.style.flexGrow = count;
    return part;
  }));
  bar.setAttribute("role", "img");
  bar.setAttribute("aria-label", `${row.wins} wins, ${row.ties} ties, ${row.losses} losses`);
  const names = make("div", { className: "names" }, make("b", { textContent: row.first }), " vs ", make("b", { textContent: row.second }));
  const rate = make("div", { className: "rate-of" }, make("b", { textContent: percent(row.rate) }),
    make("span", { textContent: row.rate === null ? "" : `${(100 * row.low).toFixed(1)}–${percent(row.high)}` }));
  return make("li", {}, make("div", { className: "line" }, names, rate), bar);
}

function dimension(part) {
  const card = make("section", { className: "card dimension" }, make("h2", { textContent: part.name }), make("p", { className: "muted", textContent: part.question, dir: "auto" }));
  if (part.pairs.every((row) => row.wins + row.ties + row.losses === 0)) {
    card.append(make("p", { className: "muted", textContent: "No votes yet." }));
    return card;
  }
  card.append(make("h3", { textContent: "Win rate" }), make("ul", { className: "pairs" }, ...part.pairs.map(pair)));
  const alpha = part.agreement === null ? "–" : part.agreement.toFixed(2).replace("-", "−");
  card.append(make("p", { className: "agreement" }, "Agreement α = ", make("b", { textContent: alpha }),
    make("span", { className: "muted", textContent: ` over ${part.judged_twice} comparisons with two votes or more` })));
  return card;
}

function rater(row) {
  const bar = make("progress", { value: row.done, max: row.total || 1 });
  bar.setAttribute("aria-label", `Rater ${row.rater}`);
  const cells = [
    make("td", { className: "who" }, String(row.rater), ...(row.flagged ? [make("span", { className: "flag", textContent: "flagged" })] : [])),
    make("td", { className: "done" }, bar, ` ${row.done} of ${row.total}`),
    make("td", { textContent: row.checks ? `${row.checks - row.failed} of ${row.checks}` : "–" }),
    make("td", { textContent: row.seconds === null ? "–" : `${row.seconds.toFixed(1)} s` }),
    make("td", { textContent: percent(row.ties, 0) }),
    make("td", { textContent: percent(row.left, 0) }),
  ];
  return make("tr", {}, ...cells);
}

function show(found) {
  document.title = $("title").textContent = found.title;
  const facts = [["votes", found.votes], ["raters", found.voters], ["prompts", found.prompts], ["methods", found.methods.length]];
  $("facts").replaceChildren(...facts.map(([name, value]) => make("div", {}, make("dd", { textContent: value }), make("dt", { textContent: name }))));
  $("exclude-label").hidden = !found.flagged.length;
  $("exclude-text").textContent = `Leave out ${found.flagged.length} flagged`;
  $("dimensions").replaceChildren(...found.dimensions.map(dimension));
  $("raters").tBodies[0].replaceChildren(...found.raters.map(rater));
  $("flag-note").textContent = `Flagged: failed more than ${percent(found.max_failed, 0)} of the attention checks. Checks are never part of the figures.`;
  $("main").hidden = $("tools").hidden = false;
}

/** Draws what there is now; false when the link opens nothing. */
async function load() {
  try {
    const response = await get(`api/results${$("exclude").checked ? "?exclude_flagged=1" : ""}`);
    show(await response.json());
    notice("");
  } catch (error) {
    const invalid = error.status === 401;
    notice(invalid ? "This link is not valid. `sage-grpo study links --renew admin` gives a new one." : "No answer from the server. Trying again.");
    return !invalid;
  }
  return true;
}

async function refresh() {
  if (await load()) setTimeout(refresh, document.hidden ? 60000 : 10000);
}

$("exclude").addEventListener("change", load);
$("download").addEventListener("click", async () => {
  const link = make("a", { href: URL.createObjectURL(await (await get("api/votes.csv")).blob()), download: "votes.csv" });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
});
addEventListener("hashchange", () => location.reload());
if (token) refresh();
else notice("This link is not valid: the part behind # is missing.");
