"use strict";
// Plays a trace.
// Texts of the model are only ever set as textContent or as attribute values, never as markup.

const MASKED = "░";

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

// The text of a token in a cell.
function shown(text) {
  return text.replaceAll("\n", "⏎").replaceAll("\t", "⇥");
}

// Draws a position of the canvas; `heat`, from 0 to 1, colours it; null: it does not.
function paint(box, text, classes, heat) {
  if (heat !== null) box.style.setProperty("--heat", heat);
  box.className = ["cell", ...classes, ...(heat === null ? [] : ["heat"])].join(" ");
  box.textContent = text;
}
const trace = JSON.parse(document.getElementById("trace").textContent);
const byId = (id) => document.getElementById(id);
const percent = (value) => `${(100 * value).toFixed(1)}%`;
const longest = Math.max(...trace.runs.map((run) => run.steps.length));
const PASSES = { full: "whole canvas", window: "window", prefill: "prompt only" };
let now = 0;
let view = "state";
let timer = null;

function shape(parent, tag, attributes) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  parent.append(element);
  return element;
}

function count(number, word) {
  return `${number} ${word}${number === 1 ? "" : "s"}`;
}

function inSpans(spans, position) {
  return spans.some(([start, end]) => start <= position && position < end);
}

function width(spans) {
  return spans.reduce((sum, [start, end]) => sum + end - start, 0);
}

class Run {
  constructor(run, index) {
    this.run = run;
    this.first = run.masked.length ? run.masked[0] : 0;
    this.open = new Set(run.masked);
    // With several blocks open, what the forwards are counted by is the region that they span together.
    const shared = run.blocks.some((block, i) => i > 0 && block.region[0] < run.blocks[i - 1].region[1]);
    this.region = shared ? "active region" : "block";
    this.known = new Map(); // position -> {token, forward, edited} after `now` forwards
    this.confident = new Map(); // "forward:position" -> [token offered, its confidence]
    for (const step of run.steps)
      for (const [position, token, confidence] of step.offers)
        this.confident.set(`${step.forward}:${position}`, [token, confidence]);
    this.section = make("section", { class: "run", "aria-labelledby": `run-${index}` });
    this.section.append(make("h2", { id: `run-${index}` }, run.name), this.facts());
    this.now = make("p", { class: "now" });
    this.canvas = make("ol", { class: "canvas", "aria-label": `Canvas of ${run.name}` });
    this.detail = make("p", { class: "detail", role: "status" });
    this.section.append(this.now, this.canvas, this.legend(), this.detail, this.map(), this.blocks(), this.table());
    this.cells();
  }

  facts() {
    const { counts, recipe } = this.run;
    const list = make("p", { class: "facts" });
    const facts = [["tokens", counts.tokens], ["forwards (NFE)", counts.forwards], ["TPF", counts.tpf.toFixed(2)],
      ["positions per token", counts.positions_per_committed.toFixed(1)], ["refreshes", counts.refreshes]];
    for (const [name, value] of facts) list.append(make("span", {}, make("b", {}, String(value)), ` ${name}`));
    const told = Object.entries(recipe).map(([kind, part]) => typeof part === "string" ? `${kind} ${part}` :
      `${kind} ${Object.entries(part).map(([key, value]) => key === "name" ? value : `${key}=${JSON.stringify(value)}`).join(" ")}`);
    const whole = make("details", {}, make("summary", {}, "Recipe"), ...told.map((line) => make("div", {}, line)));
    return make("div", {}, list, whole);
  }

  legend() {
    const sample = (classes, text, words) => make("span", {}, make("span", { class: `cell ${classes}` }, text), ` ${words}`);
    this.ramp = make("span", {});
    return make("p", { class: "legend" }, sample("masked", "░", "masked"), sample("fresh", "ab", "committed by this forward"),
      sample("computed", "ab", "computed"), sample("active", "ab", `active ${this.region === "block" ? "block" : "blocks"}`), sample("stop", "■", "stop token"), this.ramp);
  }

  piece(token) {
    if (this.run.stop_ids.includes(token)) return "■";
    return shown(this.run.pieces[token]) || `#${token}`;
  }

