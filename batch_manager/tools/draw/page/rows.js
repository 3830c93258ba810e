// The chart of requests, one row each: drawn span by span if there are few spans, else from tiles.

const AXIS_HEIGHT = 24, LABEL_GAP = 10, TICK_DISTANCE = 76, LABEL_DISTANCE = 15;
const MOST_SPANS = 6000;               // in a frame drawn span by span
const SHORTEST_ROW_OF_SPANS = 3, SHORTEST_ROW_WITH_GAP = 6, SHORTEST_ROW_WITH_TEXT = 13;
const ENDED_WIDTH = 3, WIDTH_OF_DIGIT = 7;
const COUNTING_MS = 10;                // per frame; the remaining tiles are counted in the next frame
const COARSER_LEVELS = 8;              // levels searched to replace a missing tile

class RowsChart {
  constructor(canvas, view, run, theme) {
    Object.assign(this, { canvas, view, run });
    this.context = canvas.getContext("2d");
    this.setTheme(theme);
  }

  setTheme(theme) {
    this.theme = theme;
    this.tiles = new Tiles(this.run, theme.kinds.map(rgbOf));
    this.hatch = hatching(this.context, theme);
  }

  /** Draw one frame. Return whether tiles are missing, so that another frame is needed. */
  draw() {
    const { context, view, theme } = this;
    scaleToPixels(context, this.canvas);
    context.fillStyle = theme.page;
    context.fillRect(0, 0, this.canvas.clientWidth, this.canvas.clientHeight);
    drawTicks(context, view, this.run, theme, AXIS_HEIGHT);
    context.save();
    context.translate(0, AXIS_HEIGHT);
    this.drawLabels();
    context.beginPath();
    context.rect(view.left, 0, view.width, view.height);
    context.clip();
    const rows = this.visibleRows();
    const isUnfinished = this.areSpansFew(rows) ? this.drawSpans(rows) : this.drawTiles();
    context.restore();
    return isUnfinished;
  }

  visibleRows() {
    const { view } = this;
    return { first: Math.floor(view.firstRow),
             end: Math.min(this.run.rows, Math.ceil(view.firstRow + view.visibleRows)) };
  }

  areSpansFew({ first, end }) {
    const { view, run } = this;
    if (view.rowHeight < SHORTEST_ROW_OF_SPANS) return false;
    const from = view.axis.indexAt(view.begin), to = view.axis.indexAt(view.end);
    let spans = 0;
    for (let row = first; row < end && spans <= MOST_SPANS; row++) {
      if (run.rowStart(row) <= to) spans += run.spanAt(row, to) - run.spanAt(row, from) + 1;
    }
    return spans <= MOST_SPANS;
  }

  drawLabels() {
    const { context, view, run, theme } = this;
    const every = niceStep(Math.max(1, LABEL_DISTANCE / view.rowHeight));
    context.font = `${Math.min(12, Math.max(9, view.rowHeight - 2))}px system-ui, sans-serif`;
    if (view.rowHeight < LABEL_DISTANCE) context.font = "11px system-ui, sans-serif";
    context.textAlign = "right";
    context.textBaseline = "middle";
    context.fillStyle = theme.ink;
    const { first, end } = this.visibleRows();
    for (let row = Math.ceil(first / every) * every; row < end; row += every) {
      const y = view.toY(row + 0.5);
      if (y > 2 && y < view.height - 2) context.fillText(run.ids[row], view.left - LABEL_GAP, y);
    }
  }

  drawSpans({ first, end }) {
    const { view, run } = this;
    const from = view.axis.indexAt(view.begin), to = view.axis.indexAt(view.end);
    for (let row = first; row < end; row++) {
      if (run.rowStart(row) > to) continue;
      for (let span = run.firstSpanAt(row, from); span < run.rowFirst[row + 1] && run.spanStart[span] <= to; span++) {
        this.drawSpan(row, span);
      }
      this.drawEnd(row);
    }
    return false;
  }

