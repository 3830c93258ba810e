// Charts of one value per iteration, below the rows and on the same axis. A pixel column shows the mean of its
// iterations, from prefix sums; a faint shape shows the largest value.

const CHART_HEIGHT = 54, CHART_GAP = 30, COUNTERS_TOP = 4, WIDTH_WITH_GAP = 8;
const PHASE_COLOURS = 13;
const FARTHEST_LIMIT = 2;      // a limit is drawn if it is at most this many times the visible values

class Series {
  constructor(name, colour, values) {
    Object.assign(this, { name, colour, values });
    this.sums = new Float64Array(values.length + 1);
    for (let i = 0; i < values.length; i++) this.sums[i + 1] = this.sums[i] + values[i];
  }

  mean(from, to) { return (this.sums[to] - this.sums[from]) / (to - from); }
}

/** The largest value of any range, from the maxima of ranges of 1, 2, 4, ... values. */
class Largest {
  constructor(values) {
    this.levels = [values];
    for (let below = values; below.length > 1; below = this.levels.at(-1)) {
      this.levels.push(Float64Array.from({ length: Math.ceil(below.length / 2) },
        (_, i) => Math.max(below[2 * i], below[2 * i + 1] ?? 0)));
    }
  }

  get all() { return this.levels.at(-1)[0] ?? 0; }

  of(from, to) {
    let most = 0;
    for (let level = 0; from < to; level++) {
      const values = this.levels[level];
      if (from % 2) most = Math.max(most, values[from++]);
      if (to % 2) most = Math.max(most, values[--to]);
      from /= 2;
      to /= 2;
    }
    return most;
  }
}

/**
 * The charts of a run: title, `limit`, the setting that bounds it, if there is one, stacked series with the first at the bottom, and `text`, which formats a value.
 * followsView: the scale fits the visible iterations, so that one large value does not flatten all others.
 */
function chartsOf(run) {
  const column = (name) => run.columns[name];
  const stacked = (title, series, options = {}) => {
    const total = Float64Array.from({ length: run.count }, (_, i) => series.reduce((sum, s) => sum + s.values[i], 0));
    const value = run.settings[options.limit];
    const limit = typeof value === "number" && value > 0 ? { name: options.limit, value } : undefined;
    return { title, series, largest: new Largest(total), text: countText, ...options, limit };
  };
  const charts = [
    stacked("KV cache blocks", [new Series("live", "live", column("live_blocks")),
      new Series("cached", "cached", column("cached_blocks")), new Series("free", "free", column("free_blocks"))], { limit: "num_blocks" }),
    stacked("tokens of each step", [new Series("generation", "generation", column("generation_tokens")),
      new Series("context", "context", column("context_tokens"))], { followsView: true, limit: "max_num_tokens" }),
    stacked("requests of each step", [new Series("generation", "generation", column("generation_tokens")),
      new Series("context", "context", column("context_requests"))], { followsView: true, limit: "max_batch_size" }),
    stacked("queued requests", [new Series("queued", "queued", column("queued_requests"))], { followsView: true }),
    stacked("duration of each iteration", run.phases.map(
      (phase, i) => new Series(phase, `phase${i % PHASE_COLOURS}`, column(`phase ${phase}`))), { text: durationText, followsView: true }),
  ];
  return charts;
}

/** Height of a chart and its title; a chart without values has only the title. */
function heightWithTitle(chart) { return CHART_GAP + (chart.largest.all > 0 ? CHART_HEIGHT : 0); }

class CountersChart {
  constructor(canvas, view, run, theme) {
    Object.assign(this, { canvas, view, run, theme });
    this.context = canvas.getContext("2d");
    this.charts = chartsOf(run);
  }

  get height() { return COUNTERS_TOP + this.charts.reduce((sum, chart) => sum + heightWithTitle(chart), 0); }

  draw() {
    const { context, view, theme } = this;
    scaleToPixels(context, this.canvas);
    context.fillStyle = theme.page;
    context.fillRect(0, 0, this.canvas.clientWidth, this.height);
    const columns = this.columns();
    let top = COUNTERS_TOP;
    for (const chart of this.charts) {
      context.save();
      context.translate(0, top + CHART_GAP - 8);
      this.drawChart(chart, columns);
      context.restore();
      top += heightWithTitle(chart);
    }
  }

  /** The iterations of each pixel column, first (inclusive) and end (exclusive); equal if the column has none, as in
   *  time in which the engine is idle. */
  columns() {
    const { view, run } = this, count = Math.round(view.width * devicePixelRatio);
    const first = new Int32Array(count), end = new Int32Array(count);
    for (let i = 0; i < count; i++) {
      const from = view.begin + i / count * (view.end - view.begin);
      const to = view.begin + (i + 1) / count * (view.end - view.begin);
      if (from >= view.axis.end) continue;
      const index = view.axis.indexAt(from);
      if (from >= view.axis.ends[index] && to < view.axis.positions[index + 1]) continue;      // the engine is idle
      first[i] = index;
      end[i] = Math.max(first[i] + 1, Math.min(run.count, view.axis.indexAt(to)));
    }
    return { first, end, count };
  }

