// Horizontal axes: map iterations to positions, in iterations or seconds.

const MIN_SECONDS_SHOWN = 1e-5, MIN_ITERATIONS_SHOWN = 2;

class Axis {
  /** positions: start of each iteration, and end of the last one.
   *  ends: end of each iteration; earlier than the next start if the engine was idle in between.
   *  spanBegins, rowEnds: start of each span, and end of each row. */
  constructor(name, positions, ends, minShown, spanBegins, rowEnds) {
    this.name = name;
    this.positions = positions;
    this.ends = ends;
    this.minShown = minShown;
    this.spanBegins = spanBegins;
    this.rowEnds = rowEnds;
  }

  /** End of a span of a row. The last one of a row does not extend into idle time. */
  spanEnd(run, row, span) {
    return span + 1 < run.rowFirst[row + 1] ? this.spanBegins[span + 1] : this.rowEnds[row];
  }

  /** The span of a row at a position; undefined outside the life of its request. */
  spanAt(run, row, position) {
    if (position < this.spanBegins[run.rowFirst[row]] || position >= this.rowEnds[row]) return undefined;
    let low = run.rowFirst[row], high = run.rowFirst[row + 1] - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.spanBegins[middle] <= position) low = middle;
      else high = middle - 1;
    }
    return low;
  }

  get end() { return this.positions[this.positions.length - 1]; }

  /** The iteration at a position: the last one that begins at or before it. */
  indexAt(position) {
    const last = this.positions.length - 2;
    if (this.name === "iteration") return Math.max(0, Math.min(last, Math.floor(position)));
    let low = 0, high = last;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.positions[middle] <= position) low = middle;
      else high = middle - 1;
    }
    return low;
  }
}

/** A span in the engine begins with its iteration; a span in the client within one, in proportion to its time. */
function iterationAxis(run) {
  const positions = Float64Array.from({ length: run.count + 1 }, (_, i) => i);
  const begins = Float64Array.from(run.spanUs, (us, span) => {
    const start = run.spanStart[span], begin = run.beginUs[start], next = run.beginUs[start + 1];
    return run.isInClient(span) && next > begin ? start + Math.min(1, Math.max(0, (us - begin) / (next - begin))) : start;
  });
  for (let row = 0; row < run.rows; row++) {      // the client's part of the iteration that accepted the request
    for (let span = run.rowFirst[row + 1] - 2; span >= run.rowFirst[row]; span--) {
      begins[span] = Math.min(begins[span], begins[span + 1]);
    }
  }
  return new Axis("iteration", positions, positions.subarray(1), MIN_ITERATIONS_SHOWN, begins, run.rowEnd);
}

function timeAxis(run) {
  const beginUs = run.count ? run.beginUs : new Float64Array(1);
  const [positions, ends, spanBegins, rowEnds] = [beginUs, run.endUs, run.spanUs, run.rowEndUs].map(
    (all) => all.map((us) => us / 1e6));
  return new Axis("time", positions, ends, MIN_SECONDS_SHOWN, spanBegins, rowEnds);
}

/** The smallest 1, 2 or 5 times a power of ten that is at least `least`. */
function niceStep(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((each) => each * power).find((step) => step >= least * (1 - 1e-9));
}

function secondsText(seconds, step = 1e-6) {
  const digits = Math.max(0, Math.min(6, -Math.floor(Math.log10(step) + 1e-9)));
  return `${seconds.toFixed(digits)} s`;
}

function durationText(us) {
  if (us >= 1e6) return `${(us / 1e6).toPrecision(3)} s`;
  return us >= 1e3 ? `${(us / 1e3).toPrecision(3)} ms` : `${Math.round(us)} µs`;
}

function countText(value) { return Math.round(value).toLocaleString("en-US"); }
