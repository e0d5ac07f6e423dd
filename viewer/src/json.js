/**
 * Read the JSON of a container (rules C2, C3) without losing the order of its keys.
 *
 * JSON.parse puts keys that look like numbers first and keeps one of two equal keys, so the
 * text is cut into tokens here; each text is then decoded by JSON.parse.
 */
import { need, Refused } from "./failure.js";

const TOKEN = /[ \t\r\n]*(?:([{}[\],:])|("(?:[^"\\\u0000-\u001f]|\\.)*")|(-?[^\s{}[\],:"]+))/y;

/** Return the top object as Map; objects are Map, whole numbers BigInt, others {other: text}. */
export function parse(text) {
  const tokens = new Tokens(text);
  need(text[0] === "{", "C3", "the JSON does not start with {");
  const value = tokens.value(1);
  need(/^[ \t\r\n]*$/.test(text.slice(tokens.at)), "C3", "text behind the JSON");
  return value;
}

class Tokens {
  constructor(text) {
    this.text = text;
    this.at = 0;
  }

  next() {
    TOKEN.lastIndex = this.at;
    const match = TOKEN.exec(this.text);
    need(match, "C3", `not JSON at character ${this.at}`);
    this.at = TOKEN.lastIndex;
    return match;
  }

  peek() {
    const at = this.at;
    const match = this.next();
    this.at = at;
    return match[1];
  }

  value(depth) {
    need(depth <= 8, "C3", "the JSON nests deeper than a table of tensors");
    const [, mark, string, word] = this.next();
    if (mark === "{") return this.object(depth);
    if (mark === "[") return this.list(depth);
    if (string) return decodeText(string);
    need(word, "C3", `${mark} where a value is expected`);
    if (/^(0|[1-9][0-9]*)$/.test(word)) {
      need(word.length <= 20, "C3", "a number of more than 20 digits");
      return BigInt(word);
    }
    return { other: word };
  }

  object(depth) {
    const found = new Map();
    if (this.peek() === "}") return this.next(), found;
    for (;;) {
      const string = this.next()[2];
      need(string, "C3", "a key is no text");
      const key = decodeText(string);
      need(!found.has(key), "C3", () => `key ${JSON.stringify(key)} is there twice`);
      need(this.next()[1] === ":", "C3", "no : behind a key");
      found.set(key, this.value(depth + 1));
      if (this.more("}")) return found;
    }
  }

  list(depth) {
    const found = [];
    if (this.peek() === "]") return this.next(), found;
    for (;;) {
      found.push(this.value(depth + 1));
      if (this.more("]")) return found;
    }
  }

  /** Step over a comma, or over `end`, for which true is returned. */
  more(end) {
    const mark = this.next()[1];
    need(mark === "," || mark === end, "C3", `no , or ${end} behind a value`);
    return mark === end;
  }
}

function decodeText(string) {
  let value;
  try {
    value = JSON.parse(string);
  } catch {
    throw new Refused("C3", "a text with a broken escape");
  }
  need(value.isWellFormed(), "C3", "half a surrogate pair");
  return value;
}
