// Horizontal axes: map iterations to positions, in iterations or seconds.

const MIN_SECONDS_SHOWN = 1e-5, MIN_ITERATIONS_SHOWN = 2;

class Axis {
  /** positions: start of each iteration, and end of the last one.
   *  ends: end of each iteration; earlier than the next start if the engine was idle in between. */
  constructor(name, positions, ends, minShown) {
    this.name = name;
    this.positions = positions;
    this.ends = ends;
    this.minShown = minShown;
  }

  /** End of a span of a row. The last one of a row does not extend into idle time. */
  spanEnd(run, row, span) {
    const end = run.spanEnd(row, span);
    return end === run.rowEnd[row] ? this.ends[end - 1] : this.positions[end];
  }

  /** End of the last span of a row. */
  rowEnd(run, row) { return this.ends[run.rowEnd[row] - 1]; }

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

function iterationAxis(count) {
  const positions = Float64Array.from({ length: count + 1 }, (_, i) => i);
  return new Axis("iteration", positions, positions.subarray(1), MIN_ITERATIONS_SHOWN);
}

function timeAxis(run) {
  const beginUs = run.count ? run.beginUs : new Float64Array(1);
  return new Axis("time", beginUs.map((us) => us / 1e6), run.endUs.map((us) => us / 1e6), MIN_SECONDS_SHOWN);
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
