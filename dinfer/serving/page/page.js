// The page of the server: conversations, the composer, and what is sent.
import { ask, call, events, roomFor } from "./api.js";
import { button, byId, icon, make, say } from "./dom.js";
import { choose, fieldsOf, nameOf } from "./forms.js";
import { chosen, controls, offered, rival, told, wanted } from "./settings.js";
import { chats, drop, keep, keepSettings, newChat, settings } from "./store.js";
import { TurnView } from "./turns.js";

const LARGEST = 3e6; // bytes of a picture, which is a third longer in a request
const LEAST = 32; // positions below which an answer is not begun: it would be cut off
const EXAMPLES = { // the models in the box solve word problems; others chat
  tiny: ["Take the number 71, then add 124, subtract 59 and subtract 87. Which number is it?",
    "Start with 78: add 114, add 59, then add 96. What is the result?",
    "Tom has 12 coins and buys 3 books at 2 coins each. How many coins are left?"],
  other: ["Explain how a diffusion language model writes, in three sentences.",
    "Write a Python function that returns the n-th Fibonacci number.", "Name five rivers of Africa as a list."],
};
const GAPS = {
  tiny: ["<|user|>What is 12 + 5?<|assistant|>12 + 5 = [MASK:2]",
    "<|user|>Take the number 71, then add 124, subtract 59 and subtract 87. Which number is it?<|assistant|>add 124: 71 + 124 = [MASK:3]\nnow [MASK:3] - 59 = 136"],
  other: ["The capital of France is [MASK:2], and the capital of Italy is [MASK:2].",
    "def double(number):\n    return [MASK:3]"],
};
const TITLES = { chat: "Watch an answer appear", fill: "Fill what is missing" };
const LEADS = {
  chat: "All places of the answer are open at first. The model writes them in any order, many at a time.",
  fill: "The model reads both sides of a gap. [MASK:4] is a gap of four tokens.",
};
const narrow = matchMedia("(max-width: 60rem)");

let models = [];
let sides = [{ model: "", values: {} }];
let prefs = { form: { kind: "text", text: "" }, system: "", theme: "", panes: { chats: true, settings: false } };
let chat = newChat("chat");
let views = [];
let pictures = []; // data: URLs that go with the next question
let running = null; // the AbortController of the requests under way
let shownSide = 0; // whose settings are shown

const card = (side) => models.find(({ id }) => id === side.model);
const examplesOf = (found) => found[sides[0].model.startsWith("tiny") ? "tiny" : "other"];

// --- What is asked

// The messages before a turn. Where several answered, the conversation goes on with the chosen one.
function conversation(turn) {
  const said = chat.turns.slice(0, chat.turns.indexOf(turn)).flatMap((before) => {
    const { answers, chosen: at } = before;
    const answer = answers[at ?? 0]?.text ? answers[at ?? 0] : answers.find(({ text }) => text);
    return answer ? [{ role: "user", content: contentOf(before) }, { role: "assistant", content: answer.text }] : [];
  });
  return [...(turn.system ? [{ role: "system", content: turn.system }] : []), ...said, { role: "user", content: contentOf(turn) }];
}

// What a user's message holds: the question, behind its pictures if it has any.
const contentOf = ({ question, images }) => images
  ? [...images.map((url) => ({ type: "image_url", image_url: { url } })), { type: "text", text: question }]
  : question;

async function submit(question, images) {
  const mine = (running = new AbortController());
  const asked = chat.kind === "fill" ? sides.slice(0, 1) : sides;
  const turn = { question, system: chat.kind === "chat" ? prefs.system.trim() : "", answers: asked.map(blank), ...(images?.length ? { images } : {}) };
  const owner = chat;
  owner.turns.push(turn);
  owner.title ||= question.replace(/<\|\w+\|>/g, " ").trim().slice(0, 80);
  byId("error").textContent = "";
  append(turn);
  remembered();
  stuck = true;
  busy(true);
  say("The model answers.");
  const asking = views.at(-1).views.map((view, i) => answered(view, asked[i], turn, mine.signal));
  keep(owner); // so that a reload does not lose the question
  list();
  await Promise.all(asking);
  keep(owner);
  if (running !== mine) return; // another conversation has been opened
  running = null;
  busy(false);
  const [first] = turn.answers;
  say(first.text ? `Answer: ${first.text}` : first.error ?? "Stopped.");
}

