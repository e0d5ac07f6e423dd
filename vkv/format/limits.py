"""Hold the limits of a file, each with its reason."""

from __future__ import annotations

#: Bytes of the JSON table: 10,000 tensors of 200 bytes each fit.
MAX_JSON = 1 << 21
#: ``{`` and ``[``, and commas, of the JSON. They bound its memory when parsed: an empty list takes
#: 2 bytes of text and 64 of memory. A tensor takes 3 of the first and some 8 of the second.
MAX_OPEN, MAX_COMMAS = 1 << 16, 1 << 17
#: No file has 2^48 bytes; sums of sizes below still fit 64 bits.
MAX_SIZE = (1 << 48) - 1
#: Bytes of the msgpack header: 6,000 stored tensors fit. The smallest items of which a field may
#: have any number (frequencies) take 49 times their bytes when decoded.
MAX_HEADER = 1 << 20
#: Maps and lists inside one another in the header. Layers in ``MAX_DEPTH`` lists, their tensors,
#: segments and params take 20.
MAX_NESTED = 64
#: Slots of a recurrent cache; models use a handful.
MAX_SLOTS = 64
#: The data, and the first tensor after the header, start at multiples of this many bytes.
ALIGN = 64
#: Bytes of key ``pad`` and of the head of its value.
PAD_OVERHEAD = 6
#: Lists of caches inside one another; the deepest model known nests once.
MAX_DEPTH = 4
#: Entries of lists and maps that grow with the model (layers, segments); entries of all others;
#: frequencies of a rope.
MANY, FEW, MAX_FREQS = 4096, 64, 1 << 15
#: Token ids: more than any model takes; as a Python list they take nine times their bytes.
MAX_TOKENS = 1 << 22
#: Range of the numbers of a rope. The largest base known is 1e11.
ROPE_RANGE = (1e-12, 1e12)
#: Files that one may depend on; each is open while it is read.
MAX_FILES = 64
#: Elements a stored byte may stand for: 0.125 bits an element is below any useful rate, and a
#: hostile shape cannot make a small file ask for much memory (H10).
MAX_EXPANSION = 64
#: Bits of a code and channels of a group that ``mx.quantize`` takes.
BITS, GROUPS = (2, 3, 4, 5, 6, 8), (32, 64, 128)
#: Elements beyond that which a file may hold, so that short prompts meet no limit.
FREE_ELEMENTS = 1 << 16
#: Characters and nesting of the model's configuration (H13). The longest known, with a block of
#: settings for each of 162 layers, has some 40,000 characters, nested 5 deep.
MAX_CONFIG, MAX_CONFIG_DEPTH = 1 << 18, 32
