// The visible part of the run: a range of the axis and a range of rows. Lengths are CSS pixels.

const TALLEST_ROW = 24, MARGIN_OF_LIFE = 0.04, FOUND_ROW = 18;

class View {
  constructor(run, axes) {
    this.run = run;
    this.axes = axes;
    this.axis = axes.iteration;
    this.left = 0;              // left edge of the charts, right of the labels
    this.width = 1;
    this.height = 1;            // height of the rows
    this.fit();
  }

  /** Set the size of the area of the rows. A view that shows everything continues to show everything. */
  resize(left, width, height) {
    const wasAll = this.showsAll;
    Object.assign(this, { left, width, height });
    if (wasAll) this.fit();
    else this.clamp();
  }

  get showsAll() {
    return this.begin <= 0 && this.end >= this.axis.end && this.rowHeight <= this.fittingRowHeight + 1e-9;
  }

  get fittingRowHeight() { return Math.min(TALLEST_ROW, this.height / Math.max(1, this.run.rows)); }

  get visibleRows() { return this.height / this.rowHeight; }

  fit() {
    this.begin = 0;
    this.end = Math.max(this.axis.end, this.axis.minShown);
    this.firstRow = 0;
    this.rowHeight = this.fittingRowHeight;
  }

  toX(position) { return this.left + (position - this.begin) / (this.end - this.begin) * this.width; }

  toPosition(x) { return this.begin + (x - this.left) / this.width * (this.end - this.begin); }

  toY(row) { return (row - this.firstRow) * this.rowHeight; }

  toRow(y) { return Math.floor(this.firstRow + y / this.rowHeight); }

  /** The row, span and iteration at a point; row -1 below the last one; span undefined outside the request's life;
   *  undefined outside the run. */
  at(x, y) {
    const position = this.toPosition(x), row = y < 0 || y > this.height ? -1 : this.toRow(y);
    if (position < 0 || position >= this.axis.end || x < this.left || !this.run.count) return undefined;
    const index = this.axis.indexAt(position);
    const found = row < this.run.rows ? row : -1;
    return { index, row: found, span: found < 0 ? undefined : this.axis.spanAt(this.run, found, position) };
  }

  zoom(factor, x = this.left + this.width / 2) {
    const fixed = this.toPosition(x);
    const most = Math.max(this.axis.end, this.axis.minShown);
    const shown = Math.min(most, Math.max(this.axis.minShown, (this.end - this.begin) / factor));
    this.begin = fixed - (x - this.left) / this.width * shown;
    this.end = this.begin + shown;
    this.clamp();
  }

  zoomRows(factor, y = this.height / 2) {
    const fixed = this.firstRow + y / this.rowHeight;
    this.rowHeight = Math.min(TALLEST_ROW, Math.max(this.fittingRowHeight, this.rowHeight * factor));
    this.firstRow = fixed - y / this.rowHeight;
    this.clamp();
  }

  pan(dx, dy) {
    const shift = -dx / this.width * (this.end - this.begin);
    this.begin += shift;
    this.end += shift;
    this.firstRow -= dy / this.rowHeight;
    this.clamp();
  }

  clamp() {
    const shown = this.end - this.begin, most = Math.max(this.axis.end, shown);
    this.begin = Math.max(0, Math.min(most - shown, this.begin));
    this.end = this.begin + shown;
    this.rowHeight = Math.min(TALLEST_ROW, Math.max(this.fittingRowHeight, this.rowHeight));
    this.firstRow = Math.max(0, Math.min(this.run.rows - this.visibleRows, this.firstRow));
  }

  /** Show the same iterations on the other axis. */
  switchAxis(name) {
    if (name === this.axis.name) return;
    const before = this.axis, after = this.axes[name];
    const moved = (position) => {
      const index = before.indexAt(position), begin = before.positions[index];
      const part = (position - begin) / (before.positions[index + 1] - begin || 1);
      return after.positions[index] + part * (after.positions[index + 1] - after.positions[index]);
    };
    const begin = moved(this.begin), end = moved(Math.min(this.end, before.end));
    this.axis = after;
    this.begin = begin;
    this.end = Math.max(end, begin + after.minShown);
    this.clamp();
  }

  showLife(row) {
    const from = this.axis.spanBegins[this.run.rowFirst[row]], to = this.axis.rowEnds[row];
    const margin = Math.max((to - from) * MARGIN_OF_LIFE, this.axis.minShown / 2);
    this.begin = from - margin;
    this.end = Math.min(to + margin, from - margin + Math.max(this.axis.end, this.axis.minShown));
    this.rowHeight = Math.max(FOUND_ROW, this.rowHeight);
    this.firstRow = row + 0.5 - this.visibleRows / 2;
    this.clamp();
  }

  /** Show the fewest rows that contain all requests alive in the visible iterations. */
  showRowsInView() {
    const from = this.axis.indexAt(this.begin), to = this.axis.indexAt(this.end);
    let first = -1, last = -1;
    for (let row = 0; row < this.run.rows; row++) {
      if (this.run.rowStart(row) > to || this.run.rowEnd[row] <= from) continue;
      if (first < 0) first = row;
      last = row;
    }
    if (first < 0) return;
    this.rowHeight = this.height / (last + 1 - first);
    this.firstRow = first;
    this.clamp();
  }
}