const blank = (side) => ({
  model: side.model, label: sides.length > 1 ? told(card(side), side, sides[1 - sides.indexOf(side)]) : side.model,
  text: "", thought: "", frames: [], state: "running", form: prefs.form.kind === "text" ? null : prefs.form.kind,
});

async function answered(view, side, turn, signal) {
  const { answer } = view;
  view.begin();
  try {
    await (chat.kind === "fill" ? fill : converse)(view, side, turn, signal);
    answer.state = "done";
  } catch (error) {
    if (error.full) Object.assign(answer, { state: "full", error: error.message, alone: error.alone });
    else if (error.name === "AbortError") answer.state = "stopped";
    else Object.assign(answer, { state: "failed", error: error.message });
  }
  view.end();
}

async function converse(view, side, turn, signal) {
  const { answer } = view;
  const messages = conversation(turn);
  const { left, used, most } = await roomFor(side.model, messages, signal);
  const alone = messages.filter(({ role }) => role !== "system").length < 2;
  const longest = wanted(card(side), side);
  if (left < Math.min(longest, LEAST)) throw full(used, most, alone);
  const asked = { model: side.model, max_tokens: Math.min(longest, left), dinfer: chosen(card(side), side), ...fieldsOf(prefs.form) };
  const body = { ...asked, messages, stream: true, stream_options: { include_usage: true }, dinfer: { ...asked.dinfer, drafts: true } };
  const began = performance.now();
  for await (const message of events("v1/chat/completions", body, signal)) {
    if (message.dinfer?.canvas) view.frame(message.dinfer.canvas);
    const [choice] = message.choices;
    answer.text += choice?.delta.content ?? "";
    answer.thought += choice?.delta.reasoning_content ?? "";
    if (choice?.finish_reason === "length") Object.assign(answer, { full: left < longest, alone, cut: cut(asked.max_tokens, left < longest) });
    if (message.usage) finish(answer, message.usage, asked.max_tokens, began);
  }
  answer.asked = asked;
  room(used + (answer.facts?.tokens ?? 0), most);
}

function full(used, most, alone) {
  const text = alone
    ? `The question is too long for this model: with ${used} of ${most} tokens it leaves no room for an answer. Make it shorter.`
    : `This conversation is full: with this question it has ${used} of ${most} tokens, which leaves no room for an answer.`;
  return Object.assign(new Error(text), { full: true, alone });
}

const cut = (tokens, filled) => filled
  ? `The answer ends here since the conversation is full: ${tokens} tokens were left for it.`
  : `The answer ends here: it reached the longest length, ${tokens} tokens. “Longest answer” in the settings allows more.`;

function finish(answer, usage, length, began) {
  const { forwards, recipe } = usage.dinfer;
  const seconds = (performance.now() - began) / 1000;
  answer.facts = { tokens: usage.completion_tokens, steps: forwards, seconds, recipe, unused: length - usage.completion_tokens };
}

async function fill(view, side, turn, signal) {
  const form = fieldsOf(prefs.form);
  const body = { model: side.model, text: turn.question, logprobs: true, dinfer: chosen(card(side), side), ...form,
    ...(Object.keys(form).length ? { scope: "gap" } : {}) };
  const began = performance.now();
  const { text, gaps, logprobs, usage } = await ask("v1/infill", body, signal);
  finish(view.answer, usage, usage.completion_tokens, began);
  const sure = logprobs?.map((gap) => gap.map(({ logprob }) => Math.exp(logprob)));
  Object.assign(view.answer, { text, gaps, sure, frames: undefined });
}

// --- What can be done with a turn

