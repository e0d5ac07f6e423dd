"""The page in a real browser: it reads every golden file and refuses every bad header."""

from __future__ import annotations

import base64
import json
import os
import shutil
from pathlib import Path

import msgpack
import pytest

import vkv
from vkv.format.document import open_document
from vkv.format.file_id import of_header
from vkv.format.framing import frame

ROOT = Path(__file__).parents[2]
FIXTURES = ROOT / "fixtures/v1"
MANIFEST = json.loads((FIXTURES / "manifest.json").read_text())["files"]
#: Rules of codecs, whose parts the page does not read; of tensors' digests; of other files.
NOT_IN_HEAD = tuple("ADKNQRTX")
#: Files that break two rules, and the one that the page names.
OTHER_RULE = {"bad/H8-hundred-lists.vkv": "H1", "bad/K3-codes-of-integers.vkv": "L4"}
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


def expected(row: dict) -> str | None:
    """Return the rule that the page names, or ``None`` where it reads the file."""
    if row["file"] in OTHER_RULE:
        return OTHER_RULE[row["file"]]
    rule = row.get("rule")
    return None if rule is None or rule.startswith(NOT_IN_HEAD) or rule == "H12" else rule


@pytest.fixture(scope="module")
def page():
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("no chromium on this machine")
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started.new_page(viewport={"width": 1100, "height": 900})
        started.close()


@pytest.fixture
def viewer(page):
    """Open the viewer; afterwards it must have said nothing and asked for nothing."""
    said, asked = [], []
    listeners = {
        "console": lambda message: said.append(message.text),
        "pageerror": lambda error: said.append(str(error)),
        "request": lambda request: asked.append(request.url),
    }
    for name, listener in listeners.items():
        page.on(name, listener)
    address = (ROOT / "docs/viewer/index.html").as_uri()
    page.goto(address)
    yield page
    for name, listener in listeners.items():
        page.remove_listener(name, listener)
    assert said == []
    assert asked == [address]


#: Drops files, one after the other; gives the message of each that is refused, else null.
DROP_ALL = """async (files) => {
    const found = {};
    const main = document.querySelector("main");
    for (const [name, data] of Object.entries(files)) {
        main.replaceChildren();
        const bytes = Uint8Array.from(atob(data), (c) => c.charCodeAt(0));
        const dropped = new DataTransfer();
        dropped.items.add(new File([bytes], name));
        dispatchEvent(new DragEvent("drop", { dataTransfer: dropped, cancelable: true }));
        while (!main.querySelector("h2")) await new Promise((done) => setTimeout(done));
        found[name] = document.querySelector(".refused p")?.textContent ?? null;
    }
    return found;
}"""


def drop_all(page, names: list[str]) -> dict[str, str | None]:
    """Drop fixtures by turns; return for each the rule that it is refused by, or ``None``."""
    files = {name: base64.b64encode((FIXTURES / name).read_bytes()).decode() for name in names}
    found = page.evaluate(DROP_ALL, files)
    return {name: why and why.split("format. ")[-1].split(":")[0] for name, why in found.items()}


def choose(page, *names: str) -> None:
    page.evaluate("document.querySelector('main').replaceChildren()")
    page.set_input_files("#drop input", [str(FIXTURES / name) for name in names])
    page.wait_for_selector("main h2")


def test_reads_and_refuses_what_the_specification_says(viewer):
    found = drop_all(viewer, [row["file"] for row in MANIFEST])
    assert found == {row["file"]: expected(row) for row in MANIFEST}
    refused = [rule for rule in found.values() if rule]
    assert len(refused) > 140


def test_a_dropped_file_shows_its_id(viewer):
    assert drop_all(viewer, ["good/tc-joint.vkv"]) == {"good/tc-joint.vkv": None}
    assert viewer.text_content(".id") == vkv.inspect(FIXTURES / "good/tc-joint.vkv").id
    assert viewer.text_content("h2") == "good/tc-joint.vkv"


def test_a_version_of_64_bits_is_shown_to_the_last_digit(viewer, tmp_path):
    with open_document(FIXTURES / "good/raw-kv-f16.vkv") as document:
        data = document.source.read(0, document.size)
        entries = sorted(document.entries.items(), key=lambda item: item[1].start)
        end = document.entries["vkv.header"].stop
    header = msgpack.unpackb(data[entries[0][1].start : end])
    header["layers"][0]["tensors"]["keys"]["segments"][0]["version"] = 2**64 - 1
    raw = msgpack.packb(header)
    forms = [("vkv.header", "U8", (len(raw),)), *((n, e.dtype, e.shape) for n, e in entries[1:])]
    path = tmp_path / "a.vkv"
    path.write_bytes(frame("1.0", of_header(raw), forms) + raw + data[end:])
    choose(viewer, str(path))
    assert "v18446744073709551615" in viewer.text_content("main")


def test_two_files_are_compared(viewer):
    choose(viewer, "good/tc-head.vkv", "good/tc-joint.vkv")
    rows = viewer.locator("section").first.locator("tbody tr").all_text_contents()
    assert any(row.startswith("layer 0, keys") and row.endswith("differ") for row in rows)
    choose(viewer, "good/tc-head.vkv", "good/tc-head.vkv")
    assert "one id" in viewer.text_content("h3 >> nth=0")


def test_the_treemap_is_walked_with_the_keyboard(viewer):
    choose(viewer, "good/checkpoints-affine.vkv")
    viewer.focus("svg.map")
    viewer.keyboard.press("ArrowRight")
    first = viewer.text_content(".detail")
    viewer.keyboard.press("ArrowRight")
    assert "layer 0" in first
    assert viewer.text_content(".detail") != first


def test_text_of_a_file_stays_text(viewer, tmp_path):
    hostile = {"<img src=x onerror=alert(1)>": "\u202eevil\u0000" + "x" * 500_000}
    vkv.save(tmp_path / "a.vkv", vkv.load(FIXTURES / "good/raw-kv-f16.vkv"), metadata=hostile)
    choose(viewer, str(tmp_path / "a.vkv"))
    assert viewer.locator("img").count() == 0
    shown = viewer.text_content("main")
    assert "<img src=x onerror=alert(1)>" in shown
    assert "\\u{202e}evil\\u{0}" in shown
    assert len(shown) < 10_000


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark(viewer, scheme):
    """With VKV_UPDATE_SCREENSHOTS, `make screenshots` keeps what is seen in docs/images."""
    viewer.emulate_media(color_scheme=scheme)
    choose(viewer, "good/checkpoints-affine.vkv")
    paper = viewer.evaluate("getComputedStyle(document.body).backgroundColor")
    assert paper == {"light": "rgb(255, 255, 255)", "dark": "rgb(22, 24, 26)"}[scheme]
    if os.environ.get("VKV_UPDATE_SCREENSHOTS"):
        viewer.screenshot(path=ROOT / f"docs/images/view-{scheme}.png", full_page=True)
