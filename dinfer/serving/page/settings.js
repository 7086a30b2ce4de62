// What a request may set, under names that people know. The options themselves, their defaults and what is not named
// here come from the model's card.
import { make } from "./dom.js";

// Of each option: its group, its name, what it does, its range where it slides; `rare` ones are folded away.
const NAMES = {
  max_tokens: { group: "Length", name: "Longest answer", hint: "In tokens. A long conversation leaves less.", range: [16, null] },
  min_tokens: { group: "Length", name: "Shortest answer", hint: "In tokens. The answer does not end before.", rare: true },
  ban_eos: { group: "Length", name: "Fill the whole length", hint: "Never ends early.", toggle: true, rare: true },
  eos_last: { group: "Length", name: "Decide the end last", hint: "The end is written after everything before it.", toggle: true, rare: true },
  temperature: { group: "Wording", name: "Temperature", hint: "0 takes the likeliest word. Higher varies more.", range: [0, 2] },
  top_p: { group: "Wording", name: "Top-p", hint: "Draws from the likeliest words that make up this share.", range: [0, 1] },
  top_k: { group: "Wording", name: "Top-k", hint: "Draws from so many of the likeliest words. 0: from all." },
  min_p: { group: "Wording", name: "Min-p", hint: "Leaves out words that are less likely than this share of the likeliest.", range: [0, 1], rare: true },
  seed: { group: "Wording", name: "Seed", hint: "The same seed repeats an answer. Empty: a new one each time.", empty: true },
  repetition_penalty: { group: "Wording", name: "Avoid repetition", hint: "1: off.", range: [1, 2] },
  frequency_penalty: { group: "Wording", name: "Avoid frequent words", hint: "By how often each was used. 0: off.", range: [0, 2], rare: true },
  presence_penalty: { group: "Wording", name: "Prefer new words", hint: "0: off.", range: [0, 2], rare: true },
  guidance: { group: "Wording", name: "Stay close to the question", hint: "Guidance. Twice the work for each step. 0: off.", range: [0, 4], rare: true },
  threshold: { group: "Speed and care", name: "Confidence", hint: "A word is written once the model is this sure. Lower is faster and errs more.", range: [0, 1] },
  edit_threshold: { group: "Speed and care", name: "Confidence to rewrite", hint: "A written word changes if the model is this sure of another.", range: [0, 1] },
  remask_threshold: { group: "Speed and care", name: "Confidence to keep", hint: "Written words below this are opened again.", range: [0, 1] },
  keep_threshold: { group: "Speed and care", name: "Confidence to keep", hint: "Written words below this are opened again.", range: [0, 1] },
  steps: { group: "Speed and care", name: "Steps", hint: "More steps write fewer words at a time." },
  bound: { group: "Speed and care", name: "Doubt allowed in a step", hint: "Higher is faster and errs more.", range: [0, 2] },
  factor: { group: "Speed and care", name: "Boldness", hint: "Higher writes more words in a step.", range: [0, 4] },
  least: { group: "Speed and care", name: "Words in a step, at least", hint: "Written even if the model is not so sure.", rare: true },
  leftmost: { group: "Speed and care", name: "Keep to the left", hint: "Writes only in the first so many open places. 0: anywhere.", rare: true },
};
const GROUPS = ["Length", "Wording", "Speed and care"];
const OF_COMPONENT = { decoder: "Speed and care", sampling: "Wording" };

// The options of a model, each with what is known of it here.
export function offered(card) {
  const { options, max_length: most, max_new_tokens: usual } = card.dinfer;
  const length = { default: Math.min(usual, Math.ceil(most / 2)), integer: true, help: "" };
  return Object.entries({ max_tokens: length, ...options }).map(([raw, option]) => {
    const known = NAMES[raw] ?? { group: OF_COMPONENT[option.component], name: plain(raw), hint: option.help, rare: true };
    const [least, limit] = known.range ?? [];
    const range = known.range && option.default >= least && option.default <= (limit ?? most) ? [least, limit ?? most] : null;
    return { raw, ...option, ...known, range };
  });
}

const plain = (raw) => raw[0].toUpperCase() + raw.slice(1).replaceAll("_", " ");

