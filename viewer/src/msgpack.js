/**
 * Decode canonical msgpack (rule H1).
 *
 * Whole numbers become BigInt and floats Number, so that 1 and 1.0 stay apart and no
 * 64-bit value is rounded; maps become Map, byte strings Uint8Array (views, no copies).
 */
import { need, Refused } from "./failure.js";

const MAX_DEPTH = 64;
const utf8 = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });

export function decode(bytes) {
  const reader = new Reader(bytes);
  need(bytes.length > 0 && isMap(bytes[0]), "H1", "not a msgpack map");
  const value = reader.value(1);
  need(reader.at === bytes.length, "H1", `${bytes.length - reader.at} bytes behind the map`);
  return value;
}

const isMap = (lead) => (lead & 0xf0) === 0x80 || lead === 0xde || lead === 0xdf;

class Reader {
  constructor(bytes) {
    this.bytes = bytes;
    this.view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
    this.at = 0;
  }

  /** Return the offset of the next `count` bytes and step over them. */
  step(count) {
    const at = this.at;
    need(count <= this.bytes.length - at, "H1", `ends inside a value at byte ${at}`);
    this.at = at + count;
    return at;
  }

  /** Read a length of 1, 2 or 4 bytes; it must be above `least`, the longest of a shorter form. */
  length(width, least) {
    const at = this.step(width);
    const n =
      width === 1 ? this.view.getUint8(at) : width === 2 ? this.view.getUint16(at) : this.view.getUint32(at);
    need(n > least, "H1", `a length of ${n} is not in its shortest form, byte ${at}`);
    return n;
  }

  value(depth) {
    const lead = this.view.getUint8(this.step(1));
    if (lead < 0x80) return BigInt(lead);
    if (lead >= 0xe0) return BigInt(lead - 256);
    if (lead < 0x90) return this.map(lead & 15, depth);
    if (lead < 0xa0) return this.array(lead & 15, depth);
    if (lead < 0xc0) return this.text(lead & 31);
    return this.long(lead, depth);
  }

  long(lead, depth) {
    switch (lead) {
      case 0xc0: return null;
      case 0xc2: return false;
      case 0xc3: return true;
      case 0xc4: return this.raw(this.length(1, -1));
      case 0xc5: return this.raw(this.length(2, 0xff));
      case 0xc6: return this.raw(this.length(4, 0xffff));
      case 0xcb: return this.view.getFloat64(this.step(8));
      case 0xcc: case 0xcd: case 0xce: case 0xcf: return this.unsigned(1 << (lead - 0xcc));
      case 0xd0: case 0xd1: case 0xd2: case 0xd3: return this.signed(1 << (lead - 0xd0));
      case 0xd9: return this.text(this.length(1, 31));
      case 0xda: return this.text(this.length(2, 0xff));
      case 0xdb: return this.text(this.length(4, 0xffff));
      case 0xdc: return this.array(this.length(2, 15), depth);
      case 0xdd: return this.array(this.length(4, 0xffff), depth);
      case 0xde: return this.map(this.length(2, 15), depth);
      case 0xdf: return this.map(this.length(4, 0xffff), depth);
    }
    throw new Refused("H1", `byte ${lead.toString(16)} begins no canonical value, byte ${this.at - 1}`);
  }

  unsigned(width) {
    const at = this.step(width);
    const n = width === 8 ? this.view.getBigUint64(at) : BigInt(this.small(at, width, false));
    const least = width === 1 ? 0x7fn : (1n << BigInt(width * 4)) - 1n;
    need(n > least, "H1", `${n} is not in its shortest form, byte ${at}`);
    return n;
  }

  signed(width) {
    const at = this.step(width);
    const n = width === 8 ? this.view.getBigInt64(at) : BigInt(this.small(at, width, true));
    const least = width === 1 ? -32n : -(1n << BigInt(width * 4 - 1));
    need(n < least, "H1", `${n} is not in its shortest form, byte ${at}`);
    return n;
  }

  small(at, width, signed) {
    return this.view[`get${signed ? "Int" : "Uint"}${width * 8}`](at);
  }

  raw(length) {
    const at = this.step(length);
    return this.bytes.subarray(at, at + length);
  }

  text(length) {
    const at = this.at;
    try {
      return utf8.decode(this.raw(length));
    } catch (error) {
      if (error instanceof Refused) throw error;
      throw new Refused("H1", `a text is not UTF-8, byte ${at}`);
    }
  }

  array(length, depth) {
    need(depth <= MAX_DEPTH, "H1", `nests deeper than ${MAX_DEPTH}`);
    need(length <= this.bytes.length - this.at, "H1", "an array is longer than the header");
    const values = [];
    for (let i = 0; i < length; i++) values.push(this.value(depth + 1));
    return values;
  }

  map(length, depth) {
    need(depth <= MAX_DEPTH, "H1", `nests deeper than ${MAX_DEPTH}`);
    need(2 * length <= this.bytes.length - this.at, "H1", "a map is longer than the header");
    const values = new Map();
    let before = null;
    for (let i = 0; i < length; i++) {
      const start = this.at;
      const key = this.value(depth + 1);
      need(typeof key === "string", "H1", `a key is no text, byte ${start}`);
      const bytes = new TextEncoder().encode(key);
      need(before === null || less(before, bytes), "H1", () => `key ${JSON.stringify(key)} is out of order or there twice`);
      before = bytes;
      values.set(key, this.value(depth + 1));
    }
    return values;
  }
}

function less(a, b) {
  const shared = Math.min(a.length, b.length);
  for (let i = 0; i < shared; i++) if (a[i] !== b[i]) return a[i] < b[i];
  return a.length < b.length;
}
