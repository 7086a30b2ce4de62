// A question and its answers, as they are shown.
import { button, copier, make } from "./dom.js";
import { Canvas, Replay } from "./canvas.js";
import { code, markdown } from "./text.js";

const GAP = /\[MASK(?::(\d+))?\]/;

// `acts`: what can be done with a turn or an answer, see page.js.
export class TurnView {
  constructor(turn, acts) {
    this.turn = turn;
    this.acts = acts;
    this.bubble = make("div", { class: "bubble" }, ...(turn.images ?? []).map((src) => make("img", { src, alt: "Picture" })), ...written(turn.question));
    this.asked = make("div", { class: "asked" }, this.bubble, make("div", { class: "tools" },
      copier("Copy the question", () => turn.question), button("edit", "Edit the question", () => this.edit())));
    this.views = turn.answers.map((answer) => new AnswerView(answer, turn, acts));
    this.answers = make("div", { class: "answers", "data-count": turn.answers.length }, ...this.views.map((view) => view.root));
    this.root = make("article", { class: "turn" }, this.asked, this.answers);
  }

  edit() {
    if (this.acts.busy()) return;
    const box = make("textarea", { "aria-label": "Edit the question", rows: 3 });
    box.value = this.turn.question;
    const back = () => { form.replaceWith(this.asked); this.asked.querySelector(".tools button:last-child").focus(); };
    const cancel = make("button", { type: "button", class: "quiet" }, "Cancel");
    cancel.addEventListener("click", back);
    const form = make("form", { class: "editing" }, box, make("div", { class: "line end" }, cancel, make("button", { class: "main" }, "Ask again")));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (box.value.trim()) this.acts.again(this.turn, box.value.trim());
    });
    box.addEventListener("keydown", (event) => {
      if (event.key === "Escape") { event.stopPropagation(); back(); }
    });
    this.asked.replaceWith(form);
    box.focus();
  }
}

// A text whose gaps stand as marks.
function written(text) {
  const parts = text.split(new RegExp(GAP, "g"));
  return parts.flatMap((part, i) => (i % 2 ? [make("span", { class: "gap" }, `${part ?? 1}`)] : tagged(part)));
}

// A text in which tokens such as <|user|> stand as marks.
function tagged(text) {
  return text.split(/<\|(\w+)\|>/).map((part, i) => (i % 2 ? make("span", { class: "special" }, part) : part));
}

export class AnswerView {
  constructor(answer, turn, acts) {
    Object.assign(this, { answer, turn, acts });
    this.body = make("div", { class: "body" });
    this.below = make("div", { class: "below" });
    this.who = make("div", { class: "who" }, answer.label);
    this.who.hidden = turn.answers.length < 2;
    this.root = make("section", { class: "answer", "aria-label": `Answer of ${answer.label}` }, this.who, this.body, this.below);
    if (answer.state !== "running") this.end();
  }

  begin() {
    this.canvas = new Canvas({ settling: !this.answer.form });
    this.canvas.line.append(...Array.from({ length: 8 }, () => make("span", { class: "token masked" })));
    this.body.replaceChildren(this.canvas.root);
    this.body.setAttribute("aria-hidden", "true"); // what is said is the text, when it is there
    this.root.classList.add("running");
  }

  frame(frame) {
    if (!this.answer.frames.length) this.canvas.clear();
    this.answer.frames.push(frame);
    this.canvas.apply(frame);
  }

  end() {
    const { answer } = this;
    this.root.classList.remove("running");
    this.body.removeAttribute("aria-hidden");
    this.show();
    this.below.replaceChildren(...this.notices(), this.tools());
    if (this.turn.answers.length > 1 && answer.text) this.who.replaceChildren(answer.label, this.choice());
    this.root.classList.toggle("failed", !answer.text);
  }

  show() {
    const { answer, body } = this;
    if (answer.state === "stopped" && answer.frames?.length) { // as it stood
      const canvas = new Canvas({ settling: !answer.form });
      for (const frame of answer.frames) canvas.apply(frame);
      body.replaceChildren(canvas.root);
    } else if (answer.gaps) body.replaceChildren(make("div", { class: "text filled" }, ...filled(this.turn.question, answer.gaps, answer.sure)));
    else if (!answer.text) body.replaceChildren();
    else if (answer.form === "json") body.replaceChildren(code(answer.text));
    else body.replaceChildren(make("div", { class: "text" }, answer.form ? answer.text : markdown(answer.text)));
    if (answer.thought) body.prepend(this.thoughts());
  }