  drawSpan(row, span) {
    const { context, view, run } = this;
    const start = run.spanStart[span], begin = view.axis.spanBegins[span];
    const left = Math.max(view.toX(begin), view.left - 8);
    const right = Math.min(view.toX(view.axis.spanEnd(run, row, span)), view.left + view.width + 8);
    const gap = Math.min(1, (right - left) / 6), margin = rowMargin(view.rowHeight);
    const box = [left, view.toY(row) + margin, Math.max(right - left - gap, 0.75), view.rowHeight - 2 * margin];
    context.fillStyle = this.theme.kinds[run.spanKind[span]];
    fillBox(context, box);
    if (run.kinds[run.spanKind[span]].kind === "queued") {
      context.fillStyle = this.hatch;
      fillBox(context, box);
    }
    if (run.isContext(span)) this.drawTokens(span, begin, view.axis.ends[start], row);
  }

  /** Draw the number of tokens in the cell of a context chunk. */
  drawTokens(span, begin, end, row) {
    const { context, view, run } = this;
    const text = String(run.chunkTokens[run.chunkOf[span]]);
    const left = view.toX(begin), width = view.toX(end) - left;
    if (view.rowHeight < SHORTEST_ROW_WITH_TEXT || width < WIDTH_OF_DIGIT * text.length + 2) return;
    context.font = "11px system-ui, sans-serif";
    context.textAlign = "center";
    context.textBaseline = "middle";
    context.fillStyle = "#ffffff";
    context.fillText(text, left + (width - 1) / 2, view.toY(row + 0.5) + 0.5);
  }

  drawEnd(row) {
    const { context, view, run } = this;
    if (!run.rowEnded[row]) return;
    const x = view.toX(view.axis.rowEnds[row]), margin = rowMargin(view.rowHeight);
    if (x < view.left || x > view.left + view.width + ENDED_WIDTH) return;
    const width = view.rowHeight >= SHORTEST_ROW_WITH_GAP ? ENDED_WIDTH : 1;
    context.fillStyle = this.theme.ended;
    context.fillRect(x - width - 1, view.toY(row) + margin, width, view.rowHeight - 2 * margin);
  }

  drawTiles() {
    const { context, view } = this, ratio = devicePixelRatio;
    const level = {
      log2Bin: Math.ceil(Math.log2((view.end - view.begin) / (view.width * ratio))),
      log2Group: Math.max(0, Math.ceil(Math.log2(1 / (view.rowHeight * ratio)))),
    };
    if (view.axis.name === "iteration") level.log2Bin = Math.max(0, level.log2Bin);
    const tileWidth = TILE_BINS * 2 ** level.log2Bin, tileRows = TILE_GROUPS * 2 ** level.log2Group;
    const deadline = performance.now() + COUNTING_MS;
    let isUnfinished = false;
    context.imageSmoothingEnabled = false;
    for (let line = Math.floor(view.firstRow / tileRows); line * tileRows < this.visibleRows().end; line++) {
      for (let column = Math.floor(view.begin / tileWidth); column * tileWidth < view.end; column++) {
        const isDrawn = this.drawTile(level, column, line, performance.now() < deadline);
        isUnfinished ||= !isDrawn;
      }
    }
    if (view.rowHeight >= SHORTEST_ROW_WITH_GAP) this.drawGapsAndEnds();
    return isUnfinished;
  }

  /** Draw a tile. Return false if it is missing, even if a coarser one replaces it. */
  drawTile(level, column, line, mayCount) {
    const tile = this.tiles.tile(this.view.axis, level, column, line, mayCount);
    const whole = { x: 0, width: TILE_BINS };
    if (tile) {
      this.copyTile(tile, level, column, line, whole);
      return true;
    }
    for (let coarser = 1; coarser <= COARSER_LEVELS; coarser++) {
      const other = { ...level, log2Bin: level.log2Bin + coarser }, scale = 2 ** coarser;
      const stand = this.tiles.tile(this.view.axis, other, Math.floor(column / scale), line, false);
      if (!stand) continue;
      const part = { x: (column - Math.floor(column / scale) * scale) * TILE_BINS / scale, width: TILE_BINS / scale };
      this.copyTile(stand, level, column, line, part);
      break;
    }
    return false;
  }

