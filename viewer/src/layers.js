/** Check layers and their scalars: L3 to L6 and L12, in spec/v1/format.md. */
import { need } from "./failure.js";

const MAX_SCALAR = 2 ** 48 - 1;
const SCALARS = {
  kv: ["offset"],
  concatenate: ["offset"],
  quantized: ["offset", "bits", "group_size"],
  rotating: ["offset", "keep", "max_size", "idx"],
  chunked: ["offset", "chunk_size", "start"],
  arrays: ["size"],
  list: [],
};
const CONSTANT = ["keep", "max_size", "chunk_size", "size"];
const FLOATS = ["F16", "BF16", "F32"];

export function checkLayers(header, layers) {
  let offset = header.tokens?.count ?? null;
  for (const { path, layer, checkpoint } of layers) {
    const at = checkpoint ? `checkpoint at ${checkpoint.tokens}, layer ${path}` : `layers.${path}`;
    const scalars = scalarsOf(layer, at);
    checkTensors(layer, scalars, at);
    const own = scalars.offset;
    if (checkpoint) checkCheckpoint(header, path, scalars, checkpoint, at);
    else if (own) {
      need(offset === null || own === offset, "L6", `offset ${own}, expected ${offset}`, at);
      offset = own;
    }
  }
}

function scalarsOf(layer, at) {
  need(Object.hasOwn(SCALARS, layer.kind), "L3", "unknown kind of cache", at);
  need(layer.kind === "list" || !layer.children.length, "L3", "children in a layer that is no list", at);
  const found = {};
  for (const name of SCALARS[layer.kind]) {
    const n = layer.scalars.get(name);
    need(typeof n === "number" && n >= 0 && n <= MAX_SCALAR, "L3", `${name} is ${n}`, at);
    found[name] = n;
  }
  const { bits, group_size: group, size, chunk_size: chunk } = found;
  if (layer.kind === "quantized") need([2, 3, 4, 5, 6, 8].includes(bits) && [32, 64, 128].includes(group), "L3", `${bits} bits in groups of ${group}`, at);
  need(size === undefined || size <= 64, "L3", `${size} slots`, at);
  need(chunk !== 0, "L3", "chunk_size 0", at);
  return found;
}

function checkTensors(layer, scalars, at) {
  const names = [...layer.tensors.keys()];
  if (layer.kind === "list") need(!names.length, "L4", "tensors in a list", at);
  else if (layer.kind === "arrays") {
    const slots = (name) => /^(0|[1-9][0-9]?)$/.test(name) && Number(name) < scalars.size;
    need(names.every((name) => slots(name) || name === "left_padding" || name === "lengths"), "L4", "a tensor that is no slot", at);
    for (const tensor of layer.tensors.values()) need(tensor.segments.every(({ rope }) => rope === null), "L4", "a rope where there are no keys", at);
  } else checkRows(layer, scalars, at);
}

function checkRows(layer, scalars, at) {
  const names = [...layer.tensors.keys()].sort().join();
  need(names === "" || names === "keys,values", "L4", "expected keys and values, or neither", at);
  const [keys, values] = [layer.tensors.get("keys"), layer.tensors.get("values")];
  for (const { shape, dtype } of [keys, values].filter(Boolean)) {
    need(shape.length === 4 && shape.every((n) => n > 0) && FLOATS.includes(dtype), "L4", `${dtype} of ${shape}`, at);
  }
  if (keys) {
    need(keys.shape.slice(0, 3).join() === values.shape.slice(0, 3).join(), "L4", "keys and values are not alike", at);
    need(values.segments.every(({ rope }) => rope === null), "L4", "rotated values", at);
    if (layer.kind === "quantized") [keys, values].forEach((one) => checkCodes(one, scalars, at));
  }
  rows(layer.kind, scalars, keys ? keys.shape[2] : 0, at);
}

function checkCodes({ dtype, segments }, { bits, group_size: group }, at) {
  const { codec, params, rope } = segments[0];
  const want = codec === "affine" && params.get("bits") === BigInt(bits) && params.get("group") === BigInt(group);
  need(segments.length === 1 && want && params.get("scale") === dtype && rope === null, "L4", "not one segment of affine codes with the layer's bits and group", at);
}

/** Compare the rows with the scalars (L5). */
function rows(kind, { offset, keep, max_size: most, idx, chunk_size: chunk, start }, T, at) {
  const fail = `${T} rows do not fit the scalars`;
  if (kind === "rotating") {
    need(keep < most, "L5", `keep ${keep} of max_size ${most}`, at);
    if (T === 0) need(offset === 0 && idx === 0, "L4", "an empty ring with an offset", at);
    else {
      need(Math.min(offset, most) <= T && T <= offset, "L5", fail, at);
      need(T === offset ? idx === T : keep <= idx && idx <= T, "L5", `idx ${idx} does not fit ${T} rows`, at);
    }
  } else if (kind === "chunked") {
    need(start <= offset, "L5", `starts at ${start}, past its offset ${offset}`, at);
    need(T === offset - start, "L5", fail, at);
  } else need(T === offset, "L5", fail, at);
}

function checkCheckpoint(header, path, scalars, { tokens }, at) {
  const { offset } = scalars;
  need(!offset || offset === tokens, "L12", `offset ${offset}, expected ${tokens}`, at);
  let there = { children: header.layers };
  for (const i of path.split(".")) there = there.children[i];
  for (const name of CONSTANT) {
    if (name in scalars) need(there.scalars.get(name) === scalars[name], "L12", `${name} ${scalars[name]}, the layer has ${there.scalars.get(name)}`, at);
  }
}
