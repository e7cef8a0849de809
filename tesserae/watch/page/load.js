// How much of the step's work each rank has: who has most keeps the others waiting.
{
  const part = section("load", "Load, rank by rank");
  const canvas = canvasIn(part.body, "What each rank has to do in a step, against the mean of the ranks", 90);
  const left = 116, top = 2, row = 30;
  const NAMES = { tokens: "tokens", expert_tokens: "tokens of experts", pairs: "attended pairs" };
  const body = el("tbody");
  const columns = el("colgroup", {}, ["32%", "18%", "15%", "18%", "17%"].map((width) => el("col", { width })));
  part.body.append(el("table", { class: "hops" }, columns, el("thead", {}, el("tr", {}, ["in a step", "most", "of rank", "mean", "most / mean"].map((name, i) => el("th", { scope: "col", class: i ? "num" : null }, name)))), body));
  let spot = null, filled = "";

  // Of kinds that a rank has told something of.
  const rowsOf = () => {
    const load = (known.now && known.now.load) || {};
    return list(load.kinds).map((kind, i) => {
      const values = list(load.amounts).map((amounts) => list(amounts)[i]), mean = sum(values) / Math.max(1, values.length);
      return { name: NAMES[kind] || kind, color: MORE_COLORS[i % MORE_COLORS.length], values, middle: mean, full: mean / 4, text: count, rank: list(load.most)[i], ratio: list(load.imbalance)[i] };
    }).filter((entry) => entry.middle > 0 && isNumber(entry.ratio));
  };
  const cellOf = () => (canvas.clientWidth - left - 2) / Math.max(1, ranksOf());
  const ratioText = (ratio) => ratio.toFixed(ratio < 10 ? 2 : 0);

  const draw = () => {
    const rows = rowsOf();
    if (!part.show(rows.length ? "" : "Nobody has counted what the ranks have to do: models of tokens do, with their attention and their experts.")) return;
    const ranks = ranksOf(), cell = cellOf(), below = top + rows.length * row;
    const { pen } = fit(canvas, below + 36);
    rows.forEach((entry, i) => rankRow(pen, entry, left, top + i * row, row, cell, ranks, cell < 44 ? null : (of, value) => of.text(value)));
    rows.forEach((entry, i) => { if (entry.ratio > 1.02) frameCell(pen, left, top + i * row, row, cell, entry.rank, theme.text); });
    if (spot && spot.row < rows.length) frameCell(pen, left, top + spot.row * row, row, cell, spot.rank, theme.focus);
    rankAxis(pen, left, cell * ranks, below, ranks);
    const worst = rows.reduce((a, b) => (b.ratio > a.ratio ? b : a));
    part.readout.replaceChildren(...(worst.ratio > 1.02 ? [`${worst.name}: rank ${whole(worst.rank)} has `, el("b", {}, `${ratioText(worst.ratio)} ×`), " the mean"] : ["all ranks have as much"]));
    const cells = rows.map((entry) => [entry.name, count(Math.max(...entry.values)), whole(entry.rank), count(entry.middle), ratioText(entry.ratio)]);
    if (filled === (filled = cells.join("|"))) return;
    body.replaceChildren(...cells.map((line) => el("tr", {}, line.map((text, i) => el("td", { class: i ? "num" : null }, text)))));
  };

  hover(canvas, (x, y) => {
    const rank = Math.floor((x - left) / cellOf()), i = Math.floor((y - top) / row), entry = rowsOf()[i];
    const inside = x >= left && y >= top && rank < ranksOf() && entry;
    spot = inside ? { rank, row: i } : null;
    draw();
    return inside ? `rank ${rank}${hostSuffix(rank)}\n${entry.text(entry.values[rank])} ${entry.name} · ${ratioText(entry.values[rank] / entry.middle)} × the mean` : "";
  }, () => [Math.max(cellOf(), 1), row]);
  watchSize(canvas, draw);
  drawers.push(draw);
}