  copyTile(tile, level, column, line, part) {
    const { view } = this;
    const tileWidth = TILE_BINS * 2 ** level.log2Bin, tileRows = TILE_GROUPS * 2 ** level.log2Group;
    const left = toPixel(view.toX(column * tileWidth)), right = toPixel(view.toX((column + 1) * tileWidth));
    const top = toPixel(view.toY(line * tileRows)), bottom = toPixel(view.toY((line + 1) * tileRows));
    this.context.drawImage(tile, part.x, 0, part.width, TILE_GROUPS, left, top, right - left, bottom - top);
  }

  drawGapsAndEnds() {
    const { context, view, theme } = this, { first, end } = this.visibleRows();
    const margin = rowMargin(view.rowHeight);
    context.fillStyle = theme.page;
    for (let row = first; row <= end; row++) context.fillRect(view.left, view.toY(row) - margin, view.width, 2 * margin);
    for (let row = first; row < end; row++) this.drawEnd(row);
  }
}

/** Space above and below the box of a row. */
function rowMargin(rowHeight) {
  return rowHeight >= SHORTEST_ROW_WITH_GAP ? Math.min(2, rowHeight / 10) : 0;
}

function fillBox(context, [x, y, width, height]) {
  if (width < 6 || height < 6) context.fillRect(x, y, width, height);
  else {
    context.beginPath();
    context.roundRect(x, y, width, height, 2);
    context.fill();
  }
}

/** Draw marks at round iterations or times, with labels above. */
function drawTicks(context, view, run, theme, height) {
  const isTime = view.axis.name === "time", shown = view.end - view.begin;
  const least = shown / view.width * TICK_DISTANCE;
  const step = isTime ? niceStep(least) : Math.max(1, niceStep(least));
  const shift = isTime || !run.count ? 0 : run.iterations[0] % step;      // a trace may begin at any iteration
  const first = Math.ceil((view.begin + shift) / step);
  const last = Math.floor((Math.min(view.end, view.axis.end) + shift) / step);
  const middle = !isTime && view.width / shown > 4 ? 0.5 : 0;      // middle of a cell, if cells are visible
  context.font = "11px system-ui, sans-serif";
  context.textAlign = "center";
  context.textBaseline = "alphabetic";
  for (let tick = first; tick <= last; tick++) {
    const at = tick * step - shift, x = view.toX(at + middle);
    if (!isTime && at >= run.count || x < view.left || x > view.left + view.width) continue;
    context.fillStyle = theme.grid;
    context.fillRect(toPixel(x), height - 5, 1 / devicePixelRatio, 4);
    context.fillStyle = theme.faint;
    const label = isTime ? secondsText(at, step) : run.iterationText(at);
    context.fillText(label, Math.max(x, view.left + context.measureText(label).width / 2), height - 9);
  }
  context.textAlign = "right";
  context.fillStyle = theme.faint;
  context.fillText("request", view.left - LABEL_GAP, height - 9);
}

/** A pattern of diagonal lines, which distinguishes queued requests from the background without colour. */
function hatching(context, theme) {
  const size = 6, tile = document.createElement("canvas");
  tile.width = tile.height = size;
  const pen = tile.getContext("2d");
  pen.strokeStyle = theme.line;
  pen.lineWidth = 1;
  for (const shift of [-size, 0, size]) {
    pen.moveTo(shift, size);
    pen.lineTo(shift + size, 0);
  }
  pen.stroke();
  return context.createPattern(tile, "repeat");
}

/** Give a canvas the resolution of the screen. */
function scaleToPixels(context, canvas) {
  const width = Math.round(canvas.clientWidth * devicePixelRatio);
  const height = Math.round(canvas.clientHeight * devicePixelRatio);
  if (canvas.width !== width || canvas.height !== height) Object.assign(canvas, { width, height });
  context.setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0);
}

/** Round to an edge between screen pixels, so that neighbours leave no seam. */
function toPixel(length) { return Math.round(length * devicePixelRatio) / devicePixelRatio; }

function rgbOf(colour) { return [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16)); }
