// The page: reads the data, lays out the charts, handles pointer and keys.

const WHEEL_ZOOM = 0.0015, KEY_ZOOM = 1.5, KEY_PAN = 0.12, DRAG_DISTANCE = 4;
const LEAST_ROWS_HEIGHT = 120, DETAILS_GAP = 14, WIDTH_OF_LABEL = 7, LEAST_LEFT = 62, RIGHT_MARGIN = 12;
const BASIC_KINDS = 3;                   // context, generation, paused: always in the legend
const byId = (id) => document.getElementById(id);

class Page {
  constructor(run) {
    this.run = run;
    this.axes = { iteration: iterationAxis(run), time: timeAxis(run) };
    this.view = new View(run, this.axes);
    const theme = readTheme(run);
    this.rows = new RowsChart(byId("rows"), this.view, run, theme);
    this.counters = new CountersChart(byId("counters"), this.view, run, theme);
    this.pinned = undefined;
    this.pointer = undefined;
    for (const id of ["controls", "charts"]) byId(id).hidden = false;
    document.querySelector("input[value=time]").disabled = this.axes.time.end <= 0;
    this.showLegend();
    this.listen();
    this.resize();
    this.view.fit();
    this.draw();
  }

  // ------------------------------------------------------------ layout and drawing

  resize() {
    const width = byId("charts").clientWidth;
    const longest = this.run.ids.reduce((most, id) => Math.max(most, id.length), 0);
    const left = Math.max(LEAST_LEFT, WIDTH_OF_LABEL * longest + 2 * LABEL_GAP);
    const above = byId("charts").getBoundingClientRect().top + scrollY;
    const room = Math.max(LEAST_ROWS_HEIGHT, innerHeight - above - this.counters.height - AXIS_HEIGHT - 16);
    const height = Math.max(1, Math.min(room, TALLEST_ROW * this.run.rows));
    byId("rows").style.height = `${height + AXIS_HEIGHT}px`;
    byId("counters").style.height = `${this.counters.height}px`;
    this.view.resize(left, Math.max(1, width - left - RIGHT_MARGIN), height);
    this.wanted();
  }

  /** Request a frame. Requests before the next frame are combined. */
  wanted() {
    this.frame ??= requestAnimationFrame(() => {
      this.frame = undefined;
      this.draw();
    });
  }

  draw() {
    const isUnfinished = this.rows.draw();
    this.counters.draw();
    this.showDetails();
    if (isUnfinished) this.wanted();
  }

  showLegend() {
    const theme = this.rows.theme, used = new Set(this.run.spanKind);
    const entries = this.run.kinds.map((kind, code) => {
      const box = swatch(theme.kinds[code]);
      if (kind.kind === "queued") box.classList.add("hatched");
      return used.has(code) || code < BASIC_KINDS ? [box, this.run.kindName(code)] : undefined;
    });
    const ended = swatch(theme.ended);
    ended.style.width = "3px";
    byId("legend").replaceChildren(...[...entries, [ended, "ended"]].filter(Boolean).map((entry) => {
      const item = document.createElement("li");
      item.append(...entry);
      return item;
    }));
  }

  setTheme() {
    const theme = readTheme(this.run);
    this.rows.setTheme(theme);
    this.counters.theme = theme;
    this.showLegend();
    this.wanted();
  }

  // ------------------------------------------------------------ description under the pointer

  showDetails() {
    const at = this.pinned ?? this.underPointer(), details = byId("details");
    const isVisible = at !== undefined && !this.drag?.hasMoved;
    for (const id of ["details", "crosshair", "row-mark"]) byId(id).hidden = !isVisible;
    if (!isVisible) return;
    showDescription(details, describe(this.run, this.rows.theme, at));
    details.classList.toggle("pinned", this.pinned !== undefined);
    this.place(at, details);
  }

