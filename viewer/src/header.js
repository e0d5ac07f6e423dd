/** Check a header and its container against each other: H2 to H14, in spec/v1/format.md. */
import { need } from "./failure.js";
import { ITEMSIZE } from "./container.js";
import { checkLayers } from "./layers.js";
import { config, heads } from "./config.js";
import { decode } from "./msgpack.js";
import { load } from "./schema.js";

const MAJOR = "1";
const FEATURES = new Set(["checkpoints", "files", "rope"]);
const ROLES = new Set(["payload", "table", "metadata", "outlier", "sink", "residual", "tokens"]);
const MAX_SEGMENTS = 4096;
const MAX_LAYERS = 4096;
const MAX_FILES = 64;
const FREE_ELEMENTS = 65_536n;
const MAX_EXPANSION = 64n;

/** Return the header of a container that `readContainer` returned, checked. */
export function readHeader(container) {
  const raw = decode(container.header);
  checkVersion(raw.get("version"), raw.get("needs"));
  const header = load(raw);
  need(header.version === container.version, "C8", `version ${header.version}, __metadata__ says ${container.version}`);
  need(header.pad.every((byte) => byte === 0), "H2", "pad is not zeros");
  for (const [name, { dtype, role }] of header.tensors) {
    need(ITEMSIZE.has(dtype), "H2", "unknown dtype", `tensors.${name}`);
    need(ROLES.has(role), "H2", "unknown role", `tensors.${name}`);
  }
  const layers = [...walk(header)];
  need(layers.length <= MAX_LAYERS, "H8", `${layers.length} layers, the limit is ${MAX_LAYERS}`);
  const segments = layers.flatMap((one) => [...segmentsOf(one)]);
  need(segments.length <= MAX_SEGMENTS, "H8", `${segments.length} segments, the limit is ${MAX_SEGMENTS}`);
  if (header.model) config(header.model.config);
  checkNeeds(header, segments);
  for (const one of layers) checkCover(one);
  for (const segment of segments) checkSegment(header, segment);
  checkCheckpoints(header);
  checkUses(header, segments);
  checkForms(header, container.entries);
  checkExpansion(header, segments);
  checkLayers(header, layers);
  if (header.model) heads(header);
  return { header, layers, segments };
}

/** H3 and H4 come first: a newer header may have other types. */
function checkVersion(version, needs) {
  need(typeof version === "string" && /^(0|[1-9][0-9]*)\.(0|[1-9][0-9]*)$/.test(version), "H2", "version is not major.minor");
  need(version.split(".")[0] === MAJOR, "H3", `version ${version}, this reader knows ${MAJOR}.x`);
  for (const name of Array.isArray(needs) ? needs : []) {
    need(typeof name !== "string" || FEATURES.has(name), "H4", () => `needs ${JSON.stringify(name).slice(0, 60)}, which this reader does not know`);
  }
}

/** Yield {path, layer, checkpoint, nested} of all layers, children and layers of checkpoints. */
export function* walk(header) {
  for (const [i, layer] of header.layers.entries()) yield* nested(`${i}`, layer, null, false);
  for (const checkpoint of header.checkpoints) {
    for (const [path, layer] of checkpoint.layers) yield* nested(path, layer, checkpoint, false);
  }
}

function* nested(path, layer, checkpoint, inside) {
  yield { path, layer, checkpoint, inside };
  for (const [i, child] of layer.children.entries()) yield* nested(`${path}.${i}`, child, checkpoint, true);
}

function* segmentsOf({ path, layer, checkpoint }) {
  for (const [name, tensor] of layer.tensors) {
    for (const segment of tensor.segments) yield { at: `layers.${path}.${name}`, path, name, tensor, segment, checkpoint };
  }
}

function checkNeeds(header, segments) {
  const files = new Set();
  for (const { file } of header.tensors.values()) if (file) files.add(String(file));
  need(!files.size || header.needs.includes("files"), "H11", "tensors of other files, but needs does not list files");
  need(files.size <= MAX_FILES, "H11", `depends on ${files.size} files, the limit is ${MAX_FILES}`);
  need(!header.tokens || !header.tensors.get(header.tokens.tensor)?.file, "H11", "the token ids are in another file");
  need(!header.checkpoints.length || header.needs.includes("checkpoints"), "H14", "checkpoints, but needs does not list them");
  need(header.checkpoints.length > 0 === header.needs.includes("checkpoints"), "H4", "lists checkpoints and has none");
  need(files.size > 0 === header.needs.includes("files"), "H4", "lists files and depends on none");
  const rotated = segments.some(({ segment }) => segment.rope !== null);
  need(rotated === header.needs.includes("rope"), "H4", "needs and segments do not agree on rope");
}

/** The segments of a tensor cover its rows (H7). */
function checkCover({ path, layer }) {
  for (const [name, { dtype, shape, segments }] of layer.tensors) {
    const at = `layers.${path}.${name}`;
    need(ITEMSIZE.has(dtype), "H2", "unknown dtype", at);
    if (segments.length === 1 && segments[0].tokens === null) continue;
    const total = segments.reduce((sum, one) => sum + (one.tokens ?? NaN), 0);
    need(segments.length && shape.length > 1 && total === shape.at(-2), "H7", `segments do not cover ${shape.at(-2)} rows`, at);
  }
}

