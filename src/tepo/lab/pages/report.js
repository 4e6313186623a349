"use strict";
// The report: curves, pass@k, flipped questions, the objective diff, downloads.

start(async () => {
  document.querySelector("header").append(themeButton());
  document.body.append(tip);
  downloads();
  const curves = await unpack("curves");
  if (curves) drawCurves(curves);
  const atK = await unpack("at-k");
  if (atK) drawAtK(atK);
  const flips = await unpack("flips");
  if (flips) drawFlips(flips);
  const diff = await unpack("diff");
  if (diff) drawDiff(diff);
});

/** Put download buttons under every table that is named for them. */
function downloads() {
  for (const table of document.querySelectorAll("table[data-name]")) {
    const rows = () => [...table.rows].map((row) => [...row.cells].map((cell) => cell.textContent.trim()));
    const name = table.dataset.name;
    const box = table.parentElement;
    const hint = box.scrollWidth > box.clientWidth + 1 ? el("span", { class: "dim" }, " scrolls sideways") : null;
    box.after(el("p", { class: "take" },
      el("button", { type: "button", class: "quiet", onclick: () => download(`${name}.csv`, csv(rows())) }, "CSV"), " ",
      el("button", { type: "button", class: "quiet", onclick: () => download(`${name}.tex`, latex(rows())) }, "LaTeX"), hint));
  }
}

const PANELS = [
  ["reward/mean"], ["eval/avg"], ["entropy/rollout"], ["mask/kl"], ["entropy/change"], ["kl/old"], ["ratio/max"],
  ["clip/low", "clip/high"], ["length/mean"], ["length/truncated"], ["group/signal"], ["mismatch/logp"], ["grad/norm"],
];

function drawCurves({ variants, meanings, metrics }) {
  const longest = Math.max(0, ...variants.flatMap((variant) => variant.runs.map((run) => run.steps.length)));
  const state = { axis: "steps", smooth: longest > 200 ? "20" : longest > 60 ? "5" : "1", more: "", hidden: new Set() };
  const box = document.getElementById("curves-box");
  const controls = el("div", { class: "controls" });
  const keys = el("div", { class: "keys" });
  const charts = el("div", { class: "charts" });
  const change = (name) => (value) => ((state[name] = value), draw());
  controls.append(
    select("axis", "Over", [["steps", "steps"], ["tokens", "response tokens"], ["seconds", "seconds of training"]], state.axis, change("axis")),
    select("smooth", "Smoothing", [["1", "none"], ["5", "mean of 5 steps"], ["20", "mean of 20 steps"], ["50", "mean of 50 steps"]], state.smooth, change("smooth")),
    select("more", "One more curve", [["", "choose a metric"], ...metrics.map((name) => [name, name])], "", change("more")),
  );
  controls.append(el("div", { class: "field" }, el("span", {}, "Data"),
    el("button", { type: "button", onclick: () => download("curves.csv", csv(rows())) }, "all curves as CSV")));
  box.append(controls, keys, charts);

  function rows() {
    const head = ["variant", "run", "seed", "step", "tokens", "seconds", ...metrics];
    return [head, ...variants.flatMap((variant) => variant.runs.flatMap((run) =>
      run.steps.map((step, at) => [variant.name, run.name, run.seed, step, run.tokens[at], run.seconds[at], ...metrics.map((name) => run.values[name]?.[at])])))];
  }

  function series(metric) {
    return variants.map((variant, place) => {
      const lines = variant.runs.map((run) => {
        const values = run.values[metric] || [];
        const points = values.map((y, at) => [run[state.axis][at], y]).filter(([x, y]) => finite(x) && finite(y));
        return { label: `${variant.name}, seed ${run.seed}`, points: smooth(points, metric.startsWith("eval/") ? 1 : Number(state.smooth)) };
      }).filter((line) => line.points.length);
      return { name: variant.name, place, lines, band: band(lines.map((line) => line.points)) };
    }).filter((one) => !state.hidden.has(one.name) && one.lines.length);
  }

  function draw() {
    hideTip();
    keys.replaceChildren(...variants.map((variant, place) =>
      el("label", {}, el("input", { type: "checkbox", checked: !state.hidden.has(variant.name), onchange: (event) => {
        state.hidden[event.target.checked ? "delete" : "add"](variant.name);
        draw();
      } }), " ", keyOfLine(place), variant.name)));
    const wanted = PANELS.flat().filter((name) => metrics.includes(name));
    if (state.more) wanted.unshift(state.more);
    const label = { steps: "steps", tokens: "response tokens", seconds: "seconds of training" }[state.axis];
    charts.replaceChildren(...[...new Set(wanted)].map((metric) =>
      chart({ title: metric, about: meanings[metric], series: series(metric), xLabel: label })));
  }
  themeListeners.push(draw);
  draw();
}

function drawAtK(sides) {
  const box = document.getElementById("at-k-box");
  const one = (key, title, about) => chart({
    title, about, log: true, xLabel: "k", beyond: Infinity,
    series: sides.map((side, place) => ({ name: side.name, place, lines: [], band: side[key].filter(([, value]) => finite(value)) })),
  });
  const draw = () => box.replaceChildren(
    el("div", { class: "keys" }, sides.map((side, place) => el("span", {}, keyOfLine(place), side.name))),
    el("div", { class: "charts" },
      one("pass", "pass@k", "chance that one of k samples is right, unbiased; band: 95 % interval"),
      one("maj", "maj@k", "chance that the majority of k samples is right; band: 95 % interval")));
  themeListeners.push(draw);
  draw();
}