  // What the model thought before it answered, folded away.
  thoughts() {
    return make("details", { class: "thought" }, make("summary", {}, "Thoughts"), make("div", { class: "text" }, markdown(this.answer.thought)));
  }

  replay() {
    const replay = new Replay(this.answer.frames, () => { this.show(); this.below.hidden = false; this.below.querySelector(".replays")?.focus(); });
    this.body.replaceChildren(replay.root);
    this.below.hidden = true;
    if (matchMedia("(prefers-reduced-motion: reduce)").matches) { replay.show(this.answer.frames.length); replay.stop(); } else replay.start();
    replay.play.focus();
    replay.root.scrollIntoView({ block: "nearest" });
  }

  choice() {
    const { turn, answer, acts } = this;
    const index = turn.answers.indexOf(answer);
    const found = make("button", { type: "button", class: "quiet choice", "aria-pressed": String((turn.chosen ?? 0) === index) }, "Go on with this");
    found.addEventListener("click", () => acts.choose(turn, index));
    return found;
  }

  notices() {
    const { answer, turn, acts } = this;
    const again = () => button("retry", "Ask again", () => acts.again(turn), "Try again");
    const fresh = () => button("new", "Ask in a new conversation", () => acts.anew(turn), "New chat with this question");
    const notice = (kind, text, ...offers) => make("div", { class: `notice ${kind}`, role: "alert" }, make("p", {}, text), make("div", { class: "line" }, ...offers));
    if (answer.state === "full") return [notice("full", answer.error, ...(answer.alone ? [] : [fresh()]))];
    if (answer.state === "failed") return [notice("bad", answer.error, again())];
    if (answer.state === "stopped") return [notice("plain", "Stopped.", again())];
    if (answer.cut) return [notice("plain", answer.cut, ...(answer.alone || !answer.full ? [] : [fresh()]))];
    if (!answer.text) return [notice("plain", "The model ended its answer without a word.", again())];
    return [];
  }

  tools() {
    const { answer, turn, acts } = this;
    const line = make("div", { class: "tools" });
    if (answer.text) line.append(copier("Copy the answer", () => answer.text));
    if (answer.state === "done") line.append(button("retry", "Ask again", () => acts.again(turn)));
    if (answer.frames?.length > 1) {
      const found = button("play", "Replay how it was written", () => this.replay(), "Replay");
      found.classList.add("replays");
      line.append(found);
    }
    if (answer.state === "done" && !answer.gaps) line.append(button("save", "Save the whole trace as a page", () => acts.trace(turn, answer)));
    if (answer.facts) line.append(facts(answer.facts));
    return line;
  }
}

function facts({ tokens, steps, seconds, unused, recipe }) {
  const many = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;
  const parts = [many(tokens, "token"), many(steps, "step"), `${(tokens / Math.max(steps, 1)).toFixed(1)} a step`, `${Math.round(tokens / seconds)} tokens/s`];
  const title = "Tokens of the answer, forwards of the network, tokens that each wrote, and tokens a second in this browser";
  const found = make("p", { class: "facts", title }, parts.join(" · "));
  if (unused) found.append(" ", make("span", { class: "fold", title: `${unused} positions were not needed` }, `+${unused}`));
  if (recipe) found.append(` · recipe ${recipe}`);
  return found;
}

// The text with what was filled in; `sure`: of each gap, the probability of its tokens.
function filled(text, gaps, sure) {
  return text.split(/\[MASK(?::\d+)?\]/).flatMap((part, i) => {
    if (i >= gaps.length) return tagged(part);
    const least = Math.min(...(sure?.[i] ?? []));
    const title = Number.isFinite(least) ? `Its least sure token: ${Math.round(100 * least)}%` : "";
    return [...tagged(part), make("mark", { title }, gaps[i])];
  });
}
