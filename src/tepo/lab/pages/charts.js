"use strict";
// Line charts: thin lines for seeds, a thick one for their mean, a band for its 95 % interval.

const COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d31", "#7f7f7f"];
const DARK_COLOURS = ["#4ba3e3", "#ff8b4a", "#2fcf9f", "#e79ac6", "#f2bd4b", "#8fd0f5", "#c9a866", "#b0b0b0"];
const DASHES = ["", "7 3", "2 3", "9 3 2 3", "4 2", "1 4", "12 4", "6 2 2 2"];
const colourOf = (place) => (isDark() ? DARK_COLOURS : COLOURS)[place % COLOURS.length];
// Two-sided 95 % points of Student's t with 1, 2, ... degrees of freedom.
const STUDENT = [12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.16, 2.145, 2.131, 2.12, 2.11, 2.101, 2.093, 2.086];

/** Return 3 to 6 round places within a range. */
function ticks(low, high, wanted = 4) {
  const raw = (high - low) / wanted || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= raw);
  const found = [];
  for (let value = Math.ceil(low / step) * step; found.length < 20 && value <= high + step * 1e-9; value += step) found.push(Math.abs(value) < step * 1e-9 ? 0 : value);
  return found;
}

/** Trailing mean over a window of points. */
function smooth(points, window) {
  if (window <= 1) return points;
  return points.map(([x], index) => {
    const part = points.slice(Math.max(0, index - window + 1), index + 1);
    return [x, part.reduce((sum, [, y]) => sum + y, 0) / part.length];
  });
}

/** Value of a line at x, between its points; null outside. */
function interpolate(points, x) {
  if (!points.length || x < points[0][0] || x > points[points.length - 1][0]) return null;
  let low = 0;
  let high = points.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (points[middle][0] <= x) low = middle;
    else high = middle;
  }
  const [[x0, y0], [x1, y1]] = [points[low], points[high]];
  return x1 === x0 ? y1 : y0 + ((y1 - y0) * (x - x0)) / (x1 - x0);
}

/** Mean and 95 % interval over lines, where all of them are, on up to 200 places. */
function band(lines) {
  const full = lines.filter((points) => points.length);
  if (full.length < 2) return [];
  const start = Math.max(...full.map((points) => points[0][0]));
  const end = Math.min(...full.map((points) => points[points.length - 1][0]));
  if (!(end >= start)) return [];
  const count = Math.min(200, Math.max(...full.map((points) => points.length)));
  const found = [];
  for (let place = 0; place < count; place++) {
    const x = count === 1 ? start : start + ((end - start) * place) / (count - 1);
    const values = full.map((points) => interpolate(points, Math.min(x, end))).filter(finite);
    const mean = values.reduce((sum, value) => sum + value, 0) / values.length;
    const spread = Math.sqrt(values.reduce((sum, value) => sum + (value - mean) ** 2, 0) / (values.length - 1));
    const half = ((STUDENT[values.length - 2] || 1.96) * spread) / Math.sqrt(values.length);
    found.push([x, mean, mean - half, mean + half]);
    if (end === start) break;
  }
  return found;
}

/**
 * Return a chart. `series`: { name, place, lines: [{ label, points: [[x, y]] }], band: [[x, mean, low, high]] };
 * `log`: the x axis counts in powers of two; `beyond`: how far bands may reach outside the lines, in heights of these.
 */
