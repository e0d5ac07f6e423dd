/** Draw what a file holds. Text of a file goes through textContent alone, cut and made visible. */
import { bytesOf, elements } from "./header.js";
import { changes } from "./compare.js";
import { treemap } from "./treemap.js";
import { bar, bytes, count, el, hex, section, table, text } from "./dom.js";

export function report(file, name, extra = {}) {
  const cells = account(file);
  return [
    overview(file, name, cells),
    extra.text ? section("How the prompt begins", el("blockquote", {}, text(extra.text, 2000))) : null,
    section("Where the bytes are", roles(file, cells), treemap(groups(cells))),
    codecs(file, cells),
    layers(file, cells),
    checkpoints(file),
    dependencies(file),
    pairs("Metadata", file.header.metadata),
    pairs("Tables offered to other files", file.header.tables),
    technical(file),
  ];
}

/** Every stored tensor of this file with the place that uses it first; BigInt bytes. */
export function account({ header, segments, entries, header: { tensors } }) {
  const found = new Map();
  for (const { path, name, tensor, segment, checkpoint } of segments) {
    for (const [part, stored] of segment.parts) {
      if (!found.has(stored)) found.set(stored, { path, name, part, segment, tensor, checkpoint });
    }
  }
  return [...tensors].map(([stored, info]) => ({
    stored, info, size: bytesOf(info), here: entries.has(stored), use: found.get(stored) ?? null,
  }));
}

const title = (use) => (use ? `${use.checkpoint ? `checkpoint ${use.checkpoint.tokens}, ` : ""}layer ${use.path}` : "whole file");

function groups(cells) {
  const found = new Map();
  for (const { stored, info, size, here, use } of cells) {
    if (!here || size === 0n) continue;
    const key = title(use);
    if (!found.has(key)) found.set(key, []);
    found.get(key).push({ label: use ? `${use.name} ${use.part}` : stored, role: info.role, size: Number(size), of: use?.segment.codec });
  }
  return new Map([...found].sort(([a], [b]) => a.localeCompare(b, "en", { numeric: true })));
}

function overview({ header, id, version, size, layers: all }, name, cells) {
  const own = cells.reduce((sum, { size: n, here }) => (here ? sum + n : sum), 0n);
  const plain = all.filter(({ checkpoint }) => !checkpoint).flatMap(({ layer }) => [...layer.tensors.values()]).reduce((sum, one) => sum + bytesOf(one), 0n);
  const facts = [
    ["Model", header.model ? `${text(header.model.type, 80)}, ${count(header.model.parameters)} parameters` : "not recorded"],
    ["Tokens", header.tokens ? count(header.tokens.count) : "not recorded"],
    ["Layers", layerText(header.layers)],
    ["Size", `${bytes(size)}${plain && own ? ` for ${bytes(plain)} of keys, values and states (${ratio(plain, size)})` : ""}`],
    ["Created", text(header.created ?? "not recorded", 80)],
    ["Made by", text(header.producer, 120)],
    ["Needs", header.needs.length ? header.needs.join(", ") : "nothing beyond format 1.0"],
  ];
  const verdict = el("p", { class: "verdict" }, el("strong", {}, "✓ id verified"), ` container and header keep the rules of format ${version}; the bytes of the tensors were not read`);
  return el("header", { class: "file" }, el("h2", {}, text(name, 200)), verdict, el("p", { class: "id" }, el("code", {}, id)), el("dl", {}, ...facts.flatMap(([key, value]) => [el("dt", {}, key), el("dd", {}, value)])));
}

const ratio = (plain, size) => `${(Number(plain) / Number(size)).toFixed(2)}×`;

function layerText(layers) {
  const kinds = new Map();
  for (const { kind } of layers) kinds.set(kind, (kinds.get(kind) ?? 0) + 1);
  return [...kinds].map(([kind, n]) => `${n} ${kind}`).join(", ") || "none";
}

