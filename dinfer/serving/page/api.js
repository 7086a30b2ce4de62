// Talks to the API of the server that sent this page, and to nobody else.
import { byId } from "./dom.js";

function headers() {
  const key = byId("key").value;
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

// Resolves to the response. Throws an Error with the server's own sentence; `code` is the API's word for it.
export async function call(path, body, signal) {
  const given = body === undefined ? { headers: headers() } : { method: "POST", headers: headers(), body: JSON.stringify(body) };
  const response = await fetch(path, { ...given, signal }).catch((error) => {
    throw error.name === "AbortError" ? error : new Error("The server does not answer. Is it still running?");
  });
  if (response.ok) return response;
  if (response.status === 401) byId("unlock").hidden = false;
  const told = await response.json().catch(() => ({ error: { message: response.statusText } }));
  throw Object.assign(new Error(told.error.message), { code: told.error.code });
}

export const ask = async (path, body, signal) => (await call(path, body, signal)).json();

// The JSON messages of a stream of server-sent events.
export async function* events(path, body, signal) {
  const reader = (await call(path, body, signal)).body.pipeThrough(new TextDecoderStream()).getReader();
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
      if (data.startsWith(":")) continue; // a sign of life
      if (data === "[DONE]") return;
      const message = JSON.parse(data);
      if (message.error) throw Object.assign(new Error(message.error.message), { code: message.error.code });
      yield message;
    }
  }
}

// Positions that are left for an answer to these messages.
export async function roomFor(model, messages, signal) {
  const { count, max_model_len: most } = await ask("tokenize", { model, messages }, signal);
  return { left: most - count, used: count, most };
}
