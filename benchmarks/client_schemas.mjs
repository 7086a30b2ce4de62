// The types of zod 4 as JSON Schema, and whether zod takes values. Run by benchmarks/client_schemas.py, which says how.
// "schemas": prints {name: schema} of all types. "validate": reads {name: [text]} and prints {name: [boolean]}.
import { createRequire } from "node:module";
import { readFileSync } from "node:fs";

const z = createRequire(process.argv[3] + "/")("zod");
const strings = Object.fromEntries(
  ("email uuid uuidv4 uuidv6 uuidv7 guid url httpUrl hostname emoji nanoid cuid cuid2 ulid xid ksuid base64 base64url hex"
    + " e164 jwt lowercase uppercase ipv4 ipv6 mac cidrv4 cidrv6").split(" ")
    .filter((name) => typeof z[name] === "function" && name !== "lowercase" && name !== "uppercase")
    .map((name) => [name, z[name]()]),
);
const types = {
  string: z.string(), ...strings,
  "iso.date": z.iso.date(), "iso.time": z.iso.time(), "iso.datetime": z.iso.datetime(),
  "iso.datetime offset": z.iso.datetime({ offset: true }), "iso.duration": z.iso.duration(),
  "hash sha256": z.hash?.("sha256"), "hash md5 base64": z.hash?.("md5", { enc: "base64" }),
  min: z.string().min(3), max: z.string().max(5), length: z.string().length(4), nonempty: z.string().nonempty(),
  regex: z.string().regex(/^[a-c]+\d?$/), "regex lookahead": z.string().regex(/^(?=.*\d)(?=.*[a-z])[a-z\d]{3,8}$/),
  "regex word": z.string().regex(/^\w+\s\w+$/),
  startsWith: z.string().startsWith("ab"), endsWith: z.string().endsWith("yz"), includes: z.string().includes("mid"),
  "email startsWith": z.email().startsWith("a"), "string lowercase": z.string().lowercase(),
  "string uppercase": z.string().uppercase(), "string trim": z.string().trim(), "template literal":
    z.templateLiteral?.(["v", z.number().int(), ".", z.enum(["a", "b"])]), "string enum": z.enum(["a", "b"]),
  literal: z.literal("tuna"), literals: z.literal(["red", 5, true, null]), stringbool: z.stringbool?.(),
  number: z.number(), int: z.int(), int32: z.int32(), uint32: z.uint32(), float32: z.float32(), float64: z.float64(),
  "number int": z.number().int(), gt: z.number().gt(5), gte: z.number().gte(5), lt: z.number().lt(5),
  lte: z.number().lte(5), positive: z.number().positive(), nonnegative: z.number().nonnegative(),
  negative: z.number().negative(), nonpositive: z.number().nonpositive(), multipleOf: z.number().multipleOf(5),
  "multipleOf 0.5": z.number().multipleOf(0.5), "multipleOf 0.01": z.number().multipleOf(0.01),
  "step 0.25 in a range": z.number().min(0).max(1).step(0.25), finite: z.number().finite(), safe: z.number().safe(),
  "int in a range": z.int().min(1).max(10), boolean: z.boolean(), null: z.null(), nullable: z.string().nullable(),
  optional: z.object({ a: z.string().optional() }), nullish: z.object({ a: z.int().nullish() }),
  object: z.object({ a: z.string(), b: z.int() }), "object empty": z.object({}), strictObject: z.strictObject({ a: z.int() }),
  looseObject: z.looseObject({ a: z.int() }), record: z.record(z.string(), z.int()),
  "record of an enum": z.record(z.enum(["a", "b"]), z.int()), partialRecord: z.partialRecord(z.enum(["a", "b"]), z.int()),
  array: z.array(z.int()).max(3), "array min": z.array(z.boolean()).min(2), tuple: z.tuple([z.string(), z.int()]),
  "tuple rest": z.tuple([z.string()], z.int()), union: z.union([z.string(), z.int()]),
  discriminatedUnion: z.discriminatedUnion("k", [z.object({ k: z.literal("a"), x: z.int() }), z.object({ k: z.literal("b") })]),
  intersection: z.intersection(z.object({ a: z.int() }), z.object({ b: z.int() })), default: z.int().default(3),
  catch: z.int().catch(1), readonly: z.array(z.int()).max(2).readonly(), any: z.any(), unknown: z.unknown(), never: z.never(),
  json: z.json?.(), set: z.set(z.string()), bigint: z.bigint(), date: z.date(), undefined: z.undefined(),
  lazy: z.object({ name: z.string(), get child() { return z.lazy(() => z.object({ x: z.int() })).optional(); } }),
  pipe: z.string().pipe(z.string().min(2)), described: z.string().describe("a text").meta({ title: "T", examples: ["x"] }),
};

const found = {};
const [, , mode] = process.argv;
const asked = mode === "validate" ? JSON.parse(readFileSync(0)) : {};
for (const [name, type] of Object.entries(types)) {
  if (!type) continue;
  if (mode === "validate") {
    if (asked[name]) found[name] = asked[name].map((text) => type.safeParse(JSON.parse(text)).success);
  } else {
    try { found[name] = z.toJSONSchema(type); } catch (error) { found[name] = String(error.message); }
  }
}
console.log(JSON.stringify(found));
