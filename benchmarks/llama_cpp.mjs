// llama.cpp on one thread of a CPU, greedy, for the rows of benchmarks.smol that have one request in flight:
//     npm install --ignore-scripts node-llama-cpp && node llama_cpp.mjs BASE.gguf held.jsonl 12 64 > llama.json
// The arguments: a GGUF file, held.jsonl of tools/convert_ar, how many of its prompts, and the most new tokens of each.
import {readFileSync} from "node:fs";
import {getLlama, LlamaLogLevel} from "node-llama-cpp";

const [path, held, most, fresh] = process.argv.slice(2);
const llama = await getLlama({gpu: false, build: "never", maxThreads: 1, logLevel: LlamaLogLevel.error});
const model = await llama.loadModel({modelPath: path});
const context = await model.createContext({contextSize: 512, threads: 1, batchSize: 512});
const rows = readFileSync(held, "utf8").trim().split("\n").slice(0, Number(most)).map((line) => JSON.parse(line));
const ids = [];
let seconds = 0, cpu = 0;
for (const pass of [0, 1]) { // the first one warms up
  ids.length = seconds = cpu = 0;
  for (const {tokens, answer} of rows) {
    const sequence = context.getSequence();
    const found = [];
    const begun = performance.now(), used = process.cpuUsage();
    for await (const token of sequence.evaluate(tokens.slice(0, answer), {temperature: 0})) {
      found.push(token);
      if (token === model.tokens.eot || token === model.tokens.eos || found.length >= Number(fresh)) break;
    }
    seconds += (performance.now() - begun) / 1e3;
    const {user, system} = process.cpuUsage(used);
    cpu += (user + system) / 1e6;
    ids.push(found);
    sequence.dispose();
  }
}
const count = ids.reduce((sum, one) => sum + one.length, 0);
const release = llama.llamaCppRelease?.release;
const speed = {seconds, tokens_per_s: count / seconds, cpu_seconds: cpu, tokens_per_cpu_s: count / cpu};
console.log(JSON.stringify({engine: "llama.cpp", release, tokens: count, ...speed, ids}));
process.exit(0);