function chart({ title, about, series, xLabel, log = false, beyond = 0.6 }) {
  const [width, height, left, right, top, bottom] = [420, 240, 50, 12, 10, 34];
  const scaled = (x) => (log ? Math.log2(x) : x);
  const xs = [];
  const ys = [];
  const core = [];
  for (const one of series) {
    for (const line of one.lines) for (const [x, y] of line.points) xs.push(scaled(x)), ys.push(y), core.push(y);
    for (const [x, mean, low, high] of one.band) xs.push(scaled(x)), core.push(mean), ys.push(low, high);
  }
  const caption = el("figcaption", {}, title, about ? el("span", { class: "dim" }, about) : null);
  if (!xs.length) return el("figure", {}, caption, el("p", { class: "dim" }, "not recorded"));
  const least = (values) => values.reduce((a, b) => Math.min(a, b), Infinity);
  const most = (values) => values.reduce((a, b) => Math.max(a, b), -Infinity);
  let [x0, x1] = [least(xs), most(xs)];
  if (x0 === x1) [x0, x1] = [x0 - 0.5, x1 + 0.5];
  // Bands of few seeds are wide; they may run out of the picture rather than flatten the lines.
  const spread = most(core) - least(core);
  const alike = spread <= 1e-9 * Math.max(Math.abs(most(core)), Math.abs(least(core)));
  const reach = (alike ? Math.abs(most(core)) : spread) || 1;
  let [y0, y1] = [Math.max(least(ys), least(core) - beyond * reach), Math.min(most(ys), most(core) + beyond * reach)];
  if (alike && y1 - y0 < reach) [y0, y1] = [y0 - 0.5 * reach, y1 + 0.5 * reach];
  const px = (x) => left + ((scaled(x) - x0) / (x1 - x0)) * (width - left - right);
  const py = (y) => height - bottom - ((y - y0) / (y1 - y0)) * (height - top - bottom);
  const clamp = (y) => Math.max(top, Math.min(height - bottom, py(y)));
  const path = (points) => points.map(([x, y], index) => `${index ? "L" : "M"}${px(x).toFixed(1)} ${py(y).toFixed(1)}`).join("");
  const svg = el("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${title} by ${xLabel}`, tabindex: "0" });
  for (const y of ticks(y0, y1)) {
    svg.append(el("line", { class: "grid", x1: left, x2: width - right, y1: py(y), y2: py(y) }));
    svg.append(el("text", { x: left - 6, y: py(y) + 4, "text-anchor": "end" }, short(y)));
  }
  const places = log ? [...new Set(xs)].sort((a, b) => a - b).map((x) => 2 ** x) : ticks(x0, x1);
  for (const x of places) svg.append(el("text", { x: px(x), y: height - bottom + 15, "text-anchor": "middle" }, short(x)));
  svg.append(el("line", { class: "axis", x1: left, x2: width - right, y1: height - bottom, y2: height - bottom }));
  svg.append(el("text", { class: "x-label", x: (left + width - right) / 2, y: height - 3, "text-anchor": "middle" }, xLabel));
  for (const one of series) {
    const colour = colourOf(one.place);
    const edge = one.band.map(([x, , low]) => `${px(x).toFixed(1)},${clamp(low).toFixed(1)}`);
    const back = one.band.map(([x, , , high]) => `${px(x).toFixed(1)},${clamp(high).toFixed(1)}`).reverse();
    if (edge.length > 1) svg.append(el("path", { d: `M${[...edge, ...back].join("L")}Z`, fill: colour, "fill-opacity": 0.16, class: "band" }));
    const alone = one.band.length === 0;
    for (const line of one.lines) {
      const style = { fill: "none", stroke: colour, "stroke-width": alone ? 1.8 : 0.8, "stroke-opacity": alone ? 1 : 0.45, "stroke-dasharray": DASHES[one.place % DASHES.length], class: "seed" };
      svg.append(el("path", { d: path(line.points), ...style }));
      if (line.points.length <= 12) for (const [x, y] of line.points) svg.append(el("circle", { cx: px(x), cy: py(y), r: alone ? 3 : 2, fill: colour }));
    }
    if (one.band.length) {
      svg.append(el("path", { d: path(one.band), fill: "none", stroke: colour, "stroke-width": 2.2, "stroke-dasharray": DASHES[one.place % DASHES.length], class: "mean" }));
      if (one.band.length <= 12) for (const [x, y] of one.band) svg.append(el("circle", { cx: px(x), cy: py(y), r: 3, fill: colour }));
    }
  }
  const figure = el("figure", {}, caption, svg);
  reading(svg, { series, px, width, left, right, height, top, bottom, log, x0, x1, xLabel });
  return figure;
}

/** Short words for an axis: 1.5k, 2M. */
function short(value) {
  const size = Math.abs(value);
  if (size >= 1e6) return `${number(value / 1e6)}M`;
  if (size >= 1e4) return `${number(value / 1e3)}k`;
  return number(value);
}

/** Show the values under the pointer, or under a cursor that arrow keys move. */
function reading(svg, { series, px, width, left, right, height, top, bottom, log, x0, x1, xLabel }) {
  let cursor = null;
  let share = 0.5;
  const show = () => {
    const scaled = x0 + share * (x1 - x0);
    const x = log ? 2 ** scaled : scaled;
    cursor ||= svg.appendChild(el("line", { class: "cursor", y1: top, y2: height - bottom }));
    cursor.setAttribute("x1", px(x));
    cursor.setAttribute("x2", px(x));
    const rows = [[`${xLabel} ${short(x)}`]];
    for (const one of series) {
      const mean = one.band.length > 1 ? interpolate(one.band, x) : null;
      const low = interpolate(one.band.map(([at, , value]) => [at, value]), x);
      const high = interpolate(one.band.map(([at, , , value]) => [at, value]), x);
      if (finite(mean)) rows.push([one.name, `${number(mean)} [${number(low)}, ${number(high)}]`]);
      else for (const line of one.lines) rows.push([line.label, number(interpolate(line.points, x))]);
    }
    showTip(cursor, rows);
  };
  const leave = () => (cursor?.remove(), (cursor = null), hideTip());
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const place = ((event.clientX - box.left) / box.width) * width;
    share = Math.max(0, Math.min(1, (place - left) / (width - left - right)));
    show();
  });
  svg.addEventListener("pointerleave", leave);
  svg.addEventListener("blur", leave);
  svg.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 0.02, ArrowLeft: -0.02, Home: -1, End: 1 }[event.key];
    if (event.key === "Escape") leave();
    if (!step) return;
    event.preventDefault();
    share = Math.max(0, Math.min(1, share + step));
    show();
  });
}

/** Return the key of a chart's lines: colour and dash. */
function keyOfLine(place) {
  return el("svg", { viewBox: "0 0 34 12", "aria-hidden": "true" },
    el("line", { x1: 0, x2: 34, y1: 6, y2: 6, stroke: colourOf(place), "stroke-width": 2.5, "stroke-dasharray": DASHES[place % DASHES.length] }));
}
