"use strict";
// Text from runs (prompts, names, settings) only ever becomes text nodes: nothing here parses HTML.

const D = JSON.parse(document.getElementById("data").textContent);

const find = (selector, root = document) => root.querySelector(selector);
const COLOURS = 8;
const DASHES = ["", "7 4", "2 3", "9 3 2 3"];

function make(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

function draw(tag, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 0.001 || size >= 1e5)) return value.toExponential(2);
  return size >= 1000 ? value.toFixed(0) : size >= 100 ? value.toFixed(1) : value.toFixed(digits);
}

function signed(value) {
  if (value === null || value === undefined) return "–";
  return (value > 0 ? "+" : value < 0 ? "−" : "±") + number(Math.abs(value));
}

const tone = (value) => (value > 0 ? "good" : value < 0 ? "bad" : "soft");
const arrow = (value) => (value > 0 ? "▲" : value < 0 ? "▼" : "•");
const colour = (run) => `var(--c${run % COLOURS})`;
const dash = (run) => DASHES[Math.floor(run / COLOURS) % DASHES.length];
const dot = (paint) => make("span", { class: "dot", style: `background:${paint}`, "aria-hidden": "true" });

const memory = {
  // A page from a file may have no storage.
  get(key) { try { return localStorage.getItem(key); } catch { return null; } },
  set(key, value) { try { localStorage.setItem(key, value); } catch { /* it is a convenience */ } },
};

function options(select, values, chosen) {
  select.replaceChildren(...values.map(([value, text]) => make("option", { value, selected: String(value) === String(chosen) }, text)));
  return select;
}