  cells() {
    this.boxes = new Map();
    for (let position = this.first; position < this.run.length; position++) {
      const final = this.piece(this.run.canvas[position]);
      const box = make("li", { class: "cell", tabindex: "-1" });
      box.style.width = `calc(${Math.max(2, [...final].length)}ch + .5rem)`;
      box.style.overflow = "hidden";
      box.addEventListener("focus", () => this.explain(position));
      box.addEventListener("mouseenter", () => this.explain(position));
      this.canvas.append(box);
      this.boxes.set(position, box);
      if (final.includes("⏎")) {
        const line = make("li", { role: "presentation", "aria-hidden": "true" });
        line.style.flexBasis = "100%";
        this.canvas.append(line);
      }
    }
    this.boxes.get(this.first).tabIndex = 0;
    this.canvas.addEventListener("keydown", (event) => this.move(event));
  }

  move(event) {
    const boxes = [...this.boxes.values()];
    const at = boxes.indexOf(document.activeElement);
    const to = { ArrowLeft: at - 1, ArrowRight: at + 1, ArrowUp: this.line(boxes, at, -1), ArrowDown: this.line(boxes, at, 1),
      Home: 0, End: boxes.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    event.stopPropagation();
    if (!boxes[to]) return;
    boxes[at].tabIndex = -1;
    boxes[to].tabIndex = 0;
    boxes[to].focus();
  }

  // The nearest cell of the line above or below.
  line(boxes, at, way) {
    if (at < 0) return undefined;
    const { offsetLeft, offsetTop } = boxes[at];
    let best = at;
    let top = null;
    for (let i = at + way; i >= 0 && i < boxes.length; i += way) {
      if (boxes[i].offsetTop === offsetTop) continue;
      top ??= boxes[i].offsetTop;
      if (boxes[i].offsetTop !== top) break;
      if (best === at || Math.abs(boxes[i].offsetLeft - offsetLeft) < Math.abs(boxes[best].offsetLeft - offsetLeft)) best = i;
    }
    return best;
  }

  state() {
    const found = new Map();
    for (const step of this.run.steps.slice(0, now)) {
      for (const [position, token] of step.commits) {
        const edited = found.has(position);
        found.set(position, { token, forward: step.forward, edited });
      }
      for (const position of step.remasked) found.delete(position);
    }
    return found;
  }

  step() {
    return this.run.steps[Math.min(now, this.run.steps.length) - 1];
  }

  draw() {
    const step = this.step();
    const state = this.known;
    const ended = now > this.run.steps.length;
    this.section.classList.toggle("view-state", view === "state");
    this.map_.classList.toggle("heated", view === "confidence");
    if (view === "confidence") this.warm();
    for (const [position, box] of this.boxes) {
      const known = state.get(position);
      const given = !this.open.has(position);
      const offer = step && this.confident.get(`${step.forward}:${position}`);
      const classes = [];
      let text = MASKED;
      let heat = null;
      if (given) {
        classes.push("given");
        text = this.piece(this.run.canvas[position]);
      } else if (known) {
        text = this.piece(known.token);
        if (this.run.stop_ids.includes(known.token)) classes.push("stop");
        if (!ended && known.forward === step.forward) classes.push("fresh", ...(known.edited ? ["edited"] : []));
        if (view === "order") heat = known.forward / this.run.steps.length;
        if (view === "confidence") heat = this.confident.get(`${known.forward}:${position}`)?.[1] ?? null;
      } else {
        classes.push("masked");
        if (view === "confidence" && offer) [text, heat] = [this.piece(offer[0]), offer[1]];
        if (step && step.remasked.includes(position)) classes.push("remasked");
      }
      if (step && !ended) {
        if (inSpans(step.computed, position)) classes.push("computed");
        if (inSpans([step.region], position)) classes.push("active");
      }
      paint(box, text, classes, heat);
      box.setAttribute("aria-label", this.words(position));
    }
    this.cursor.setAttribute("x", Math.max(0, Math.min(now, this.run.steps.length) - 1));
    this.cursor.setAttribute("visibility", now ? "visible" : "hidden");
    [...this.blockRows].forEach((row, index) => row.classList.toggle("current", !!step && !ended && index === step.block));
    [...this.stepRows].forEach((row, index) => row.classList.toggle("current", index === now - 1));
    const ramps = { state: "", confidence: "0% to 100% confidence", order: `forward 1 to ${this.run.steps.length}` };
    this.ramp.replaceChildren(...(ramps[view] ? [make("span", { class: "ramp" }), ` ${ramps[view]}`] : []));
    this.now.replaceChildren(...this.told(step, ended));
  }

  told(step, ended) {
    if (!step) return ["Before the first forward: everything is masked."];
    const decoded = `${this.known.size} of ${this.run.masked.length} decoded.`;
    if (ended) return [`Finished after ${count(this.run.steps.length, "forward")}. ${decoded}`];
    const pill = make("span", { class: `phase ${step.phase}` }, step.refresh ? "cache refresh" : PASSES[step.phase]);
    const again = step.remasked.length ? `, ${step.remasked.length} masked again` : "";
    return [pill, ` Computed ${width(step.computed)} of ${this.run.length} positions, ${this.region} ${step.block}. ` +
      `${count(step.commits.length, "token")} committed${again}. ${decoded}`];
  }

  // A position in words, for whoever points at it or cannot see it.
  words(position) {
    const step = this.step();
    const name = `Position ${position}`;
    if (!this.open.has(position)) return `${name}: given, ${this.piece(this.run.canvas[position])}`;
    const known = this.known.get(position);
    if (known) {
      const offered = this.confident.get(`${known.forward}:${position}`);
      const sure = offered && offered[0] === known.token ? ` with confidence ${percent(offered[1])}` : "";
      return `${name}: ${this.piece(known.token)}, committed by forward ${known.forward}${sure}`;
    }
    const offer = step && this.confident.get(`${step.forward}:${position}`);
    return `${name}: masked${offer ? `, offered ${this.piece(offer[0])} with confidence ${percent(offer[1])}` : ""}`;
  }

  explain(position) {
    this.detail.textContent = this.words(position);
  }

  map() {
    const { steps, length, prompt_ids, name } = this.run;
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    const words = `${name}: ${count(steps.length, "forward")} from left to right over ${length} positions from top to bottom`;
    for (const [key, value] of Object.entries({ viewBox: `0 0 ${steps.length} ${length}`,
      preserveAspectRatio: "none", role: "img", "aria-label": words })) svg.setAttribute(key, value);
    steps.forEach((step, x) => {
      for (const [start, end] of step.computed)
        shape(svg, "rect", { class: step.phase, x: x + 0.06, y: start, width: 0.88, height: end - start });
    });
    steps.forEach((step, x) => {
      for (const [position] of step.commits)
        shape(svg, "rect", { class: "commit", x: x + 0.2, y: position + 0.1, width: 0.6, height: 0.8 });
    });
    if (prompt_ids.length < length)
      shape(svg, "line", { class: "edge", x1: 0, x2: steps.length, y1: prompt_ids.length, y2: prompt_ids.length });
    this.cursor = shape(svg, "rect", { class: "cursor", x: 0, y: 0, width: 1, height: length });
    svg.addEventListener("click", (event) => {
      const box = svg.getBoundingClientRect();
      pause();
      show(1 + Math.floor(((event.clientX - box.left) / box.width) * steps.length));
    });
    const caption = make("figcaption", {}, "Forwards from left to right, positions from top to bottom; small marks are " +
      "commits, the dashed line is the end of the prompt. Purple: the whole canvas was computed. Blue: a window.");
    this.glow = make("canvas", { width: steps.length, height: length, "aria-hidden": "true" });
    this.map_ = make("div", { class: "map" }, this.glow, svg);
    return make("figure", {}, make("h3", {}, "Map of the computation"), this.map_, caption);
  }

  // The confidence of every offer, a pixel each: a bitmap, since there may be a million of them.
  warm() {
    const brush = this.glow.getContext("2d");
    brush.clearRect(0, 0, this.glow.width, this.glow.height);
    brush.fillStyle = getComputedStyle(byId("swatch")).color;
    this.run.steps.forEach((step, x) => {
      for (const [position, , confidence] of step.offers) {
        brush.globalAlpha = confidence;
        brush.fillRect(x, position, 1, 1);
      }
    });
  }

  blocks() {
    const { blocks } = this.run;
    const most = Math.max(...blocks.map((block) => block.forwards));
    const body = make("tbody");
    for (const block of blocks) {
      const bar = make("span");
      bar.style.width = `${(100 * block.forwards) / most}%`;
      body.append(make("tr", {}, ...[block.index, `${block.region[0]} to ${block.region[1] - 1}`, block.forwards,
        block.refreshes, block.commits].map((value) => make("td", {}, String(value))),
      make("td", { class: "bar", "aria-hidden": "true" }, bar)));
    }
    this.blockRows = body.children;
    return make("div", {}, make("h3", {}, `Forwards (NFE) of each ${this.region}`),
      this.tableOf([this.region, "positions", "NFE", "refreshes", "commits", ""], body));
  }

  table() {
    const body = make("tbody");
    for (const step of this.run.steps) {
      const offered = step.commits.map(([position]) => this.confident.get(`${step.forward}:${position}`)?.[1]);
      const known = offered.filter((value) => value !== undefined);
      const mean = known.length ? percent(known.reduce((a, b) => a + b) / known.length) : "";
      const texts = step.commits.map(([position, token]) => `${position}: ${this.piece(token).trim() || "␣"}`);
      const computed = step.computed.map(([start, end]) => `${start} to ${end - 1}`).join(", ");
      const row = make("tr", {}, ...[step.forward, step.refresh ? "refresh" : step.phase, step.block, computed, mean]
        .map((value) => make("td", {}, String(value))), make("td", { class: "words" }, texts.join("  ")));
      body.append(row);
    }
    this.stepRows = body.children;
    const table = this.tableOf(["forward", "pass", this.region, "computed", "confidence", "committed"], body);
    return make("details", {}, make("summary", {}, "All forwards as a table"), make("div", { class: "steps", tabindex: "0",
      role: "region", "aria-label": `Forwards of ${this.run.name}` }, table));
  }

  tableOf(heads, body) {
    const row = make("tr", {}, ...heads.map((head) => head ? make("th", { scope: "col" }, head) : make("td")));
    return make("table", {}, make("thead", {}, row), body);
  }
}

const runs = trace.runs.map((run, index) => new Run(run, index));

function show(forward) {
  now = Math.max(0, Math.min(longest, forward));
  for (const run of runs) {
    run.known = run.state();
    run.draw();
  }
  byId("seek").value = now;
  byId("seek").setAttribute("aria-valuetext", `forward ${now} of ${longest}`);
  byId("where").textContent = `${now} / ${longest}`;
  if (timer === null) announce();
}

// Not while it plays: no one can listen to a sentence for each of many forwards a second.
function announce() {
  const told = runs.map((run) => `${run.run.name}: ${run.now.textContent}`);
  byId("status").textContent = `Forward ${now} of ${longest}. ${told.join(" ")}`;
}

function pause() {
  if (timer === null) return;
  clearInterval(timer);
  timer = null;
  byId("play").textContent = "▶ Play";
  byId("play").setAttribute("aria-label", "Play");
  announce();
}

function play() {
  if (now >= longest) show(0);
  byId("play").textContent = "⏸ Pause";
  byId("play").setAttribute("aria-label", "Pause");
  timer = setInterval(() => {
    show(now + 1);
    if (now >= longest) pause();
  }, Number(byId("speed").value));
}

const toggle = () => (timer === null ? play() : pause());
const jump = (forward) => { pause(); show(forward); };
const ACTIONS = {
  first: () => jump(0), back: () => jump(now - 1), play: toggle, next: () => jump(now + 1), last: () => jump(longest),
};
for (const [id, action] of Object.entries(ACTIONS)) byId(id).addEventListener("click", action);
byId("seek").addEventListener("input", (event) => jump(Number(event.target.value)));
byId("view").addEventListener("change", (event) => { view = event.target.value; show(now); });
byId("speed").addEventListener("change", () => { if (timer !== null) { pause(); play(); } });
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, button, summary, .steps")) return;
  const action = { " ": "play", ArrowLeft: "back", ArrowRight: "next", Home: "first", End: "last" }[event.key];
  if (!action) return;
  event.preventDefault();
  ACTIONS[action]();
});

// page.html#forward=5&view=confidence opens the page at a forward.
function follow() {
  const wanted = new URLSearchParams(location.hash.slice(1));
  if ([...byId("view").options].some((option) => option.value === wanted.get("view"))) view = wanted.get("view");
  byId("view").value = view;
  jump(wanted.has("forward") ? Number(wanted.get("forward")) || 0 : 0);
}

for (const run of runs) byId("runs").append(run.section);
byId("seek").max = longest;
byId("controls").hidden = false;
window.addEventListener("hashchange", follow);
follow();
