"use strict";
// How a canvas is drawn, on the page of a trace and on the page of the server.
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
