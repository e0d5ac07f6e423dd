"""Draw the pictures of how-it-works.md: boxes, arrows and words, in colours for light and dark.

python docs/pictures/draw.py
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

HERE = Path(__file__).parent
STYLE = """
  .page { fill: #ffffff; } .box { fill: #eef2f8; stroke: #5b6b82; } .key { fill: #d9e8ff; stroke: #2f5fa8; }
  .value { fill: #dff3e1; stroke: #2f7d3a; } .exact { fill: #ffe9c7; stroke: #a8701a; }
  text { fill: #1c2430; font: 13px system-ui, sans-serif; } .small { font-size: 11px; } .line { stroke: #5b6b82; fill: none; }
  .tip { fill: #5b6b82; }
  @media (prefers-color-scheme: dark) {
    .page { fill: #171c26; } .box { fill: #242c3a; stroke: #8b9bb4; } .key { fill: #1d3559; stroke: #7fb0ff; }
    .value { fill: #1c3b24; stroke: #7fd08d; } .exact { fill: #45330f; stroke: #f0b95a; }
    text { fill: #e6ebf3; } .line { stroke: #8b9bb4; } .tip { fill: #8b9bb4; }
  }
"""  # noqa: E501


class Picture:
    """A picture that is drawn from left to right and top to bottom; sizes are in pixels."""

    def __init__(self, title: str, width: int, height: int):
        self.title, self.width, self.height = title, width, height
        self.parts: list[str] = []

    def box(self, x: int, y: int, width: int, height: int, words: str, kind: str = "box") -> None:
        """Draw a box with lines of words in its middle."""
        self.parts.append(
            f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="4"/>'
        )
        lines = words.split("\n") if words else []
        first = y + height / 2 - 8 * (len(lines) - 1) + 4
        for number, line in enumerate(lines):
            self.word(x + width // 2, int(first + 16 * number), line, "middle")

    def word(self, x: int, y: int, words: str, anchor: str = "start", small: bool = False) -> None:
        """Write a line of words at a place."""
        kind = ' class="small"' if small else ""
        self.parts.append(
            f'<text{kind} x="{x}" y="{y}" text-anchor="{anchor}">{escape(words)}</text>'
        )

    def arrow(self, x1: int, y1: int, x2: int, y2: int) -> None:
        """Draw an arrow."""
        self.parts.append(f'<path class="line" d="M{x1} {y1} L{x2} {y2}" marker-end="url(#tip)"/>')

    def steps(self, y: int, height: int, steps: Sequence[str]) -> None:
        """Draw five boxes in a row, from keys to what is stored, with arrows between them."""
        for number, words in enumerate(steps):
            x, middle = 16 + 140 * number, y + height // 2
            self.box(x, y, 118, height, words, {0: "key", 4: "exact"}.get(number, "box"))
            if number:
                self.arrow(x - 20, middle, x - 3, middle)

    def save(self, name: str) -> None:
        """Write ``name.svg`` beside this file."""
        tip = (
            '<marker id="tip" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto">'
            '<path class="tip" d="M0 0 L8 4 L0 8 z"/></marker>'
        )
        (HERE / f"{name}.svg").write_text(
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            f'width="{self.width}" height="{self.height}" role="img">'
            f"<title>{escape(self.title)}</title><style>{STYLE}</style><defs>{tip}</defs>"
            f'<rect class="page" width="{self.width}" height="{self.height}" rx="8"/>'
            + "".join(self.parts)
            + "</svg>\n"
        )


def layout() -> None:
    """Draw what lies where in a file."""
    p = Picture("The layout of a .vkv file", 720, 210)
    p.box(16, 30, 50, 60, "n\n8 bytes")
    p.box(70, 30, 130, 60, "JSON, n bytes\nnames, offsets, id")
    p.box(204, 30, 130, 60, "vkv.header\nmsgpack")
    p.box(338, 30, 80, 60, "vkv.tokens")
    p.box(422, 30, 70, 60, "layer 0\nkeys", "key")
    p.box(496, 30, 70, 60, "layer 0\nvalues", "value")
    p.box(570, 30, 134, 60, "layer 1 keys, …", "key")
    p.word(16, 20, "any safetensors reader opens it", small=True)
    p.arrow(269, 120, 269, 94)
    p.box(
        120,
        122,
        300,
        66,
        "the codec of each segment, the model,\nthe tokenizer, metadata,\na digest of every tensor",
    )
    p.word(440, 140, "id in the JSON = BLAKE3 of vkv.header;", small=True)
    p.word(440, 158, "the header has the digest of each tensor:", small=True)
    p.word(440, 176, "so the id covers every byte.", small=True)
    p.save("layout")


def pre_rope() -> None:
    """Draw how keys lose their rotary embedding before they are coded."""
    p = Picture("Keys are coded without their rotary embedding", 720, 170)
    p.box(16, 50, 130, 56, "key in the cache\nrotated by position", "key")
    p.arrow(150, 78, 196, 78)
    p.box(200, 50, 120, 56, "rotate back\nby position")
    p.arrow(324, 78, 370, 78)
    p.box(374, 50, 90, 56, "codec", "exact")
    p.arrow(468, 78, 514, 78)
    p.box(518, 50, 186, 56, "codes in the file\n+ the rope, once", "key")
    p.word(16, 28, "Save:")
    p.word(
        16,
        134,
        "A rotation mixes two channels differently for each token. Without it a channel keeps its",
    )
    p.word(
        16,
        154,
        "range, and fewer bits do. Load decodes, and rotates again with the model's own operation.",
    )
    p.save("pre-rope")


def nsnquant() -> None:
    """Draw the steps of nsnquant."""
    p = Picture("nsnquant", 720, 190)
    steps = (
        "a window of\n64 tokens",
        "normalize\neach token",
        "shift by the\nmean, again\nnormalize",
        "rotate\n(Hadamard)",
        "8 channels:\nnearest of 256\ncodewords",
    )
    p.steps(40, 74, steps)
    p.word(
        16,
        26,
        "After the rotation every model looks like normal random numbers: one codebook fits all.",
    )
    p.word(16, 144, "stored: an index (1 byte) and 8 signs (1 byte, at 2 bits) for 8 channels;")
    p.word(16, 164, "scales of a token and the mean of a window, in 4 bits")
    p.save("nsnquant")


def kvquant() -> None:
    """Draw levels and outliers of kvquant."""
    p = Picture("kvquant", 720, 190)
    p.word(16, 26, "One channel of the keys, over all tokens (3 bits: 8 levels, not evenly spaced)")
    p.parts.append('<path class="line" d="M40 110 H680"/>')
    for x in (210, 270, 312, 345, 375, 408, 450, 515):
        p.parts.append(f'<rect class="key" x="{x - 4}" y="70" width="8" height="40"/>')
    for x in (70, 640):
        p.parts.append(f'<circle class="exact" cx="{x}" cy="110" r="7"/>')
        p.word(x, 92, "outlier", "middle", small=True)
    p.word(362, 132, "levels are where the values are (Lloyd)", "middle", small=True)
    p.word(
        16,
        160,
        "The farthest 1 % of values and the first token are stored exactly. Values have one",
    )
    p.word(16, 178, "table for a layer, with a scale and an offset for each token.")
    p.save("kvquant")


def tc() -> None:
    """Draw the steps of tc."""
    p = Picture("tc: transform coding", 720, 180)
    steps = (
        "keys of a layer\nT × (H·D)",
        "principal\naxes",
        "one step for\nall, rounded",
        "entropy\ncoder",
        "bytes",
    )
    p.steps(44, 60, steps)
    p.word(
        16,
        28,
        "Along its principal axes most of a cache is in few components; the others round to 0.",
    )
    p.word(
        16,
        132,
        "The step decides the rate: the writer finds the one that gives the bits asked for. Axes",
    )
    p.word(
        16,
        150,
        "take room in the file; learnt once for a model, they are in a basis file for many.",
    )
    p.save("tc")


def checkpoints() -> None:
    """Draw what checkpoints are for."""
    p = Picture("Checkpoints", 720, 190)
    p.word(
        16,
        26,
        "A recurrent state, or a window that has wrapped, cannot go back to an earlier token.",
    )
    p.box(16, 60, 560, 40, "")
    p.word(26, 84, "the old prompt")
    for x, name in ((156, "512"), (296, "1,024"), (436, "1,536")):
        p.box(x - 5, 52, 10, 56, "", "exact")
        p.word(x, 46, name, "middle", small=True)
    p.box(16, 124, 330, 40, "new prompt: the same up to here", "key")
    p.box(350, 124, 140, 40, "then another text", "value")
    p.arrow(346, 118, 302, 110)
    p.word(504, 142, "go back to 1,024, and compute", small=True)
    p.word(504, 158, "from there: not from the start", small=True)
    p.save("checkpoints")


PICTURES = (layout, pre_rope, nsnquant, kvquant, tc, checkpoints)

if __name__ == "__main__":
    for draw in PICTURES:
        draw()