function roles({ size, header: { tokens } }, cells) {
  const sums = new Map();
  let rest = BigInt(size);
  for (const { info, size: n, here } of cells) {
    if (!here) continue;
    sums.set(info.role, (sums.get(info.role) ?? 0n) + n);
    rest -= n;
  }
  sums.set("header", rest);
  const rows = [...sums].sort(([, a], [, b]) => (a < b ? 1 : -1)).map(([role, n]) => {
    const share = Number(n) / Number(size);
    return [role, bytes(n), `${(100 * share).toFixed(1)} %`, bar(share, role)];
  });
  return table("Bytes by role", ["role", "bytes", "share", ""], rows);
}

function codecs({ segments }, cells) {
  const found = new Map();
  const sizes = new Map(cells.map(({ stored, size, info }) => [stored, info.role === "table" ? 0n : size]));
  for (const { name, tensor, segment } of segments) {
    const options = [...segment.params].map(([key, value]) => `${text(key, 40)}=${text(typeof value === "number" ? Number(value.toPrecision(4)) : value, 40)}`);
    const own = options.filter((one) => !/^(step|scale_step)=/.test(one)).join(" ");
    const key = JSON.stringify([name, segment.codec, String(segment.version), own]);
    const row = found.get(key) ?? { name, codec: `${text(segment.codec, 60)} ${segment.version === 1 ? "" : `v${segment.version}`}`, own, n: 0, elements: 0n, bytes: 0n, steps: [] };
    row.n++;
    row.elements += elements(tensor, segment);
    for (const stored of segment.parts.values()) row.bytes += sizes.get(stored);
    const step = segment.params.get("step");
    if (typeof step === "number") row.steps.push(step);
    found.set(key, row);
  }
  const rows = [...found.values()].map((row) => [text(row.name, 60), row.codec, row.own + range(row.steps), count(row.n), bytes(row.bytes), row.elements ? (8 * Number(row.bytes) / Number(row.elements)).toFixed(2) : "—"]);
  return section("Codecs", table("Codecs by tensor", ["tensor", "codec", "options", "segments", "bytes", "bits per element"], rows), el("p", { class: "note" }, "Tables that segments share are not counted in bits per element. How much the values of a file differ from those of another is measured by vkv diff --deep."));
}

function range(steps) {
  if (!steps.length) return "";
  const [low, high] = [Math.min(...steps), Math.max(...steps)].map((n) => n.toPrecision(3));
  return low === high ? ` step ${low}` : ` step ${low} to ${high}`;
}

/** One row a layer, one column a tensor: codec, bits per element and bytes, with a bar. */
function layers({ layers: all, header }, cells) {
  const shown = all.filter(({ checkpoint, layer }) => !checkpoint && layer.tensors.size);
  if (!shown.length) return null;
  const names = [...new Set(shown.flatMap(({ layer }) => [...layer.tensors.keys()]))].sort();
  const sizes = new Map(cells.map(({ stored, size }) => [stored, size]));
  const spent = (tensor) => [...new Set(tensor.segments.flatMap(({ parts }) => [...parts.values()]))].reduce((sum, one) => sum + (header.tensors.get(one).role === "table" ? 0n : sizes.get(one)), 0n);
  const most = Number(shown.flatMap(({ layer }) => [...layer.tensors.values()]).map(spent).reduce((a, b) => (a > b ? a : b), 1n));
  const cell = (tensor) => {
    if (!tensor) return "—";
    const n = spent(tensor);
    const codec = [...new Set(tensor.segments.map(({ codec }) => text(codec, 40)))].join(" + ");
    const note = tensor.note === null ? [] : [el("small", { title: text(tensor.note, 300) }, " (see note)")];
    return el("div", { class: "cell" }, el("span", {}, `${codec}, ${bytes(n)}`), ...note, bar(Number(n) / most, "payload"));
  };
  const rows = shown.map(({ path, layer }) => [path, layer.kind, forms(layer), ...names.map((name) => cell(layer.tensors.get(name)))]);
  return section("Layers and tensors", table("Layers", ["layer", "cache", "shape", ...names.map((name) => text(name, 60))], rows));
}

/** The dtype and shape of a layer's tensors, each once. */
function forms({ tensors }) {
  return [...new Set([...tensors.values()].map(({ dtype, shape }) => `${text(dtype, 20)} ${shape.join(" × ")}`))].join("; ");
}

