/** A squarified treemap (Bruls, Huizing, van Wijk 2000): groups, then what is in them. */
import { bytes, el, svg, text } from "./dom.js";

const WIDTH = 960;
const HEIGHT = 420;
/** More cells than this are merged: nobody sees them, and a page has to draw them. */
const MOST = 1500;

/** @param groups title -> [{label, role, size, of}] */
export function treemap(groups) {
  const total = [...groups.values()].flat().reduce((sum, { size }) => sum + size, 0);
  if (!total) return null;
  const detail = el("p", { class: "detail", "aria-live": "polite" }, "Arrow keys or the pointer show each area.");
  const picture = svg("svg", { class: "map", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "group", "aria-label": "Treemap of the bytes; arrow keys go from area to area", tabindex: 0 });
  const boxes = squares([...groups].map(([title, items]) => ({ title, items, size: sum(items) })), 0, 0, WIDTH, HEIGHT);
  const cells = [];
  for (const { item, x, y, w, h } of boxes) {
    for (const box of squares(merged(item.items, MOST / boxes.length), x, y, w, h)) cells.push({ ...box, title: item.title });
  }
  for (const cell of cells) picture.append(...drawn(cell));
  for (const { item, x, y, w, h } of boxes) picture.append(frame(item.title, x, y, w, h));
  listen(picture, cells, detail, total);
  const used = [...new Set(cells.map(({ item }) => item.role))];
  const legend = el("p", { class: "legend" }, ...used.flatMap((role) => [svg("svg", { viewBox: "0 0 12 12", class: "key", "aria-hidden": "true" }, svg("rect", { class: `role ${role}`, width: 12, height: 12 })), `${role}  `]));
  return el("figure", {}, picture, legend, detail);
}

const sum = (items) => items.reduce((all, { size }) => all + size, 0);

function merged(items, most) {
  const sorted = [...items].sort((a, b) => b.size - a.size);
  const keep = Math.max(1, Math.floor(most));
  if (sorted.length <= keep) return sorted;
  const rest = sorted.slice(keep);
  return [...sorted.slice(0, keep), { label: `${rest.length} smaller ones`, role: rest[0].role, size: sum(rest), of: "" }];
}

/** Lay items out in a rectangle, each as near to a square as it gets. */
function squares(items, x, y, w, h) {
  const queue = items.filter(({ size }) => size > 0).sort((a, b) => b.size - a.size);
  const scale = (w * h) / sum(queue);
  const placed = [];
  while (queue.length) {
    const side = Math.min(w, h);
    let [row, area, worst] = [0, 0, Infinity];
    while (row < queue.length) {
      const more = area + queue[row].size * scale;
      const ratio = Math.max((side * side * queue[0].size * scale) / more ** 2, more ** 2 / (side * side * queue[row].size * scale));
      if (ratio > worst) break;
      [worst, area] = [ratio, more];
      row++;
    }
    const thick = side ? area / side : 0;
    let along = 0;
    for (const item of queue.splice(0, row)) {
      const long = thick ? (item.size * scale) / thick : 0;
      placed.push(w >= h ? { item, x, y: y + along, w: thick, h: long } : { item, x: x + along, y, w: long, h: thick });
      along += long;
    }
    if (w >= h) (x += thick), (w -= thick);
    else (y += thick), (h -= thick);
  }
  return placed;
}

function drawn(cell) {
  const { item, x, y, w, h } = cell;
  cell.rect = svg("rect", { class: `role ${item.role}`, x, y, width: Math.max(0, w - 0.5), height: Math.max(0, h - 0.5) });
  const label = text(item.label, 60);
  if (h < 34 || w < 6.2 * label.length + 8) return [cell.rect];
  const name = svg("text", { class: "name", x: x + 4, y: y + 25 });
  name.textContent = label;
  return [cell.rect, name];
}

function frame(title, x, y, w, h) {
  const made = svg("g", { class: "frame" }, svg("rect", { x, y, width: w, height: h }));
  if (w > 40 && h > 16) {
    const label = svg("text", { x: x + 4, y: y + 12 });
    const short = w > 7 * title.length ? title : title.replace("layer ", "");
    if (w > 7 * short.length) label.textContent = short;
    made.append(label);
  }
  return made;
}

function listen(picture, cells, detail, total) {
  let at = -1;
  const show = (i) => {
    cells[at]?.rect.classList.remove("on");
    at = i;
    const { item, title, rect } = cells[at];
    rect.classList.add("on");
    detail.textContent = `${title}: ${text(item.label, 80)}, ${bytes(item.size)} (${((100 * item.size) / total).toFixed(1)} %), ${item.role}${item.of ? ` of ${text(item.of, 60)}` : ""}`;
  };
  cells.forEach(({ rect }, i) => rect.addEventListener("pointerenter", () => show(i)));
  picture.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    const target = event.key === "Home" ? 0 : event.key === "End" ? cells.length - 1 : step && (at + step + cells.length) % cells.length;
    if (target === undefined) return;
    event.preventDefault();
    show(target);
  });
}
