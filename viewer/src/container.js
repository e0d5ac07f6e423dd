/** Read the container: rules C1 to C8 and C10 of spec/v1/format.md. */
import { blake3 } from "@noble/hashes/blake3.js";
import { bytesToHex } from "@noble/hashes/utils.js";
import { need } from "./failure.js";
import { parse } from "./json.js";

const MAX_JSON = 2_097_152n;
const MAX_HEADER = 1_048_576n;
const MAX_SIZE = (1n << 48n) - 1n;
export const ITEMSIZE = new Map(
  Object.entries({
    BOOL: 1n, U8: 1n, I8: 1n, U16: 2n, I16: 2n, F16: 2n, BF16: 2n, U32: 4n, I32: 4n, F32: 4n,
    U64: 8n, I64: 8n, F64: 8n, C64: 8n,
  }),
);

/**
 * Return {version, id, entries, header}: `header` the verified bytes of vkv.header, `entries`
 * name -> {dtype, shape, start, stop} in the order of the data.
 *
 * @param size bytes of the file, BigInt
 * @param read (start, stop) -> Promise of Uint8Array; BigInt offsets; it is called twice
 */
export async function readContainer(size, read) {
  need(size >= 8n, "C1", `${size} bytes, expected at least 8`);
  const first = await read(0n, 8n);
  const length = new DataView(first.buffer, first.byteOffset, 8).getBigUint64(0, true);
  need(length <= MAX_JSON, "C2", `a JSON of ${length} bytes, the limit is ${MAX_JSON}; is this a vkv file?`);
  need(length <= size - 8n, "C1", `a JSON of ${length} bytes in a file of ${size}`);
  const raw = await read(8n, 8n + length);
  const table = parse(text(raw));
  const { meta, entries } = split(table);
  checkOffsets(entries, size - 8n - length);
  const top = checkFirst(entries);
  checkMeta(meta);
  checkFrame(raw, length, meta, entries);
  need(top.stop <= MAX_HEADER, "H5", `a header of ${top.stop} bytes, the limit is ${MAX_HEADER}`);
  const header = await read(8n + length, 8n + length + top.stop);
  const id = bytesToHex(blake3(header));
  need(id === meta.get("id"), "C8", `the id is ${id.slice(0, 16)}…, __metadata__ says ${meta.get("id").slice(0, 16)}…: the header changed`);
  return { version: meta.get("vkv"), id, entries, header, data: 8n + length };
}

function text(raw) {
  let open = 0;
  let commas = 0;
  for (const byte of raw) {
    if (byte === 0x7b || byte === 0x5b) open++;
    else if (byte === 0x2c) commas++;
  }
  need(open <= 65_536 && commas <= 131_072, "C2", `${open} brackets and ${commas} commas`);
  try {
    return new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(raw);
  } catch {
    need(false, "C3", "the JSON is not UTF-8");
  }
}

/** Check the types of the table (C3); return its metadata and its entries by offset. */
function split(table) {
  const meta = table.get("__metadata__");
  const entries = [];
  for (const [name, value] of table) {
    if (name !== "__metadata__") entries.push([name, entry(name, value)]);
  }
  if (meta !== undefined) {
    need(meta instanceof Map, "C3", "__metadata__ is no object");
    for (const value of meta.values()) need(typeof value === "string", "C3", "__metadata__ is not text to text");
  }
  entries.sort(([, a], [, b]) => compare(a.start, b.start) || compare(a.stop, b.stop));
  return { meta, entries: new Map(entries) };
}

const compare = (a, b) => (a < b ? -1 : a > b ? 1 : 0);
const isSize = (n) => typeof n === "bigint" && n <= MAX_SIZE;
const sizes = (list, most) => Array.isArray(list) && list.length <= most && list.every(isSize);

function entry(name, value) {
  const keys = value instanceof Map ? [...value.keys()].sort().join() : "";
  need(keys === "data_offsets,dtype,shape", "C3", "expected dtype, shape and data_offsets", name);
  const [dtype, shape, offsets] = ["dtype", "shape", "data_offsets"].map((key) => value.get(key));
  need(ITEMSIZE.has(dtype), "C3", "unknown dtype", name);
  need(sizes(shape, 8), "C3", "shape is not at most 8 whole numbers below 2^48", name);
  need(sizes(offsets, 2) && offsets.length === 2, "C3", "data_offsets are not two whole numbers below 2^48", name);
  let product = 1n;
  for (const n of shape) if (n) product *= n;
  need(product <= MAX_SIZE, "C3", "more than 2^48 elements", name);
  return { dtype, shape, start: offsets[0], stop: offsets[1], keys: [...value.keys()].join() };
}

function checkOffsets(entries, end) {
  let at = 0n;
  for (const [name, { dtype, shape, start, stop }] of entries) {
    need(start === at, "C4", `starts at ${start}, the one before ends at ${at}`, name);
    const bytes = shape.reduce((a, b) => a * b, 1n) * ITEMSIZE.get(dtype);
    need(stop - start === bytes, "C5", `spans ${stop - start} bytes, its shape ${bytes}`, name);
    at = stop;
  }
  need(at === end, "C6", `the tensors end at ${at}, the data at ${end}: cut, or something trails`);
}

function checkFirst(entries) {
  const found = entries.get("vkv.header");
  need(found && found.start === 0n, "C7", "vkv.header is not the first tensor");
  need(found.dtype === "U8" && found.shape.length === 1, "C7", "vkv.header is no U8 vector");
  const before = entries.keys().next().value;
  need(before === "vkv.header" || entries.get(before).stop === 0n, "C7", "vkv.header is not the first tensor");
  return found;
}

function checkMeta(meta) {
  need(meta && meta.get("format") === "vkv", "C8", "__metadata__ does not say format vkv");
  need([...meta.keys()].sort().join() === "format,id,vkv", "C8", "__metadata__ holds other fields than format, vkv, id");
  need(/^[0-9a-f]{64}$/.test(meta.get("id")), "C8", "the id is not 64 hex digits in small letters");
}

/** Write the only JSON that there may be, and compare (C10). */
function checkFrame(raw, length, meta, entries) {
  need((8n + length) % 64n === 0n, "C10", "the data does not start at a multiple of 64");
  const parts = [`"__metadata__":{"format":${quote("vkv")},"vkv":${quote(meta.get("vkv"))},"id":${quote(meta.get("id"))}}`];
  for (const [name, { dtype, shape, start, stop }] of entries) {
    parts.push(`${quote(name)}:{"dtype":"${dtype}","shape":[${shape}],"data_offsets":[${start},${stop}]}`);
  }
  const want = `{${parts.join()}}`;
  const padding = raw.length - want.length;
  need(padding >= 0 && padding < 64, "C10", "the JSON is not in its one form");
  const full = new TextEncoder().encode(want + " ".repeat(padding));
  need(full.length === raw.length && full.every((byte, i) => byte === raw[i]), "C10", "the JSON is not in its one form");
}

/** JSON text in ASCII: JSON.stringify escapes as C10 says but for what is above U+007E. */
function quote(value) {
  return JSON.stringify(value).replace(/[\u007f-\uffff]/g, (c) => `\\u${c.charCodeAt(0).toString(16).padStart(4, "0")}`);
}