  place(at, details) {
    const { view } = this, positions = view.axis.positions;
    const left = view.toX(positions[at.index]), right = view.toX(view.axis.ends[at.index]);
    const x = this.pinned ? (left + right) / 2 : this.pointer.x;
    const y = this.pinned ? AXIS_HEIGHT + view.toY(at.row + 0.5) : this.pointer.y;
    const isInside = (each) => each >= view.left && each <= view.left + view.width;
    byId("crosshair").style.left = `${(left + right) / 2}px`;
    byId("crosshair").hidden = !isInside((left + right) / 2);
    this.placeRowMark(at.row);
    const charts = byId("charts"), isLeft = x + DETAILS_GAP + details.offsetWidth > charts.clientWidth;
    const lowest = Math.max(0, charts.clientHeight - details.offsetHeight);
    details.style.left = `${Math.max(0, isLeft ? x - DETAILS_GAP - details.offsetWidth : x + DETAILS_GAP)}px`;
    details.style.top = `${Math.max(0, Math.min(lowest, y + DETAILS_GAP))}px`;
  }

  placeRowMark(row) {
    const { view } = this, mark = byId("row-mark"), top = view.toY(row);
    mark.hidden = row < 0 || top < -view.rowHeight || top > view.height;
    Object.assign(mark.style, { left: `${view.left}px`, width: `${view.width}px`, top: `${AXIS_HEIGHT + top}px`,
                                height: `${Math.max(2, view.rowHeight)}px` });
  }

  /** The row and iteration under the pointer. Keys and the wheel change them without a pointer event. */
  underPointer() {
    return this.pointer && this.view.at(this.pointer.x, this.pointer.y - AXIS_HEIGHT);
  }

  /** Position of an event on the charts. */
  pointOf(event) {
    const box = byId("charts").getBoundingClientRect();
    return { x: event.clientX - box.left, y: event.clientY - box.top };
  }

  // ------------------------------------------------------------ pointer