function checkSegment(header, { at, tensor, segment }) {
  const { parts, params, rope } = segment;
  for (const name of parts.values()) need(header.tensors.has(name), "H6", `${name} is not in tensors`, at);
  if (params.has("pre_rope")) need(params.get("pre_rope") === (rope !== null), "H4", "pre_rope and rope do not agree", at);
  if (rope === null) return;
  need(rope < header.ropes.length, "H6", `rope ${rope} of ${header.ropes.length}`, at);
  checkRope(header.ropes[rope], at);
  need(header.ropes[rope].dims <= (tensor.shape.at(-1) ?? 0), "H2", "the rope is wider than the head", at);
}

function checkRope({ dims, base, freqs, scale, mscale }, at) {
  const within = (n) => n >= 1e-12 && n <= 1e12;
  need(dims % 2 === 0, "H2", `a rope of ${dims} dims, expected an even number`, at);
  need((base === null) !== (freqs === null), "H2", "a rope has base or freqs, and not both", at);
  need(base === null || within(base), "H2", `a rope of base ${base}`, at);
  need(freqs === null || freqs.length === dims / 2, "H2", `a rope of ${freqs?.length} freqs`, at);
  need(freqs === null || freqs.every((n) => within(n) || n === Infinity), "H2", "a rope with a frequency out of range", at);
  need(within(scale) && within(mscale), "H2", `a rope of scale ${scale} and mscale ${mscale}`, at);
}

function checkCheckpoints(header) {
  const end = header.tokens?.count ?? Infinity;
  let before = 0;
  for (const { tokens, layers } of header.checkpoints) {
    const at = `checkpoint at ${tokens}`;
    need(tokens > before && tokens < end, "H14", `tokens do not ascend, or reach the end`, at);
    need(layers.size, "H14", "has no layers", at);
    before = tokens;
    for (const [path, layer] of layers) {
      need(/^(0|[1-9][0-9]{0,8})(\.(0|[1-9][0-9]{0,8}))*$/.test(path), "H14", "not a path of a layer", at);
      const target = layerAt(header.layers, path);
      need(target && target.kind === layer.kind && layer.kind !== "list", "H14", `layer ${path} is no ${layer.kind}`, at);
    }
  }
}

/** Return the layer at a path such as `3.1`, or undefined. */
export function layerAt(layers, path) {
  let found = { children: layers };
  for (const i of path.split(".")) found = found?.children[i];
  return found;
}

/** All that is stored is used, once but for tables; references exist (H6). */
function checkUses(header, segments) {
  const uses = new Map();
  const use = (name) => uses.set(name, (uses.get(name) ?? 0) + 1);
  for (const { segment } of segments) for (const name of segment.parts.values()) use(name);
  for (const [name, tensor] of header.tables) {
    need(header.tensors.get(tensor)?.role === "table", "H6", "refers to no table", `tables.${name}`);
    use(tensor);
  }
  if (header.tokens) {
    const { tensor, count, digest } = header.tokens;
    const stored = header.tensors.get(tensor);
    need(stored && stored.role === "tokens" && stored.dtype === "U32" && stored.shape.length === 1 && stored.shape[0] === count, "H6", `not a U32 vector of ${count}, of role tokens`, "tokens");
    need(same(stored.digest, digest), "H6", "another digest than the tensor's", "tokens");
    use(tensor);
  }
  for (const [name, { role }] of header.tensors) {
    const n = uses.get(name) ?? 0;
    need(n === 1 || (n > 1 && role === "table"), "H6", `${n} uses of a ${role}`, `tensors.${name}`);
  }
  const { layers, model } = header;
  if (!model) return;
  need(!layers.length || [0, layers.length].includes(model.ropes.length), "H6", `${model.ropes.length} ropes for ${layers.length} layers`, "model.ropes");
  for (const index of model.ropes) {
    if (index === null) continue;
    need(index >= 0 && index < header.ropes.length, "H6", `no rope ${index}`, "model.ropes");
  }
}

const same = (a, b) => a.length === b.length && a.every((byte, i) => byte === b[i]);

function checkForms(header, entries) {
  for (const [name, { file, dtype, shape }] of header.tensors) {
    const entry = entries.get(name);
    need(Boolean(entry) === (file === null), "H6", file === null ? "only in the header" : "here and in another file", name);
    if (!entry) continue;
    need(entry.dtype === dtype && entry.shape.join() === shape.join(), "H6", "another form in the container", name);
  }
  for (const name of entries.keys()) {
    need(name === "vkv.header" ? !header.tensors.has(name) : header.tensors.has(name), "H6", "only in the container", name);
  }
}

export function elements(tensor, segment) {
  const shape = tensor.shape.map(BigInt);
  if (segment.tokens !== null) shape[shape.length - 2] = BigInt(segment.tokens);
  return shape.reduce((a, b) => a * b, 1n);
}

/** Bytes of a stored tensor, BigInt. */
export function bytesOf({ dtype, shape }) {
  return shape.reduce((a, b) => a * BigInt(b), ITEMSIZE.get(dtype));
}

function checkExpansion(header, segments) {
  let free = FREE_ELEMENTS;
  for (const { at, tensor, segment } of segments) {
    let held = 0n;
    for (const name of segment.parts.values()) {
      const stored = header.tensors.get(name);
      if (stored.role !== "table") held += bytesOf(stored);
    }
    const more = elements(tensor, segment) - MAX_EXPANSION * held;
    if (more > 0n) free -= more;
    need(free >= 0n, "H10", `many more elements than ${held} bytes can stand for`, at);
  }
}
