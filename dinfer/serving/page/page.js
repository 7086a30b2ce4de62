"use strict";
// Served at /. Talks to the API of the same server, and to nobody else.

// By the server's number: a guess at a mask, a token that an edit may change, one that stays, one that the schema forced.
const STATES = [["masked"], ["draft"], ["final"], ["final", "forced"]];
const FORCED = 3;
const SAID = ["a guess", "decided, may be edited", "decided"];
const RANGES = { temperature: [0, 2], guidance: [0, 4], repetition_penalty: [1, 2] }; // of sliders; others go from 0 to 1
const EXAMPLES = { // the models in the box solve word problems; others chat
  tiny: ["Take the number 71, then add 124, subtract 59 and subtract 87. Which number is it?",
    "Start with 78: add 114, add 59, then add 96. What is the result?"],
  other: ["Explain how a diffusion language model writes, in three sentences.",
    "Write a Python function that returns the n-th Fibonacci number.", "Name five rivers of Africa as a list."],
};
const GAPS = {
  tiny: "<|user|>Take the number 71, then add 124, subtract 59 and subtract 87. Which number is it?<|assistant|>add 124: 71 + 124 = [MASK:3]\nnow [MASK:3] - 59 = 136",
  other: "The capital of France is [MASK:2], and the capital of Italy is [MASK:2].",
};
const byId = (id) => document.getElementById(id);
const sides = [];
let models = [];
let turns = []; // the conversation: when two recipes are compared, both answer this one, and it goes on with the left answer
let running = null; // the AbortController of the requests under way

const kind = (model) => (model?.startsWith("tiny") ? "tiny" : "other");