function drawFlips(contrasts) {
  const box = document.getElementById("flips-box");
  const LONGEST = 240;
  const cut = (text) => (text.length > LONGEST ? `${text.slice(0, LONGEST)} …` : text);
  const percent = (share) => `${Math.round(100 * share)} %`;
  const answered = (name, responses) => el("div", { class: "side" }, el("h3", {}, name), responses.map((one) =>
    el("div", {}, el("div", { class: `badge ${one.passed ? "right" : "wrong"}` }, one.passed ? "✓ right" : "✗ wrong",
      el("span", { class: "dim" }, ` seed ${one.seed}${one.answer === null ? "" : `, read as ${one.answer}`}`)), el("pre", {}, one.text))));
  contrasts.forEach((contrast, place) => {
    const state = { way: "" };
    const list = el("ul", { class: "flips" });
    const draw = () => list.replaceChildren(...contrast.questions
      .filter(({ rates: [before, after] }) => !state.way || (state.way === "better") === after > before)
      .map((question) => {
        const [before, after] = question.rates;
        const body = el("div", { hidden: true });
        const button = el("button", { type: "button", "aria-expanded": "false", onclick: () => {
          body.hidden = !body.hidden;
          button.setAttribute("aria-expanded", String(!body.hidden));
          if (body.childElementCount) return;
          if (question.question.length > LONGEST) body.append(el("pre", {}, question.question));
          body.append(el("p", { class: "dim" }, `reference: ${question.answer ?? "none"}`),
            el("div", { class: "sides" }, answered(contrast.first, question.responses[0]), answered(contrast.second, question.responses[1])));
        } }, el("span", { class: after > before ? "good" : "bad" }, after > before ? "better ▲ " : "worse ▼ "), `${percent(before)} → ${percent(after)}  `, cut(question.question));
        return el("li", {}, button, body);
      }));
    box.append(el("h3", {}, `${contrast.second} against ${contrast.first}`),
      el("p", { class: "dim" }, `Share of right samples over all seeds, ${contrast.first} → ${contrast.second}. A question opens to answers of both.`),
      el("div", { class: "controls" }, select(`way-${place}`, "Show", [["", "all that differ"], ["better", "better"], ["worse", "worse"]], "", (value) => ((state.way = value), draw()))),
      list);
    if (contrast.left) box.append(el("p", { class: "dim" }, `and ${contrast.left} more that moved less`));
    if (!contrast.questions.length) box.append(el("p", {}, "No question differs."));
    draw();
  });
}

function drawDiff({ index, responses }) {
  const { rows, labels, objectives, scales, prompts } = index;
  const able = objectives.filter((one) => !one.why);
  const box = document.getElementById("diff-box");
  const first = able[0]?.name;
  const another = able.find((one) => one.name.startsWith("run ") && one.name !== first)
    || able.find((one) => ["dapo", "tepo", "grpo"].includes(one.name) && `run ${one.name}` !== first && one.name !== first);
  const state = { left: first, right: (another || able[0])?.name, colour: "credit", from: 0 };
  if (!able.length) return;
  const perPage = 8;
  const options = objectives.map((one) => [one.name, labels[one.name], one.why]);
  const place = el("div", {});
  const change = (name) => (value) => ((state[name] = value), draw());
  box.append(el("div", { class: "controls" },
    select("left", "Left", options, state.left, change("left")),
    select("right", "Right", options, state.right, change("right")),
    select("colour", "Colour by", Object.entries(QUANTITIES).map(([key, kind]) => [key, kind.label]), state.colour, change("colour"))), place);

  function column(objective, scale) {
    const shown = el("div", { class: "side" }, el("h3", {}, labels[objective]));
    responses.slice(state.from, state.from + perPage).forEach((one, offset) => {
      const row = state.from + offset;
      const kind = QUANTITIES[state.colour];
      const nothing = kind.own && !kind.marks && !one.t.some((_, i) => finite(kind.value(one, i, objective)));
      shown.append(el("article", { class: "card" },
        el("div", { class: "head" }, el("span", { class: `badge ${rows.passed[row] ? "right" : "wrong"}` }, rows.passed[row] ? "✓" : "✗"),
          el("span", { class: "dim" }, prompts[rows.prompt[row]].question.slice(0, 120))),
        nothing ? el("p", { class: "dim" }, `${kind.label}: not applicable`) : null,
        tokenLine(one, { quantity: state.colour, objective, scale, objectives: [objective], labels })));
    });
    return shown;
  }

  function draw() {
    hideTip();
    const own = QUANTITIES[state.colour].own;
    // Both sides on one scale, so that a paler side is a smaller push.
    const scale = own ? Math.max(...[state.left, state.right].map((name) => scales[`${name}/${state.colour}`] || 0)) || 1 : scales[state.colour] || 1;
    const turn = (by) => () => ((state.from += by), draw());
    place.replaceChildren(legend(state.colour, scale),
      el("div", { class: "sides" }, column(state.left, scale), column(state.right, scale)),
      el("nav", { class: "pages", "aria-label": "responses of the batch" },
        el("button", { type: "button", disabled: state.from === 0, onclick: turn(-perPage) }, "‹ previous"),
        el("span", {}, ` responses ${state.from + 1} to ${Math.min(responses.length, state.from + perPage)} of ${responses.length} `),
        el("button", { type: "button", disabled: state.from + perPage >= responses.length, onclick: turn(perPage) }, "next ›")));
  }
  themeListeners.push(draw);
  draw();
}
