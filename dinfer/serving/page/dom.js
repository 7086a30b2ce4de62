// Elements. Texts of the model are only ever set as textContent, or pass through `markdown` of text.js.

export const byId = (id) => document.getElementById(id);

export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes))
    if (value !== false) element.setAttribute(name, value === true ? "" : value);
  element.append(...children);
  return element;
}

export function icon(name) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const use = document.createElementNS("http://www.w3.org/2000/svg", "use");
  use.setAttribute("href", `#i-${name}`);
  svg.setAttribute("aria-hidden", "true");
  svg.append(use);
  return svg;
}

// A button that shows an icon, or an icon and a word. `label`: what it does, for readers and as a tooltip.
export function button(name, label, action, word) {
  const found = make("button", { type: "button", class: word ? "quiet" : "icon", title: label }, icon(name));
  if (word) found.append(make("span", {}, word));
  else found.setAttribute("aria-label", label);
  found.addEventListener("click", action);
  return found;
}

// A button that copies `text()` and says so for a moment.
export function copier(label, text) {
  const found = button("copy", label, async () => {
    await copy(text());
    found.replaceChildren(icon("done"));
    say("Copied.");
    setTimeout(() => found.replaceChildren(icon("copy")), 1500);
  });
  return found;
}

async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const box = make("textarea", { class: "unseen" }); // over plain http a browser has no clipboard
  box.value = text;
  document.body.append(box);
  box.select();
  document.execCommand("copy");
  box.remove();
}

// Tells readers of the screen what has happened.
export function say(text) {
  byId("said").textContent = text;
}
