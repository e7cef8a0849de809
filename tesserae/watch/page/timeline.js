// The last step in time.
{
  const part = section("timeline", "One step in time");
  const canvas = canvasIn(part.body, "What each rank did during one step", 240);
  const view = { from: 0, to: 1 };  // shares of the longest step
  let held = false, first = 0, shown = 0, drag = null;
  const step = { rows: [], longest: 0 };
  const button = (text, label, click) => el("button", { class: "btn", type: "button", "aria-label": label, title: label, onclick: click }, text);
  const zoom = (factor, around = 0.5) => {
    const middle = view.from + (view.to - view.from) * around, span = clamp((view.to - view.from) * factor, 0.002, 1);
    view.from = clamp(middle - span * around, 0, 1 - span);
    view.to = view.from + span;
    draw();
  };
  const pan = (share) => {
    const span = view.to - view.from;
    view.from = clamp(view.from + share * span, 0, 1 - span);
    view.to = view.from + span;
    draw();
  };
  const rankBox = el("input", { type: "number", min: 0, "aria-label": "First rank", value: 0 });
  const picker = el("label", { hidden: true }, "from rank", rankBox);
  const slowButton = button("Slow rank", "Show the slow rank", () => { const slow = list(known.now && known.now.slow)[0]; if (slow) goTo(slow.rank - 3); });
  const goTo = (rank) => {
    chosen = true;
    first = clamp(Math.round(rank) || 0, 0, Math.max(0, ranksOf() - most()));
    rankBox.value = first;
    known.timelineStep = -1;
    poll();
  };
  rankBox.addEventListener("change", () => goTo(Number(rankBox.value)));
  const hold = button("Hold", "Keep this step while the job goes on", () => { held = !held; hold.setAttribute("aria-pressed", held); known.holdTimeline = held; });
  hold.setAttribute("aria-pressed", "false");
  part.tools.append(picker, slowButton, hold, button("−", "Zoom out", () => zoom(2)), button("+", "Zoom in", () => zoom(0.5)), button("All", "The whole step", () => { view.from = 0; view.to = 1; draw(); }));
  const key = legend(part.body, []);
  const left = 68, top = 20;
  const rowHeight = () => (step.rows.length > 24 ? 18 : step.rows.length > 12 ? 24 : 32);
  const lanesOf = () => {
    const count = list(known.timeline && known.timeline.lanes).length || 1, height = rowHeight() - 5;
    const main = count > 1 ? Math.round(height * 0.56) : height, thin = count > 1 ? Math.floor((height - main) / (count - 1)) : 0;
    return Array.from({ length: count }, (_, lane) => (lane ? [main + (lane - 1) * thin + 1, Math.max(2, thin - 1)] : [0, main]));
  };
  const most = () => (innerWidth < 560 ? 8 : 16);
  let chosen = false;  // by the user
  known.timelineRange = () => {
    const slow = list(known.now && known.now.slow)[0];
    if (!chosen && slow && ranksOf() > most()) { chosen = true; first = clamp(slow.rank - 3, 0, ranksOf() - most()); rankBox.value = first; }
    return rangeOf();
  };
  const rangeOf = () => [ranksOf() > most() ? first : 0, ranksOf() > most() ? most() : 64];
  const draw = () => {
    const data = known.timeline;
    if (!part.show(data && list(data.ranks).length ? "" : "No step has been drawn yet. The monitor writes <code>monitor/timeline.json</code> while somebody trains; a run without a monitor has none.")) return;
    step.rows = data.ranks;
    step.longest = Math.max(1e-6, ...step.rows.map((rank) => Math.max(isNumber(rank.seconds) ? rank.seconds : 0, ...list(rank.events).map((event) => (event[3] + event[4]) / 1e6))));
    const many = ranksOf() > most();
    picker.hidden = !many;
    slowButton.hidden = !many || !list(known.now && known.now.slow).length;
    rankBox.max = Math.max(0, ranksOf() - 1);
    const row = rowHeight(), { pen, width } = fit(canvas, top + step.rows.length * row + 2);
    const plot = width - left - 4, from = view.from * step.longest, span = (view.to - view.from) * step.longest;
    const X = (time) => left + ((time - from) / span) * plot;
    part.readout.replaceChildren(`step ${whole(data.step)} · ${seconds(step.longest)}${view.to - view.from < 0.999 ? ` · showing ${seconds(span)}` : ""} · each rank from its own start`);
    pen.strokeStyle = theme.line;
    pen.fillStyle = theme.dim;
    pen.textAlign = "center";
    for (const tick of niceTicks(from, from + span, Math.max(2, plot / 110))) {
      const x = Math.round(X(tick)) + 0.5;
      pen.lineWidth = 1;
      pen.beginPath(); pen.moveTo(x, top - 4); pen.lineTo(x, top + step.rows.length * row); pen.stroke();
      pen.fillText(plain(seconds(tick)), clamp(x, left + 14, width - 22), 8);
    }
    const lanes = lanesOf(), stages = list(data.stages), waits = new Set(list(known.now && known.now.waits)), slow = new Set(list(known.now && known.now.slow).map((entry) => entry.rank));
    step.rows.forEach((rank, i) => {
      const y = top + i * row;
      pen.fillStyle = slow.has(rank.rank) ? theme.alarm : theme.text;
      pen.textAlign = "right";
      pen.font = `${slow.has(rank.rank) ? "600 " : ""}11px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif`;
      pen.fillText(`rank ${rank.rank}`, left - 8, y + (row - 5) / 2);
      pen.fillStyle = theme.track;
      const end = Math.min(width - 4, X(rank.seconds || step.longest)), start = Math.max(left, X(0));
      if (end > start) pen.fillRect(start, y, end - start, row - 5);
      for (const [lane, stage, unit, begin, length] of list(rank.events)) {
        const x = Math.max(left, X(begin / 1e6)), right = Math.min(width - 4, X((begin + length) / 1e6));
        if (right < left || x > width - 4 || !lanes[lane]) continue;
        const [offset, height] = lanes[lane], wide = Math.max(0.7, right - x - (right - x > 3 ? 0.6 : 0));
        pen.fillStyle = stageColor(stages[stage], stage);
        pen.globalAlpha = lane === 0 && waits.has(stages[stage]) ? 0.35 : 1;  // it stands and waits
        pen.fillRect(x, y + offset, wide, height);
        pen.globalAlpha = 1;
        if (lane === 0 && wide > 74 && height > 12 && unit >= 0 && list(data.units)[unit]) {
          pen.fillStyle = waits.has(stages[stage]) ? theme.text : stages[stage] === "backward" ? "#1b1b1b" : "#fff";
          pen.textAlign = "left";
          pen.save();
          pen.beginPath(); pen.rect(x, y, wide - 4, height); pen.clip();
          pen.font = "10px system-ui, sans-serif";
          pen.fillText(data.units[unit], x + 5, y + offset + height / 2 + 0.5);
          pen.restore();
        }
      }
    });
    pen.font = '11px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif';
    refill(key, stages.map((stage, i) => [stage, stageColor(stage, i)]).concat([[`thick: ${list(data.lanes)[0] || "compute"}, faint while it waits for others · thin below: ${list(data.lanes).slice(1).join(", ")}`, "", "text long"]]));
  };
  const find = (x, y) => {
    const data = known.timeline, row = rowHeight(), index = Math.floor((y - top) / row), rank = step.rows[index];
    if (!data || !rank || x < left) return "";
    const time = 1e6 * (view.from + ((x - left) / (canvas.clientWidth - left - 4)) * (view.to - view.from)) * step.longest;
    const slack = (1e6 * (view.to - view.from) * step.longest * 1.5) / canvas.clientWidth, inRow = y - top - index * row;
    const lanes = lanesOf(), lane = Math.max(0, lanes.findIndex(([offset, height]) => inRow >= offset && inRow < offset + height + 1));
    const hit = list(rank.events).find((event) => event[0] === lane && time >= event[3] - slack && time <= event[3] + event[4] + slack);
    const head = `rank ${rank.rank}${hostSuffix(rank.rank)} · ${list(data.lanes)[lane] || ""} · ${seconds(time / 1e6)}`;
    if (!hit) return head;
    const waits = lane === 0 && list(known.now && known.now.waits).includes(data.stages[hit[1]]);
    return `${head}\n${data.stages[hit[1]]}${hit[2] >= 0 ? ` ${list(data.units)[hit[2]] || ""}` : ""}${waits ? " (waits)" : ""}: ${seconds(hit[4] / 1e6)}, from ${seconds(hit[3] / 1e6)} on`;
  };
  hover(canvas, (x, y) => (x < 0 || drag ? "" : find(x, y)), () => [6, rowHeight()]);
  canvas.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey && !event.shiftKey) return;  // the page scrolls
    event.preventDefault();
    const around = clamp((event.offsetX - left) / (canvas.clientWidth - left), 0, 1);
    if (event.shiftKey) pan((event.deltaY || event.deltaX) / 1000); else zoom(event.deltaY > 0 ? 1.25 : 0.8, around);
  }, { passive: false });
  canvas.addEventListener("dblclick", (event) => zoom(0.4, clamp((event.offsetX - left) / (canvas.clientWidth - left), 0, 1)));
  canvas.addEventListener("pointerdown", (event) => { if (view.to - view.from < 0.999) { drag = event.offsetX; canvas.setPointerCapture(event.pointerId); } });
  canvas.addEventListener("pointermove", (event) => {
    if (drag === null) return;
    pan((drag - event.offsetX) / (canvas.clientWidth - left));
    drag = event.offsetX;
  });
  for (const name of ["pointerup", "pointercancel"]) canvas.addEventListener(name, () => { drag = null; });
  canvas.addEventListener("keydown", (event) => {
    if (event.key === "+" || event.key === "=") zoom(0.5);
    else if (event.key === "-") zoom(2);
    else if (event.shiftKey && event.key === "ArrowLeft") pan(-0.2);
    else if (event.shiftKey && event.key === "ArrowRight") pan(0.2);
    else if (event.key === "0") { view.from = 0; view.to = 1; draw(); }
  });
  watchSize(canvas, draw);
  drawers.push(draw);
}
