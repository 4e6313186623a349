"use strict";
// The token viewer: filters, pages, and the cards of responses.

start(async () => {
  const index = await unpack("index");
  const { rows, labels, objectives, scales, steps, prompts, own, chunk } = index;
  const count = rows.step.length;
  const wanted = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  const state = { quantity: "credit", objective: own, versus: "", step: "", reward: "", prompt: "", search: "", layout: "list", sort: "run", page: 0, ...wanted };
  state.page = Number(state.page) || 0;
  if (!objectives.some((one) => one.name === state.objective && !one.why)) state.objective = own;
  if (!QUANTITIES[state.quantity]) state.quantity = "credit";
  const perPage = 20;
  const loaded = new Map();

  const controls = document.getElementById("controls");
  const list = document.getElementById("responses");
  const options = objectives.map((one) => [one.name, labels[one.name], one.why]);
  const change = (name) => (value) => {
    state[name] = value;
    if (!["quantity", "objective", "versus"].includes(name)) state.page = 0;
    draw();
  };
  const text = (id, label, hint) =>
    el("label", { class: "field" }, el("span", {}, label),
      el("input", { type: "search", id, placeholder: hint, value: state[id], oninput: (event) => change(id)(event.target.value) }));
  controls.append(
    select("objective", "Objective", options, state.objective, change("objective")),
    select("quantity", "Colour by", Object.entries(QUANTITIES).map(([key, kind]) => [key, kind.label]), state.quantity, change("quantity")),
    select("versus", "Compare with", [["", "no other"], ...options], state.versus, change("versus")),
    select("layout", "Layout", [["list", "one below the other"], ["sides", "right and wrong side by side"]], state.layout, change("layout")),
    select("step", "Step", [["", "all steps"], ...steps.map((step) => [String(step), `step ${step}`])], state.step, change("step")),
    select("reward", "Reward", [["", "any"], ["right", "right"], ["wrong", "wrong"], ["mixed", "groups with both"], ["cut", "cut at the limit"], ["failed", "reward failed"]], state.reward, change("reward")),
    select("sort", "Order", [["run", "as sampled"], ["reward", "highest reward first"], ["worst", "lowest reward first"], ["long", "longest first"]], state.sort, change("sort")),
    text("prompt", "Prompt", "problem or question"),
    text("search", "Search", "text of a response"),
  );
  document.querySelector("header").append(themeButton());
  document.body.append(tip);

  const keyOf = (row) => `${rows.step[row]}/${rows.draw[row]}`;
  const groups = new Map();
  for (let row = 0; row < count; row++) {
    const group = groups.get(keyOf(row)) || { right: 0, wrong: 0 };
    group[rows.passed[row] ? "right" : "wrong"]++;
    groups.set(keyOf(row), group);
  }

  function chosen() {
    const search = state.search.toLowerCase();
    const prompt = state.prompt.toLowerCase();
    const found = [];
    for (let row = 0; row < count; row++) {
      const about = prompts[rows.prompt[row]];
      const group = groups.get(keyOf(row));
      if (state.step && String(rows.step[row]) !== state.step) continue;
      if (state.reward === "right" && !rows.passed[row]) continue;
      if (state.reward === "wrong" && rows.passed[row]) continue;
      if (state.reward === "mixed" && !(group.right && group.wrong)) continue;
      if (state.reward === "cut" && rows.stop[row] !== "length") continue;
      if (state.reward === "failed" && !rows.error[row]) continue;
      if (prompt && !about.question.toLowerCase().includes(prompt) && !String(about.problem).toLowerCase().includes(prompt)) continue;
      if (search && !rows.text[row].toLowerCase().includes(search)) continue;
      found.push(row);
    }
    const reward = (row) => (rows.reward[row] === null ? -Infinity : rows.reward[row]);
    const orders = { reward: (a, b) => reward(b) - reward(a) || a - b, worst: (a, b) => reward(a) - reward(b) || a - b, long: (a, b) => rows.length[b] - rows.length[a] || a - b };
    return state.sort === "run" ? found : found.sort(orders[state.sort]);
  }

  /** Split rows into pages: whole groups stay on one page where right and wrong stand side by side. */
  function paged(found) {
    if (state.layout === "list") return Array.from({ length: Math.ceil(found.length / perPage) }, (_, page) => found.slice(page * perPage, (page + 1) * perPage));
    const byGroup = new Map();
    found.forEach((row) => byGroup.set(keyOf(row), [...(byGroup.get(keyOf(row)) || []), row]));
    const pages = [];
    for (const group of byGroup.values()) {
      const last = pages[pages.length - 1];
      if (last && last.length + group.length <= perPage) last.push(...group);
      else pages.push([...group]);
    }
    return pages;
  }

  async function response(row) {
    const number = Math.floor(row / chunk);
    if (!loaded.has(number)) {
      if (loaded.size >= 12) loaded.delete(loaded.keys().next().value);
      loaded.set(number, unpack(`chunk-${number}`));
    }
    return (await loaded.get(number))[row % chunk];
  }

  const about = (objective) => objectives.find((one) => one.name === objective) || {};
  const scaleOf = (objective) => scales[QUANTITIES[state.quantity].own ? `${objective}/${state.quantity}` : state.quantity] || 1;
  const missing = (objective, one) => QUANTITIES[state.quantity].own && !QUANTITIES[state.quantity].marks && !one.t.some((_, i) => finite(QUANTITIES[state.quantity].value(one, i, objective)));

  function card(row, one) {
    const passed = rows.passed[row];
    const shown = [state.objective, ...(state.versus && state.versus !== state.objective ? [state.versus] : [])];
    const head = el("div", { class: "head" },
      el("span", { class: `badge ${passed ? "right" : "wrong"}` }, passed ? "✓ right" : "✗ wrong"),
      el("span", {}, `reward ${rows.reward[row] === null ? "none" : number(rows.reward[row])}`),
      el("span", { class: "dim" }, `step ${rows.step[row]} · draw ${rows.draw[row]} · sample ${rows.sample[row]} · ${rows.length[row]} tokens · ended by ${rows.stop[row]}`),
      rows.error[row] ? el("span", { class: "badge wrong" }, `reward failed: ${rows.error[row]}`) : null);
    const box = el("article", { class: "card", "data-row": row }, head);
    for (const objective of shown) {
      if (shown.length > 1) box.append(el("div", { class: "dim" }, labels[objective]));
      if (!one.t.length) box.append(el("p", { class: "dim" }, "no token"));
      else if (missing(objective, one)) box.append(el("p", { class: "dim" }, `${QUANTITIES[state.quantity].label}: not applicable to ${labels[objective]}`));
      box.append(tokenLine(one, { quantity: state.quantity, objective, scale: scaleOf(objective), objectives: shown, labels, search: state.search }));
    }
    return box;
  }

  function question(row) {
    const about = prompts[rows.prompt[row]];
    return el("div", { class: "question" }, el("span", { class: "text" }, about.question),
      about.answer === null ? null : el("span", { class: "dim" }, ` reference: ${about.answer} `),
      el("button", { type: "button", class: "quiet", onclick: () => { document.getElementById("prompt").value = about.question; change("prompt")(about.question); } }, "only this prompt"));
  }

  let drawing = 0;
  async function draw() {
    const mine = ++drawing;
    hideTip();
    const found = chosen();
    const pages = paged(found);
    state.page = Math.max(0, Math.min(pages.length - 1, state.page));
    const page = pages[state.page] || [];
    const responses = await Promise.all(page.map(response));
    if (mine !== drawing) return;
    const nodes = [];
    let group = null;
    let sides = null;
    page.forEach((row, place) => {
      if (keyOf(row) !== group) {
        group = keyOf(row);
        sides = el("div", { class: "sides" }, el("div", { class: "side" }, el("h3", {}, "✓ right")), el("div", { class: "side" }, el("h3", {}, "✗ wrong")));
        nodes.push(question(row));
        if (state.layout === "sides") nodes.push(sides);
      }
      if (state.layout === "sides") sides.children[rows.passed[row] ? 0 : 1].append(card(row, responses[place]));
      else nodes.push(card(row, responses[place]));
    });
    list.replaceChildren(...nodes);
    if (!page.length) list.append(el("p", {}, "No response fits these filters."));
    document.getElementById("legend").replaceChildren(legend(state.quantity, scaleOf(state.objective)), note());
    document.getElementById("count").textContent = `${found.length} of ${count} responses`;
    document.querySelectorAll("nav.pages").forEach((nav) => nav.replaceChildren(
      el("button", { type: "button", class: "previous", disabled: state.page === 0, onclick: () => turn(-1) }, "‹ previous"),
      el("span", {}, ` page ${pages.length ? state.page + 1 : 0} of ${pages.length} `),
      el("button", { type: "button", class: "next", disabled: state.page >= pages.length - 1, onclick: () => turn(1) }, "next ›")));
    const kept = Object.entries(state).filter(([, value]) => value !== "" && value !== 0);
    history.replaceState(null, "", `#${new URLSearchParams(kept)}`);
    document.documentElement.setAttribute("data-drawn", String(mine));
  }

  function note() {
    const one = about(state.objective);
    return el("p", { class: "dim" }, [one.summary, one.note].filter(Boolean).join(" "));
  }

  function turn(by) {
    state.page += by;
    draw().then(() => list.scrollIntoView());
  }

  document.addEventListener("keydown", (event) => {
    if (/^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName) || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "n" || event.key === "PageDown" && event.shiftKey) document.querySelector(".next").click();
    if (event.key === "p" || event.key === "PageUp" && event.shiftKey) document.querySelector(".previous").click();
    if (event.key === "/") (event.preventDefault(), document.getElementById("search").focus());
  });
  themeListeners.push(draw);
  await draw();
});
