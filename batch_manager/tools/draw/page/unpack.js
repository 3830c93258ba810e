// The data of the page. ../packing.py describes the format.

const MORE_FOLLOWS = 128, GROUP_VALUES = 128;

/** Return the header, and name -> Float64Array of each column. */
async function unpack(base64) {
  const packed = Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  const bytes = new Uint8Array(await new Response(stream).arrayBuffer());
  const headerBytes = new DataView(bytes.buffer).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(bytes.subarray(4, 4 + headerBytes)));
  return { header, columns: unpackColumns(bytes, 4 + headerBytes, header.columns) };
}

function unpackColumns(bytes, begin, named) {
  const columns = {};
  let at = begin;
  for (const [name, count] of named) {
    const values = new Float64Array(count);
    let before = 0;
    for (let i = 0; i < count; i++) {
      // No shifts: they have 32 bits, too few for the microseconds of a long run.
      let folded = 0, scale = 1, byte;
      do {
        byte = bytes[at++];
        folded += (byte % GROUP_VALUES) * scale;
        scale *= GROUP_VALUES;
      } while (byte >= MORE_FOLLOWS);
      before += folded % 2 ? -(folded + 1) / 2 : folded / 2;
      values[i] = before;
    }
    columns[name] = values;
  }
  return columns;
}
