// An answer while it is denoised: its positions are words of the text, open places among them.
import { make } from "./dom.js";
import { markdown } from "./text.js";

// By the server's number: a guess at a mask, a token that an edit may change, one that stays, one that a form forced.
const GUESS = 0;
const FINAL = 2;
const FORCED = 3;
const SAID = ["a guess", "decided, may be edited", "decided", "the shape of the answer left no other token"];

export class Canvas {
  // `settling`: text before the last finished paragraph is shown as Markdown, as it will stay.
  constructor({ settling = true, heat = false } = {}) {
    this.settling = settling;
    this.text = make("div", { class: "text" });
    this.fold = make("span", { class: "fold" });
    this.line = make("div", { class: heat ? "canvas heat" : "canvas" }, this.fold);
    this.root = make("div", {}, this.text, this.line);
    this.clear();
  }

  clear() {
    this.cells = [];
    this.first = this.last = 0; // the positions that stand in the line
    this.settled = "";
    this.text.replaceChildren();
    this.line.replaceChildren(this.fold);
    this.fold.hidden = true;
  }

  apply({ length, region, changes }) {
    for (let at = this.cells.length; at < (length ?? 0); at++)
      this.cells.push({ text: "", box: make("span", { class: "token masked" }) });
    for (const [position, text, sure, state] of changes) paint(this.cells[position], text, sure, state);
    this.draw(region[1]);
  }

  // Shows the positions from the last finished paragraph to the last one in use; the others fold into one mark.
  draw(active) {
    let end = this.cells.length;
    while (end && !this.cells[end - 1].text && (end > active || this.cells[end - 1].state !== undefined)) end--;
    const unused = this.cells.length - end;
    this.fold.hidden = !unused;
    this.fold.textContent = `+${unused}`;
    this.fold.title = `${unused} positions that the answer does not use so far`;
    const begin = this.settling ? this.settle() : 0;
    while (this.last < end) this.fold.before(this.cells[this.last++].box);
    while (this.last > end) this.cells[--this.last].box.remove();
    while (this.first < begin) this.cells[this.first++].box.remove();
  }

  // Draws finished paragraphs as Markdown. Returns the first position after them.
  settle() {
    let text = "", begin = 0, finished = "";
    for (const [at, cell] of this.cells.entries()) {
      if (!(cell.state >= FINAL) || !cell.text) break;
      text += cell.text;
      const end = text.lastIndexOf("\n\n");
      if (end <= finished.length || text.slice(0, end).split("```").length % 2 === 0) continue; // within a block of code
      finished = text.slice(0, end);
      begin = end + 2 < text.length ? at : at + 1; // a token may end one paragraph and begin the next
    }
    if (finished.length > this.settled.length) this.text.replaceChildren(markdown((this.settled = finished)));
    return Math.max(begin, this.first);
  }
}

function paint(cell, text, sure, state) {
  const decided = state !== GUESS;
  const became = decided && !(cell.state >= 1);
  Object.assign(cell, { text, sure, state });
  cell.box.className = `token ${decided ? "decided" : "guess"}${state === FORCED ? " forced" : ""}${became ? " fresh" : ""}${text ? "" : " end"}`;
  if (state === FORCED) delete cell.box.dataset.sure;
  else cell.box.dataset.sure = sure;
  cell.box.textContent = decided ? text : text.replaceAll("\n", "⏎");
}

// Plays the moments of an answer again. The arrow keys go from token to token.
export class Replay {
  constructor(frames, close) {
    this.frames = frames;
    this.canvas = new Canvas({ settling: false, heat: true });
    this.line = this.canvas.line;
    this.line.setAttribute("role", "listbox");
    this.line.setAttribute("aria-label", "Positions of the answer");
    this.about = make("p", { class: "about", role: "status" }, "Point at a word to see how sure the model was.");
    this.slider = make("input", { type: "range", min: 0, max: frames.length, "aria-label": "Moment of the denoising" });
    this.play = make("button", { type: "button", class: "quiet" });
    const done = make("button", { type: "button", class: "quiet" }, "Done");
    this.moment = make("output", { class: "about" });
    this.root = make("div", { class: "replay" }, this.canvas.root, this.about,
      make("div", { class: "line" }, this.play, this.slider, this.moment, done));
    this.slider.addEventListener("input", () => { this.stop(); this.show(Number(this.slider.value)); });
    this.play.addEventListener("click", () => (this.timer ? this.stop() : this.start()));
    done.addEventListener("click", () => { this.stop(); close(); });
    this.line.addEventListener("pointermove", (at) => { if (at.movementX || at.movementY) this.explain(at.target); });
    for (const event of ["focusin", "click"]) this.line.addEventListener(event, (at) => this.explain(at.target));
    this.line.addEventListener("keydown", (event) => this.move(event));
  }

  show(moment) {
    this.canvas.clear();
    for (const frame of this.frames.slice(0, moment)) this.canvas.apply(frame);
    this.slider.value = moment;
    this.moment.textContent = `${moment} / ${this.frames.length}`;
    for (const [at, cell] of this.canvas.cells.entries()) {
      cell.box.setAttribute("role", "option");
      cell.box.setAttribute("aria-selected", "false");
      cell.box.setAttribute("aria-label", cell.text.trim() || (cell.state === undefined ? "open" : "blank"));
      cell.box.tabIndex = at ? -1 : 0;
    }
    this.line.tabIndex = this.canvas.last ? -1 : 0;
  }

  start() {
    const pause = Math.min(300, Math.max(50, 3000 / this.frames.length));
    let moment = Number(this.slider.value) % this.frames.length; // from the beginning again, where it has ended
    this.show(moment);
    this.timer = setInterval(() => {
      this.show(++moment);
      if (moment >= this.frames.length || !this.root.isConnected) this.stop();
    }, pause);
    this.play.textContent = "Pause";
  }

  stop() {
    clearInterval(this.timer);
    this.timer = null;
    this.play.textContent = "Play";
  }

  explain(box) {
    const at = this.canvas.cells.findIndex((cell) => cell.box === box);
    const cell = this.canvas.cells[at];
    if (!cell) return;
    const sure = cell.state === undefined ? "open" : SAID[cell.state] +
      (cell.state === FORCED ? "" : `, ${Math.min(90, 10 * cell.sure)} to ${Math.min(100, 10 * (cell.sure + 1))}% sure`);
    this.about.textContent = `Position ${at + 1}: ${sure}`;
  }

  move(event) {
    const cells = this.canvas.cells;
    const at = cells.findIndex((cell) => cell.box === event.target) + { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!cells[at]?.box.isConnected) return;
    event.preventDefault();
    event.target.tabIndex = -1;
    cells[at].box.tabIndex = 0;
    cells[at].box.focus();
  }
}