  drawChart(chart, columns) {
    const { context, view, theme } = this;
    const visible = chart.followsView ? this.largestMean(chart, columns) * 1.1 : chart.largest.all;
    const limit = chart.limit && chart.limit.value <= FARTHEST_LIMIT * visible ? chart.limit.value : 0;
    const top = Math.max(visible, chart.followsView ? limit * 1.1 : limit);
    this.drawTitle(chart, top, chart.followsView && columns.first.some((from, i) => columns.end[i] - from > 1));
    if (chart.largest.all <= 0) return;
    if (top > 0) {
      this.drawLargest(chart, columns, top);
      this.drawStack(chart, columns, top);
    }
    if (limit > 0) this.drawLimit(CHART_HEIGHT * (1 - limit / top));
    context.fillStyle = theme.line;
    context.fillRect(view.left, CHART_HEIGHT, view.width, 1);
    if (!chart.followsView) context.fillRect(view.left, 0, view.width, 1 / devicePixelRatio);
  }

  largestMean(chart, { first, end, count }) {
    let most = 0;
    for (let i = 0; i < count; i++) {
      if (end[i] > first[i]) most = Math.max(most, chart.series.reduce((sum, s) => sum + s.mean(first[i], end[i]), 0));
    }
    return most;
  }

  drawTitle(chart, top, hasMeans) {
    const { context, view, theme } = this;
    context.font = "12px system-ui, sans-serif";
    context.textBaseline = "alphabetic";
    context.textAlign = "left";
    context.fillStyle = theme.ink;
    context.fillText(chart.title, view.left, -6);
    let x = view.left + context.measureText(chart.title).width + 16;
    context.font = "11px system-ui, sans-serif";
    const names = chart.series.length > 1 && top > 0 ? chart.series : [];
    for (const { name, colour } of names) {
      context.fillStyle = theme[colour];
      context.fillRect(x, -14, 9, 9);
      context.fillStyle = theme.faint;
      context.fillText(name, x + 13, -6);
      x += 13 + context.measureText(name).width + 12;
    }
    context.fillStyle = theme.faint;
    if (chart.largest.all <= 0) {
      context.fillText("none in this run", x, -6);
      return;
    }
    const { limit } = chart, words = limit ? [`${limit.name}: ${countText(limit.value)}`] : [];
    if (hasMeans && top > 0) words.push("mean of each pixel's iterations; paler: the largest");
    context.fillText(words.join("; "), x, -6);
    context.textAlign = "right";
    context.textBaseline = "middle";
    if (top > 0) context.fillText(chart.text(top), view.left - LABEL_GAP, 3);
    context.fillText("0", view.left - LABEL_GAP, CHART_HEIGHT - 2);
  }

  /** Draw a dashed line at the limit of a chart. */
  drawLimit(y) {
    const { context, view, theme } = this;
    context.strokeStyle = theme.limit;
    context.lineWidth = 1;
    context.setLineDash([4, 3]);
    context.beginPath();
    context.moveTo(view.left, y);
    context.lineTo(view.left + view.width, y);
    context.stroke();
    context.setLineDash([]);
  }

  drawStack(chart, { first, end, count }, top) {
    const { context, view, theme } = this;
    const base = new Float64Array(count);
    const gap = view.width / (view.axis.indexAt(view.end) - view.axis.indexAt(view.begin) + 1) >= WIDTH_WITH_GAP ? 1 : 0;
    for (const series of chart.series) {
      context.fillStyle = theme[series.colour];
      context.beginPath();
      for (let i = 0; i < count; i++) {
        if (end[i] === first[i]) continue;
        const height = series.mean(first[i], end[i]) / top * CHART_HEIGHT;
        let run = i + 1;        // columns of the same iteration are one box
        while (run < count && end[i] - first[i] === 1 && first[run] === first[i] && end[run] === end[i]) run++;
        const left = view.left + i / devicePixelRatio, width = (run - i) / devicePixelRatio;
        if (height > 0) context.rect(left, CHART_HEIGHT - base[i] - height, width - gap, height);
        for (; i < run - 1; i++) base[i] += height;
        base[i] += height;
      }
      context.fill();
    }
  }

  drawLargest(chart, { first, end, count }, top) {
    const { context, view, theme } = this;
    context.fillStyle = theme[chart.series.at(-1).colour];
    context.globalAlpha = 0.35;
    context.beginPath();
    for (let i = 0; i < count; i++) {
      if (end[i] - first[i] < 2) continue;
      const height = Math.min(1, chart.largest.of(first[i], end[i]) / top) * CHART_HEIGHT;
      context.rect(view.left + i / devicePixelRatio, CHART_HEIGHT - height, 1 / devicePixelRatio, height);
    }
    context.fill();
    context.globalAlpha = 1;
  }
}