// The controls of one side. `side`: { model, values }, where values has only what differs from the default.
export function controls(card, side, changed) {
  const fields = offered(card);
  const groups = GROUPS.map((group) => {
    const [usual, rare] = [false, true].map((kind) =>
      fields.filter((field) => field.group === group && Boolean(field.rare) === kind).map((field) => control(field, side, changed)));
    const more = rare.length ? [make("details", {}, make("summary", {}, "More"), ...rare)] : [];
    return usual.length + rare.length ? make("section", { class: "group" }, make("h3", {}, group), ...usual, ...more) : "";
  });
  return groups;
}

function control(field, side, changed) {
  const id = `set-${field.raw}`;
  const input = make("input", { id, "aria-describedby": `${id}-hint`, ...kind(field) });
  const now = side.values[field.raw] ?? (field.empty ? "" : field.default);
  if (field.toggle) input.checked = Boolean(now);
  else input.value = now;
  const number = field.range ? make("input", { type: "number", class: "number", step: "any", "aria-label": `${field.name}, as a number` }) : null;
  if (number) number.value = now;
  const set = (value) => {
    const usual = field.empty ? value === "" : value === "" || Number(value) === field.default;
    if (usual) delete side.values[field.raw];
    else side.values[field.raw] = Number(value);
    row.classList.toggle("changed", !usual);
    changed();
  };
  input.addEventListener("input", () => {
    if (number) number.value = input.value;
    set(field.toggle ? String(Number(input.checked)) : input.value);
  });
  number?.addEventListener("input", () => { input.value = number.value; set(number.value); });
  const row = make("div", { class: `control${field.toggle ? " toggle" : ""}` },
    make("label", { for: id }, field.name), ...(number ? [number] : []), input,
    make("p", { class: "hint", id: `${id}-hint` }, field.hint, " ", make("code", { class: "raw" }, field.raw)));
  row.classList.toggle("changed", field.raw in side.values);
  return row;
}

function kind({ toggle, range, integer, empty }) {
  if (toggle) return { type: "checkbox", role: "switch" };
  if (range) return { type: "range", min: range[0], max: range[1], step: integer ? 1 : 0.01 };
  return { type: "number", class: "number", step: integer ? 1 : "any", min: integer ? 0 : false, placeholder: empty ? "any" : false };
}

// What a request of this side asks for, under `dinfer`. An answer that is drawn gets a seed, so that it can be traced.
export function chosen(card, side) {
  const known = new Set(Object.keys(card.dinfer.options));
  const options = Object.fromEntries(Object.entries(side.values).filter(([raw]) => known.has(raw)));
  if ((options.temperature ?? card.dinfer.options.temperature?.default) && known.has("seed")) options.seed ??= Math.floor(Math.random() * 2 ** 31);
  return options;
}

export const wanted = (card, side) => side.values.max_tokens ?? offered(card)[0].default;

// How a side is called where two are compared: its recipe, and what it sets that the other does not.
export function told(card, side, other) {
  const differs = offered(card).filter(({ raw, default: usual }) => {
    const mine = side.values[raw] ?? usual;
    return raw !== "seed" && (side.model !== other.model ? raw in side.values : mine !== (other.values[raw] ?? usual));
  });
  return [side.model, ...differs.map(({ raw, name, default: usual }) => `${name.toLowerCase()} ${side.values[raw] ?? usual}`)].join(" · ");
}

// The side to compare with: another recipe, or the same one in a greater hurry (or with more care).
export function rival(models, side) {
  const other = models.find(({ id }) => id !== side.model);
  if (other) return { model: other.id, values: {} };
  const fields = offered(models.find(({ id }) => id === side.model)).filter(({ range, component }) => range && component);
  const field = fields.find(({ component }) => component === "decoder") ?? fields.find(({ raw }) => raw === "temperature");
  if (!field) return { model: side.model, values: { ...side.values } };
  const [least, most] = field.range;
  const now = side.values[field.raw] ?? field.default;
  const far = now - least > (most - least) / 2 ? now - 0.3 * (most - least) : now + 0.3 * (most - least);
  return { model: side.model, values: { ...side.values, [field.raw]: Math.round(100 * far) / 100 } };
}
