// A run: requests as rows of spans, and counters with one value per iteration.

class Run {
  constructor(header, columns) {
    this.header = header;
    this.kinds = header.kinds;
    this.phases = header.phases;
    this.ids = header.requests ? header.requests.split(",") : [];
    this.iterations = columns.iteration;
    this.beginUs = columns.begin_us;
    this.endUs = endOfEach(columns, this.phases);
    this.rowEnd = columns.row_end;
    this.rowEnded = columns.row_ended;
    this.spanStart = columns.span_start;
    this.spanKind = Uint16Array.from(columns.span_kind);
    this.rowFirst = firstOfEach(columns.row_spans);
    this.spanUs = columns.span_late_us.map((late, span) => this.beginUs[this.spanStart[span]] + late);
    this.rowEndUs = columns.row_late_us.map((late, row) => this.beginUs[this.rowEnd[row] - 1] + late);
    this.settings = header.settings ?? {};
    this.chunkFirst = columns.chunk_first;
    this.chunkTokens = columns.chunk_tokens;
    this.chunkOf = chunkOfEach(this.spanKind, this.kinds);
    this.columns = columns;
  }

  get rows() { return this.ids.length; }

  get count() { return this.iterations.length; }

  /** The span of a row that contains an iteration, or the next span; rowFirst[row + 1] after the last one. */
  spanAt(row, index) {
    if (index >= this.rowEnd[row]) return this.rowFirst[row + 1];
    let low = this.rowFirst[row], high = this.rowFirst[row + 1] - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.spanStart[middle] <= index) low = middle;
      else high = middle - 1;
    }
    return low;
  }

  /** The first span of a row that begins in the same iteration as `spanAt`. */
  firstSpanAt(row, index) {
    let span = this.spanAt(row, index);
    while (span > this.rowFirst[row] && span < this.rowFirst[row + 1] &&
           this.spanStart[span - 1] === this.spanStart[span]) span--;
    return span;
  }

  /** The iteration after the last one of a span of a row. */
  spanEnd(row, span) {
    return span + 1 < this.rowFirst[row + 1] ? this.spanStart[span + 1] : this.rowEnd[row];
  }

  /** Duration of a span of a row, in microseconds. */
  durationUs(row, span) {
    return (span + 1 < this.rowFirst[row + 1] ? this.spanUs[span + 1] : this.rowEndUs[row]) - this.spanUs[span];
  }

  rowStart(row) { return this.spanStart[this.rowFirst[row]]; }

  isInClient(span) { return this.kinds[this.spanKind[span]].kind === "client"; }

  /** Number of an iteration as text; the column before the first iteration has none. */
  iterationText(index) {
    return this.header.has_before && index === 0 ? "before" : countText(this.iterations[index]);
  }

  isContext(span) { return this.kinds[this.spanKind[span]].kind === "context"; }

  kindName(code) {
    const { kind, reason } = this.kinds[code];
    return reason ? `${kind}: ${reason}` : kind;
  }
}

/** End of each iteration: the end of its phases, or the start of the next iteration if the trace has no phases. */
function endOfEach(columns, phases) {
  const ends = columns.begin_us.slice(1);
  ends.forEach((next, i) => {
    const us = phases.reduce((sum, phase) => sum + columns[`phase ${phase}`][i], 0);
    if (us > 0) ends[i] = Math.min(next, columns.begin_us[i] + us);
  });
  return ends;
}

/** Exclusive prefix sums: index of the first span of each row. */
function firstOfEach(counts) {
  const first = new Uint32Array(counts.length + 1);
  counts.forEach((count, i) => { first[i + 1] = first[i] + count; });
  return first;
}

/** Index of the chunk of each context span: the number of context spans before it. */
function chunkOfEach(spanKind, kinds) {
  const context = kinds.findIndex((each) => each.kind === "context");
  const chunkOf = new Uint32Array(spanKind.length);
  let chunks = 0;
  for (let i = 0; i < spanKind.length; i++) {
    chunkOf[i] = chunks;
    if (spanKind[i] === context) chunks++;
  }
  return chunkOf;
}
