// The description of the request and the iteration at a point of the charts.

/** Return {title, colour, facts: [[name, text], ...]} of an iteration and a span (undefined: none) of a row (-1: none). */
function describe(run, theme, { row, index, span }) {
  const facts = [["iteration", run.iterationText(index)], ...timeOf(run, index)];
  if (span !== undefined) facts.push(...factsOfSpan(run, row, span));
  facts.push(...factsOfIteration(run, index));
  if (row < 0) return { title: "iteration", facts };
  const kind = span === undefined ? wordsOutsideLife(run, row, index) : run.kindName(run.spanKind[span]);
  return { title: `request ${run.ids[row]}: ${kind}`, facts,
           colour: span === undefined ? undefined : theme.kinds[run.spanKind[span]] };
}

function wordsOutsideLife(run, row, index) {
  return index < Math.max(run.rowStart(row), run.rowEnd[row] - 1) ? "not arrived yet" : "ended";
}

function timeOf(run, index) {
  return run.beginUs.at(-1) > 0 ? [["time", secondsText(run.beginUs[index] / 1e6)]] : [];
}

function factsOfSpan(run, row, span) {
  const facts = [], start = run.spanStart[span], end = run.spanEnd(row, span);
  if (run.isContext(span)) {
    const chunk = run.chunkOf[span], first = run.chunkFirst[chunk], tokens = run.chunkTokens[chunk];
    facts.push(["tokens", countText(tokens)], ["first position", countText(first)]);
  }
  const { kind, reason } = run.kinds[run.spanKind[span]];
  if (reason) facts.push([kind === "client" ? "is there because of" : "waits for", reason]);
  if (end - start > 1) {
    facts.push([kind === "generation" ? "generates in" : "lasts",
                `${run.iterationText(start)} to ${run.iterationText(end - 1)}, ` +
                `${countText(end - start)} iterations`]);
  }
  const us = run.durationUs(row, span);
  if (us > 0) facts.push(["for", durationText(us)]);
  if (end === run.rowEnd[row]) facts.push(["then", run.rowEnded[row] ? "ended" : "the trace ends"]);
  facts.push(["request in all", durationText(run.rowEndUs[row] - run.spanUs[run.rowFirst[row]])]);
  return facts;
}

function factsOfIteration(run, index) {
  const at = (name) => run.columns[name][index];
  const tokens = ["context", "generation"].map((name) => `${countText(at(`${name}_tokens`))} ${name}`);
  const facts = [["tokens of the step", tokens.join(", ")]], form = run.header.forms[at("form")];
  if (form) facts.push(["form of the step", form]);
  const blocks = ["live", "cached", "free"].map((name) => `${countText(at(`${name}_blocks`))} ${name}`);
  facts.push(["KV cache blocks", blocks.join(", ")], ["queued requests", countText(at("queued_requests"))]);
  const us = run.phases.reduce((sum, phase) => sum + at(`phase ${phase}`), 0);
  if (us > 0) facts.push(["duration", durationText(us)]);
  return facts;
}

/** Write a description into an element, as text and never as HTML: names come from the trace. */
function showDescription(element, { title, colour, facts }) {
  const heading = document.createElement("h2"), list = document.createElement("dl");
  if (colour) heading.append(swatch(colour));
  heading.append(title);
  for (const [name, text] of facts) {
    const term = document.createElement("dt"), value = document.createElement("dd");
    term.textContent = name;
    value.textContent = text;
    list.append(term, value);
  }
  element.replaceChildren(heading, list);
}

function swatch(colour) {
  const box = document.createElement("span");
  box.className = "swatch";
  box.style.background = colour;
  return box;
}
