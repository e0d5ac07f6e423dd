/**
 * Check a decoded header against spec/v1/header.schema.json (rule H2), which is read as it is.
 *
 * Maps with named fields become plain objects with the defaults filled in; fields that are not
 * in the schema are left out. Maps of any keys stay Map. Whole numbers become Number where
 * that loses nothing; those in `params` stay BigInt, so that they differ from floats.
 */
import schema from "../../spec/v1/header.schema.json" with { type: "json" };
import { need } from "./failure.js";

/** Most nested layers that are looked at: H8 allows 4 lists, one more is refused by its rule. */
const MAX_NESTING = 6;

export function load(value) {
  return check(value, schema.$defs.Header, "", 0);
}

function check(value, rule, at, depth) {
  if (rule.$ref) {
    if (rule.$ref === "#/$defs/Layer") need(++depth < MAX_NESTING, "H8", "lists nest deeper than 4", at);
    return check(value, schema.$defs[rule.$ref.slice("#/$defs/".length)], at, depth);
  }
  if (rule.anyOf) return anyOf(value, rule.anyOf, at, depth);
  const [name, fits] = kindOf(rule);
  need(fits(value), ruleOf(at), () => `${shown(value)}, expected ${name}`, at);
  if (rule.type === "integer") return whole(value, rule, at);
  if (rule.type === "number") return Number(value);
  if (rule.type === "string") return bounded(value, rule, at);
  if (rule.type === "array") {
    need(value.length <= (rule.maxItems ?? Infinity), ruleOf(at), `${value.length} items, the limit is ${rule.maxItems}`, at);
    return value.map((item, i) => check(item, rule.items, `${at}[${i}]`, depth));
  }
  return rule.type === "object" ? object(value, rule, at, depth) : value;
}

/** `metadata` has a rule of its own (H9). */
const ruleOf = (at) => (/^metadata(\W|$)/.test(at) ? "H9" : "H2");

function kindOf(rule) {
  switch (rule.type) {
    case "integer": return ["a whole number", (v) => typeof v === "bigint"];
    case "number": return ["a number", (v) => typeof v === "number" || typeof v === "bigint"];
    case "boolean": return ["true or false", (v) => typeof v === "boolean"];
    case "null": return ["nil", (v) => v === null];
    case "array": return ["an array", Array.isArray];
    case "object": return ["a map", (v) => v instanceof Map];
    case "string":
      return rule.contentEncoding
        ? ["bytes", (v) => v instanceof Uint8Array]
        : ["text", (v) => typeof v === "string"];
  }
  throw new Error(`the schema has type ${rule.type}`);
}

function anyOf(value, rules, at, depth) {
  const rule = rules.find((one) => one.$ref ? value !== null : kindOf(one)[1](value));
  need(rule, ruleOf(at), () => `${shown(value)} is of none of the types allowed`, at);
  // Whole params stay BigInt: 1 and 1.0 are two things there.
  if (typeof value === "bigint" && rules.some((one) => one.type === "boolean")) return value;
  return check(value, rule, at, depth);
}

function whole(value, rule, at) {
  const { minimum, maximum } = rule;
  need(minimum === undefined || value >= BigInt(minimum), "H2", `${value}, expected at least ${minimum}`, at);
  need(maximum === undefined || value <= BigInt(maximum), "H2", `${value}, expected at most ${maximum}`, at);
  return value >= Number.MIN_SAFE_INTEGER && value <= Number.MAX_SAFE_INTEGER ? Number(value) : value;
}

function bounded(value, { minLength = 0, maxLength = Infinity, contentEncoding }, at) {
  // In the schema byte strings are base64, so 44 characters are 32 bytes.
  let length = value.length;
  if (contentEncoding) length = 4 * Math.ceil(value.length / 3);
  else if (length > maxLength) length = [...value].length;
  const exact = contentEncoding && minLength === 44 ? value.length === 32 : true;
  need(exact && length >= minLength && length <= maxLength, ruleOf(at), `of length ${value.length}, expected ${minLength} to ${maxLength}`, at);
  return value;
}

function object(map, rule, at, depth) {
  const inside = (name) => (at ? `${at}.${name}` : name);
  if (rule.properties) {
    for (const name of rule.required ?? []) need(map.has(name), "H2", `no field ${name}`, at);
    const found = {};
    for (const [name, field] of Object.entries(rule.properties)) {
      found[name] = map.has(name) ? check(map.get(name), field, inside(name), depth) : absent(field);
    }
    return found;
  }
  const most = rule.maxProperties ?? Infinity;
  need(map.size <= most, ruleOf(at), `${map.size} entries, the limit is ${most}`, at);
  const found = new Map();
  for (const [name, item] of map) {
    if (rule.propertyNames) bounded(name, rule.propertyNames, at);
    found.set(name, check(item, rule.additionalProperties, inside(name), depth));
  }
  return found;
}

function absent({ default: value, contentEncoding }) {
  if (contentEncoding) return new Uint8Array(0);
  if (Array.isArray(value)) return [];
  if (value !== null && typeof value === "object") return new Map();
  return value;
}

function shown(value) {
  if (typeof value === "string") return JSON.stringify(value.slice(0, 40));
  if (value instanceof Uint8Array) return `${value.length} bytes`;
  if (value instanceof Map) return "a map";
  return Array.isArray(value) ? "an array" : String(value);
}