function headers() {
  const key = byId("key").value;
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

async function call(path, body, signal) {
  const given = body === undefined ? { headers: headers() } : { method: "POST", headers: headers(), body: JSON.stringify(body) };
  const response = await fetch(path, { ...given, signal }).catch((error) => {
    throw error.name === "AbortError" ? error : new Error("The server does not answer. Is it still running?");
  });
  if (response.ok) return response;
  if (response.status === 401) byId("unlock").hidden = false;
  const told = await response.json().catch(() => ({ error: { message: response.statusText } }));
  throw new Error(told.error.message);
}

// The JSON messages of a stream of server-sent events.
async function* messages(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read().catch((error) => {
      throw error.name === "AbortError" ? error : new Error("The connection ended in the middle of the answer.");
    });
    if (done) throw new Error("The server ended the answer before it was complete.");
    rest += value;
    for (let end = rest.indexOf("\n\n"); end >= 0; end = rest.indexOf("\n\n")) {
      const data = rest.slice(0, end).replace(/^data: /, "");
      rest = rest.slice(end + 2);
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

// The canvas of one answer: it is drawn as it is denoised, and can be replayed afterwards.
class Replay {
  constructor() {
    this.frames = [];
    this.cells = [];
    this.canvas = make("ol", { class: "canvas", "aria-label": "Canvas" });
    this.about = make("p", { class: "about", role: "status" });
    this.slider = make("input", { type: "range", min: 0, value: 0, "aria-label": "Moment of the denoising" });
    this.play = make("button", { type: "button" }, "Replay");
    this.bar = make("div", { class: "replay" }, this.play, this.slider);
    this.bar.hidden = true;
    this.legend = make("p", { class: "legend" }, make("span", { class: "cell final forced" }, "{"), " the JSON Schema left no other token");
    this.legend.hidden = true;
    this.slider.addEventListener("input", () => this.show(Number(this.slider.value)));
    this.play.addEventListener("click", () => this.run());
    for (const event of ["click", "focusin"]) this.canvas.addEventListener(event, (at) => this.explain(at.target));
    this.canvas.addEventListener("keydown", (event) => this.move(event));
  }

  take(frame) {
    this.frames.push(frame);
    this.apply(frame);
  }

  apply({ length, region, changes }) {
    for (let i = this.cells.length; i < (length ?? 0); i++) {
      const box = make("li", { tabindex: i ? -1 : 0 });
      this.cells.push(box);
      this.canvas.append(box);
      paint(box, MASKED, ["masked"], null);
    }
    for (const [position, text, bucket, state] of changes) {
      const box = this.cells[position];
      const forced = state === FORCED;
      paint(box, shown(text) || "■", STATES[state], forced ? null : bucket / 10);
      const said = forced ? "the JSON Schema left no other token" : `${SAID[state]}, at most ${Math.min(100, 10 * (bucket + 1))}% sure`;
      box.dataset.about = `Position ${position + 1}: ${said}`;
      if (forced) this.legend.hidden = false;
    }
    this.cells.forEach((box, position) => box.classList.toggle("active", region[0] <= position && position < region[1]));
  }

  show(moment) {
    for (const box of this.cells) { paint(box, MASKED, ["masked"], null); delete box.dataset.about; }
    for (const frame of this.frames.slice(0, moment)) this.apply(frame);
    this.slider.value = moment;
  }

  end() {
    for (const box of this.cells) box.classList.remove("active");
    this.slider.max = this.frames.length;
    this.slider.value = this.frames.length;
    this.bar.hidden = this.frames.length < 2;
  }

  run() {
    let moment = 0;
    clearInterval(this.timer);
    this.timer = setInterval(() => {
      this.show(moment);
      if (moment++ >= this.frames.length) { clearInterval(this.timer); this.end(); }
    }, Math.max(40, 2500 / this.frames.length));
  }

  explain(box) {
    this.about.textContent = box.dataset.about ?? "";
  }

  move(event) {
    const at = this.cells.indexOf(event.target) + { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!this.cells[at]) return;
    event.preventDefault();
    event.target.tabIndex = -1;
    this.cells[at].tabIndex = 0;
    this.cells[at].focus();
  }
}

// One recipe: its settings and its answers.
class Side {
  constructor(index) {
    this.inputs = new Map();
    this.model = make("select", { id: `model-${index}`, "aria-label": "Model and recipe" });
    for (const model of models) this.model.append(make("option", { value: model.id }, model.id));
    if (models[index]) this.model.value = models[index].id;
    this.settings = make("div", {});
    this.log = make("div", { class: "log", role: "log", "aria-label": `Answers of ${index ? "the right" : "the left"} recipe` });
    const folded = make("details", { class: "settings" }, make("summary", {}, "Settings"), this.settings);
    this.section = make("section", { class: "side" }, make("div", { class: "row" }, this.model), folded, this.log);
    this.model.addEventListener("change", () => { this.offer(); examples(); });
    this.offer();
  }

  // A control for each option that a request may set, as the model's card lists them.
  offer() {
    const { options, max_length, max_new_tokens } = models.find((model) => model.id === this.model.value).dinfer;
    this.inputs.clear();
    const length = { default: Math.min(max_new_tokens, Math.ceil(max_length / 2)), integer: true, help: "length of the answer, in tokens" };
    this.settings.replaceChildren(...Object.entries({ max_tokens: length, ...options }).map(([name, option]) => this.control(name, option)));
  }

  control(name, option) {
    const [least, most] = RANGES[name] ?? [0, 1];
    const slides = !option.integer && option.default >= least && option.default <= most;
    const input = make("input", slides
      ? { type: "range", min: least, max: most, step: 0.01 }
      : { type: "number", min: option.integer ? 0 : least, step: option.integer ? 1 : "any" });
    input.value = option.default;
    input.dataset.default = option.default;
    const value = make("output", {}, slides ? String(option.default) : "");
    input.addEventListener("input", () => { if (slides) value.textContent = input.value; });
    this.inputs.set(name, input);
    return make("label", {}, name, value, input, make("small", {}, option.help));
  }

  request(question) {
    const chosen = {};
    for (const [name, input] of this.inputs)
      if (name !== "max_tokens" && input.value !== input.dataset.default) chosen[name] = Number(input.value);
    if (chosen.temperature) chosen.seed ??= Math.floor(Math.random() * 2 ** 32); // so that a trace shows the same answer
    return {
      model: this.model.value, messages: [...turns, { role: "user", content: question }], stream: true,
      max_tokens: Number(this.inputs.get("max_tokens").value), stream_options: { include_usage: true },
      dinfer: { ...chosen, drafts: true }, ...form(),
    };
  }

  // Resolves to the answer, or to null if there is none; then the turn offers to try again.
  async ask(question, signal) {
    const answer = make("p", { class: "answer", "aria-live": "polite" });
    const facts = make("p", { class: "facts" });
    const replay = new Replay();
    const turn = make("div", { class: "turn" }, make("div", { class: "user" }, question), replay.canvas, replay.legend, replay.bar, replay.about, answer, facts);
    this.log.append(turn);
    turn.scrollIntoView?.({ block: "nearest" });
    const body = this.request(question);
    const began = performance.now();
    let text = "";
    try {
      for await (const message of messages(await call("v1/chat/completions", body, signal))) {
        if (message.error) throw new Error(message.error.message);
        if (message.dinfer?.canvas) replay.take(message.dinfer.canvas);
        text += message.choices[0]?.delta.content ?? "";
        answer.textContent = text;
        if (message.usage) this.tell(facts, message.usage, performance.now() - began, body);
      }
      replay.end();
      return text;
    } catch (error) {
      replay.end();
      if (!replay.frames.length) replay.canvas.hidden = true;
      const again = make("button", { type: "button", class: "retry" }, "Try again");
      again.addEventListener("click", () => { if (!running) { turn.remove(); submit(question, [this]); } });
      facts.replaceChildren(error.name === "AbortError" ? "Stopped. " : `${error.message} `, again);
      return null;
    }
  }

  tell(facts, usage, milliseconds, body) {
    const { forwards, tpf, positions_per_committed: positions, recipe } = usage.dinfer;
    const speed = (1000 * usage.completion_tokens) / milliseconds;
    facts.replaceChildren(`${usage.completion_tokens} tokens in ${forwards} forwards, ${tpf.toFixed(2)} tokens per forward, ` +
      `${positions.toFixed(1)} positions computed per token, ${speed.toFixed(0)} tokens/s. ${recipe ? `Recipe: ${recipe}. ` : ""}`);
    const save = make("button", { type: "button" }, "Save the trace");
    save.addEventListener("click", () => this.save(body).catch(report));
    facts.append(save);
  }

  async save({ stream, stream_options, dinfer: { drafts, ...options }, ...body }) {
    const page = await (await call("v1/trace", { ...body, dinfer: options })).blob();
    const link = make("a", { href: URL.createObjectURL(page), download: "trace.html" });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  }
}

// What the answer is held to. Throws an Error for a text that is no JSON.
function form() {
  const text = byId("schema").value.trim();
  if (!text) return {};
  try {
    return { response_format: { type: "json_schema", json_schema: { name: "page", schema: JSON.parse(text) } } };
  } catch (error) {
    throw new Error(`The JSON Schema is not JSON: ${error.message}`);
  }
}

function report(error) {
  if (error.name !== "AbortError") byId("error").textContent = error.message;
}

// Asks these sides, and adds the question and the left answer to the conversation.
async function submit(question, asked = sides) {
  const mine = (running = new AbortController());
  byId("error").textContent = "";
  busy(true);
  const answers = await Promise.all([...asked].map((side) => side.ask(question, mine.signal)));
  if (running !== mine) return; // a new chat has begun
  if (asked[0] === sides[0] && answers[0] !== null)
    turns.push({ role: "user", content: question }, { role: "assistant", content: answers[0] });
  running = null;
  busy(false);
}

function busy(now) {
  byId("send").disabled = now;
  byId("halt").disabled = !now;
  examples();
}

function send(event) {
  event.preventDefault();
  const question = byId("question").value.trim();
  if (running || !question) return;
  if (!models.length) return begin().then(() => send(event)).catch(report); // the question stays until it can be asked
  try {
    form();
  } catch (error) {
    return report(error);
  }
  byId("question").value = "";
  submit(question);
}

async function fill(event) {
  event.preventDefault();
  byId("error").textContent = "";
  const text = byId("gaps").value;
  try {
    const answer = await (await call("v1/infill", { model: byId("fill-model").value, text })).json();
    const between = text.split(/\[MASK(?::\d+)?\]/);
    byId("filled").replaceChildren(...between.flatMap((part, i) =>
      i < answer.gaps.length ? [part, make("mark", {}, answer.gaps[i])] : [part]));
  } catch (error) {
    report(error);
  }
}

function choose(name) {
  for (const each of ["chat", "infill"]) {
    byId(each).hidden = each !== name;
    byId(`tab-${each}`).setAttribute("aria-selected", each === name);
    byId(`tab-${each}`).tabIndex = each === name ? 0 : -1;
  }
}

function arrange(count) {
  while (sides.length < count) {
    const side = new Side(sides.length);
    if (turns.length) side.log.append(make("p", { class: "about" }, "From here on both answer the same conversation."));
    sides.push(side);
  }
  sides.length = count;
  byId("sides").replaceChildren(...sides.map((side) => side.section));
  byId("compare").setAttribute("aria-pressed", count > 1);
}

// Examples stand where nothing has been asked yet.
function examples() {
  const offered = turns.length || running ? [] : EXAMPLES[kind(sides[0]?.model.value)];
  byId("examples").replaceChildren(...offered.map((text) => {
    const button = make("button", { type: "button" }, text);
    button.addEventListener("click", () => { byId("question").value = text; byId("question").focus(); });
    return button;
  }));
}

// A new chat ends what is running, and keeps models and settings.
function fresh() {
  running?.abort();
  running = null;
  turns = [];
  for (const side of sides) side.log.replaceChildren();
  busy(false);
  byId("question").focus();
}

async function begin() {
  models = (await (await call("v1/models")).json()).data;
  byId("error").textContent = "";
  byId("unlock").hidden = true;
  byId("fill-model").replaceChildren(...models.map((model) => make("option", { value: model.id }, model.id)));
  arrange(1);
  examples();
}

byId("ask").addEventListener("submit", send);
byId("fill").addEventListener("submit", fill);
byId("fill-example").addEventListener("click", () => { byId("gaps").value = GAPS[kind(byId("fill-model").value)]; });
byId("halt").addEventListener("click", () => running?.abort());
byId("compare").addEventListener("click", () => models.length && arrange(sides.length > 1 ? 1 : 2));
byId("fresh").addEventListener("click", fresh);
byId("unlock").addEventListener("submit", (event) => { event.preventDefault(); begin().catch(report); });
byId("help-button").addEventListener("click", (event) => {
  byId("help").hidden = !byId("help").hidden;
  event.currentTarget.setAttribute("aria-expanded", !byId("help").hidden);
});
byId("question").addEventListener("keydown", (event) => {
  // While a word is composed (Chinese, Japanese, Korean), Enter ends the word.
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing && event.keyCode !== 229) send(event);
});
byId("schema").addEventListener("input", () => { byId("form-on").hidden = !byId("schema").value.trim(); });
document.addEventListener("keydown", (event) => { if (event.key === "Escape") running?.abort(); });
for (const name of ["chat", "infill"]) {
  byId(`tab-${name}`).addEventListener("click", () => choose(name));
  byId(`tab-${name}`).addEventListener("keydown", (event) => {
    if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
    const other = name === "chat" ? "infill" : "chat";
    choose(other);
    byId(`tab-${other}`).focus();
  });
}
begin().catch(report);
