// The shape that an answer is held to: free text, JSON by a schema, one of a list, or a pattern.
import { byId, make } from "./dom.js";

const KINDS = {
  text: { name: "Free text" },
  json: {
    name: "JSON", label: "JSON Schema",
    examples: {
      "A number": { type: "object", properties: { answer: { type: "integer" } }, required: ["answer"] },
      "A person": { type: "object", properties: { name: { type: "string", maxLength: 20 }, age: { type: "integer", minimum: 0, maximum: 120 } }, required: ["name", "age"] },
      "A list": { type: "array", items: { type: "integer" }, minItems: 2, maxItems: 4 },
    },
    fields: (text) => ({ response_format: { type: "json_schema", json_schema: { name: "page", schema: parsed(text) } } }),
  },
  choice: {
    name: "Choices", label: "The answers to choose from, one a line",
    examples: { "Yes or no": "yes\nno", Numbers: "49\n59\n69" },
    fields: (text) => ({ structured_outputs: { choice: text.split("\n").map((line) => line.trim()).filter(Boolean) } }),
  },
  pattern: {
    name: "Pattern", label: "Regular expression that the whole answer matches",
    examples: { "A number": "[0-9]{1,4}", "A sentence": "The answer is [0-9]+\\." },
    fields: (text) => ({ regex: text }),
  },
};

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`The JSON Schema is not JSON: ${error.message}`);
  }
}

// The fields of a request. `form`: { kind, text }. Throws an Error for a text that cannot be read.
export const fieldsOf = (form) => KINDS[form?.kind]?.fields?.(form.text) ?? {};
export const nameOf = (form) => KINDS[form?.kind ?? "text"].name;

// Lets the reader choose. `use` gets the new form.
export function choose(form, use) {
  const dialog = byId("form");
  const texts = { [form.kind]: form.text };
  let kind = form.kind;
  const text = byId("form-text");
  const show = () => {
    const { label, examples } = KINDS[kind];
    byId("form-field").hidden = !label;
    byId("form-label").textContent = label ?? "";
    text.value = texts[kind] ?? "";
    byId("form-error").textContent = "";
    byId("form-examples").replaceChildren(...Object.entries(examples ?? {}).map(([name, example]) => {
      const found = make("button", { type: "button", class: "chip" }, name);
      found.addEventListener("click", () => { text.value = typeof example === "string" ? example : JSON.stringify(example, null, 2); });
      return found;
    }));
  };
  byId("form-kinds").replaceChildren(...Object.entries(KINDS).map(([name, { name: shown }]) => {
    const radio = make("input", { type: "radio", name: "kind", value: name, class: "unseen" });
    radio.checked = name === kind;
    radio.addEventListener("change", () => { texts[kind] = text.value; kind = name; show(); });
    return make("label", {}, radio, shown);
  }));
  show();
  dialog.querySelector("form").onsubmit = (event) => {
    if (event.submitter?.value === "close") return;
    const found = KINDS[kind].label && text.value.trim() ? { kind, text: text.value } : { kind: "text", text: "" };
    try {
      fieldsOf(found);
    } catch (error) {
      event.preventDefault();
      byId("form-error").textContent = error.message;
      return;
    }
    use(found);
  };
  dialog.showModal();
}
