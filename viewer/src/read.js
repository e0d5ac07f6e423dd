/** Read a vkv file from its first bytes: the one entry of the reader. */
import { readContainer } from "./container.js";
import { readHeader } from "./header.js";

/**
 * @param size bytes of the whole file
 * @param slice (start, stop) -> Promise of Uint8Array, of those bytes; called for the head alone
 */
export async function readFile(size, slice) {
  const read = async (start, stop) => {
    const bytes = await slice(Number(start), Number(stop));
    if (bytes.length !== Number(stop - start)) throw new Error("the file changed while it was read");
    return bytes;
  };
  const container = await readContainer(BigInt(size), read);
  return { size, ...container, ...readHeader(container) };
}
