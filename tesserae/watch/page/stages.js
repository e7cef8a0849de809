// Stages by rank: seconds, and how far they are from the median of the ranks.
{
  const part = section("stages", "Stages, rank by rank");
  const canvas = canvasIn(part.body, "Seconds of each rank in each stage against the median of the ranks", 250);
  const left = 92, top = 2, row = 32;
  let usual = false, spot = null;
  const toggle = el("button", { class: "btn", type: "button", "aria-pressed": "false", title: "Medians of the last 32 steps instead of the last step" }, "Last 32 steps");
  toggle.addEventListener("click", () => { usual = !usual; toggle.setAttribute("aria-pressed", usual); draw(); });
  part.tools.append(toggle);
  const key = el("div", { class: "legend" });
  key.append(el("span", {}, "faster"), el("span", { class: "scale" }), el("span", { class: "long" }, "slower than the median of the ranks, by a quarter of a step or more"));
  part.body.append(key);

  const table = () => (usual && list(known.now.usual).length ? known.now.usual : list(known.now.seconds));
  // `full`: how far off a rank is where the colour is strongest.
  const rowsOf = () => {
    const { now } = known, seen = table(), waits = new Set(list(now.waits)), step = median(seen.map(sum)) || 1;
    const rows = list(now.stages).map((name, s) => ({ name, color: stageColor(name, s), waits: waits.has(name), full: step / 4, values: seen.map((ranked) => list(ranked)[s]), text: seconds, of: seen }));
    return rows.map((entry) => ({ ...entry, middle: median(entry.values) }));
  };
  const cellOf = () => (canvas.clientWidth - left - 2) / Math.max(1, ranksOf());

  const draw = () => {
    const { now } = known;
    if (!part.show(now && list(now.seconds).length ? "" : "No rank has told of a step yet. The monitor writes <code>monitor/now.json</code> after the first one.")) return;
    const rows = rowsOf(), ranks = ranksOf(), cell = cellOf(), below = top + rows.length * row;
    const { pen } = fit(canvas, below + 36);
    // Where a cell has no room for a unit, all have the same, and the heading names it.
    const narrow = cell >= 44 && cell < 62, small = Math.max(...rows.filter((entry) => entry.of).map((entry) => Math.max(0, ...entry.values.filter(isNumber)))) < 1;
    const print = cell < 44 ? null : (entry, value) => (narrow && entry.of ? digits(small ? value * 1e3 : value) : entry.text(value));
    set(part.readout, `${usual ? "medians of 32 steps" : `step ${whole(now.step)}`}${narrow ? (small ? ", in ms" : ", in seconds") : ""}`);
    rows.forEach((entry, i) => rankRow(pen, entry, left, top + i * row, row, cell, ranks, print));
    const frame = (rank, i, color) => frameCell(pen, left, top + i * row, row, cell, rank, color);
    for (const slow of list(now.slow)) {
      const i = rows.findIndex((entry) => entry.name === slow.stage);
      if (i >= 0) frame(slow.rank, i, theme.text);
    }
    if (spot) frame(spot.rank, spot.row, theme.focus);
    rankAxis(pen, left, cell * ranks, below, ranks);
    pen.fillStyle = theme.dim;
    pen.textAlign = "left";
    pen.fillText("rank", 10, below + 9);
  };

  hover(canvas, (x, y) => {
    if (!known.now) return "";
    const rank = Math.floor((x - left) / cellOf()), i = Math.floor((y - top) / row), entry = rowsOf()[i];
    const inside = x >= left && y >= top && rank < ranksOf() && entry;
    spot = inside ? { rank, row: i } : null;
    draw();
    if (!inside) return "";
    const value = entry.values[rank], off = value - entry.middle;
    const share = entry.of ? `\n${percent(value / sum(list(entry.of[rank])))} of its step` : "";
    return `rank ${rank}${hostSuffix(rank)} · ${entry.name}${entry.waits ? " (waits for others)" : ""}\n${entry.text(value)} · ${off >= 0 ? "+" : "−"}${entry.text(Math.abs(off))} against the median${share}`;
  }, () => [Math.max(cellOf(), 1), row]);
  watchSize(canvas, draw);
  drawers.push(draw);
}