function checkpoints({ header: { checkpoints: all } }) {
  if (!all.length) return null;
  const rows = all.map(({ tokens, layers: own, message }) => [count(tokens), count(own.size), message ? "yes" : "no"]);
  return section("Checkpoints", table("Checkpoints", ["tokens", "layers", "end of a message"], rows));
}

function dependencies({ header: { tensors } }) {
  const found = new Map();
  for (const stored of tensors.values()) {
    if (stored.file === null) continue;
    const row = found.get(hex(stored.file)) ?? [0, 0n];
    found.set(hex(stored.file), [row[0] + 1, row[1] + bytesOf(stored)]);
  }
  if (!found.size) return null;
  const rows = [...found].map(([id, [n, size]]) => [el("code", {}, id), count(n), bytes(size)]);
  return section("Files it depends on", table("Dependencies", ["id", "tensors", "bytes"], rows));
}

function pairs(heading, map) {
  if (!map.size) return null;
  const rows = [...map].slice(0, 500).map(([key, value]) => [text(key, 120), text(value, 2000)]);
  const more = map.size > 500 ? el("p", { class: "note" }, `${count(map.size - 500)} more are not shown.`) : null;
  return section(heading, table(heading, ["name", "value"], rows), more);
}

function technical({ header: { model, tokenizer, tokens, ropes } }) {
  const rows = [];
  if (model) rows.push(["model id", el("code", {}, hex(model.id))], ["config", el("code", {}, text(model.config, 2000))]);
  if (tokenizer) rows.push(["tokenizer id", el("code", {}, hex(tokenizer.id))], ["vocabulary", count(tokenizer.vocab_size)]);
  if (tokens) rows.push(["digest of token ids", el("code", {}, hex(tokens.digest))]);
  for (const [i, rope] of ropes.entries()) rows.push([`rope ${i}`, `${rope.dims} dims, ${rope.freqs ? `${rope.freqs.length} frequencies` : `base ${rope.base}`}, scale ${rope.scale}`]);
  return rows.length ? section("Identity", table("Identity", ["", ""], rows)) : null;
}

const plural = (n, one, more) => `${count(n)} ${n === 1 ? one : more}`;

/** Two files: what differs, layer by layer. */
export function comparison(a, b, names) {
  const { same, rows } = changes(a, b);
  const heading = same ? "The two files are the same: one id" : `What differs: A is ${text(names[0], 120)}, B is ${text(names[1], 120)}`;
  return section(heading, rows.length ? table("Differences", ["where", "A", "B", "bytes in A", "bytes in B", "stored bytes"], rows.map((row) => row.map((one) => (typeof one === "bigint" ? bytes(one) : text(one, 160))))) : el("p", {}, "No difference."));
}

export function store({ root, entries, stats }) {
  const most = Math.max(1, ...entries.map(({ size }) => size));
  const day = (t) => new Date(1000 * t).toISOString().slice(0, 16).replace("T", " ");
  const rows = entries.map((one) => [el("code", {}, one.id.slice(0, 12)), text(one.name || "—", 120), text(one.tags.join(", ") || "—", 120), text(one.label, 80), count(one.tokens), text(one.codec, 80), el("div", {}, bytes(one.size), bar(one.size / most, "payload")), day(one.created), day(one.used), count(one.uses), one.pinned ? "pinned" : ""]);
  const head = el("header", { class: "file" }, el("h2", {}, text(root, 200)), el("p", { class: "verdict" }, `${plural(stats.entries, "entry", "entries")} of ${plural(stats.models, "model", "models")}, ${plural(stats.tokens, "token", "tokens")}, ${bytes(stats.bytes)}`));
  const files = new Map([["entries", entries.map((one) => ({ label: one.name || one.id.slice(0, 12), role: one.pinned ? "table" : "payload", size: one.size, of: one.codec }))]]);
  return [head, entries.length > 1 ? section("Where the bytes are", treemap(files)) : null, section("Entries", table("Entries", ["id", "name", "tags", "model", "tokens", "codec", "size", "put (UTC)", "last used", "uses", ""], rows))];
}
