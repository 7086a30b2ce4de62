"use strict";
// Served at /. Talks to the API of the same server, and to nobody else.

const STATES = [["masked"], ["draft"], ["final"]]; // a guess at a mask; a token that an edit may change; one that stays
const RANGES = { temperature: [0, 2], guidance: [0, 4], repetition_penalty: [1, 2] }; // of sliders; others go from 0 to 1
const byId = (id) => document.getElementById(id);
const sides = [];
let models = [];
let running = null; // the AbortController of the requests under way

function headers() {
  const key = byId("key").value;
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

async function call(path, body, signal) {
  const given = body === undefined ? { headers: headers() } : { method: "POST", headers: headers(), body: JSON.stringify(body) };
  const response = await fetch(path, { ...given, signal });
  if (response.ok) return response;
  if (response.status === 401) byId("key-label").hidden = false;
  const told = await response.json().catch(() => ({ error: { message: response.statusText } }));
  throw new Error(told.error.message);
}

// The JSON messages of a stream of server-sent events.
async function* messages(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    rest += value;
    for (let end = rest.indexOf("\n\n"); end >= 0; end = rest.indexOf("\n\n")) {
      const data = rest.slice(0, end).replace(/^data: /, "");
      rest = rest.slice(end + 2);
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

// One recipe: its settings, its conversation, and its answers.
class Side {
  constructor(index) {
    this.turns = [];
    this.inputs = new Map();
    this.model = make("select", { id: `model-${index}`, "aria-label": "Model and recipe" });
    for (const model of models) this.model.append(make("option", { value: model.id }, model.id));
    if (models[index]) this.model.value = models[index].id;
    this.settings = make("div", { class: "settings" });
    this.log = make("div", { class: "log", role: "log", "aria-label": `Conversation ${index + 1}` });
    this.section = make("section", { class: "side" }, this.model, this.settings, this.log);
    this.model.addEventListener("change", () => this.offer());
    this.offer();
  }

  // A control for each option that a request may set, as the model's card lists them; of the sampling's, most are folded.
  offer() {
    const { options } = models.find((model) => model.id === this.model.value).dinfer;
    this.inputs.clear();
    const more = make("details", {}, make("summary", {}, "Sampling"));
    this.settings.replaceChildren(this.control("max_tokens", { default: 96, integer: true, help: "length of the answer, in tokens" }));
    for (const [name, option] of Object.entries(options))
      (option.component === "decoder" || name === "temperature" ? this.settings : more).append(this.control(name, option));
    this.settings.append(more);
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
    return make("label", { title: option.help }, name, input, value);
  }

  request(question) {
    const chosen = {};
    for (const [name, input] of this.inputs)
      if (name !== "max_tokens" && input.value !== input.dataset.default) chosen[name] = Number(input.value);
    if (chosen.temperature) chosen.seed ??= Math.floor(Math.random() * 2 ** 32); // so that a trace shows the same answer
    return {
      model: this.model.value, messages: [...this.turns, { role: "user", content: question }], stream: true,
      max_tokens: Number(this.inputs.get("max_tokens").value), stream_options: { include_usage: true },
      dinfer: { ...chosen, drafts: true },
    };
  }

  async ask(question, signal) {
    const answer = make("p", { class: "answer", "aria-live": "polite" });
    const canvas = make("ol", { class: "canvas", "aria-hidden": "true" });
    const facts = make("p", { class: "facts" });
    this.log.append(make("div", { class: "turn" }, make("div", { class: "user" }, question), canvas, answer, facts));
    const body = this.request(question);
    const began = performance.now();
    const cells = [];
    let text = "";
    for await (const message of messages(await call("v1/chat/completions", body, signal))) {
      if (message.error) throw new Error(message.error.message);
      if (message.dinfer?.canvas) this.draw(canvas, cells, message.dinfer.canvas);
      text += message.choices[0]?.delta.content ?? "";
      answer.textContent = text;
      if (message.usage) this.tell(facts, message.usage, performance.now() - began, body);
    }
    canvas.hidden = true;
    this.turns.push({ role: "user", content: question }, { role: "assistant", content: text });
  }

  draw(canvas, cells, { length, region, changes }) {
    if (length !== undefined)
      for (let i = 0; i < length; i++) {
        const box = make("li", {});
        paint(box, MASKED, ["masked"], null);
        cells.push(box);
        canvas.append(box);
      }
    for (const [position, text, bucket, state] of changes)
      paint(cells[position], shown(text) || "■", STATES[state], bucket / 10);
    cells.forEach((box, position) => box.classList.toggle("active", region[0] <= position && position < region[1]));
  }

  tell(facts, usage, milliseconds, body) {
    const { forwards, tpf } = usage.dinfer;
    const speed = (1000 * usage.completion_tokens) / milliseconds;
    facts.replaceChildren(`${usage.completion_tokens} tokens in ${forwards} forwards, ${tpf.toFixed(2)} tokens per forward, ` +
      `${speed.toFixed(0)} tokens/s. `);
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

function report(error) {
  if (error.name !== "AbortError") byId("error").textContent = error.message;
}

async function send(event) {
  event.preventDefault();
  const question = byId("question").value.trim();
  if (running || !question) return;
  running = new AbortController();
  byId("error").textContent = "";
  byId("send").disabled = true;
  byId("halt").disabled = false;
  byId("question").value = "";
  const results = await Promise.allSettled(sides.map((side) => side.ask(question, running.signal)));
  for (const { reason } of results) if (reason) report(reason);
  running = null;
  byId("send").disabled = false;
  byId("halt").disabled = true;
  byId("question").focus();
}

async function fill(event) {
  event.preventDefault();
  byId("error").textContent = "";
  try {
    const answer = await (await call("v1/infill", { model: sides[0].model.value, text: byId("gaps").value })).json();
    byId("filled").textContent = answer.text;
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
  while (sides.length < count) sides.push(new Side(sides.length));
  sides.length = count;
  byId("sides").replaceChildren(...sides.map((side) => side.section));
  byId("compare").setAttribute("aria-pressed", count > 1);
}

async function begin() {
  byId("error").textContent = "";
  models = (await (await call("v1/models")).json()).data;
  arrange(1);
}

byId("ask").addEventListener("submit", send);
byId("fill").addEventListener("submit", fill);
byId("halt").addEventListener("click", () => running?.abort());
byId("compare").addEventListener("click", () => arrange(sides.length > 1 ? 1 : 2));
byId("fresh").addEventListener("click", () => { const count = sides.length; sides.length = 0; arrange(count); });
byId("key").addEventListener("change", () => begin().catch(report));
byId("question").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey) send(event);
});
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
