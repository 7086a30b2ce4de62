// Conversations and settings, kept in this browser alone: each conversation under a key of its own, so that two tabs
// do not overwrite each other's.

const CHAT = "dinfer.chat.";
const SETTINGS = "dinfer.settings";

function read(key) {
  try {
    return JSON.parse(localStorage.getItem(key));
  } catch {
    return null; // storage is switched off, or holds what is not ours
  }
}

// Newest first.
export function chats() {
  try {
    const found = Object.keys(localStorage).filter((key) => key.startsWith(CHAT)).map(read);
    return found.filter((chat) => chat?.turns).sort((a, b) => b.changed - a.changed);
  } catch {
    return [];
  }
}

export function newChat(kind) {
  return { id: `${Date.now().toString(36)}${Math.random().toString(36).slice(2, 6)}`, kind, title: "", changed: 0, turns: [] };
}

// Where the browser has no room, replays of the oldest conversations go first, then the oldest conversations.
export function keep(chat) {
  chat.changed = Date.now();
  const older = chats().filter(({ id }) => id !== chat.id);
  for (;;) {
    try {
      localStorage.setItem(CHAT + chat.id, JSON.stringify(chat));
      return;
    } catch (error) {
      if (error.name !== "QuotaExceededError") return; // storage is switched off: it lives as long as the page
      if (!older.length) return lighten(chat) && keep(chat);
      const oldest = older.at(-1);
      if (lighten(oldest)) localStorage.setItem(CHAT + oldest.id, JSON.stringify(oldest));
      else drop(older.pop().id);
    }
  }
}

// Takes the replays out of a conversation. False if it has none.
function lighten(chat) {
  const answers = chat.turns.flatMap((turn) => turn.answers).filter((answer) => answer.frames);
  for (const answer of answers) delete answer.frames;
  return answers.length > 0;
}

export function drop(id) {
  localStorage.removeItem(CHAT + id);
}

export const settings = () => read(SETTINGS) ?? {};

export function keepSettings(values) {
  try {
    localStorage.setItem(SETTINGS, JSON.stringify(values));
  } catch {
    // they hold until the page is left
  }
}
