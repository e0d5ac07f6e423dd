/** Make elements. Nothing here takes HTML: what a file says is text and stays text. */
export function el(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children.filter((one) => one !== null && one !== undefined));
  return made;
}

/** Text of a file for people: cut to `most` characters; controls and bidi marks are shown as codes. */
export function text(value, most) {
  const whole = String(value);
  const cut = whole.length > most ? `${whole.slice(0, most).toWellFormed()}… (${count(whole.length)} characters)` : whole;
  return cut.replace(/[\u0000-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]/g, (c) => (c === "\n" || c === "\t" ? " " : `\\u{${c.charCodeAt(0).toString(16)}}`));
}

export const count = (n) => Number(n).toLocaleString("en-US");
export const hex = (bytes) => Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");

/** Bytes in a unit that gives three digits: 1,536 is 1.54 kB. */
export function bytes(value) {
  let n = Number(value);
  if (n < 1000) return `${n} B`;
  let unit = -1;
  while (n >= 999.5 && unit < 4) (n /= 1000), unit++;
  return `${n.toPrecision(3)} ${["kB", "MB", "GB", "TB", "PB"][unit]}`;
}

export function section(heading, ...content) {
  return el("section", {}, el("h3", {}, heading), ...content);
}

export function table(caption, head, rows) {
  const titles = el("tr", {}, ...head.map((one) => el("th", { scope: "col" }, one)));
  const body = rows.map((row) => el("tr", {}, ...row.map((one, i) => (i ? el("td", {}, one) : el("th", { scope: "row" }, one)))));
  const made = el("table", {}, el("caption", {}, caption), el("thead", {}, titles), el("tbody", {}, ...body));
  return el("div", { class: "wide", tabindex: "0", role: "region", "aria-label": caption }, made);
}

const SVG = "http://www.w3.org/2000/svg";
export function svg(name, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

/** A bar of a share from 0 to 1. */
export function bar(share, role) {
  const width = 100 * Math.min(1, Math.max(0, share));
  return svg("svg", { class: "bar", viewBox: "0 0 100 6", preserveAspectRatio: "none", "aria-hidden": "true" }, svg("rect", { class: "track", width: 100, height: 6 }), svg("rect", { class: `role ${role}`, width, height: 6 }));
}