  listen() {
    const charts = byId("charts");
    charts.addEventListener("wheel", (event) => this.onWheel(event), { passive: false });
    charts.addEventListener("pointerdown", (event) => this.onDown(event));
    charts.addEventListener("pointermove", (event) => this.onMove(event));
    charts.addEventListener("pointerup", (event) => this.onUp(event));
    charts.addEventListener("pointercancel", () => this.endDrag());
    charts.addEventListener("pointerleave", () => { this.pointer = undefined; this.showDetails(); });
    addEventListener("resize", () => this.resize());
    document.addEventListener("keydown", (event) => this.onKey(event));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.setTheme());
    byId("zoom-in").onclick = () => this.change((view) => view.zoom(KEY_ZOOM));
    byId("zoom-out").onclick = () => this.change((view) => view.zoom(1 / KEY_ZOOM));
    byId("fit").onclick = () => this.change((view) => view.fit());
    byId("fit-rows").onclick = () => this.change((view) => view.showRowsInView());
    byId("search").onsubmit = (event) => { event.preventDefault(); this.find(byId("request").value.trim()); };
    for (const input of document.getElementsByName("axis")) input.onchange = () => this.switchAxis(input.value);
  }

  change(action) {
    action(this.view);
    this.wanted();
  }

  onWheel(event) {
    event.preventDefault();
    const { x, y } = this.pointOf(event);
    // With Shift, some browsers report horizontal scrolling.
    const along = event.shiftKey ? event.deltaY || event.deltaX : event.deltaY;
    const factor = Math.exp(-along * (event.deltaMode ? 30 : 1) * WHEEL_ZOOM);
    this.change((view) => {
      if (event.shiftKey) view.zoomRows(factor, y - AXIS_HEIGHT);
      else if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) view.pan(-event.deltaX, 0);
      else view.zoom(factor, x);
    });
  }

  onDown(event) {
    if (event.button !== 0) return;
    this.drag = { x: event.clientX, y: event.clientY, hasMoved: false };
    if (event.isTrusted) byId("charts").setPointerCapture(event.pointerId);
  }

  onMove(event) {
    this.pointer = this.pointOf(event);
    const { drag } = this;
    if (drag) {
      const dx = event.clientX - drag.x, dy = event.clientY - drag.y;
      drag.hasMoved ||= Math.hypot(dx, dy) >= DRAG_DISTANCE;
      if (drag.hasMoved) {
        byId("charts").classList.add("dragging");
        this.change((view) => view.pan(dx, dy));
        Object.assign(drag, { x: event.clientX, y: event.clientY });
      }
    }
    this.showDetails();
  }

  onUp(event) {
    this.pointer = this.pointOf(event);
    if (this.drag && !this.drag.hasMoved) this.pinned = this.pinned ? undefined : this.underPointer();
    this.endDrag();
  }

  endDrag() {
    this.drag = undefined;
    byId("charts").classList.remove("dragging");
    this.showDetails();
  }

  // ------------------------------------------------------------ keys and search

  onKey(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target.tagName === "INPUT" && event.key !== "Escape") return;
    const { width, height } = this.view;
    const actions = {
      ArrowLeft: (view) => view.pan(KEY_PAN * width, 0), ArrowRight: (view) => view.pan(-KEY_PAN * width, 0),
      ArrowUp: (view) => view.pan(0, KEY_PAN * height), ArrowDown: (view) => view.pan(0, -KEY_PAN * height),
      "+": (view) => view.zoom(KEY_ZOOM), "=": (view) => view.zoom(KEY_ZOOM), "-": (view) => view.zoom(1 / KEY_ZOOM),
      "]": (view) => view.zoomRows(KEY_ZOOM), "[": (view) => view.zoomRows(1 / KEY_ZOOM),
      0: (view) => view.fit(), r: (view) => view.showRowsInView(),
      t: (view) => this.switchAxis(view.axis.name === "time" ? "iteration" : "time"),
      "/": () => byId("request").focus(),
      Escape: () => { this.pinned = undefined; document.activeElement.blur(); },
    };
    if (!Object.hasOwn(actions, event.key)) return;
    event.preventDefault();
    this.change(actions[event.key]);
  }

  switchAxis(name) {
    if (this.axes[name].end <= 0) return;
    this.change((view) => view.switchAxis(name));
    document.querySelector(`input[value=${name}]`).checked = true;
  }

  /** Show a request. Repeated searches show the next request with the same id. */
  find(id) {
    const after = this.pinned && this.run.ids[this.pinned.row] === id ? this.pinned.row + 1 : 0;
    const row = [this.run.ids.indexOf(id, after), this.run.ids.indexOf(id)].find((each) => each >= 0);
    byId("found").textContent = row === undefined ? `there is no request ${id}` : "";
    if (row === undefined) return;
    this.pinned = { row, index: this.run.rowStart(row), span: this.run.rowFirst[row] };
    this.change((view) => view.showLife(row));
  }
}

/** The current colours: those of kinds are in the data, the others in the style sheet. */
function readTheme(run) {
  const isDark = matchMedia("(prefers-color-scheme: dark)").matches ? 1 : 0;
  const style = getComputedStyle(document.documentElement);
  const theme = { kinds: run.header.colours.map((pair) => pair[isDark]), ended: run.header.ended[isDark] };
  for (const name of ["page", "ink", "faint", "grid", "line", "live", "cached", "free", "context", "generation", "queued", "limit"]) {
    theme[name] = style.getPropertyValue(`--${name}`).trim();
  }
  for (let i = 0; i < PHASE_COLOURS; i++) theme[`phase${i}`] = style.getPropertyValue(`--phase-${i}`).trim();
  return theme;
}

function showMessage(text) {
  byId("message").textContent = text;
  byId("message").hidden = false;
}

async function open() {
  if (typeof DecompressionStream === "undefined") {
    showMessage("This browser cannot unpack the data of this page: it has no DecompressionStream. Open the page with " +
                "Chrome or Edge from version 99, Safari from 16.4 or Firefox from 113.");
    return;
  }
  try {
    const { header, columns } = await unpack(byId("data").textContent);
    new Page(new Run(header, columns));
    document.documentElement.dataset.openedMs = Math.round(performance.now());
  } catch (error) {
    showMessage(`This page could not be drawn: ${error.message}. If the file is complete, please report this.`);
    throw error;
  }
}

open();
