"use strict";
// Tokens coloured by a quantity, and the values behind each of them.
//
// A response: { t: tokens, lp, olp, e, oe, rlp, adv: per-token numbers, one number where all are equal, or absent,
// o: { objective: { c, ec, a, r, w, f } } }.

const at = (values, index) => (Array.isArray(values) ? values[index] : values);
const minus = (a, b) => (finite(a) && finite(b) ? a - b : null);

/** KL to the sampling policy of one token, the k3 estimate: never negative, 0 where nothing changed. */
function k3(logp, old) {
  const gap = minus(old, logp);
  return gap === null ? null : Math.max(0, Math.expm1(gap) - gap);
}

const OWN = (key) => (response, index, objective) => at(response.o[objective]?.[key], index);
const ratioOf = (r, i) => (finite(minus(at(r.lp, i), at(r.olp, i))) ? Math.exp(minus(at(r.lp, i), at(r.olp, i))) : null);

const QUANTITIES = {
  credit: { label: "credit: −d loss / d log-prob", signed: true, value: OWN("c"), own: true },
  "entropy-credit": { label: "−d loss / d entropy", signed: true, value: OWN("ec"), own: true },
  advantage: { label: "advantage", signed: true, value: OWN("a"), own: true },
  weight: { label: "weight in the policy term", value: OWN("w"), own: true },
  "objective-ratio": { label: "log of the ratio the objective uses", signed: true, own: true,
    value: (r, i, o) => { const ratio = at(r.o[o]?.r, i); return finite(ratio) && ratio > 0 ? Math.log(ratio) : null; } },
  clipped: { label: "clipped", marks: 1 | 2 | 4 | 8, value: OWN("f"), own: true },
  mask: { label: "under the mask (TEPO's, or another regulariser's)", marks: 16, value: OWN("f"), own: true },
  "left-out": { label: "not chosen for the policy term", marks: 32, value: OWN("f"), own: true },
  entropy: { label: "entropy", value: (r, i) => at(r.e, i) },
  "entropy-change": { label: "entropy change", signed: true, value: (r, i) => minus(at(r.e, i), at(r.oe, i)) },
  ratio: { label: "log-ratio of the token, new to old", signed: true, value: (r, i) => minus(at(r.lp, i), at(r.olp, i)) },
  kl: { label: "KL to old (k3)", value: (r, i) => k3(at(r.lp, i), at(r.olp, i)) },
  surprise: { label: "surprise: −log-prob", value: (r, i) => (finite(at(r.lp, i)) ? -at(r.lp, i) : null) },
  mismatch: { label: "sampler minus scorer log-prob", signed: true, value: (r, i) => minus(at(r.rlp, i), at(r.olp, i)) },
};
const MARKS = [[1, "▾", "clipped below"], [2, "▴", "clipped above"], [4, "◆", "dual clip"], [8, "✕", "response left out"], [16, "◉", "under the mask"], [32, "○", "not chosen"]];
const NO_MARK = "·";

/** Return what a token looks like under a quantity: background, ink, sign class, marks. */
function look(quantity, value, flags, scale) {
  const kind = QUANTITIES[quantity];
  const marks = MARKS.filter(([bit]) => (flags || 0) & bit & ~(kind.marks ? 0 : 32)).map(([, glyph]) => glyph).join("");
  if (kind.marks) {
    const on = ((value || 0) & kind.marks) !== 0;
    return { colour: on ? sequential(0.75) : null, sign: on ? "marked" : "", marks };
  }
  if (!finite(value)) return { colour: null, sign: "unknown", marks };
  const share = value / (scale || 1);
  if (kind.signed) return { colour: diverging(share), sign: Math.abs(share) < 0.02 ? "" : value > 0 ? "plus" : "minus", marks };
  return { colour: sequential(share), sign: "", marks };
}

