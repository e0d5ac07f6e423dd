/** Compare two files by their headers: values that differ, and layers whose stored bytes do. */
import { bytesOf } from "./header.js";
import { hex } from "./dom.js";

/** Return {same, rows}; a row is [where, a, b, bytes of a, bytes of b, what of the digests]. */
export function changes(a, b) {
  const rows = [];
  const fact = (where, x, y) => x !== y && rows.push([where, x, y, "", "", ""]);
  const one = (f) => [f(a.header), f(b.header)];
  fact("model", ...one(({ model }) => (model ? `${model.type} ${hex(model.id).slice(0, 12)}` : "not recorded")));
  fact("tokenizer", ...one(({ tokenizer }) => (tokenizer ? hex(tokenizer.id).slice(0, 12) : "not recorded")));
  fact("tokens", ...one(({ tokens }) => (tokens ? `${tokens.count}, digest ${hex(tokens.digest).slice(0, 12)}` : "not recorded")));
  fact("made by", ...one(({ producer }) => producer));
  fact("checkpoints", ...one(({ checkpoints }) => checkpoints.map(({ tokens }) => tokens).join(", ") || "none"));
  const [left, right] = [tensors(a), tensors(b)];
  for (const key of new Set([...left.keys(), ...right.keys()])) {
    const [x, y] = [left.get(key), right.get(key)];
    const digests = x && y && x.digests === y.digests ? "the same" : x && y ? "differ" : "in one file";
    if (digests !== "the same" || x.form !== y.form) rows.push([key, x?.form ?? "—", y?.form ?? "—", x?.bytes ?? "—", y?.bytes ?? "—", digests]);
  }
  return { same: a.id === b.id, rows };
}

function tensors({ header, layers }) {
  const found = new Map();
  for (const { path, layer, checkpoint } of layers) {
    for (const [name, tensor] of layer.tensors) {
      const stored = tensor.segments.flatMap(({ parts }) => [...parts.values()]).map((part) => header.tensors.get(part));
      const codecs = [...new Set(tensor.segments.map(({ codec }) => codec))].join(" + ");
      found.set(`${checkpoint ? `checkpoint ${checkpoint.tokens}, ` : ""}layer ${path}, ${name}`, {
        form: `${codecs}, ${tensor.dtype} ${tensor.shape.join(" × ")}`,
        bytes: stored.reduce((sum, info) => sum + bytesOf(info), 0n),
        digests: stored.map(({ digest }) => hex(digest)).join(),
      });
    }
  }
  return found;
}
