"use strict";
// What every page shares: elements from text (never from markup), data, colours, the tip, downloads.

/** Return a new element; children are nodes or text, attributes plain strings. */
function el(tag, attributes = {}, ...children) {
  const svg = ["svg", "g", "path", "line", "text", "circle", "rect", "title"].includes(tag);
  const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

/** Return the data of a block: JSON, compressed, in base64, so that no text of a response is ever markup. */
async function unpack(id) {
  const block = document.getElementById(`data-${id}`);
  if (!block) return null;
  const bytes = Uint8Array.from(atob(block.textContent.trim()), (character) => character.charCodeAt(0));
  const unzip = new DecompressionStream("gzip");
  const writer = unzip.writable.getWriter();
  writer.write(bytes);
  writer.close();
  return JSON.parse(await new Response(unzip.readable).text());
}

/** Run the page's start; a failure is shown on the page, not only in the console. */
function start(main) {
  preparePrinting();
  main().then(
    () => document.documentElement.setAttribute("data-ready", "yes"),
    (error) => {
      const old = typeof DecompressionStream === "undefined";
      const words = old ? "This browser is too old to unpack the page's data (it lacks DecompressionStream)." : String(error);
      document.querySelector("main").prepend(el("p", { class: "failure", role: "alert" }, words));
      if (!old) throw error;
    },
  );
}

// --- numbers ---------------------------------------------------------------------------------------------

/** Write a number for people: about three digits, a real minus sign. */
function number(value, digits = 3) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  const text = size >= 1e5 || size < 1e-3 ? size.toExponential(digits - 1) : String(Number(size.toPrecision(digits)));
  return (value < 0 ? "−" : "") + text;
}

const finite = (value) => typeof value === "number" && Number.isFinite(value);

// --- colours ---------------------------------------------------------------------------------------------

const VIRIDIS = ["#440154", "#472d7b", "#3b528b", "#2c728e", "#21918c", "#28ae80", "#5ec962", "#addc30", "#fde725"];
const rgb = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
const mix = (from, to, share) => from.map((value, index) => Math.round(value + (to[index] - value) * share));
const css = (colour) => `rgb(${colour.join(",")})`;

function isDark() {
  const chosen = document.documentElement.getAttribute("data-theme");
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

/** Colour of a share 0..1 on viridis, running from the page's background to its far end. */
function sequential(share) {
  const dark = isDark();
  const at = Math.min(1, Math.max(0, share));
  const place = (dark ? at : 1 - at) * (VIRIDIS.length - 1);
  const low = Math.min(VIRIDIS.length - 2, Math.floor(place));
  const full = mix(rgb(VIRIDIS[low]), rgb(VIRIDIS[low + 1]), place - low);
  return mix(dark ? [22, 24, 29] : [255, 255, 255], full, Math.min(1, at * 5));
}

/** Colour of a share -1..1: blue above zero, orange below; the sign is also drawn as a line under the token. */
function diverging(share) {
  const dark = isDark();
  const strong = share > 0 ? (dark ? [86, 160, 235] : [20, 92, 170]) : dark ? [240, 140, 60] : [190, 82, 4];
  return mix(dark ? [22, 24, 29] : [255, 255, 255], strong, Math.min(1, Math.abs(share)) ** 0.8);
}

/** Black or white, whichever reads better on a colour. */
function inkOn(colour) {
  const [r, g, b] = colour.map((value) => {
    const part = value / 255;
    return part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.179 ? "#000" : "#fff";
}

// --- light and dark --------------------------------------------------------------------------------------

const themeListeners = [];

function themeButton() {
  const button = el("button", { type: "button", class: "quiet", id: "theme" });
  const label = () => (button.textContent = isDark() ? "Light" : "Dark");
  const changed = () => (label(), themeListeners.forEach((listener) => listener()));
  button.addEventListener("click", () => {
    document.documentElement.setAttribute("data-theme", isDark() ? "light" : "dark");
    changed();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", changed);
  label();
  return button;
}

/** On paper: light whatever the screen is, and nothing folded that nobody could open. */
function preparePrinting() {
  let theme = null;
  let folded = [];
  addEventListener("beforeprint", () => {
    theme = document.documentElement.getAttribute("data-theme");
    folded = [...document.querySelectorAll("details:not([open])")];
    folded.forEach((one) => (one.open = true));
    document.documentElement.setAttribute("data-theme", "light");
    themeListeners.forEach((listener) => listener());
  });
  addEventListener("afterprint", () => {
    folded.forEach((one) => (one.open = false));
    if (theme) document.documentElement.setAttribute("data-theme", theme);
    else document.documentElement.removeAttribute("data-theme");
    themeListeners.forEach((listener) => listener());
  });
}

// --- the tip ---------------------------------------------------------------------------------------------

const tip = el("div", { id: "tip", role: "status", "aria-live": "polite", hidden: true });

/** Show rows of [name, value] beside an element; a row of one cell is a heading. */
function showTip(anchor, rows) {
  tip.replaceChildren(
    el("table", {}, rows.map((row) =>
      row.length === 1
        ? el("tr", {}, el("th", { colspan: "2", scope: "colgroup" }, row[0]))
        : el("tr", {}, el("td", {}, row[0]), el("td", {}, row[1])))),
  );
  tip.hidden = false;
  const box = anchor.getBoundingClientRect();
  const { offsetWidth: width, offsetHeight: height } = tip;
  const below = box.bottom + 8 + height < innerHeight || box.top < height + 8;
  tip.style.left = `${Math.max(6, Math.min(innerWidth - width - 6, box.left))}px`;
  tip.style.top = `${Math.max(6, below ? Math.min(box.bottom + 8, innerHeight - height - 6) : box.top - height - 8)}px`;
}

const hideTip = () => (tip.hidden = true);

// --- controls and downloads ------------------------------------------------------------------------------

/** Return a labelled select; options are [value, label] or [value, label, why it cannot be chosen]. */
function select(id, label, options, value, changed) {
  const box = el("select", { id, onchange: (event) => changed(event.target.value) },
    options.map(([key, words, why]) =>
      el("option", { value: key, disabled: Boolean(why), title: why || null }, why ? `${words} (not available)` : words)));
  box.value = value;
  return el("label", { class: "field" }, el("span", {}, label), box);
}

function download(name, text) {
  const url = URL.createObjectURL(new Blob([text], { type: "text/plain;charset=utf-8" }));
  el("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

/** Write rows as CSV; cells that a spreadsheet would take for a formula are kept as text. */
function csv(rows) {
  const cell = (value) => {
    const text = value === null || value === undefined ? "" : String(value);
    const safe = /^[=+@\t\r]|^-(?![\d.])/.test(text) ? `'${text}` : text;
    return /[",\n\r]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
  };
  return rows.map((row) => row.map(cell).join(",")).join("\n") + "\n";
}

/** Write rows as a LaTeX table; the first row is the head. */
function latex(rows) {
  const special = { "\\": "\\textbackslash{}", "~": "\\textasciitilde{}", "^": "\\textasciicircum{}", "−": "$-$", "–": "--" };
  const cell = (value) => String(value ?? "").replace(/[\\~^−–&%$#_{}]/g, (c) => special[c] || `\\${c}`);
  const [head, ...body] = rows.map((row) => row.map(cell).join(" & ") + " \\\\");
  const columns = `l${"r".repeat(rows[0].length - 1)}`;
  return ["\\begin{tabular}{" + columns + "}", "\\hline", head, "\\hline", ...body, "\\hline", "\\end{tabular}", ""].join("\n");
}
