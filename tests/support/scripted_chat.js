// Answers chats with a text of the test's own, in blocks whose places are written in a fixed scattered order. Of each
// answer it sends `most` pieces, and the others once the test raises `window.most`.
const real = (window.real ??= window.fetch);
const [text, pause, thought, most] = arguments;
window.most = most ?? Infinity;
window.fetch = (path, given) => {
  if (path !== "v1/chat/completions") return real(path, given);
  const { max_tokens: length } = JSON.parse(given.body);
  const words = (text.match(/\s?\S+|\s/g) ?? []).slice(0, length);
  const send = (message) => `data: ${JSON.stringify({ choices: [{ delta: {} }], ...message })}\n\n`;
  const said = [];
  let sent = 0;
  for (let block = 0; block < length && block <= words.length; block += 32) {
    const end = Math.min(block + 32, length), order = [];
    for (let i = 0; i < 32; i++) if (block + (i * 13) % 32 < end) order.push(block + (i * 13) % 32);
    for (let i = 0; i < order.length; i += 4) {
      const changes = order.slice(i, i + 4).map((at) => [at, words[at] ?? "", 9, 2]);
      changes.push(...order.slice(i + 4, i + 12).map((at) => [at, words[at] ? words[at].slice(0, 3) : "", 2 + at % 6, 0]));
      const last = i + 4 >= order.length;
      said.push(send({ choices: [{ delta: last ? { content: words.slice(block, end).join(""), reasoning_content: block ? "" : thought } : {} }],
        dinfer: { canvas: { v: 1, region: [block, end], changes, ...(said.length ? {} : { length }) } } }));
    }
  }
  said.push(send({ choices: [{ delta: {}, finish_reason: "stop" }] }));
  said.push(send({ choices: [], usage: { completion_tokens: words.length, dinfer: { forwards: said.length } } }), "data: [DONE]\n\n");
  const encode = new TextEncoder();
  const body = new ReadableStream({
    async pull(stream) {
      do await new Promise((done) => setTimeout(done, pause));
      while (sent >= window.most && !given.signal.aborted);
      if (given.signal.aborted) return stream.error(new DOMException("aborted", "AbortError"));
      if (said.length) stream.enqueue(encode.encode(said.shift())), sent++;
      else stream.close();
    },
  });
  return Promise.resolve(new Response(body));
};
