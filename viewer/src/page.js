/** The page: it shows what vkv view put into it, or files that are dropped on it. */
import { el } from "./dom.js";
import { readFile } from "./read.js";
import { comparison, report, store } from "./report.js";

const main = document.querySelector("main");
const drop = document.querySelector("#drop");
const MOST_FILES = 2;

async function show(inputs) {
  main.setAttribute("aria-busy", "true");
  const files = [];
  const parts = [];
  for (const input of inputs.slice(0, MOST_FILES)) {
    try {
      const file = await readFile(input.size, input.slice);
      files.push(file);
      parts.push(...report(file, input.name, input));
    } catch (error) {
      parts.push(refusal(input.name, error));
    }
  }
  if (files.length === 2) parts.unshift(comparison(...files, inputs.map(({ name }) => name)));
  main.replaceChildren(...parts.filter(Boolean));
  main.removeAttribute("aria-busy");
  main.querySelector("h2, h3")?.scrollIntoView?.({ block: "nearest" });
}

function refusal(name, error) {
  const why = error.rule ? `It breaks a rule of the format. ${error.message}` : `It cannot be read: ${error.message}`;
  return el("section", { class: "refused", role: "alert" }, el("h2", {}, `✗ ${name.slice(0, 200)} is refused`), el("p", {}, why.slice(0, 600)));
}

function dropped(list) {
  const inputs = [...list].map((file) => ({
    name: file.name,
    size: file.size,
    slice: async (start, stop) => new Uint8Array(await file.slice(start, stop).arrayBuffer()),
  }));
  if (inputs.length) show(inputs);
}

function embedded({ name, size, head, text }) {
  const bytes = Uint8Array.from(atob(head), (c) => c.charCodeAt(0));
  return { name, size, text, slice: async (start, stop) => bytes.slice(start, stop) };
}

function start() {
  const data = document.querySelector("#data").textContent.trim();
  if (data) {
    const bytes = Uint8Array.from(atob(data), (c) => c.charCodeAt(0));
    const content = JSON.parse(new TextDecoder().decode(bytes));
    if (content.store) return main.replaceChildren(...store(content.store).filter(Boolean));
    return show(content.files.map(embedded));
  }
  drop.hidden = false;
  const input = drop.querySelector("input");
  input.addEventListener("change", () => dropped(input.files));
  for (const kind of ["dragover", "dragenter"]) addEventListener(kind, (event) => (event.preventDefault(), drop.classList.add("over")));
  addEventListener("dragleave", () => drop.classList.remove("over"));
  addEventListener("drop", (event) => {
    event.preventDefault();
    drop.classList.remove("over");
    dropped(event.dataTransfer.files);
  });
}

start();