const acts = {
  busy: () => running !== null,
  // Asks a question again, or what it was changed to. What came after it goes.
  again(turn, question = turn.question) {
    if (running) return;
    chat.turns.length = chat.turns.indexOf(turn);
    show();
    submit(question, turn.images);
  },
  anew(turn) {
    open(newChat(chat.kind));
    submit(turn.question, turn.images);
  },
  choose(turn, index) {
    turn.chosen = index;
    keep(chat);
    for (const [i, view] of views[chat.turns.indexOf(turn)].views.entries())
      view.root.querySelector(".choice")?.setAttribute("aria-pressed", String(i === index));
  },
  async trace(turn, { asked }) {
    try {
      const page = await (await call("v1/trace", { ...asked, messages: conversation(turn) })).blob();
      const link = make("a", { href: URL.createObjectURL(page), download: "trace.html" });
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 10000);
    } catch (error) {
      report(error);
    }
  },
};

// --- The conversation on the screen

let stuck = true; // the newest answer stays in view, unless the reader has scrolled up
let height = 0;

function follow() {
  const log = byId("log");
  const away = log.scrollHeight - log.scrollTop - log.clientHeight;
  if (away < 48) stuck = true;
  else if (log.scrollTop < height) stuck = false;
  height = log.scrollTop;
  byId("newest").hidden = stuck || away < 48;
}

function stick() {
  const log = byId("log");
  if (stuck) log.scrollTop = log.scrollHeight;
  follow();
}

function append(turn) {
  byId("turns").querySelector(".welcome")?.remove();
  views.push(new TurnView(turn, acts));
  byId("turns").append(views.at(-1).root);
}

function show() {
  views = [];
  byId("turns").replaceChildren();
  for (const turn of chat.turns) append(turn);
  if (!chat.turns.length) byId("turns").append(welcome());
  for (const kind of ["chat", "fill"]) {
    byId(`tab-${kind}`).setAttribute("aria-selected", String(chat.kind === kind));
    byId(`tab-${kind}`).tabIndex = chat.kind === kind ? 0 : -1;
  }
  const gaps = chat.kind === "fill";
  byId("gap-button").hidden = !gaps;
  byId("compare").hidden = gaps;
  if (models.length) versus();
  byId("question").placeholder = gaps ? "Text with gaps" : "Ask something";
  byId("room").hidden = true;
  heading();
  list();
}

// Where nothing has been asked yet, examples stand.
function welcome() {
  const offers = models.length ? examplesOf(chat.kind === "fill" ? GAPS : EXAMPLES) : [];
  const cards = offers.map((text) => {
    const found = make("button", { type: "button", class: "example" }, text.replace(/<\|user\|>|<\|assistant\|>/g, " ").trim());
    found.addEventListener("click", () => { byId("question").value = text; grow(); byId("question").focus(); });
    return found;
  });
  const art = make("p", { class: "art", "aria-hidden": "true" }, ...TITLES[chat.kind].split(" ").map((word, i) => make("span", { "data-at": i }, word)));
  return make("div", { class: "welcome" }, art, make("h2", { class: "unseen" }, TITLES[chat.kind]),
    make("p", { class: "lead" }, LEADS[chat.kind]), make("div", { class: "examples" }, ...cards));
}

function list() {
  const found = chats();
  byId("chat-list").replaceChildren(...found.map((each) => {
    const name = make("button", { type: "button", class: "name", "aria-current": each.id === chat.id ? "true" : false }, each.title || "Untitled");
    name.addEventListener("click", () => open(each));
    const away = button("delete", `Delete “${each.title}”`, () => remove(each, away));
    away.addEventListener("blur", () => { away.classList.remove("armed"); away.replaceChildren(icon("delete")); });
    return make("li", {}, name, away);
  }));
  if (!found.length) byId("chat-list").append(make("li", { class: "hint" }, "Conversations are kept in this browser."));
}

// The first press asks, the second deletes.
function remove(each, pressed) {
  if (!pressed.classList.contains("armed")) {
    pressed.classList.add("armed");
    pressed.replaceChildren("Delete?");
    return;
  }
  drop(each.id);
  if (each.id === chat.id) open(newChat(chat.kind));
  else list();
}

// The address names the conversation, so that a reload shows it again.
function remembered() {
  history.replaceState(null, "", chat.turns.length ? `#${chat.id}` : location.pathname);
}

function open(found) {
  running?.abort();
  running = null;
  chat = found;
  pictures = [];
  attached();
  remembered();
  stuck = true;
  busy(false);
  show();
  if (byId("sheet").open) byId("sheet").close();
  byId("question").focus();
}

