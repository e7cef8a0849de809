// Bytes by rank: memory and traffic.
const stackChart = (id, title, options) => {
  const part = section(id, title);
  const canvas = canvasIn(part.body, title, 210);
  const key = legend(part.body, []);
  const left = 58, top = 14, bottom = 36;
  let spot = -1;
  const scaleOf = (ranks) => { const width = canvas.clientWidth - left - 2; return { width, cell: width / Math.max(1, ranks) }; };
  const draw = () => {
    const data = options.of(known.now);
    if (!part.show(data && list(data.bytes).length ? "" : options.none)) return;
    const { pen, width, height } = fit(canvas), ranks = data.bytes.length, { cell } = scaleOf(ranks);
    const totals = data.bytes.map(sum), peaks = list(data.peak), limits = list(data.limit).filter(isNumber);
    const tallest = Math.max(1, ...totals, ...peaks.filter(isNumber));
    // The limit is part of the picture unless it would flatten it.
    const limit = limits.length ? Math.min(...limits) : NaN, withLimit = isNumber(limit) && limit < 3 * tallest;
    const most = Math.max(tallest, withLimit ? limit : 0) * 1.06, plot = height - top - bottom;
    const Y = (value) => top + plot * (1 - value / most);
    pen.strokeStyle = theme.line; pen.lineWidth = 1; pen.textAlign = "right";
    const unit = 1024 ** Math.max(0, Math.floor(Math.log(most) / Math.log(1024)));
    for (const tick of niceTicks(0, most / unit, 3)) {
      const y = Math.round(Y(tick * unit)) + 0.5;
      pen.beginPath(); pen.moveTo(left, y); pen.lineTo(width, y); pen.stroke();
      pen.fillStyle = theme.dim;
      pen.fillText(plain(bytes(tick * unit)), left - 7, y);
    }
    const names = list(data.names), bar = cell > 8 ? Math.min(56, cell * 0.72) : Math.max(1, cell);
    const stack = (rank, x, wide) => {
      let under = 0;
      names.forEach((_, i) => {
        const value = list(data.bytes[rank])[i];
        if (!(value > 0)) return;
        const y0 = Y(under), y1 = Y(under + value);
        pen.fillStyle = MORE_COLORS[i % MORE_COLORS.length];
        pen.fillRect(x, y1, wide, Math.max(0.5, y0 - y1 - (wide > 4 && y0 - y1 > 3 ? 0.6 : 0)));
        under += value;
      });
      return under;
    };
    if (cell < 3) {  // ranks share pixels: the fullest of them shows
      for (let pixel = 0; pixel < Math.floor(cell * ranks); pixel++) {
        let fullest = Math.floor(pixel / cell);
        for (let rank = fullest; rank < Math.min(ranks, (pixel + 1) / cell); rank++) if (totals[rank] > totals[fullest]) fullest = rank;
        stack(fullest, left + pixel, 1);
        if (isNumber(peaks[fullest])) { pen.fillStyle = theme.text; pen.fillRect(left + pixel, Y(peaks[fullest]), 1, 1); }
      }
      if (spot >= 0) { pen.fillStyle = theme.focus; pen.fillRect(left + (spot + 0.5) * cell - 1, top, 2, plot); }
    } else {
      for (let rank = 0; rank < ranks; rank++) {
        const x = left + (rank + 0.5) * cell - bar / 2, under = stack(rank, x, bar);
        if (isNumber(peaks[rank])) { pen.fillStyle = theme.text; pen.fillRect(x - 2, Y(peaks[rank]), bar + 4, 1.2); }
        if (rank === spot) { pen.strokeStyle = theme.focus; pen.lineWidth = 2; pen.strokeRect(x - 2, Y(under) - 2, bar + 4, Y(0) - Y(under) + 2); }
        if (cell >= 62) { pen.fillStyle = theme.dim; pen.textAlign = "center"; pen.fillText(bytes(under), x + bar / 2, Y(Math.max(under, peaks[rank] || 0)) - 7); }
      }
    }
    if (withLimit) {
      pen.strokeStyle = theme.alarm; pen.lineWidth = 1.2; pen.setLineDash([5, 4]);
      pen.beginPath(); pen.moveTo(left, Y(limit)); pen.lineTo(width, Y(limit)); pen.stroke();
      pen.setLineDash([]);
    }
    rankAxis(pen, left, cell * ranks, height - bottom + 2, ranks);
    const fullest = totals.indexOf(Math.max(...totals));
    const text = [`rank ${fullest} has the most: `, el("b", {}, bytes(totals[fullest]))];
    if (isNumber(limit)) text.push(` of ${bytes(limit)}`);
    part.readout.replaceChildren(...text);
    refill(key, names.map((name, i) => [name.replace(/_/g, " "), MORE_COLORS[i % MORE_COLORS.length]]).filter((_, i) => data.bytes.some((row) => list(row)[i] > 0))
      .concat(peaks.some(isNumber) ? [["peak", theme.text, "line"]] : [], withLimit ? [["limit", "", "dashes"]] : []));
  };
  hover(canvas, (x) => {
    const data = options.of(known.now), ranks = data ? list(data.bytes).length : 0, rank = Math.floor((x - left) / scaleOf(ranks).cell);
    spot = x >= left && rank < ranks ? rank : -1;
    draw();
    if (spot < 0) return "";
    const row = data.bytes[rank];
    const parts = list(data.names).map((name, i) => [name.replace(/_/g, " "), row[i]]).filter(([, value]) => value > 0).map(([name, value]) => `${name}: ${bytes(value)}`);
    const peak = list(data.peak)[rank], limit = list(data.limit)[rank];
    return [`rank ${rank}${hostSuffix(rank)}: ${bytes(sum(row))}${isNumber(limit) ? ` of ${bytes(limit)}` : ""}`, ...parts, isNumber(peak) ? `peak: ${bytes(peak)}` : ""].filter(Boolean).join("\n");
  }, () => [scaleOf(ranksOf()).cell, 8]);
  watchSize(canvas, draw);
  drawers.push(draw);
};
stackChart("memory", "Memory, rank by rank", {
  of: (now) => now && now.memory && { names: now.memory.categories, bytes: now.memory.bytes, peak: now.memory.peak, limit: now.memory.limit },
  none: "No rank has told what it holds. The monitor tells it at the end of each step.",
});
stackChart("traffic", "Sent in a step, rank by rank", {
  of: (now) => now && now.traffic && { names: now.traffic.verbs, bytes: now.traffic.bytes },
  none: "No rank has told what it sent. The monitor tells it at the end of each step.",
});
