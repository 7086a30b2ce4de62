// Markdown to elements. What a model writes is never trusted: no image, style, form or script comes through.
import { copier, make } from "./dom.js";

const ALLOWED = {
  ALLOWED_TAGS: ["p", "br", "hr", "h1", "h2", "h3", "h4", "h5", "h6", "strong", "em", "del", "code", "pre", "blockquote", "ul", "ol",
    "li", "a", "table", "thead", "tbody", "tr", "th", "td", "sup", "sub"],
  ALLOWED_ATTR: ["href", "title", "start", "align"],
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  RETURN_DOM_FRAGMENT: true,
};

// Markup that a model writes is shown as text, as it stands.
marked.use({ gfm: true, breaks: true, renderer: { html: ({ text }) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;") } });

export function markdown(text) {
  const found = DOMPurify.sanitize(marked.parse(text), ALLOWED);
  for (const link of found.querySelectorAll("a[href]")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer nofollow";
  }
  for (const block of found.querySelectorAll("pre")) framed(block);
  for (const table of found.querySelectorAll("table")) {
    const frame = make("div", { class: "wide-table", tabindex: 0, role: "group", "aria-label": "Table" });
    table.replaceWith(frame);
    frame.append(table);
  }
  return found;
}

// JSON, indented; as it is where it was cut off.
export function code(text) {
  const block = make("pre", {}, make("code", {}, indented(text)));
  const frame = make("div", {}, block);
  framed(block);
  return frame;
}

// Every number and string stays as it was written: JSON.stringify would round what JavaScript's numbers cannot hold.
function indented(text) {
  try {
    JSON.parse(text);
  } catch {
    return text;
  }
  let depth = 0;
  const line = (change) => `\n${"  ".repeat((depth += change))}`;
  return text.replace(/"(?:[^"\\]|\\.)*"|[{[]\s*[}\]]|[{}[\],:]|\s+/g, (part) => {
    if (part[0] === '"') return part;
    if (!part.trim()) return "";
    if (part.length > 1) return part[0] + part.at(-1); // nothing is in it
    if (part === ":") return ": ";
    if (part === ",") return part + line(0);
    return part === "{" || part === "[" ? part + line(1) : line(-1) + part;
  });
}

function framed(block) {
  const frame = make("div", { class: "code" });
  block.replaceWith(frame);
  block.tabIndex = 0; // it may scroll
  frame.append(copier("Copy the code", () => block.textContent), block);
}