function busy(now) {
  byId("send").hidden = now;
  byId("halt").hidden = !now;
  byId("favicon").href = `static/icon${now ? "-busy" : ""}.svg`;
  heading(now);
  if (!now) list();
}

function heading(now = running !== null) {
  const title = chat.title ? `${chat.title} · dinfer` : "dinfer";
  document.title = now ? `Answering… ${title}` : title;
}

function room(used, most) {
  const ring = byId("room");
  ring.hidden = false;
  ring.style.setProperty("--used", Math.min(1, used / most));
  ring.classList.toggle("little", used > 0.8 * most);
  ring.title = `${used} of ${most} tokens of this conversation are used`;
  ring.setAttribute("aria-label", ring.title);
}

// --- Settings

function panel() {
  const box = byId("controls");
  shownSide = Math.min(shownSide, sides.length - 1);
  const side = sides[shownSide];
  const system = make("textarea", { id: "system", rows: 3, placeholder: "For example: answer in one sentence." });
  system.value = prefs.system;
  system.addEventListener("input", () => { prefs.system = system.value; remember(); });
  const theme = make("select", { id: "theme" }, ...[["", "As the system"], ["light", "Light"], ["dark", "Dark"]].map(([value, name]) => make("option", { value }, name)));
  theme.value = prefs.theme;
  theme.addEventListener("change", () => { prefs.theme = theme.value; remember(); paintTheme(); });
  const reset = make("button", { type: "button", class: "quiet" }, "Reset these settings");
  reset.addEventListener("click", () => { side.values = {}; remember(); panel(); });
  const wipe = make("button", { type: "button", class: "quiet danger" }, "Delete all conversations");
  wipe.addEventListener("click", () => {
    if (wipe.dataset.armed) { for (const { id } of chats()) drop(id); open(newChat(chat.kind)); panel(); }
    else { wipe.dataset.armed = "yes"; wipe.textContent = "Press again to delete all"; }
  });
  box.replaceChildren(
    make("section", { class: "group" }, make("h3", {}, "Instructions"), make("div", { class: "control" },
      make("label", { for: "system" }, "System prompt"), system,
      make("p", { class: "hint" }, "How the model should answer, in every conversation. ", make("code", { class: "raw" }, "system")))),
    ...(sides.length > 1 ? [whose()] : []),
    ...controls(card(side), side, remember),
    make("section", { class: "group" }, make("h3", {}, "This page"), make("div", { class: "control" }, make("label", { for: "theme" }, "Colours"), theme),
      make("div", { class: "line" }, reset, wipe)),
  );
}

// Where two answer: the model and the settings of which.
function whose() {
  const tabs = sides.map((side, i) => {
    const found = make("button", { type: "button", "aria-pressed": String(i === shownSide) }, i ? "Right" : "Left");
    found.addEventListener("click", () => { shownSide = i; panel(); byId("controls").querySelectorAll(".whose .segments button")[i].focus(); });
    return found;
  });
  const pick = make("select", { id: "side-model", "aria-label": "Model and recipe of this side" }, ...models.map(({ id }) => make("option", { value: id }, id)));
  pick.value = sides[shownSide].model;
  pick.addEventListener("change", () => { Object.assign(sides[shownSide], { model: pick.value, values: {} }); byId("model").value = sides[0].model; remember(); panel(); });
  return make("div", { class: "whose" }, make("div", { class: "segments", role: "group", "aria-label": "Settings of" }, ...tabs), pick);
}

function remember() {
  keepSettings({ ...prefs, sides });
  versus();
}

// Above the composer: what answers side by side.
function versus() {
  const line = byId("versus");
  line.hidden = sides.length < 2 || chat.kind === "fill";
  if (line.hidden) return;
  const [left, right] = sides.map((side, i) => told(card(side), side, sides[1 - i]));
  const change = make("button", { type: "button", class: "quiet" }, "Change");
  change.addEventListener("click", () => pane("settings", true));
  line.replaceChildren(make("b", {}, left), " beside ", make("b", {}, right), left === right ? " (the same: change one)" : "", change);
}

