/** Build the page: one HTML file with everything in it, and the licences of what is in it. */
import { build, transform } from "esbuild";
import { createHash } from "node:crypto";
import { mkdirSync, readFileSync, writeFileSync } from "node:fs";

const here = (name) => new URL(name, import.meta.url);
const out = process.argv[2] ? new URL(`file://${process.argv[2]}/`) : here("../");
const bundle = await build({ entryPoints: [here("src/page.js").pathname], bundle: true, write: false, format: "iife", target: "es2023", charset: "ascii", minify: true, legalComments: "none" });
const script = bundle.outputFiles[0].text.replaceAll("</script", "<\\/script").trim();
const style = (await transform(readFileSync(here("src/page.css"), "utf8"), { loader: "css", minify: true })).code.trim();
const digest = (text) => createHash("sha256").update(text).digest("base64");
const licence = readFileSync(here("node_modules/@noble/hashes/LICENSE"), "utf8").trim();
const values = { LICENCE: licence, STYLE: style, SCRIPT: script, STYLE_HASH: digest(style), SCRIPT_HASH: digest(script) };
const page = readFileSync(here("src/page.html"), "utf8").replace(/@(LICENCE|STYLE|SCRIPT|STYLE_HASH|SCRIPT_HASH)@/g, (_, name) => values[name]);
for (const [name, content] of [["cli/vkv_cli/view/page.html", page], ["docs/viewer/index.html", page.replace("@DATA@", "")]]) {
  mkdirSync(new URL("./", new URL(name, out)), { recursive: true });
  writeFileSync(new URL(name, out), content);
}
