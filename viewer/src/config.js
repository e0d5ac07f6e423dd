/** Check a model's config as text, and the KV heads that it gives: H2, H13 and I7. */
import { need } from "./failure.js";

const MAX_CHARACTERS = 262_144;
const MAX_DEPTH = 32;

export function config(text) {
  need(text.length <= MAX_CHARACTERS || [...text].length <= MAX_CHARACTERS, "H13", `a config of ${text.length} characters`);
  need(depth(text) <= MAX_DEPTH, "H13", `a config that nests deeper than ${MAX_DEPTH}`);
  try {
    return JSON.parse(text);
  } catch {
    need(false, "H2", "model.config is not JSON");
  }
}

function depth(text) {
  let [now, most] = [0, 0];
  for (const [mark] of text.matchAll(/"(?:[^"\\]|\\.)*"|[{}[\]]/g)) {
    if (mark === "{" || mark === "[") most = Math.max(most, ++now);
    else if (mark === "}" || mark === "]") now--;
  }
  return most;
}

/**
 * Refuse caches with a number of KV heads that is none of the model's (I7).
 *
 * A config gives numbers of heads anywhere under names with `heads` and `key_value` or `kv`
 * (KV heads), or `attention`.
 */
export function heads({ model, layers }) {
  const found = { kv: new Set(), attention: new Set() };
  gather(config(model.config), found);
  if (!found.kv.size) return;
  for (const [i, { tensors }] of layers.entries()) {
    const [keys, values] = [tensors.get("keys"), tensors.get("values")];
    if (!keys || !values || keys.shape[3] !== values.shape[3]) continue;
    const n = keys.shape[1];
    need(found.kv.has(n) || found.attention.has(n), "I7", `${n} KV heads, the model has ${[...found.kv]}`, `layers.${i}`);
  }
}

function gather(value, found) {
  if (value === null || typeof value !== "object") return;
  for (const [name, item] of Object.entries(value)) {
    gather(item, found);
    if (!name.includes("heads")) continue;
    const counts = [item].flat().filter((n) => Number.isInteger(n) && n > 0);
    if (/key_value|kv/.test(name)) counts.forEach((n) => found.kv.add(n));
    if (name.includes("attention")) counts.forEach((n) => found.attention.add(n));
  }
}