function paintTheme() {
  document.documentElement.dataset.theme = prefs.theme;
}

function compare() {
  if (!models.length) return;
  sides = sides.length > 1 ? [sides[0]] : [sides[0], rival(models, sides[0])];
  shownSide = sides.length - 1;
  comparing();
  remember();
  panel();
  say(sides.length > 1 ? `Compares ${told(card(sides[0]), sides[0], sides[1])} with ${told(card(sides[1]), sides[1], sides[0])}.` : "One answer.");
}

function comparing() {
  byId("compare").setAttribute("aria-pressed", String(sides.length > 1));
  versus();
}

// --- Panes: beside the conversation where there is room, in a sheet on phones

function pane(name, on) {
  if (narrow.matches) {
    if (on) sheet(name);
    return;
  }
  byId(name).hidden = !on;
  byId(`${name}-button`).setAttribute("aria-expanded", String(on));
  prefs.panes[name] = on;
  remember();
}

function sheet(name) {
  const found = byId(name), dialog = byId("sheet");
  const place = document.createComment(name);
  found.before(place);
  found.hidden = false;
  dialog.className = name;
  dialog.setAttribute("aria-label", found.getAttribute("aria-label"));
  dialog.append(found);
  dialog.showModal();
  byId(`${name}-button`).setAttribute("aria-expanded", "true");
  dialog.addEventListener("close", () => {
    place.replaceWith(found);
    arrange();
    byId(`${name}-button`).focus();
  }, { once: true });
}

function arrange() {
  for (const name of ["chats", "settings"]) {
    const on = !narrow.matches && prefs.panes[name];
    byId(name).hidden = !on;
    byId(`${name}-button`).setAttribute("aria-expanded", String(on));
  }
}

// --- The composer

function grow() {
  const box = byId("question");
  box.style.height = "auto";
  box.style.height = `${Math.min(box.scrollHeight, innerHeight * 0.4)}px`;
}

function report(error) {
  if (error.name !== "AbortError") byId("error").textContent = error.message;
}

function send(event) {
  event.preventDefault();
  const question = byId("question").value.trim();
  if (running || !question) return;
  if (!models.length) return begin().then(() => send(event)).catch(report); // the question stays until it can be asked
  if (chat.kind === "fill" && !/\[MASK(:\d+)?\]/.test(question)) return report(new Error("The text has no gap: put one in with “Gap”, such as [MASK:4] for four tokens."));
  byId("question").value = "";
  grow();
  submit(question, pictures);
  pictures = [];
  attached();
}

// Pictures that were dropped or pasted go with the next question.
async function attach(files) {
  for (const file of chat.kind === "fill" ? [] : files) {
    if (!/^image\/(png|jpeg|webp|gif)$/.test(file.type)) report(new Error(`${file.name} is no picture of type PNG, JPEG, WebP or GIF.`));
    else if (file.size > LARGEST) report(new Error(`${file.name} has more than ${LARGEST / 1e6} MB: make it smaller.`));
    else pictures = [...pictures, await dataOf(file)];
  }
  attached();
}

function attached() {
  const without = (at) => { pictures = pictures.filter((_, i) => i !== at); attached(); };
  byId("pictures").hidden = !pictures.length;
  byId("pictures").replaceChildren(...pictures.map((src, i) => make("figure", {},
    make("img", { src, alt: `Picture ${i + 1} of the question` }), button("close", `Leave picture ${i + 1} out`, () => without(i)))));
}

const dataOf = (file) => new Promise((done, failed) => {
  const reader = new FileReader();
  reader.addEventListener("load", () => done(reader.result));
  reader.addEventListener("error", () => failed(reader.error));
  reader.readAsDataURL(file);
});

function insertGap() {
  const box = byId("question");
  box.setRangeText("[MASK:4]", box.selectionStart, box.selectionEnd, "end");
  const at = box.selectionEnd;
  box.focus();
  box.setSelectionRange(at - 2, at - 1); // its length, to be typed over
  grow();
}

function turnTo(kind) {
  if (chat.kind !== kind) open(newChat(kind));
  byId(`tab-${kind}`).focus();
}

