// Levels of detail. If cells are smaller than pixels, rows are combined into groups and iterations into bins, both by
// powers of two. Each pixel shows the most frequent kind of its group and bin. A level is cut into tiles, which are
// counted when first visible and cached, so that a frame copies tiles and reads no spans.

const TILE_BINS = 512, TILE_GROUPS = 64, MOST_TILES = 600;
const FAINTEST = 0.4;     // opacity of a bin in which a request is alive only briefly

/**
 * Return the dominant kind of each cell of a tile, and the share of the cell that has any kind, one byte each.
 * Bins are `binWidth` positions wide; the first one begins at firstBin * binWidth.
 */
function countTile(run, axis, { binWidth, firstBin, rowsPerGroup, firstGroup, bins = TILE_BINS, groups = TILE_GROUPS }) {
  const kind = new Uint8Array(bins * groups), share = new Uint8Array(bins * groups);
  const counts = new Float64Array(bins * run.kinds.length);
  const window = { begin: firstBin * binWidth, binWidth, bins };
  for (let group = 0; group < groups; group++) {
    const row = (firstGroup + group) * rowsPerGroup, rowEnd = Math.min(row + rowsPerGroup, run.rows);
    if (row >= run.rows) break;
    let isEmpty = true;
    for (let each = row; each < rowEnd; each++) isEmpty = !addRow(run, axis, each, window, counts) && isEmpty;
    if (isEmpty) continue;
    pickDominant(counts, run.kinds.length, (rowEnd - row) * binWidth, kind, share, group * bins, bins);
    counts.fill(0);
  }
  return { kind, share };
}

/** Add the time of a row in each kind to counts[bin * kinds + kind]. Return false for a row outside the window. */
function addRow(run, axis, row, { begin, binWidth, bins }, counts) {
  const begins = axis.spanBegins, end = begin + bins * binWidth, kinds = run.kinds.length;
  if (begins[run.rowFirst[row]] >= end || axis.rowEnds[row] <= begin) return false;
  for (let span = run.firstSpanAt(row, axis.indexAt(begin)); span < run.rowFirst[row + 1]; span++) {
    const from = Math.max(begins[span], begin);
    const to = Math.min(axis.spanEnd(run, row, span), end);
    if (from >= end) break;
    if (to <= from) continue;             // the row ends before the window, which begins in idle time
    const kind = run.spanKind[span];
    const firstBin = Math.floor((from - begin) / binWidth), lastBin = Math.min(bins - 1, Math.floor((to - begin) / binWidth));
    if (firstBin >= lastBin) {
      if (firstBin < bins) counts[firstBin * kinds + kind] += to - from;
      continue;
    }
    counts[firstBin * kinds + kind] += begin + (firstBin + 1) * binWidth - from;
    for (let bin = firstBin + 1; bin < lastBin; bin++) counts[bin * kinds + kind] += binWidth;
    counts[lastBin * kinds + kind] += to - (begin + lastBin * binWidth);
  }
  return true;
}

/** Write the kind with the largest count of each bin (the first of equal ones), and the share of all kinds in
 *  `whole`. */
function pickDominant(counts, kinds, whole, kind, share, offset, bins) {
  for (let bin = 0; bin < bins; bin++) {
    let best = 0, most = 0, sum = 0;
    for (let k = 0; k < kinds; k++) {
      const count = counts[bin * kinds + k];
      sum += count;
      if (count > most) { most = count; best = k; }
    }
    kind[offset + bin] = best;
    share[offset + bin] = sum > 0 ? Math.max(1, Math.min(255, Math.round(255 * sum / whole))) : 0;
  }
}

class Tiles {
  /** colours: [red, green, blue] of each kind. */
  constructor(run, colours) {
    this.run = run;
    this.colours = colours;
    this.kept = new Map();      // least recently used first
  }

  /** The canvas of a tile; undefined if it is not cached and `mayCount` is false. */
  tile(axis, level, column, line, mayCount) {
    const key = `${axis.name} ${level.log2Bin} ${level.log2Group} ${column} ${line}`;
    let tile = this.kept.get(key);
    if (tile === undefined && !mayCount) return undefined;
    if (tile === undefined) tile = this.paint(axis, level, column, line);
    this.kept.delete(key);
    this.kept.set(key, tile);
    if (this.kept.size > MOST_TILES) this.kept.delete(this.kept.keys().next().value);
    return tile;
  }

  paint(axis, level, column, line) {
    const { kind, share } = countTile(this.run, axis, {
      binWidth: 2 ** level.log2Bin, firstBin: column * TILE_BINS,
      rowsPerGroup: 2 ** level.log2Group, firstGroup: line * TILE_GROUPS });
    const canvas = document.createElement("canvas");
    canvas.width = TILE_BINS;
    canvas.height = TILE_GROUPS;
    const context = canvas.getContext("2d");
    const image = context.createImageData(TILE_BINS, TILE_GROUPS);
    for (let i = 0; i < kind.length; i++) {
      if (!share[i]) continue;
      const [red, green, blue] = this.colours[kind[i]];
      image.data[4 * i] = red;
      image.data[4 * i + 1] = green;
      image.data[4 * i + 2] = blue;
      image.data[4 * i + 3] = 255 * FAINTEST + (1 - FAINTEST) * share[i];
    }
    context.putImageData(image, 0, 0);
    return canvas;
  }
}
