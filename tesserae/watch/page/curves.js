// Curves.
const curveChart = (id, title, field, options) => {
  const part = section(id, title);
  const canvas = canvasIn(part.body, `${title} over steps`, 190);
  let marked = -1;
  const left = 46, right = 10, top = 8, bottom = 20;
  const stepAt = (x) => {
    const { step } = known.curve, span = lastOf(step) - step[0] || 1;
    return step[0] + ((x - left) / (canvas.clientWidth - left - right)) * span;
  };
  const indexAt = (x) => {
    const { step } = known.curve, wanted = stepAt(x);
    let low = 0, high = step.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (step[middle] < wanted) low = middle + 1; else high = middle;
    }
    return low > 0 && wanted - step[low - 1] < step[low] - wanted ? low - 1 : low;
  };
  const draw = () => {
    const curve = known.curve, values = curve[field];
    const any = values.some(isNumber);
    if (!part.show(any ? "" : known.loading !== null ? "Reading …" : options.none)) return;
    const { pen, width, height } = fit(canvas);
    if (width < 80) return;
    const plotWidth = width - left - right, plotHeight = height - top - bottom;
    const columns = Math.max(2, Math.floor(plotWidth)), first = curve.step[0], span = lastOf(curve.step) - first || 1;
    // A column of pixels shows the lowest, the highest and the mean of all steps that fall on it.
    const low = new Float64Array(columns).fill(Infinity), high = new Float64Array(columns).fill(-Infinity), total = new Float64Array(columns), seen = new Uint32Array(columns);
    for (let i = 0; i < values.length; i++) {
      const value = values[i];
      if (!isNumber(value)) continue;
      const column = Math.min(columns - 1, Math.floor(((curve.step[i] - first) / span) * columns));
      low[column] = Math.min(low[column], value);
      high[column] = Math.max(high[column], value);
      total[column] += value;
      seen[column]++;
    }
    const means = [], columnOf = [];
    for (let i = 0; i < columns; i++) {
      if (!seen[i]) continue;
      means.push(total[i] / seen[i]);
      columnOf.push(left + ((i + 0.5) / columns) * plotWidth);
    }
    const sorted = [...means].sort((a, b) => a - b);
    let bottomValue = options.zero ? 0 : sorted[0], topValue = sorted[Math.floor((sorted.length - 1) * (sorted.length > 60 ? 0.985 : 1))];
    const room = ((isFlat(bottomValue, topValue) ? 0 : topValue - bottomValue) || Math.abs(topValue) || 1) * 0.08;
    topValue += room;
    if (!options.zero) bottomValue -= room;
    const X = (column) => left + ((column + 0.5) / columns) * plotWidth;
    const Y = (value) => top + plotHeight * (1 - (clamp(value, bottomValue, topValue) - bottomValue) / (topValue - bottomValue));
    pen.strokeStyle = theme.line;
    pen.lineWidth = 1;
    pen.fillStyle = theme.dim;
    pen.textAlign = "right";
    for (const tick of niceTicks(bottomValue, topValue, 4)) {
      const y = Math.round(Y(tick)) + 0.5;
      pen.beginPath(); pen.moveTo(left, y); pen.lineTo(width - right, y); pen.stroke();
      pen.fillText(options.tick(tick), left - 7, y);
    }
    pen.textAlign = "center";
    for (const tick of niceTicks(first, first + span, Math.max(2, plotWidth / 110))) {
      if (tick !== Math.round(tick)) continue;
      pen.fillText(tick < 1e5 ? whole(tick) : plain(count(tick)), clamp(left + ((tick - first) / span) * plotWidth, left + 8, width - right - 12), height - 8);
    }
    for (const event of known.events) {  // what happened, where it happened
      if (!["dial", "recovered", "lost", "slow", "slow_link", "bad step", "corruption"].includes(event.kind) || event.step < first || event.step > first + span) continue;
      const x = Math.round(left + ((event.step - first) / span) * plotWidth) + 0.5;
      pen.strokeStyle = event.kind === "dial" || event.kind === "recovered" ? theme.accent : theme.alarm;
      pen.setLineDash([2, 3]);
      pen.beginPath(); pen.moveTo(x, top); pen.lineTo(x, top + plotHeight); pen.stroke();
      pen.setLineDash([]);
    }
    pen.save();
    pen.beginPath(); pen.rect(left, top - 2, plotWidth, plotHeight + 4); pen.clip();
    if (values.length > columns) {
      pen.fillStyle = theme.band;
      for (let i = 0; i < columns; i++) if (seen[i]) pen.fillRect(X(i) - 0.5, Y(high[i]), 1, Math.max(1, Y(low[i]) - Y(high[i])));
    }
    // Thin for what was measured, strong for where it goes.
    const line = (points, color, wide) => {
      pen.strokeStyle = color; pen.lineWidth = wide; pen.lineJoin = "round";
      pen.beginPath();
      points.forEach(([x, y], i) => (i ? pen.lineTo(x, y) : pen.moveTo(x, y)));
      pen.stroke();
    };
    const raw = [], smooth = [];
    const reach = Math.floor(means.length / 90);
    means.forEach((value, i) => {
      const near = means.slice(Math.max(0, i - reach), i + reach + 1);
      raw.push([columnOf[i], Y(value)]);
      smooth.push([columnOf[i], Y(median(near))]);  // a median keeps the edge of a change where it was
    });
    const smoothed = options.smooth && means.length > 80;
    line(raw, smoothed ? theme.band : theme.accent, smoothed ? 1 : 1.6);
    if (smoothed) line(smooth, theme.accent, 1.8);
    if (raw.length === 1) { pen.fillStyle = theme.accent; pen.fillRect(raw[0][0] - 2, raw[0][1] - 2, 4, 4); }
    if (field === "loss") {
      pen.fillStyle = "#e69f00";
      curve.valStep.forEach((step, i) => { pen.beginPath(); pen.arc(left + ((step - first) / span) * plotWidth, Y(curve.val[i]), curve.val.length > 40 ? 2 : 3, 0, 7); pen.fill(); });
    }
    pen.restore();
    const at = marked >= 0 && marked < values.length ? marked : values.length - 1;
    if (marked >= 0 && isNumber(values[at])) {
      const x = left + ((curve.step[at] - first) / span) * plotWidth;
      pen.strokeStyle = theme.faint; pen.lineWidth = 1;
      pen.beginPath(); pen.moveTo(x, top); pen.lineTo(x, top + plotHeight); pen.stroke();
      pen.fillStyle = theme.accent;
      pen.beginPath(); pen.arc(x, Y(values[at]), 3.5, 0, 7); pen.fill();
    }
    const val = field === "loss" && curve.val.length ? ` · validation ${lastOf(curve.val).toPrecision(4)}` : "";
    part.readout.replaceChildren(el("b", {}, isNumber(values[at]) ? options.value(values[at]) : "–"), ` at step ${whole(curve.step[at])}${marked >= 0 ? "" : val}`);
    canvas.setAttribute("aria-label", `${title}: ${options.value(values[at])} at step ${curve.step[at]}`);
  };
  hover(canvas, (x) => {
    marked = x < 0 || !known.curve.step.length ? -1 : indexAt(x);
    draw();
    return "";
  });
  watchSize(canvas, draw);
  drawers.push(draw);
};
const noMetrics = "No step has been written yet. <code>tesserae train</code> writes <code>metrics.jsonl</code> after each step; of a script there are no curves.";
curveChart("loss", "Loss", "loss", { none: noMetrics, smooth: true, value: (v) => v.toPrecision(4), tick: (v) => String(Number(v.toPrecision(3))) });
curveChart("speed", "Tokens per second", "speed", { none: noMetrics, smooth: true, zero: true, value: (v) => `${whole(v)} tokens/s`, tick: (v) => (v >= 1e4 ? plain(count(v)) : whole(v)) });