/** Return [name, value] rows with everything known of one token. */
function facts(response, index, objectives, labels) {
  const rows = [[`token ${index + 1} of ${response.t.length}: ${JSON.stringify(response.t[index])}`]];
  const add = (name, value) => finite(value) && rows.push([name, number(value, 4)]);
  add("log-prob", at(response.lp, index));
  add("log-prob, old", at(response.olp, index));
  add("log-prob, sampler", at(response.rlp, index));
  add("ratio of the token", ratioOf(response, index));
  add("KL to old (k3)", k3(at(response.lp, index), at(response.olp, index)));
  add("entropy", at(response.e, index));
  add("entropy, old", at(response.oe, index));
  add("entropy change", minus(at(response.e, index), at(response.oe, index)));
  add("advantage in the run", at(response.adv, index));
  for (const objective of objectives) {
    const own = response.o[objective];
    if (!own) continue;
    rows.push([labels[objective] || objective]);
    if (own.c === undefined) rows.push(["credit", "not applicable"]);
    add("credit", at(own.c, index));
    add("−d loss / d entropy", at(own.ec, index));
    add("advantage", at(own.a, index));
    add("ratio it uses", at(own.r, index));
    add("weight", at(own.w, index));
    const flags = at(own.f, index) || 0;
    const words = MARKS.filter(([bit]) => flags & bit).map(([, glyph, text]) => `${glyph} ${text}`);
    rows.push(["marks", words.join(", ") || "none"]);
  }
  return rows;
}

/** Return a focusable line of tokens. Arrow keys walk over them; hover, focus and tap show the values. */
function tokenLine(response, { quantity, objective, scale, objectives, labels, search }) {
  const kind = QUANTITIES[quantity];
  const line = el("div", { class: "tokens", tabindex: "0", role: "group", "aria-label": `tokens by ${kind.label}; arrow keys walk` });
  const needle = (search || "").toLowerCase();
  response.t.forEach((token, index) => {
    const value = kind.value(response, index, objective);
    const { colour, sign, marks } = look(quantity, value, at(response.o[objective]?.f, index), scale);
    const node = el("span", { class: `token ${sign}`, "data-index": index });
    if (colour) {
      node.style.backgroundColor = css(colour);
      node.style.color = inkOn(colour);
    }
    if (needle && token.toLowerCase().includes(needle)) node.classList.add("found");
    node.append(token.replaceAll("\n", "⏎"));
    if (marks) node.append(el("sup", { "aria-hidden": "true" }, marks));
    line.append(node);
    if (token.includes("\n")) line.append(document.createTextNode("\n"));
  });
  let current = null;
  const show = (node) => {
    current?.classList.remove("current");
    current = node;
    node.classList.add("current");
    showTip(node, facts(response, Number(node.dataset.index), objectives, labels));
  };
  const leave = () => (current?.classList.remove("current"), hideTip());
  const under = (event) => event.target.closest(".token");
  line.addEventListener("pointerover", (event) => under(event) && show(under(event)));
  line.addEventListener("pointerleave", leave);
  line.addEventListener("click", (event) => under(event) && show(under(event)));
  line.addEventListener("blur", leave);
  line.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10, Home: -1e9, End: 1e9 }[event.key];
    if (event.key === "Escape") leave();
    if (!step) return;
    event.preventDefault();
    const nodes = line.querySelectorAll(".token");
    const from = current ? Number(current.dataset.index) : step > 0 ? -1 : nodes.length;
    if (nodes.length) show(nodes[Math.max(0, Math.min(nodes.length - 1, from + step))]);
  });
  return line;
}

/** Return the colour legend of a quantity. */
function legend(quantity, scale) {
  const kind = QUANTITIES[quantity];
  const box = el("div", { class: "legend" }, el("span", {}, kind.label));
  if (kind.marks) {
    MARKS.filter(([bit]) => bit & kind.marks).forEach(([, glyph, words]) => box.append(el("span", {}, `${glyph} ${words}`)));
    return box;
  }
  const low = kind.signed ? -scale : 0;
  const bar = el("span", { class: "bar", "aria-hidden": "true" });
  for (let step = 0; step <= 20; step++) {
    const cell = el("i");
    cell.style.backgroundColor = css(kind.signed ? diverging(step / 10 - 1) : sequential(step / 20));
    bar.append(cell);
  }
  box.append(el("span", { class: "scale" }, number(low), bar, `${number(scale)} and beyond`));
  if (kind.signed) box.append(el("span", {}, el("span", { class: "token plus" }, "above 0"), " ", el("span", { class: "token minus" }, "below 0")));
  box.append(el("span", { class: "dim" }, MARKS.slice(0, 5).map(([, glyph, words]) => `${glyph} ${words}`).join("  ")));
  return box;
}