function formShown() {
  byId("form-name").textContent = nameOf(prefs.form);
  byId("form-button").classList.toggle("on", prefs.form.kind !== "text");
}

async function begin() {
  models = (await ask("v1/models")).data;
  byId("error").textContent = "";
  byId("unlock").hidden = true;
  const known = sides.filter(({ model }) => models.some(({ id }) => id === model));
  sides = known.length ? known : [{ model: models[0].id, values: {} }];
  for (const side of sides) {
    const raws = new Set(offered(card(side)).map(({ raw }) => raw));
    side.values = Object.fromEntries(Object.entries(side.values).filter(([raw]) => raws.has(raw)));
  }
  byId("model").replaceChildren(...models.map(({ id }) => make("option", { value: id }, id)));
  byId("model").value = sides[0].model;
  comparing();
  panel();
  if (!chat.turns.length) show();
}

function restore() {
  const { sides: kept, ...found } = settings();
  prefs = { ...prefs, ...found };
  if (kept?.length) sides = kept;
  chat = chats().find(({ id }) => id === location.hash.slice(1)) ?? chat;
  for (const answer of chat.turns.flatMap(({ answers }) => answers))
    if (answer.state === "running") answer.state = "stopped"; // by the reload
  paintTheme();
  formShown();
  arrange();
  show();
}

for (const [id, kind, heard] of [
  ["ask", "submit", send],
  ["question", "input", grow],
  ["halt", "click", () => running?.abort()],
  ["fresh", "click", () => open(newChat(chat.kind))],
  ["fresh-top", "click", () => open(newChat(chat.kind))],
  ["compare", "click", compare],
  ["gap-button", "click", insertGap],
  ["newest", "click", () => { stuck = true; stick(); byId("question").focus(); }],
  ["help-button", "click", () => byId("help").showModal()],
  ["form-button", "click", () => choose(prefs.form, (form) => { prefs.form = form; formShown(); remember(); })],
  ["log", "scroll", follow],
  ["unlock", "submit", (event) => { event.preventDefault(); begin().catch(report); }],
  ["chats-button", "click", () => pane("chats", byId("chats").hidden)],
  ["settings-button", "click", () => pane("settings", byId("settings").hidden)],
  ["model", "change", () => { Object.assign(sides[0], { model: byId("model").value, values: {} }); remember(); panel(); if (!chat.turns.length) show(); }],
  ["sheet", "click", (event) => { if (event.target === byId("sheet")) byId("sheet").close(); }],
]) byId(id).addEventListener(kind, heard);
byId("settings").querySelector(".close").addEventListener("click", () => (byId("sheet").open ? byId("sheet").close() : pane("settings", false)));
byId("question").addEventListener("keydown", (event) => {
  // While a word is composed (Chinese, Japanese, Korean), Enter ends the word.
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing && event.keyCode !== 229) send(event);
});
byId("question").addEventListener("paste", (event) => {
  const { files } = event.clipboardData;
  if (!files.length) return;
  event.preventDefault();
  attach([...files]).catch(report);
});
document.addEventListener("dragover", (event) => { if (event.dataTransfer.types.includes("Files")) event.preventDefault(); });
document.addEventListener("drop", (event) => {
  const { files } = event.dataTransfer;
  if (!files.length) return;
  event.preventDefault();
  attach([...files]).catch(report);
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !document.querySelector("dialog[open]")) running?.abort();
  if (event.key === "/" && !/^(INPUT|TEXTAREA|SELECT)$/.test(document.activeElement.tagName)) {
    event.preventDefault();
    byId("question").focus();
  }
});
for (const [kind, other] of [["chat", "fill"], ["fill", "chat"]]) {
  byId(`tab-${kind}`).addEventListener("click", () => turnTo(kind));
  byId(`tab-${kind}`).addEventListener("keydown", (event) => { if (/^Arrow(Left|Right)$/.test(event.key)) turnTo(other); });
}
narrow.addEventListener("change", () => { if (byId("sheet").open) byId("sheet").close(); else arrange(); });
new ResizeObserver(stick).observe(byId("turns"));
new ResizeObserver(stick).observe(byId("log"));
restore();
begin().catch(report);
